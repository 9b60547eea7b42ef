"""Which operators of PyTorch run, and what they make."""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Call(NamedTuple):
    function: Any
    arguments: tuple  # of this package's operators: copies from before the call
    sizes: list[int]  # of the tensors that it returned


def copied(x):
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


class Operators(TorchDispatchMode):
    """Lists the operators that run within it, this package's and those that they call."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        arguments = ()
        if function.namespace == "maxrl_fast":
            arguments = tree_map(copied, args)
            with self:  # what the operator calls is listed before it
                results = function.redispatch(CPU, *args, **(kwargs or {}))
        else:
            results = function(*args, **(kwargs or {}))
        made = [] if function.is_view else tree_leaves(results)
        sizes = [x.numel() for x in made if isinstance(x, torch.Tensor)]
        self.calls.append(Call(function, arguments, sizes))
        return results

    def sizes(self) -> set[int]:
        """Return the sizes of all tensors that were made."""
        return {size for call in self.calls for size in call.sizes}

"""Which operators of PyTorch run, and what they make."""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    function: Any
    sizes: list[int]  # of the tensors that it returned


class Operators(TorchDispatchMode):
    """Lists the operators that run within it."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        made = [] if function.is_view else tree_leaves(results)
        sizes = [x.numel() for x in made if isinstance(x, torch.Tensor)]
        self.calls.append(Call(function, sizes))
        return results

    def sizes(self) -> set[int]:
        return {size for call in self.calls for size in call.sizes}

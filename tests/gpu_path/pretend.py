"""Tensors that claim the device cuda:0, and the count of what their operations would launch.

PyTorch's FakeTensor knows the shape, dtype and device of a result without computing it, and refuses
operations that mix devices. On top of it, `PretendGpu` counts kernels, and notes where the host
would wait for the device: reads of values (.item(), bool, .tolist(), .cpu()), results whose shape
depends on values (nonzero, boolean indices, repeat_interleave without output_size), and copies from
memory of the host that is not pinned. Lengths, tokens and rewards keep their values, so that code
which reads them goes on as on a GPU; other values read as 1."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# FakeTensorMode imports it, and it checks the signature of what `pretend_gpu` replaces
import torch._dynamo.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from maxrl_fast import _C
from maxrl_fast.model import attention
from maxrl_fast.ops import dispatch, loss_kernel
from maxrl_fast.ops.group_advantage import forget_tables

GPU = torch.device("cuda", 0)
_WITHOUT_KERNEL = (
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"),
    *("_unsafe_view", "detach", "lift_fresh", "set_", "device"),
)
_BY_VALUES = (
    *("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal"),
    "bincount",
)
_LARGEST_KNOWN = 1 << 20  # elements of a tensor whose values are kept


class PretendGpu(TorchDispatchMode):
    """Counts what runs while it is entered.

    `launches` counts kernels by name, `waits` lists what makes the host wait for the device. What
    has only tensors of the host runs as always, and is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.waits = Counter[str](), list[str]()
        self._fake, self._before = FakeTensorMode(allow_non_fake_inputs=True), list[bool]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        inputs = [x for x in given if isinstance(x, FakeTensor)]
        device = kwargs.get("device")
        # what C++ takes for the device of the inputs
        if inputs and device is not None and torch.device(device).type == "meta":
            kwargs = kwargs | {"device": GPU}
            device = GPU
        if inputs:  # scalars that C++ has put there
            args, kwargs = tree_map(self._from_meta, (args, kwargs))
        goes_to_gpu = device is not None and torch.device(device).type == "cuda"
        if name == "_pin_memory" and not inputs:
            return _pinned(args[0])
        if name == "is_pinned" and not inputs:
            return hasattr(args[0], "is_pretended_pinned")
        if not inputs and not goes_to_gpu:
            return func(*args, **kwargs)
        with self:  # below autograd, operations come here before they are decomposed
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if name == "_local_scalar_dense":
            self.waits.append("a value is read")
            return _value(inputs[0]).item()
        is_read = name == "copy_" and not isinstance(args[0], FakeTensor)
        if inputs and (is_read or (device is not None and not goes_to_gpu)):
            values = _value(inputs[0])
            is_awaited = name != "copy_" or args[2:] != (True,)
            if is_awaited or not hasattr(args[0], "is_pretended_pinned"):
                self.waits.append("a tensor is copied to the host")
            if name == "copy_":
                return args[0].copy_(values)
            return values.to(kwargs.get("dtype") or values.dtype)
        if _depends_on_values(name, args, kwargs):
            self.waits.append(f"the shape of {name} depends on values")
            self.launches[name] += 1
            return self._put(self._on_host(func, args, kwargs), all(map(_is_known, inputs)))
        from_host = [x for x in given if not isinstance(x, FakeTensor)]
        if from_host and name in ("_to_copy", "copy_"):
            is_asynchronous = kwargs.get("non_blocking") or args[2:] == (True,)
            if not (is_asynchronous and hasattr(from_host[0], "is_pretended_pinned")):
                self.waits.append("a tensor is copied from memory of the host that is not pinned")
        if name == "_to_copy" and not inputs:
            self.launches[name] += 1
            return self._put(args[0].to(kwargs.get("dtype") or args[0].dtype, copy=True))
        return self._run(func, name, args, kwargs, inputs)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Return an operation's result, whose shape is known without values, and count it."""
        with self._fake:
            result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        is_kernel = not func.is_view and name not in _WITHOUT_KERNEL
        if is_kernel and any(x.numel() for x in outputs or inputs):
            self.launches[name] += 1
        small = all(x.numel() < _LARGEST_KNOWN for x in outputs)
        has_values = not name.startswith(("empty", "new_empty", "_flash"))
        if small and has_values and all(map(_is_known, inputs)):
            leaves = tree_leaves(self._on_host(func, args, kwargs))
            values = [x for x in leaves if isinstance(x, Tensor)]
            for output, value in zip(outputs, values, strict=True):
                output.known = value
        else:
            for x in _written(func, args, kwargs):
                x.__dict__.pop("known", None)
        return result

    def _from_meta(self, x: Any) -> Any:
        if isinstance(x, FakeTensor) or not isinstance(x, Tensor) or x.device.type != "meta":
            return x
        return self._put(torch.empty(x.shape, dtype=x.dtype), known=False)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values of its inputs, 1 where they are not known."""
        values = tree_map(lambda x: _value(x) if isinstance(x, FakeTensor) else x, (args, kwargs))
        if "device" in kwargs:
            values[1]["device"] = torch.device("cpu")
        return func(*values[0], **values[1])

    def _put(self, values: Any, known: bool = True) -> Any:
        def put(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            with self._fake:
                fake = torch.empty(x.shape, dtype=x.dtype, device=GPU)
            if known:
                fake.known = x
            return fake

        return tree_map(put, values)

    def put(self, x: Any) -> Any:
        """Return a tensor, or a record of tensors, on this GPU, with its values. Nothing is
        counted."""
        if isinstance(x, Tensor):
            return self._put(x.clone())
        fields = vars(x).items()
        return type(x)(**{name: self.put(y) if isinstance(y, Tensor) else y for name, y in fields})

    @contextlib.contextmanager
    def watch(self) -> Iterator["PretendGpu"]:
        """Count only what runs inside."""
        self.launches.clear()
        self.waits.clear()
        with self:
            yield self

    def __enter__(self) -> "PretendGpu":
        # Else torch.tensor(data, device=...) does not show its copy to a mode.
        self._before.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before.pop())

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    def __str__(self) -> str:
        kernels = ", ".join(f"{count} {name}" for name, count in self.launches.most_common())
        return f"{self.num_launches} kernels ({kernels}); {len(self.waits)} waits {self.waits}"


def _pinned(x: Tensor) -> Tensor:
    x = x.clone()
    x.is_pretended_pinned = True  # type: ignore[attr-defined]
    return x


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    parameters = func._schema.arguments
    given = {x.name: value for x, value in zip(parameters, args, strict=False)} | kwargs
    names = [x.name for x in parameters if x.alias_info and x.alias_info.is_write]
    return [x for x in tree_leaves([given.get(name) for name in names]) if isinstance(x, Tensor)]


def _is_known(x: Tensor) -> bool:
    return hasattr(x, "known")


def _value(x: Any) -> Tensor:
    return x.known if _is_known(x) else torch.ones(x.shape, dtype=x.dtype)


def _depends_on_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("index", "index_put_", "index_put"):
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _BY_VALUES


class Event:
    """An event of CUDA, which the host may wait for."""

    def __init__(self, gpu: PretendGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.gpu.waits.append("the host waits for an event")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """A GPU without kernels of the package: their launches are counted, with every tensor whose
    address they take checked."""
    make_subclass = torch.Tensor._make_subclass

    def without_device(cls: Any, *args: Any, dispatch_device: bool = False, **kwargs: Any) -> Any:
        """In C++ the device stays `meta`: autograd of a PyTorch without CUDA ends the process at a
        tensor on cuda."""
        return make_subclass(cls, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "_make_subclass", staticmethod(without_device))
    monkeypatch.setattr(_foreach_utils, "_foreach_supported_types", [Tensor, FakeTensor])
    monkeypatch.setattr(_foreach_utils, "_device_has_foreach_support", lambda device: True)
    monkeypatch.setattr(dispatch, "has_cuda_kernels", lambda device: True)
    monkeypatch.setattr(_C, "LOSS_WORKSPACE", 64, raising=False)
    monkeypatch.setattr(attention, "_is_recent", lambda device: True)
    sizes = {"multi_processor_count": 132, "total_memory": 141 * 10**9, "major": 9, "minor": 0}
    properties = SimpleNamespace(**sizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("_lazy_init", "graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(pretended))
    pretended = PretendGpu()
    keep_on_host, run_on_host = dispatch.KernelLaunch.keep, dispatch.KernelLaunch.run

    def keep(call: dispatch.KernelLaunch, tensor: Tensor) -> int:
        if call.device.type == "cpu":
            return keep_on_host(call, tensor)
        on_gpu = isinstance(tensor, FakeTensor) and tensor.device == call.device == GPU
        assert on_gpu, f"{tensor} is not on the GPU"
        call._kept.append(tensor)
        return 1 + len(call._kept)

    def run(call: dispatch.KernelLaunch, kernel: str, dtype: Any, record: Any) -> Any:
        if call.device.type == "cpu":
            return run_on_host(call, kernel, dtype, record)
        pretended.launches[kernel] += 1
        for tensor in call._kept:  # its results, such as advantages
            is_real = tensor.dtype in (torch.float32, torch.float64)
            if is_real and tensor.numel() < _LARGEST_KNOWN and not _is_known(tensor):
                tensor.known = torch.ones(tensor.shape, dtype=tensor.dtype)
        return -1

    def run_plan(plan: Any, device: torch.device, arguments: tuple[Any, ...]) -> Any:
        if device.type == "cpu":
            return run_plan_on_host(plan, device, arguments)
        call = dispatch.KernelLaunch(device)
        _ = [keep(call, x) for x in arguments if isinstance(x, Tensor)]
        return run(call, plan, None, None)

    def make_plan(kernel: str, on_gpu: bool, *given: Any) -> Any:
        return kernel if on_gpu else dispatch.make_plan(kernel, on_gpu, *given)

    run_plan_on_host = dispatch.run_plan
    monkeypatch.setattr(dispatch.KernelLaunch, "keep", keep)
    monkeypatch.setattr(dispatch.KernelLaunch, "run", run)
    monkeypatch.setattr(dispatch, "run_plan", run_plan)
    monkeypatch.setattr(loss_kernel, "make_plan", make_plan)
    yield pretended
    forget_tables()
    loss_kernel.plan_rows.cache_clear()

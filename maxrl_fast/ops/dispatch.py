"""Which kernels run on a device, how one is called, and the checks of its arguments."""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from maxrl_fast import _C

if torch.__version__ < "2.11.dev":
    raise ImportError(f"maxrl_fast needs PyTorch 2.11 or later, this is {torch.__version__}")

# Dtypes of the kernels that run only on a GPU, in layers and in decoding.
DEVICE_DTYPES = (torch.float32, torch.bfloat16)


@lru_cache
def has_cuda_kernels(device: torch.device) -> bool:
    return _C.cuda and torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernels(device: torch.device) -> bool:
    """Whether the extension's kernels run on this device; otherwise the PyTorch references do."""
    return device.type == "cpu" or (device.type == "cuda" and has_cuda_kernels(device))


def is_gpu(device: torch.device) -> bool:
    """Whether this device runs the CUDA kernels. Tests that emulate a GPU replace this function."""
    return device.type == "cuda"


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def eager(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a public function so that torch.compile breaks its graph there and calls it as it
    is. torch.compiler.disable at once would import the compiler with the package (seconds)."""

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def check_first_order(function: str) -> None:
    """Raise RuntimeError in a backward pass with create_graph=True.

    torch's once_differentiable raises only if the incoming gradient requires a gradient, so a
    gradient penalty would be silently missing from the loss. In forward mode and in the transforms
    of torch.func PyTorch itself raises, as every Function of the package takes the context in its
    forward pass.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} can be differentiated once only, got create_graph=True, which asks for a "
            "second derivative"
        )


def check_fields(record: str, fields: Sequence[str]) -> None:
    compiled = tuple(_C.FIELDS.get(record, ()))
    if compiled != tuple(fields):
        raise ImportError(
            f"the compiled module maxrl_fast._C does not fit this Python code: its {record} has "
            f"the fields {compiled}, Python's has {fields}; build the extension again"
        )


@lru_cache
def packing(record: str) -> struct.Struct:
    """Return how a record of csrc/ is packed for csrc/kernel.h: its fields without gaps."""
    return struct.Struct("=" + "".join(x.partition("|")[0] for x in _C.FIELDS[record].values()))


@lru_cache
def choices(record: str) -> dict[str, list[str]]:
    """Return the names of the values of each field, none if it is not of an enumeration."""
    return {name: code.split("|")[1:] for name, code in _C.FIELDS[record].items()}


def pack(record: str, fields: dict[str, Any]) -> bytes:
    """Return a packed record. A field of an enumeration is given by name, one that is a record or
    an array as a tuple or a list."""
    known, values = choices(record), list[Any]()
    if fields.keys() != known.keys():
        raise TypeError(f"{record} takes {', '.join(known)}, got {', '.join(fields)}")
    for name, names in known.items():
        x = fields[name]
        if names and x not in names:
            raise ValueError(f"{record}: {name} must be one of {', '.join(names)}, got {x!r}")
        values += [names.index(x)] if names else _flat(x)
    try:
        return packing(record).pack(*values)
    except (struct.error, TypeError, OverflowError) as error:
        wanted = _C.FIELDS[record]
        raise TypeError(f"{record} must have fields of {wanted}, got {fields}: {error}") from error


def _flat(x: Any) -> list[Any]:
    return [y for part in x for y in _flat(part)] if isinstance(x, (tuple, list)) else [x]


def make_plan(
    kernel: str,
    on_gpu: bool,
    dtype: torch.dtype,
    fields: dict[str, Any],
    slots: Sequence[str],
    of_gradient: torch.dtype | None = None,
) -> _C.Plan:
    """Return a kernel's call without its arguments and sizes, for which `fields` have any numbers.
    A slot is a field, a colon, and of Slot in csrc/bindings/module.cpp the form, an element (. of
    the dtype, g of the gradient's, r of the arithmetic, d float64, x float32 or float64, q int64, b
    bool, - none) and two sizes."""
    real = 2, 64 if dtype is torch.float64 else 32  # kind and bits
    elements = {"r": real, "d": (2, 64), "x": (2, 0), "q": (0, 64), "b": (6, 8)}
    elements |= dict.fromkeys(" -", (0, 0))
    for name, x in ((".", dtype), ("g", of_gradient or dtype)):
        elements[name] = (4, 16) if x is torch.bfloat16 else real
    places, at, packed = dict[str, int](), 0, b""
    for name, code in _C.FIELDS[kernel].items():
        places[name], at = at, at + struct.calcsize("=" + code.partition("|")[0])
    for slot in slots:
        name, _, code = slot.partition(":")
        code = code.ljust(4)
        given = code[0].encode(), *elements[code[1]], code[2:].encode()
        packed += struct.pack("=HcBB2sx", places[name], *given)
    device = "cuda" if on_gpu else "cpu"
    return _C.Plan(Tensor, f"{kernel}_{device}", dtype_name(dtype), pack(kernel, fields), packed)


def run_plan(plan: _C.Plan, device: torch.device, arguments: tuple[Any, ...]) -> int:
    if not is_gpu(device):
        return plan.run(arguments, torch.get_num_threads())
    with torch.cuda.device(device):
        return plan.run(arguments, torch.cuda.current_stream().cuda_stream)


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class KernelLaunch:
    """One kernel call on a device, and the only place in the package that takes a tensor's address.

    A kernel runs without the GIL, on a GPU even after its launch has returned, so the call holds
    every tensor whose address it has given.
    """

    __slots__ = ("_cached", "_kept", "device")

    def __init__(self, device: torch.device):
        self.device = device
        self._kept: list[Tensor] = []
        self._cached: tuple[Tensor, ...] = ()

    def address(
        self,
        name: str,
        tensor: Tensor | None,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        has_stride: bool = False,
    ) -> int:
        """Return a tensor's address, 0 for None; raise ValueError if it does not fit, or is not
        contiguous. With `has_stride` its rows must be, at any distance."""
        if tensor is None:
            return 0
        memory = tensor[0] if has_stride and tensor.dim() and len(tensor) else tensor
        if (
            tensor.dtype != dtype
            or tensor.shape != shape
            or not memory.is_contiguous()
            or tensor.device != self.device
        ):
            rows = ", in rows" * has_stride
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor of shape {tuple(shape)}{rows} on "
                f"{self.device}, got {tensor.dtype} of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}"
            )
        return self.keep(tensor)

    def matrix(self, name: str, x: Tensor) -> tuple[int, int]:
        """Return Rows of csrc/token_loss.h, of a matrix."""
        distance, step = x.stride()
        if step != 1 or x.device != self.device:
            return self.address(name, x, x.dtype, tuple(x.shape), True), distance
        return self.keep(x), distance

    def addresses(
        self, dtype: torch.dtype, *shape: int, **tensors: Tensor | None
    ) -> dict[str, int]:
        """Return the addresses of tensors of one dtype and shape by name."""
        return {name: self.address(name, x, dtype, shape) for name, x in tensors.items()}

    def keep(self, tensor: Tensor) -> int:
        if tensor.is_neg():  # a view whose memory has the other sign
            tensor = tensor.resolve_neg()
        self._kept.append(tensor)
        address = tensor.data_ptr()
        if not address and tensor.numel():  # as within torch.func.vmap or a FakeTensorMode
            raise ValueError("the kernels need tensors with values, got one without memory")
        return address

    def keep_cached(self, tensor: Tensor) -> int:
        """Return the address of a tensor from a cache, which may drop it at any time: on a GPU
        `launch` records that this stream uses it."""
        self._cached += (tensor,)
        return self.keep(tensor)

    def launch(self, kernel: str, **fields: Any) -> Any:
        """Run a kernel, of `dtype` where it has several. Tensors among the other fields are memory
        that the caller made for results; None is the address 0."""
        dtype = fields.pop("dtype", None)
        for name, x in fields.items():
            if x is None or isinstance(x, Tensor):
                fields[name] = 0 if x is None else self.keep(x)
        return self.run(kernel, dtype, fields)

    def run(self, kernel: str, dtype: torch.dtype | None, record: dict[str, Any] | bytes) -> Any:
        """Run a kernel of a record, which may be packed."""
        if isinstance(record, dict):
            record = pack(kernel, record)
        name = "" if dtype is None else dtype_name(dtype)
        if not is_gpu(self.device):
            return getattr(_C, f"{kernel}_cpu")(name, record, torch.get_num_threads())
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            for tensor in self._cached:
                tensor.record_stream(stream)
            if self._cached and torch.cuda.is_current_stream_capturing():
                _captured.update(self._cached)
            return getattr(_C, f"{kernel}_cuda")(name, record, stream.cuda_stream)


# cached tensors that CUDA graphs read; a graph may be replayed at any time
_captured: set[Tensor] = set()


def kernels_for(device: torch.device) -> str:
    if device.type == "cpu":
        return "C++"
    return "CUDA" if has_kernels(device) else "PyTorch reference"

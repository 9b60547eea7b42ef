"""The choice of a FlashAttention implementation at the start of a run on a GPU.

torch.nn.attention can replace the aten operators that flash.py and rollout/decode_attention.py call
by those of an installed package. Some refuse a head size or a layout only when they are called, so
each, and the flash-attn package, is probed on small inputs against plain PyTorch.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from maxrl_fast.model import flash
from maxrl_fast.model.flash import VarlenSpec

MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
# By the major compute capability, in the order in which they are tried. No stopwatch decides, so a
# machine always computes the same numbers. Hopper (9): FA3 was written for its asynchronous matrix
# multiplications; FA4 was written for Blackwell, and runs there too. Blackwell (10): FA3 does not
# run. Others, such as Ampere and consumer GPUs: neither does.
CANDIDATES = {9: ("FA3", "FA4"), 10: ("FA4",)}
# The lengths of queries and of keys in the two patterns of tree_attention, with odd
# lengths, and a prompt that no response continues.
LENGTHS = {"causal": ([129, 3, 64], [129, 3, 64]), "to prompts": ([70, 0, 200], [65, 40, 129])}


def choose(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    is_anywhere: Callable[[bool], bool] = lambda failed: failed,
    registry: Any = torch.nn.attention,
) -> list[str]:
    """Activate the first installed implementation that is correct on this GPU, if any, and refuse a
    flash-attn package that is not. Returns sentences on what was tried.

    heads: numbers of query and key heads, head size. is_anywhere: whether a flag is set on any
    rank, because all ranks take the same implementation.
    """
    kernel, sentences = flash.kernel_for(device, dtype, heads[2]), list[str]()
    if kernel not in (flash.TORCH_VARLEN, flash.FLASH_ATTN):
        return []
    is_package = kernel is flash.FLASH_ATTN
    reason = _failure(lambda: kernel, device, dtype, heads) if is_package else "absent"
    if is_anywhere(bool(reason)) and is_package:
        flash.refused.add(kernel.name)
        sentences = [_refusal("the flash-attn package", reason)]
    candidates = CANDIDATES.get(torch.cuda.get_device_capability(device)[0], ())
    installed = [name for name in candidates if not is_anywhere(not _is_installed(MODULES[name]))]
    return sentences + first_correct(installed, device, dtype, heads, is_anywhere, registry)


def first_correct(
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    is_anywhere: Callable[[bool], bool],
    registry: Any,
) -> list[str]:
    sentences = list[str]()
    for name in names:
        reason = _activate(name, device, dtype, heads, registry)
        if not is_anywhere(bool(reason)):
            said = f"{name} of {MODULES[name]} runs in place of PyTorch's FlashAttention-2"
            return [*sentences, f"attention: {said}"]
        if not reason:
            registry.restore_flash_attention_impl()
        sentences.append(_refusal(f"{name} of {MODULES[name]}", reason))
    return sentences


def _refusal(what: str, reason: str) -> str:
    return f"attention: {what} was tried and refused: {reason or 'it failed on another rank'}"


def _activate(
    name: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], registry: Any
) -> str:
    """Activate an implementation; return why it was restored, "" if it was not."""

    def activated() -> flash.Kernel:
        registry.activate_flash_attention_impl(name)
        return flash.TORCH_VARLEN

    reason = _failure(activated, device, dtype, heads)
    if reason and registry.current_flash_attention_impl() is not None:
        registry.restore_flash_attention_impl()
    return reason


def _failure(
    get_kernel: Callable[[], flash.Kernel],
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
) -> str:
    """Return what a kernel does wrong, "" if nothing."""
    try:
        return _worst(_probe(get_kernel(), device, dtype, heads), 2 * torch.finfo(dtype).eps)
    except Exception as error:  # third-party import and kernels: anything; reported at the start
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def _worst(errors: dict[str, float], limit: float) -> str:
    """Return a sentence on the errors above the limit (NaN is), "" if there are none."""
    wrong = {what: error for what, error in errors.items() if not error <= limit}
    return "; ".join(
        f"its {what} is off by {error:.2g}, relative, at most {limit:.2g}"
        for what, error in wrong.items()
    )


def _probe(
    kernel: flash.Kernel, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]
) -> dict[str, float]:
    """Return relative errors against float32 PyTorch."""
    generator = torch.Generator().manual_seed(0)

    def normal(length: int, num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, heads[2], generator=generator).to(device, dtype)

    errors = {}
    for pattern, lengths in LENGTHS.items():
        q_lengths, k_lengths = map(torch.tensor, lengths)
        spec = VarlenSpec(q_lengths, k_lengths, device, causal=pattern == "causal")
        (q, grad), (k, v) = (
            [normal(sum(n), h) for _ in range(2)] for n, h in zip(lengths, heads, strict=False)
        )
        results = kernel.forward(q, k, v, spec)
        wanted = flash.PADDED_REFERENCE.forward(q.float(), k.float(), v.float(), spec)
        # Output and log-sum-exp as after a merge with another part, whose keys have a third of the
        # probability.
        o, lse = (wanted[0] * 0.75).to(dtype), wanted[1] + torch.tensor(1.5, device=device).log()
        grads = kernel.backward(grad, q, k, v, o, lse, spec)
        wanted_grads = flash.PADDED_REFERENCE.backward(
            grad.float(), q.float(), k.float(), v.float(), o.float(), lse, spec
        )
        names = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")
        pairs = zip((*results, *grads), (*wanted, *wanted_grads), strict=True)
        for name, (got, want) in zip(names, pairs, strict=True):
            errors[f"{name} ({pattern})"] = _relative(got, want)
    k, v, q = normal(3 * 96, heads[1]), normal(3 * 96, heads[1]), normal(3 * 4, heads[0])
    counts = torch.tensor([96, 1, 40])
    valid = (torch.arange(96) < counts[:, None]).flatten().to(device)
    spec = VarlenSpec(torch.full((3,), 4), counts, device)
    want, _ = flash.PADDED_REFERENCE.forward(q.float(), k[valid].float(), v[valid].float(), spec)
    errors["output (decoding)"] = _relative(
        _decoding(q, k, v, counts.to(device, torch.int32), 4, 96), want
    )
    return errors


def _decoding(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, samples: int, width: int) -> Tensor:
    """Call the operator as rollout/decode_attention.py does: `samples` queries each to counts [G]
    keys."""
    groups = torch.arange(len(counts) + 1, dtype=torch.int32, device=q.device)
    sizes = (groups * samples, groups * width, samples, width)
    output: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes, 0.0, False, False, seqused_k=counts
    )[0]
    return output


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())

"""The choice of a FlashAttention: what is right runs, what fails or computes something else is
taken out again.
"""

import pytest
import torch

from maxrl_fast.model import flash, flash_choice
from maxrl_fast.model.flash import Kernel

CPU, HEADS = torch.device("cpu"), (4, 2, 64)
PLAIN = flash.PADDED_REFERENCE


def decoding(q, k, v, counts, samples, width, factor=1.0):
    """The attention of flash_choice._decoding, in float64."""
    repeats, groups = q.shape[1] // k.shape[1], len(counts)
    k, v = (x.view(groups, width, -1, 64).repeat_interleave(repeats, 2).double() for x in (k, v))
    scores = torch.einsum("gshd,gkhd->gshk", q.view(groups, samples, -1, 64).double(), k) / 8
    hidden = torch.arange(width) >= counts[:, None]
    p = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return factor * torch.einsum("gshk,gkhd->gshd", p, v).flatten(0, 1).to(q.dtype)


class Registry:
    """torch.nn.attention with implementations of its own: each is a kernel, or an error of its
    activation.
    """

    def __init__(self, monkeypatch, implementations):
        self.implementations, self._patch = implementations, monkeypatch
        self.active, self.log = None, []

    def current_flash_attention_impl(self):
        return self.active

    def activate_flash_attention_impl(self, name):
        self.log.append(name)
        kernel, factor = self.implementations[name]
        if isinstance(kernel, Exception):
            raise kernel
        self.active = name
        self._patch.setattr(flash, "TORCH_VARLEN", kernel)
        self._patch.setattr(flash_choice, "_decoding", lambda *args: decoding(*args, factor=factor))

    def restore_flash_attention_impl(self):
        self.log.append("restored")
        self.active = None


def wrong(part, factor):
    """Plain attention with one of its results, 0 to 4 as (o, l, dq, dk, dv), multiplied."""

    def changed(results, first):
        return tuple(x * factor if first + i == part else x for i, x in enumerate(results))

    def forward(*x):
        return changed(PLAIN.forward(*x), 0)

    return Kernel("wrong", forward, lambda *x: changed(PLAIN.backward(*x), 2)), 1.0


def raising(*_):
    raise RuntimeError("FA3 flash_attention backward unsupported\nand a second line")


RIGHT = (PLAIN, 1.0)
NO_IMPORT = ImportError("libcudart.so.12 is missing"), 1.0
REFUSED = {  # an implementation, and why it is refused
    "its import": (NO_IMPORT, "ImportError: libcudart.so.12 is missing"),
    "its backward pass": (
        (Kernel("half", PLAIN.forward, raising), 1.0),
        "RuntimeError: FA3 flash_attention backward unsupported",
    ),
    "its output": (
        wrong(0, 1.1),
        "its output (causal) is off by 0.1, relative, at most 0.016; its output (to prompts)",
    ),
    "its log-sum-exp": (wrong(1, 0.9), "its log-sum-exp (causal) is off by 0.1"),
    "its gradient of v": (wrong(4, float("nan")), "its gradient of v (causal) is off"),
    "its decoding": ((PLAIN, 1.03), "its output (decoding) is off by 0.03"),
}


def first_correct(registry, names=("FA3", "FA4"), is_anywhere=lambda failed: failed):
    return flash_choice.first_correct(names, CPU, torch.bfloat16, HEADS, is_anywhere, registry)


def test_the_first_that_is_right_runs(monkeypatch):
    registry = Registry(monkeypatch, {"FA3": RIGHT, "FA4": RIGHT})
    assert first_correct(registry) == [
        "attention: FA3 of flash_attn_interface runs in place of PyTorch's FlashAttention-2"
    ]
    assert (registry.active, registry.log) == ("FA3", ["FA3"])


@pytest.mark.parametrize("what", REFUSED)
def test_what_fails_or_computes_something_else_is_taken_out_again(monkeypatch, what):
    implementation, reason = REFUSED[what]
    registry = Registry(monkeypatch, {"FA3": implementation, "FA4": RIGHT})
    refused, runs = first_correct(registry)
    start = "attention: FA3 of flash_attn_interface was tried and refused: "
    assert refused.startswith(start + reason)
    assert "\n" not in refused
    assert runs.startswith("attention: FA4 of flash_attn.cute.interface runs in place of PyTorch's")
    assert registry.active == "FA4"
    assert registry.log == (["FA3", "FA4"] if what == "its import" else ["FA3", "restored", "FA4"])


def test_all_ranks_take_the_same(monkeypatch):
    registry = Registry(monkeypatch, {"FA3": RIGHT})
    [sentence] = first_correct(registry, ["FA3"], is_anywhere=lambda failed: True)
    assert sentence.endswith("was tried and refused: it failed on another rank")
    assert registry.active is None


@pytest.mark.parametrize("what", ["nothing", "its output", "its decoding"])
def test_a_flash_attn_package_that_is_wrong_is_refused(monkeypatch, what):
    (kernel, factor), reason = REFUSED.get(what, (RIGHT, ""))
    cuda, half, kernel_for = torch.device("cuda"), torch.bfloat16, flash.kernel_for
    package = Kernel("flash-attn varlen", kernel.forward, kernel.backward)
    monkeypatch.setattr(flash, "FLASH_ATTN", package)
    monkeypatch.setattr(flash_choice, "_decoding", lambda *args: decoding(*args, factor=factor))
    monkeypatch.setattr(flash, "_is_recent", lambda device: True)
    monkeypatch.setattr(flash, "_flash_attn", lambda: object())
    monkeypatch.setattr(flash, "refused", set())
    monkeypatch.setattr(flash, "kernel_for", lambda _, *rest: kernel_for(cuda, *rest))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    sentences = flash_choice.choose(CPU, half, HEADS, registry=Registry(monkeypatch, {}))
    if what == "nothing":
        assert sentences == []
        assert kernel_for(cuda, half, 64, 50.0) is package
        return
    start = f"attention: the flash-attn package was tried and refused: {reason}"
    assert [x.startswith(start) for x in sentences] == [True]
    assert kernel_for(cuda, half, 64) is flash.TORCH_VARLEN
    assert kernel_for(cuda, half, 64, 50.0) is flash.PADDED_REFERENCE

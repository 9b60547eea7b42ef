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
    repeats = q.shape[1] // k.shape[1]
    k, v = (
        x.view(len(counts), width, -1, x.shape[-1]).repeat_interleave(repeats, 2) for x in (k, v)
    )
    scores = (
        torch.einsum(
            "gshd,gkhd->gshk", q.view(len(counts), samples, *q.shape[1:]).double(), k.double()
        )
        * q.shape[-1] ** -0.5
    )
    hidden = torch.arange(width) >= counts[:, None]
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    return factor * torch.einsum("gshk,gkhd->gshd", scores.softmax(-1), v.double()).flatten(
        0, 1
    ).to(q.dtype)


class Registry:
    """torch.nn.attention with implementations of its own: each is a kernel, or an error of its
    activation.
    """

    def __init__(self, monkeypatch, implementations):
        self.implementations, self.active, self.log, self._patch = (
            implementations,
            None,
            [],
            monkeypatch,
        )

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

    return Kernel(
        "wrong", lambda *x: changed(PLAIN.forward(*x), 0), lambda *x: changed(PLAIN.backward(*x), 2)
    )


def raising(*_):
    raise RuntimeError("FA3 flash_attention backward unsupported: head size\nand a second line")


RIGHT = (PLAIN, 1.0)
REFUSED = {
    "its import": (
        (ImportError("libcudart.so.12 is missing"), 1.0),
        "ImportError: libcudart.so.12 is missing",
    ),
    "its backward pass": (
        (Kernel("half", PLAIN.forward, raising), 1.0),
        "RuntimeError: FA3 flash_attention backward unsupported: head size",
    ),
    "its output": (
        (wrong(0, 1.1), 1.0),
        "its output (causal) is off by 0.1, relative, at most 0.016; its output (to prompts)",
    ),
    "its log-sum-exp": ((wrong(1, 0.9), 1.0), "its log-sum-exp (causal) is off by 0.1"),
    "its gradient of q": ((wrong(2, 0.0), 1.0), "its gradient of q (causal) is off by 1"),
    "its gradient of v": (
        (wrong(4, float("nan")), 1.0),
        "its gradient of v (causal) is off",
    ),
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
    assert refused.startswith(
        f"attention: FA3 of flash_attn_interface was tried and refused: {reason}"
    )
    assert "\n" not in refused
    assert (
        runs
        == "attention: FA4 of flash_attn.cute.interface runs in place of PyTorch's FlashAttention-2"
    )
    assert registry.active == "FA4"
    assert registry.log == (["FA3", "FA4"] if what == "its import" else ["FA3", "restored", "FA4"])


def test_all_ranks_take_the_same(monkeypatch):
    registry = Registry(monkeypatch, {"FA3": RIGHT})
    [sentence] = first_correct(registry, ["FA3"], is_anywhere=lambda failed: True)
    assert sentence.endswith("was tried and refused: it failed on another rank")
    assert registry.active is None


@pytest.mark.parametrize(
    ("capability", "names"),
    [((9, 0), ["FA3", "FA4"]), ((10, 0), ["FA4"]), ((12, 0), []), ((8, 0), [])],
)
def test_what_is_installed_and_made_for_the_gpu_is_tried_in_a_fixed_order(
    monkeypatch, capability, names
):
    registry = Registry(
        monkeypatch, {"FA3": REFUSED["its import"][0], "FA4": REFUSED["its import"][0]}
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash_choice, "_is_installed", lambda module: True)
    cuda = torch.device("cuda")
    flash._is_recent.cache_clear()
    sentences = flash_choice.choose(cuda, torch.bfloat16, HEADS, registry=registry)
    assert registry.log == names
    assert len(sentences) == len(names)
    monkeypatch.setattr(flash_choice, "_is_installed", lambda module: False)
    assert flash_choice.choose(cuda, torch.bfloat16, HEADS, registry=registry) == []
    assert registry.log == names
    flash._is_recent.cache_clear()


@pytest.mark.parametrize("what", ["nothing", "its output", "its decoding"])
def test_a_flash_attn_package_that_is_wrong_is_refused(monkeypatch, what):
    (kernel, factor), reason = REFUSED.get(what, (RIGHT, ""))
    package = Kernel("flash-attn varlen", kernel.forward, kernel.backward)
    monkeypatch.setattr(flash, "FLASH_ATTN", package)
    monkeypatch.setattr(flash_choice, "_decoding", lambda *args: decoding(*args, factor=factor))
    monkeypatch.setattr(flash, "_is_recent", lambda device: True)
    monkeypatch.setattr(flash, "_flash_attn", lambda: object())
    monkeypatch.setattr(flash, "refused", set())
    kernel_for, cuda = flash.kernel_for, torch.device("cuda")
    monkeypatch.setattr(flash, "kernel_for", lambda _, *rest: kernel_for(cuda, *rest))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    registry = Registry(monkeypatch, {})
    sentences = flash_choice.choose(CPU, torch.bfloat16, HEADS, registry=registry)
    if what == "nothing":
        assert sentences == []
        assert kernel_for(cuda, torch.bfloat16, 64, 50.0) is package
        return
    start = f"attention: the flash-attn package was tried and refused: {reason}"
    assert [x.startswith(start) for x in sentences] == [True]
    assert kernel_for(cuda, torch.bfloat16, 64) is flash.TORCH_VARLEN
    assert kernel_for(cuda, torch.bfloat16, 64, 50.0) is flash.PADDED_REFERENCE

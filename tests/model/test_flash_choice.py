import pytest
import torch

from maxrl_fast.model import flash
from maxrl_fast.model.flash import REFERENCE, Kernel

CPU, HEADS = torch.device("cpu"), (4, 2, 64)
FA3, FA4 = "FA3 of flash_attn_interface", "FA4 of flash_attn.cute.interface"


def attend_prompts(q, k, v, starts, cache_starts, most, width, lengths, factor=1.0):
    """The attention of flash.attend_prompts, where all prompts have as many queries."""
    tiles = (x.unflatten(0, (-1, n)) for x, n in ((q, most), (k, width), (v, width)))
    o, lse = flash.attend(*tiles, torch.arange(width) < lengths[:, None, None])
    return o.flatten(0, 1) * factor, lse.flatten(0, 1)


class Registry:
    """torch.nn.attention with implementations of its own: each is a kernel, or an error of its
    activation, and a factor of what it computes in decoding.
    """

    def __init__(self, patch, implementations):
        self.implementations, self._patch = implementations, patch
        self.active, self.log = None, []
        patch.setattr(flash, "registry", self)
        patch.setattr(flash, "_is_installed", lambda module: module.endswith("interface"))
        patch.setattr(flash, "kernel_for", lambda *_: flash.TORCH_VARLEN)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def current_flash_attention_impl(self):
        return self.active

    def activate_flash_attention_impl(self, name):
        self.log.append(name)
        kernel, factor = self.implementations[name]
        if isinstance(kernel, Exception):
            raise kernel
        self.active = name
        self._patch.setattr(flash, "TORCH_VARLEN", kernel)
        self._patch.setattr(flash, "attend_prompts", lambda *x: attend_prompts(*x, factor=factor))

    def restore_flash_attention_impl(self):
        self.log.append("restored")
        self.active = None


def wrong(part, factor):
    """Plain attention with one of its results, 0 to 4 as (o, l, dq, dk, dv), multiplied."""

    def changed(results, first):
        return tuple(x * factor if first + i == part else x for i, x in enumerate(results))

    def forward(*x):
        return changed(REFERENCE.forward(*x), 0)

    return Kernel("wrong", forward, lambda *x: changed(REFERENCE.backward(*x), 2)), 1.0


def raising(*_):
    raise RuntimeError("FA3 flash_attention backward unsupported\nand a second line")


RIGHT = (REFERENCE, 1.0)
REFUSED = {  # an implementation, and why it is refused
    "its import": ((ImportError("no libcudart"), 1.0), "ImportError: no libcudart"),
    "its backward pass": (
        (Kernel("half", REFERENCE.forward, raising), 1.0),
        "RuntimeError: FA3 flash_attention backward unsupported",
    ),
    "its output": (wrong(0, 1.1), "it is off by 0.1, relative, at most 0.016"),
    "its log-sum-exp": (wrong(1, 0.9), "it is off by 0.1"),
    "its gradient of v": (wrong(4, float("nan")), "it is off by nan"),
    "its decoding": ((REFERENCE, 1.03), "it is off by 0.03"),
}


@pytest.mark.parametrize("what", [*REFUSED])
def test_what_fails_or_computes_something_else_is_taken_out_again(monkeypatch, what):
    implementation, reason = REFUSED[what]
    registry = Registry(monkeypatch, {"FA3": implementation, "FA4": RIGHT})
    refused, runs = flash.choose(CPU, torch.bfloat16, HEADS)
    assert refused.startswith(f"attention: {FA3} was tried and refused: {reason}")
    assert "\n" not in refused
    assert runs == f"attention: {FA4} runs in place of PyTorch's FlashAttention-2"
    assert registry.active == "FA4"
    assert registry.log == (["FA3", "FA4"] if what == "its import" else ["FA3", "restored", "FA4"])


def test_all_ranks_take_the_same(monkeypatch):
    registry = Registry(monkeypatch, {"FA3": RIGHT, "FA4": RIGHT})
    flags = iter([False, True, False, False])  # FA3 fails on another rank
    refused, runs = flash.choose(CPU, torch.bfloat16, HEADS, lambda failed: next(flags))
    assert refused == f"attention: {FA3} was tried and refused: it failed on another rank"
    assert (registry.active, runs.split()[1]) == ("FA4", "FA4")

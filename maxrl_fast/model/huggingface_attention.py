"""The attention function that transformers calls in every layer; it calls the policy's attention.

Scale, sliding window, soft cap and sinks are passed on; anything else that eager attention would
honour is refused by name.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.errors import InputError
from maxrl_fast.model.attention import AttentionVariant

NAME = "maxrl_fast"  # under which the functions are registered
# Arguments that say nothing about the attention between tokens.
_OTHER = {
    *("position_ids", "cache_position", "position_embeddings", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("hidden_states", "layer_idx", "logits_to_keep"),
}


@dataclass
class Pass:
    """A forward pass of one layer."""

    attention: Callable[..., Tensor]  # of PolicyModel.forward
    layer: int
    num_calls: int = 0


current: ContextVar[Pass | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def within(layer_pass: Pass | None) -> Iterator[None]:
    """Let attention inside belong to this pass."""
    token = current.set(layer_pass)
    try:
        yield
    finally:
        current.reset(token)


def register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> int | None:
    """Return the layer's window in place of transformers' mask tensor; None: all earlier tokens."""
    if use_vmap:
        raise InputError(
            "the model changes the causal mask by its own function, which is not supported"
        )
    return local_size


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention [1, U, Hq, D] of query [1, Hq, U, D], key and value [1, Hkv, U, D]."""
    layer_pass = current.get()
    if layer_pass is None:
        raise InputError("the model calls attention outside its layers")
    layer_pass.num_calls += 1
    window = attention_mask if isinstance(attention_mask, int) else 0
    told = [
        x for x in others if x not in _OTHER and others[x] is not None and others[x] is not False
    ]
    if attention_mask is not None and not isinstance(attention_mask, int):
        told.append("its own mask")
    elif sliding_window is not None and sliding_window != window:
        told.append(f"sliding_window {sliding_window}, where its mask has {window or 'none'},")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        told.append("is_causal False")
    if dropout:
        told.append(f"dropout {dropout}")
    if layer_pass.num_calls > 1:
        told.append("a second attention in one layer")
    if told:
        raise InputError(
            f"{type(module).__name__} asks for {', '.join(told)}, which shared-prompt attention "
            "does not do"
        )
    # they differ in multi-head latent attention
    size, largest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, heads, D]
    if size != query.shape[-1]:
        q, k, v = (F.pad(x, (0, largest - x.shape[-1])) for x in (q, k, v))
    if scaling != largest**-0.5:
        q = q * (scaling * largest**0.5)
    variant = AttentionVariant(window, float(softcap or 0.0), s_aux)
    out = layer_pass.attention(layer_pass.layer, q, k, v, *([] if variant.is_plain else [variant]))
    return out[None, ..., :size], None

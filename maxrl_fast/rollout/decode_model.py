"""The policy for decoding on a device: weights in the compute dtype, packed for few launches.

A layer is one matrix multiplication for q, k and v, rotary embedding, attention, o, addition and
norm, one multiplication for gate and up, SwiGLU, down, and addition with the next layer's norm.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.model.decoder import Attention, DecoderConfig, rotary_table
from maxrl_fast.model.layer_kernels import KERNELS, layer_ops
from maxrl_fast.model.layer_ops import TORCH_OPS, HeadNorms, Heads, LayerOps, Rotary
from maxrl_fast.ops.logit_chunks import output_product


@dataclass
class DecodeLayer:
    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Hq + 2 Hkv) D, H]
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    o: Tensor  # [H, Hq D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 F, H]
    down: Tensor  # [H, F]


class DecodeModel:
    """A decoder without gradients. Its weights keep their addresses, which CUDA graphs read."""

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool = False,
    ):
        c, self.config, self.device, self.dtype = config, config, device, dtype
        self.head_counts = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
        kernels = layer_ops(c.hidden_size, c.intermediate_size, c.head_dim, dtype, device)
        self.ops = TORCH_OPS if compiled else kernels
        self._before, self._after = before_attention, after_attention
        if compiled:
            self._before = torch.compile(before_attention, dynamic=True)
            self._after = torch.compile(after_attention, dynamic=True)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, dim = c.hidden_size, c.head_dim
        width = sum(self.head_counts) * dim

        def head_norms() -> HeadNorms | None:
            return HeadNorms(empty(dim), empty(dim), c.rms_norm_eps) if c.has_qk_norm else None

        self.layers = [
            DecodeLayer(
                input_norm=empty(hidden),
                qkv=empty(width, hidden),
                qkv_bias=empty(width) if c.has_qkv_bias else None,
                head_norms=head_norms(),
                o=empty(hidden, c.num_attention_heads * dim),
                post_norm=empty(hidden),
                gate_up=empty(2 * c.intermediate_size, hidden),
                down=empty(hidden, c.intermediate_size),
            )
            for _ in range(c.num_hidden_layers)
        ]
        self.norm, self.embedding = empty(hidden), empty(c.vocab_size, hidden)
        self.output = self.embedding if c.tie_word_embeddings else empty(c.vocab_size, hidden)
        # [positions, 1, D/2] float32: the angles of every position are computed once.
        self.tables = rotary_table(c, torch.arange(c.max_position_embeddings, device=device))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them by their names in checkpoints; parts of packed weights are views."""
        sizes = [count * self.config.head_dim for count in self.head_counts]
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            name = f"model.layers.{i}."
            yield f"{name}input_layernorm.weight", layer.input_norm
            for own, part in zip("qkv", layer.qkv.split(sizes), strict=True):
                yield f"{name}self_attn.{own}_proj.weight", part
            if layer.qkv_bias is not None:
                for own, part in zip("qkv", layer.qkv_bias.split(sizes), strict=True):
                    yield f"{name}self_attn.{own}_proj.bias", part
            if layer.head_norms is not None:
                yield f"{name}self_attn.q_norm.weight", layer.head_norms.q
                yield f"{name}self_attn.k_norm.weight", layer.head_norms.k
            yield f"{name}self_attn.o_proj.weight", layer.o
            yield f"{name}post_attention_layernorm.weight", layer.post_norm
            for own, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
                yield f"{name}mlp.{own}_proj.weight", part
            yield f"{name}mlp.down_proj.weight", layer.down
        yield "model.norm.weight", self.norm
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.output

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> Tensor:
        """See PolicyModel.forward. Without `rows` all are computed."""
        eps, rotary = self.config.rms_norm_eps, self._rotary(positions)
        x = F.embedding(tokens, self.embedding)  # [U, H]
        _, normed = self.ops.add_rms_norm(x, None, self.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            heads = self._before(layer, normed, rotary, self.head_counts, self.ops)
            attended = attention(i, *heads).flatten(1)  # [U, Hq * D]
            if rows is not None and layer is self.layers[-1]:
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            x, normed = self._after(layer, x, attended, next_norm, eps, self.ops)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return output_product(hidden, self.output)

    def _rotary(self, positions: Tensor) -> Rotary:
        cos, sin = self.tables
        if self.ops is KERNELS:
            return Rotary(cos, sin, positions)
        return Rotary(cos[positions].to(self.dtype), sin[positions].to(self.dtype))


def before_attention(
    layer: DecodeLayer,
    normed: Tensor,
    rotary: Rotary,
    head_counts: tuple[int, int, int],
    ops: LayerOps,
) -> Heads:
    packed = F.linear(normed, layer.qkv, layer.qkv_bias)
    return ops.rotate_heads(packed, head_counts, layer.head_norms, rotary)


def after_attention(
    layer: DecodeLayer, x: Tensor, attended: Tensor, next_norm: Tensor, eps: float, ops: LayerOps
) -> tuple[Tensor, Tensor]:
    x, normed = ops.add_rms_norm(x, F.linear(attended, layer.o), layer.post_norm, eps)
    inner = ops.swiglu(F.linear(normed, layer.gate_up))
    return ops.add_rms_norm(x, F.linear(inner, layer.down), next_norm, eps)

"""The policy for decoding on a device: weights in the compute dtype, packed for few launches.

A layer is one matrix multiplication for q, k and v, rotary embedding, attention, o, addition and
norm, one multiplication for gate and up, SwiGLU, down, and addition with the next layer's norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxrl_fast.model.decoder import Attention, Decoder, DecoderConfig, Layer, RMSNorm, rotary_table
from maxrl_fast.model.layer_kernels import KERNELS, HeadNorms, Rotary, layer_ops
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

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype):
        c, self.config, self.device, self.dtype = config, config, device, dtype
        self.head_counts = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
        self.ops = layer_ops(c.hidden_size, c.intermediate_size, c.head_dim, dtype, device)
        decoder = Decoder.empty(config, device, dtype)
        self.layers = [packed_layer(layer) for layer in decoder.blocks]
        # by their names in checkpoints; parts of packed weights are views
        self.weights = {name: x.data for name, x in decoder.named_parameters()}
        self.norm = decoder.model.norm.weight.data
        self.embedding = decoder.model.embed_tokens.weight.data
        self.output = decoder.lm_head.weight.data
        # [positions, 1, D/2] float32: the angles of every position are computed once.
        self.tables = rotary_table(c, torch.arange(c.max_position_embeddings, device=device))

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> Tensor:
        """See PolicyModel.forward. Without `rows` all are computed."""
        ops, eps, (cos, sin) = self.ops, self.config.rms_norm_eps, self.tables
        if ops is KERNELS:
            rotary = Rotary(cos, sin, positions)
        else:
            rotary = Rotary(cos[positions].to(self.dtype), sin[positions].to(self.dtype))
        x = F.embedding(tokens, self.embedding)  # [U, H]
        _, normed = ops.add_rms_norm(x, None, self.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            joint = F.linear(normed, layer.qkv, layer.qkv_bias)
            heads = ops.rotate_heads(joint, self.head_counts, layer.head_norms, rotary)
            attended = attention(i, *heads).flatten(1)  # [U, Hq * D]
            if rows is not None and layer is self.layers[-1]:
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            x, normed = ops.add_rms_norm(x, F.linear(attended, layer.o), layer.post_norm, eps)
            inner = ops.swiglu(F.linear(normed, layer.gate_up))
            x, normed = ops.add_rms_norm(x, F.linear(inner, layer.down), next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return output_product(hidden, self.output)


def packed_layer(layer: nn.Module) -> DecodeLayer:
    """Return the weights of a decoder's layer, which keeps those of several matrices as views."""
    assert isinstance(layer, Layer)
    own, mlp, norms = layer.self_attn, layer.mlp, None
    if isinstance(own.q_norm, RMSNorm) and isinstance(own.k_norm, RMSNorm):
        norms = HeadNorms(own.q_norm.weight.data, own.k_norm.weight.data, own.q_norm.eps)
    projections = own.q_proj, own.k_proj, own.v_proj
    biases = [x.bias for x in projections if x.bias is not None]
    return DecodeLayer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=pack([x.weight for x in projections]),
        qkv_bias=pack(biases) if biases else None,
        head_norms=norms,
        o=own.o_proj.weight.data,
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=pack([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight.data,
    )


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor for these parameters, which become views of it."""
    whole = parts[0].data.new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for part, view in zip(parts, whole.split([*map(len, parts)]), strict=True):
        part.data = view
    return whole

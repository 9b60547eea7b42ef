"""The decoder (Qwen2 architecture). Modules carry the names of Hugging Face checkpoints, so that state dicts are theirs.

Parameters are the float32 masters. A forward pass computes in the dtype it is asked for: each layer casts its weights,
and their gradients come back, and add up, in float32.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# What a layer asks for: attention of layer i's q [U, Hq, D], k and v [U, Hkv, D] -> [U, Hq, D].
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes under the names that Hugging Face configurations use."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:8]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a whole number of at least 1, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_table(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [U, 1, D/2] float32 of positions [U]."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angles = positions[:, None].float() * config.rope_theta**-exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of x [U, heads, D]: dimension i is paired with i + D/2."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size)
        self.k_proj = Linear(config.hidden_size, key_size)
        self.v_proj = Linear(config.hidden_size, key_size)
        self.o_proj = Linear(query_size, config.hidden_size, bias=False)

    def qkv(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q [U, Hq, D] and k [U, Hkv, D], rotated, and v [U, Hkv, D] of x [U, H]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, rotary), rotate(k, rotary), v


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Body(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Decoder over a packed stream of tokens; how tokens attend to one another is the caller's."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise(self, seed: int) -> None:
        """Weights from N(0, 0.02), biases 0, norms 1, as Qwen2 starts; the same for a seed on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Final hidden states of the asked rows of a packed stream.

        Args:
            tokens, positions: [U] int64.
            attention: called once a layer.
            rows: int64 [R]; after the last attention only these rows are computed, since no other is read.
            dtype: of the computation.

        Returns:
            hidden states [R, H] after the last norm, in `dtype`.
        """
        x = self.model.embed_tokens(tokens).to(dtype)  # [U, H]
        rotary = rotary_table(self.config, positions)
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            attended = attention(i, *layer.self_attn.qkv(layer.input_layernorm(x), rotary)).flatten(1)  # [U, Hq * D]
            if i == len(self.model.layers) - 1:
                x, attended = x.index_select(0, rows), attended.index_select(0, rows)
            x = x + layer.self_attn.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in float32 from hidden [R, H]."""
        return self.lm_head(hidden).float()

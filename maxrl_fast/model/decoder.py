"""The decoder of Qwen2, Qwen3, Llama 3 and SmolLM2, with the names of Hugging Face checkpoints.

Parameters are the float32 master weights, which a forward pass casts layer by layer to the compute
dtype; gradients are added in float32 (with FSDP2, in the compute dtype within a backward pass)."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxrl_fast.model.layer_kernels import (
    TORCH_OPS,
    HeadNorms,
    Heads,
    LayerOps,
    Rotary,
    choose_rows,
    layer_ops,
)
from maxrl_fast.model.linear import Linear, merged_weights, packed
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.model.recurrence import Recurrence

# By model_type: whether q, k and v have biases, and whether q and k have norms.
FAMILIES = {"qwen2": (True, False), "qwen3": (False, True), "llama": (False, False)}


# of a model that can be built, even without weights
LIMITS = {"num_hidden_layers": 2**12, "max_position_embeddings": 2**63}


def check_sizes(**sizes: object) -> None:
    for name, value in sizes.items():
        most = LIMITS.get(name, 2**20)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} must be an integer from 1 to {most}, got {value!r:.80}")


@dataclass(frozen=True)
class RopeScaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DecoderConfig(PolicySizes):
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ValueError(
                f"model_type must be one of {', '.join(FAMILIES)}, got {self.model_type!r}"
            )
        check_sizes(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)[:8]})
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, ops: LayerOps = TORCH_OPS) -> Tensor:
        return ops.add_rms_norm(x, None, self.weight, self.eps)[1]


def rotary_table(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at positions [U], each [U, 1, D/2] float32."""
    even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    exponents = even / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents  # rounded as transformers does
    # divide low frequencies, keep high ones, and interpolate between
    if (scaling := config.rope_scaling) is not None:
        # over the original context
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = (turns - low) / (high - low)
        frequencies = torch.lerp(frequencies / scaling.factor, frequencies, keep.clamp(0, 1))
    angles = positions[:, None].float() * frequencies  # [U, D/2]
    return angles.cos()[:, None], angles.sin()[:, None]


def join(*layers: Linear) -> None:
    """Store the weights of layers that are not trained one below another; theirs become views."""

    def store(parts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([x.data for x in parts])
        for part, view in zip(parts, whole.split([*map(len, parts)]), strict=True):
            part.data = view
        return whole

    biases = [x.bias for x in layers if x.bias is not None]
    layers[0].joint = store([x.weight for x in layers]), store(biases) if biases else None


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        num_kv_heads = config.num_key_value_heads
        self.head_counts = config.num_attention_heads, num_kv_heads, num_kv_heads
        hidden, (has_bias, has_norm) = config.hidden_size, FAMILIES[config.model_type]
        q, k, v = (count * config.head_dim for count in self.head_counts)
        self.q_proj = Linear(hidden, q, bias=has_bias)
        self.k_proj = Linear(hidden, k, bias=has_bias)
        self.v_proj = Linear(hidden, v, bias=has_bias)
        self.o_proj = Linear(q, hidden, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if has_norm else nn.Identity()
            for _ in "qk"
        )

    def qkv(self, x: Tensor, rotary: Rotary, ops: LayerOps) -> Heads:
        norms = None
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        heads = packed((self.q_proj, self.k_proj, self.v_proj), x)
        return ops.rotate_heads(heads, self.head_counts, norms, rotary)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def forward(self, x: Tensor, added: Tensor, ops: LayerOps) -> Tensor:
        inner = ops.swiglu(packed((self.gate_proj, self.up_proj), x))
        output: Tensor = self.down_proj(inner, added)
        return output


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        i: int,
        attention: Callable[..., Tensor],
        rows: Tensor | None,
        ops: LayerOps,
    ) -> Tensor:
        """Return the output [U, H] for x [U, H], or only its `rows` [R]: [R, H]."""
        norm = self.input_layernorm
        x, normed = ops.add_rms_norm(x, None, norm.weight, norm.eps)
        attended = attention(i, *self.self_attn.qkv(normed, rotary, ops)).flatten(1)  # [U, Hq * D]
        if rows is not None:
            x, attended = choose_rows(x, rows), choose_rows(attended, rows)
        norm, added = self.post_attention_layernorm, self.self_attn.o_proj(attended)
        x, normed = ops.add_rms_norm(x, added, norm.weight, norm.eps)
        output: Tensor = self.mlp(normed, x, ops)
        return output


class Body(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        # Pass a weight to skip nn.Embedding's initialisation: on the meta device it imports
        # torch._dynamo, which takes 3 s.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(PolicyModel):
    config: DecoderConfig
    tables: tuple[Tensor, Tensor] | None = None  # rotary_table of all positions

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Decoder":
        with torch.device("meta"):
            model = cls(config)
        model = model.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    def pack(self) -> None:
        """Prepare a decoder that is not trained for few launches."""
        layers: Any = self.model.layers
        for layer in layers:
            own, mlp = layer.self_attn, layer.mlp
            join(own.q_proj, own.k_proj, own.v_proj)
            join(mlp.gate_proj, mlp.up_proj)
        positions = torch.arange(self.config.max_position_embeddings, device=self.device)
        self.tables = rotary_table(self.config, positions)

    def initialise(self, seed: int) -> None:
        """Draw weights from N(0, 0.02), biases 0, norms 1; they are the same on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=0.02, generator=generator)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def set_output(self, layer: nn.Module) -> None:
        self.lm_head = layer

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Callable[..., Tensor],
        rows: Tensor | None,
        dtype: torch.dtype = torch.float32,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        x, ops = self.model.embed_tokens(tokens).to(dtype), self.ops(dtype)  # [U, H]
        at = None if self.tables is None else positions
        tables = self.tables or rotary_table(self.config, positions)
        if ops is TORCH_OPS:
            rotary = Rotary(*((x if at is None else x[at]).to(dtype) for x in tables))
        else:
            rotary = Rotary(*tables, at)
        last = len(self.model.layers) - 1
        for i, layer in enumerate(self.model.layers):
            arguments = (x, rotary, i, attention, rows if i == last else None, ops)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        hidden: Tensor = self.model.norm(x, ops)
        return hidden

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self)

    def ops(self, dtype: torch.dtype) -> LayerOps:
        c = self.config
        return layer_ops((c.hidden_size, c.intermediate_size, c.head_dim), dtype, self.device)

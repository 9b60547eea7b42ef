"""Tiny models of transformers' decoder families, with weights so large that windows, soft caps and
scales matter.
"""

from typing import Any

import torch

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
WINDOW = {"sliding_window": 7}
# Common families, and what their configuration needs beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "ministral": WINDOW,
    "gemma2": {
        **WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 5},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {},
    "llama": {},
    "qwen3_moe": EXPERTS,
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "starcoder2": WINDOW,
    "glm4": {},
    "exaone4": WINDOW,
    "gpt2": {},
    "gpt_oss": {
        **WINDOW,
        **EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "cohere2": {**WINDOW, "logit_scale": 0.125},
    "mixtral": EXPERTS,
    "olmo3": WINDOW,
}

_LATENT = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "head_dim": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_DEEPSEEK = {
    **_LATENT,
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Families of the table in docs/models.md whose configuration needs more than SIZES; positions and
# windows count early.
OTHERS: dict[str, dict[str, Any]] = {
    "axk1": _DEEPSEEK,
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        **WINDOW,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 100.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32},
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 40,
        **WINDOW,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, **WINDOW},
    "glm4_moe_lite": _DEEPSEEK,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "num_layers": 3,
        "window_size": 7,
    },
    "gptj": {"rotary_dim": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {
        **EXPERTS,
        "floor_scale": 4,
        "attention_chunk_size": 64,
        "intermediate_size_mlp": 48,
    },
    "longcat_flash": {
        **_DEEPSEEK,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
    },
    "mimo_v2_flash": {
        **EXPERTS,
        **WINDOW,
        "n_routed_experts": 4,
        "v_head_dim": 6,
        "n_group": 1,
        "topk_group": 1,
    },
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]
    },
    "ministral3": {
        **WINDOW,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 4,
        },
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 16),
        "num_buckets": 4,
    },
    "xlnet": {"max_position_embeddings": None, "d_head": 8},
    "youtu": _LATENT,
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model of a family."""
    from transformers import AutoConfig

    own = SIZES | FAMILIES.get(family, {}) | OTHERS.get(family, {}) | changes
    return AutoConfig.for_model(
        family, **{name: value for name, value in own.items() if value is not None}
    )


def tiny_model(config: Any, seed: int = 0) -> Any:
    """Return a model of transformers in float32: matrices from N(0, 0.3^2), everything else from
    N(0.7, 0.2^2).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 0.7 + 0.2 * noise)
    return model

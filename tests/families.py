"""Tiny models of transformers' decoder families, with weights so large that windows, soft caps and
scales matter.
"""

from typing import Any

import torch

from maxrl_fast.model.policy import model_class

SIZES = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS["moe_intermediate_size"] = 16
WINDOW = {"sliding_window": 7}
LATENT = {
    **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "head_dim": 4},
}
MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, **MIXED},
}
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_expand": 2, "mamba_chunk_size": 8},
}
DEEPSEEK = LATENT | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1}
DEEPSEEK |= {"n_group": 1, "topk_group": 1}
# The families that people train with reinforcement learning, and what their configuration needs
# beside the sizes; tests/model/families.py has the others.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "llama": {},
    "mistral": WINDOW,
    "mixtral": EXPERTS,
    "gemma2": {
        **WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 5},
    "phi3": {},
    "olmo3": WINDOW,
    "glm4": {},
    "deepseek_v3": DEEPSEEK,
    "smollm3": {},
    "gpt_oss": {
        **WINDOW,
        **EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": DELTA,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
}

# Models that read images too: what their text_config needs, and sizes of their other parts.
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14}
QWEN |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (FAMILIES["gemma3_text"], {"vision_config": SMALL, "mm_tokens_per_image": 4}),
    "gemma4": (
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, **WINDOW},
        {},
    ),
    "llama4": (
        {
            **EXPERTS,
            **{"intermediate_size_mlp": 48, "attention_chunk_size": 1000},
            "attn_temperature_tuning": False,
        },
        {
            "vision_config": {
                **SMALL,
                **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            }
        },
    ),
    "mistral3": ({"model_type": "mistral"}, {"vision_config": {"model_type": "pixtral", **SMALL}}),
    "qwen3_5": (DELTA, {"vision_config": QWEN}),
    "qwen3_vl": (
        {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
        {"vision_config": QWEN},
    ),
}


def tiny_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    own = SIZES | FAMILIES.get(family, {}) | changes
    if family in IMAGES:
        text, others = IMAGES[family]
        own = {"text_config": SIZES | text | changes, **others}
        own |= {"image_token_id": 1, "image_token_index": 1}
    return AutoConfig.for_model(family, **{k: v for k, v in own.items() if v is not None})


def tiny_model(config: Any, seed: int = 0) -> Any:
    """Return a model of transformers in float32: matrices from N(0, 0.3^2), everything else from
    N(0.7, 0.2^2).
    """
    model = model_class(config).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 0.7 + 0.2 * noise)
    return model

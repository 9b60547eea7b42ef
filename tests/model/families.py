"""Every decoder family of transformers, in tiny: exact, or refused.

`python tests/model/families.py` prints the table of docs/models.md, and ends with code 1 if the
page has another."""

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.huggingface import HuggingFacePolicy, has_parts
from maxrl_fast.model.policy import check_supported, sizes_of
from maxrl_fast.training.passes import check_exact

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.families import (
    DEEPSEEK,
    EXPERTS,
    FAMILIES,
    LATENT,
    MAMBA,
    WINDOW,
    tiny_config,
    tiny_model,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
LONGEST = 64  # tokens
NOT_TRIED = ("gemma4_assistant",)  # its configuration has defaults that contradict each other
ROPE = {"rope_type": "default", "rope_theta": 100.0}
# Families of the table in docs/models.md whose configuration needs more than SIZES; positions and
# windows count early.
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("exaone4", "ministral", "starcoder2"), WINDOW),
    **dict.fromkeys(("axk1", "deepseek_v2", "glm4_moe_lite"), DEEPSEEK),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    **{family: {"rotary_dim": 4} for family in ("codegen", "gptj")},
    "cohere2": {**WINDOW, "logit_scale": 0.125},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        **WINDOW,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 100.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32},
    },
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 40,
        **WINDOW,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, **WINDOW},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
        **{"chunk_size": 8, "layers_block_type": ["mamba", "attention", "mlp"]},
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "num_layers": 3,
        "window_size": 7,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {
        **EXPERTS,
        "floor_scale": 4,
        "attention_chunk_size": 64,
        "intermediate_size_mlp": 48,
    },
    "longcat_flash": {
        **DEEPSEEK,
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
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]
    },
    "ministral3": {
        **WINDOW,
        "rope_parameters": {
            **ROPE,
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
}


def verdict(family: str) -> str:
    """Return "exact", or why a policy of this family is refused."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if family in NOT_TRIED:
        return "not tried: a run decides"
    if has_parts(CONFIG_MAPPING[family]):
        return "a decoder of text within: a run decides"
    try:
        if family not in OTHERS:  # the kinds of layers that it has by default
            check_supported(AutoConfig.for_model(family), LONGEST)
        try:
            config = tiny_config(family, **OTHERS.get(family, own_sizes(family)))
            check_supported(config, LONGEST)
            model = tiny_model(config)
        except InputError:
            raise
        except Exception:  # of transformers' own checks
            return "not tried: its configuration refuses tiny sizes"
        check_exact(HuggingFacePolicy(model, sizes_of(config, config.to_dict())))
    except InputError as error:
        return "refused: " + shortened(str(error), family)
    except ValueError as error:  # of sizes_of, as read_huggingface reports it
        return f"refused: {error}"
    return "exact"


def own_sizes(family: str) -> dict[str, object]:
    """Return small windows and few experts for a family that has them by default."""
    from transformers import AutoConfig

    if family in FAMILIES or family in OTHERS:
        return {}
    default = AutoConfig.for_model(family)
    return {
        name: value
        for name, value in (EXPERTS | WINDOW).items()
        if getattr(default, name, None) is not None
    }


def shortened(message: str, family: str) -> str:
    """Return the reason in an error message, without the names of classes and numbers that differ
    between machines."""
    of = rf"^{re.escape(family)} of transformers "
    for pattern, shorter in (
        (rf"{of}(is not supported|cannot be trained here): ", ""),
        (r" differ by up to \S+ nats from.*", " differ from those of its own forward pass"),
        (r"^with the prompt computed once for its responses, ", ""),
        (rf"(?s){of}(cannot compute a packed stream): .*", r"it \1"),
        (
            r"^\w+ asks for (.*), which shared-prompt attention does not do$",
            r"its attention asks for \1",
        ),
        (r"^\w+ (does not say what its decoder layers are)$", r"it \1"),
    ):
        message = re.sub(pattern, shorter, message)
    return message


def table() -> str:
    """Return the table of docs/models.md."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    names = {x for x in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if has_parts(CONFIG_MAPPING[x])}
    names |= {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    families: dict[str, list[str]] = {}
    for family in sorted(names):
        families.setdefault(verdict(family), []).append(f"`{family}`")
    lines = [f"| transformers {transformers.__version__} | `model_type` |", "|---|---|"]
    lines += [
        f"| {key} | {', '.join(families[key])} |"
        for key in sorted(families, key=lambda key: (key != "exact", key))
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    found = table()
    print(found)
    sys.exit(found not in DOCUMENT.read_text())

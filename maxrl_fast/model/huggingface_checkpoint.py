"""Loading of a policy that transformers runs, from a Hugging Face checkpoint directory.

transformers gets a configuration without the keys that make it run code, reads only safetensors,
and downloads nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import stored_dtype, untied, without_code
from maxrl_fast.model.decoder import check_sizes
from maxrl_fast.model.huggingface import HuggingFacePolicy, HuggingFaceSizes
from maxrl_fast.runtime.files import printable, read_json

# Kinds of layers (layer_types) that are not attention over earlier tokens, or not by the attention
# function.
_NOT_ATTENTION = (
    *("linear_attention", "conv", "mamba", "recurrent"),
    *("hybrid", "sparse", "compressed", "indexed"),
)
# Parts of a model that reads more than text.
_TEXT = {"text_config", "text_encoder", "decoder", "generator", "thinker_config", "patcher_config"}
# Rotary embeddings whose frequencies change once a sequence is longer than this key says; a packed
# stream has only one.
_BY_LENGTH = ("dynamic", "longrope")


def load_huggingface(directory: Path, longest: int, is_empty: bool = False) -> HuggingFacePolicy:
    """Return the policy of a directory, on the CPU in float32, or the meta device if `is_empty`.
    longest: tokens of the longest prompt with its response."""
    config, sizes = read_huggingface(directory)
    check_supported(config, longest)
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        with Quiet():
            if is_empty:
                with torch.device("meta"):
                    empty = AutoModelForCausalLM.from_config(config, **options)
                    return HuggingFacePolicy(empty, sizes)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in what was found
                **options,
            )
    except InputError:
        raise
    except Exception as error:  # transformers raises anything
        raise InputError(
            f"transformers cannot load {directory}: {printable(type(error).__name__)}: "
            f"{printable(str(error))}"
        ) from error
    model, found = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found.get(kind):
            names = ", ".join(sorted(map(str, found[kind]))[:3])
            what = f"{sizes.model_type}: {kind.replace('_', ' ')}"
            raise InputError(f"{directory} does not fit {what} {printable(names)}")
    head = model.get_output_embeddings()
    # transformers leaves tied weights apart where the file has both, and they differ
    is_tied = sizes.tie_word_embeddings and model._tied_weights_keys
    if is_tied and head.weight is not model.get_input_embeddings().weight:
        raise untied(directory)
    return policy_of(model, sizes)


def policy_of(model: Any, sizes: HuggingFaceSizes) -> HuggingFacePolicy:
    policy = HuggingFacePolicy(model, sizes)
    policy.logit_scale = _logit_scale(policy)
    return policy


def read_huggingface(directory: Path) -> tuple[Any, HuggingFaceSizes]:
    path = directory / "config.json"
    fields = without_code(read_json(path))
    model_type = fields.get("model_type")
    try:
        import transformers
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise InputError(
            f"{path}: model_type {model_type!r:.80} needs transformers: pip install "
            f"'maxrl_fast[hf]' ({error})"
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise InputError(
            "--model-backend transformers needs transformers 5 or later, got "
            f"{transformers.__version__}"
        )
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_known = isinstance(model_type, str) and model_type in names
    if not is_known or model_type not in CONFIG_MAPPING:
        raise InputError(
            f"{path}: model_type must be a decoder that transformers has, got {model_type!r:.80}"
        )
    if fields.get("quantization_config") is not None:
        raise InputError(f"{path}: weights must not be quantized, got a quantization_config")
    try:
        config = AutoConfig.for_model(**fields)
        sizes = sizes_of(config, fields)
    except InputError:
        raise
    except Exception as error:  # transformers raises anything
        raise InputError(f"{path}: {type(error).__name__}: {printable(str(error))}") from error
    return config, sizes


def sizes_of(config: Any, fields: dict[str, Any]) -> HuggingFaceSizes:
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "qk_head_dim", None) or _largest(config, "head_dim")
    intermediate = _largest(config, "intermediate_size") or 4 * hidden
    if of_expert := getattr(config, "moe_intermediate_size", None):
        intermediate = of_expert * (getattr(config, "num_experts_per_tok", None) or 1)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2**31 - 1,
    }
    check_sizes(**sizes)
    tied, dtype = bool(getattr(config, "tie_word_embeddings", False)), stored_dtype(fields)
    return HuggingFaceSizes(
        **sizes, tie_word_embeddings=tied, model_type=config.model_type, dtype=dtype, fields=fields
    )


def _largest(config: Any, name: str) -> Any:
    fields = config.to_dict()
    sizes: list[Any] = []
    for part in (fields, *(fields.get("per_layer_config") or {}).values()):
        size = part.get(name)
        sizes += size if isinstance(size, (list, tuple)) else [size]
    return max((size for size in sizes if size is not None), default=None)


def check_supported(config: Any, longest: int) -> None:
    for reason in _reasons(config, longest):
        raise InputError(f"{config.model_type} of transformers is not supported: {reason}")


def _reasons(config: Any, longest: int) -> Iterator[str]:
    parts = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    if any(part is not None for part in parts) or config.sub_configs.keys() & _TEXT:
        yield "it is not a decoder of text alone"
    if getattr(config, "is_encoder_decoder", False):
        yield "it has an encoder"
    for kind in getattr(config, "layer_types", None) or ():
        if any(word in kind for word in _NOT_ATTENTION):
            yield f"its layers are not all attention over earlier tokens, got {kind}"
    if getattr(config, "attn_temperature_tuning", False):
        yield (
            "it scales attention by the place in the stream (attn_temperature_tuning), not by the "
            "position"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < longest:
        yield f"it attends within chunks of {chunk} tokens, and sequences have up to {longest}"
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        most = getattr(config, "max_position_embeddings", None)
        original = one.get("original_max_position_embeddings") or most or 0
        if one.get("rope_type") in _BY_LENGTH and longest > original:
            yield (
                f"its {one['rope_type']} rotary embedding changes beyond {original} tokens; "
                f"sequences have up to {longest} "
                "(--max-prompt-tokens, --max-new-tokens)"
            )


@torch.no_grad()
def _logit_scale(policy: HuggingFacePolicy) -> float:
    """Return the factor of hidden @ weight.T (Granite, Cohere), or 1.

    Families use one name for a factor and a divisor, so it is measured, where soft caps do not
    matter.
    """
    config, candidates = policy.hf.config, [1.0]
    for name in ("logit_scale", "logits_scaling", "logits_scale", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            candidates += [float(value), 1 / value]
    if len(candidates) == 1:
        return 1.0
    logits, hidden = policy.own_logits(
        torch.arange(2, device=policy.lm_head.weight.device), lambda x: 1e-3 * x
    )
    plain = policy.logits(hidden)
    ratio = float((logits * plain).sum() / plain.square().sum())
    return min(candidates, key=lambda x: abs(ratio / x - 1))


class Quiet:
    def __enter__(self) -> None:
        from transformers.utils import logging

        self._logging = logging
        self._had_bars, self._level = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()

    def __exit__(self, *_: object) -> None:
        self._logging.set_verbosity(self._level)
        if self._had_bars:
            self._logging.enable_progress_bar()

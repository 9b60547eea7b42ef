"""The initial policy of a run: a new decoder, or a checkpoint that fits the task. transformers
gets a configuration without the keys that make it run code, reads only safetensors, and downloads
nothing."""

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from maxrl_fast.algorithms.options import Count, CountOrZero, Positive
from maxrl_fast.errors import InputError, UnsupportedModelError, printable
from maxrl_fast.model.checkpoint import (
    directory_of,
    find_tensors,
    load_checkpoint,
    read_config,
    read_fields,
    stored_dtype,
    untied,
    without_code,
)
from maxrl_fast.model.decoder import Decoder, DecoderConfig, check_sizes
from maxrl_fast.model.huggingface import HuggingFacePolicy, HuggingFaceSizes, has_parts
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes, find_nonfinite
from maxrl_fast.runtime.device import memory_bytes

# Kinds of layers (layer_types) that attend to some of the earlier tokens, chosen by themselves.
_NOT_ATTENTION = ("sparse", "compressed", "indexed")
# Parts of a model whose decoder of text transformers does not set apart.
_PARTS = {"text_encoder", "decoder", "generator", "thinker_config", "patcher_config"}
# Rotary embeddings whose frequencies change once a sequence is longer than this key says; a packed
# stream has only one.
_BY_LENGTH = ("dynamic", "longrope")


def load_huggingface(directory: Path, longest: int, is_empty: bool = False) -> HuggingFacePolicy:
    """Return a directory's policy, as `load_policy`: of a model that also reads images or sound its
    decoder of text. longest: tokens of the longest prompt with its response."""
    config, sizes = read_huggingface(directory)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        with quiet():
            check_supported(config, longest)
            loader = model_class(config)
            if is_empty:
                with torch.device("meta"):
                    return HuggingFacePolicy(loader.from_config(config, **options), sizes)
            find_tensors(directory)
            model, found = loader.from_pretrained(
                directory,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
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
    policy = HuggingFacePolicy(model, sizes)
    for weight in policy.parameters():  # the file's memory is mapped at any address, on which the
        weight.data = weight.data.clone()  # last bits of products depend
    return policy


def read_huggingface(directory: Path) -> tuple[Any, HuggingFaceSizes]:
    path = directory / "config.json"
    fields = without_code(read_fields(path))
    model_type = fields.get("model_type")
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        )
    except ImportError as error:
        raise InputError(
            f"{path}: model_type {model_type!r:.80} needs transformers: pip install "
            f"transformers ({error})"
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise InputError(
            "--model-backend transformers needs transformers 5 or later, got "
            f"{transformers.__version__}"
        )
    name = str(model_type)
    is_known = name in CONFIG_MAPPING and (
        name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or (name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES and has_parts(CONFIG_MAPPING[name]))
    )
    if not is_known:
        raise InputError(
            f"{path}: model_type must be a decoder that transformers has, got {model_type!r:.80}"
        )
    if fields.get("quantization_config") is not None:
        raise InputError(f"{path}: weights must not be quantized, got a quantization_config")
    try:
        for part in (fields, fields.get("text_config") or {}):
            check_sizes(num_hidden_layers=part.get("num_hidden_layers") or 1)  # lists follow
        read = json.loads(json.dumps(fields), object_hook=_number)
        config = CONFIG_MAPPING[name].from_dict(read)
        sizes = sizes_of(config, fields)
    except InputError:
        raise
    except Exception as error:  # transformers raises anything
        raise InputError(f"{path}: {type(error).__name__}: {printable(str(error))}") from error
    return config, sizes


def _number(part: dict[str, Any]) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}."""
    return float(part["__float__"]) if [*part] == ["__float__"] else part


def model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if has_parts(config) else AutoModelForCausalLM


def sizes_of(config: Any, fields: dict[str, Any]) -> HuggingFaceSizes:
    tied, model_type = bool(getattr(config, "tie_word_embeddings", False)), config.model_type
    names = (f"{x}_token_{y}" for x in ("image", "video", "audio") for y in ("id", "index"))
    images = {int(getattr(config, x)) for x in names if getattr(config, x, None) is not None}
    config = config.get_text_config()
    heads, hidden = config.num_attention_heads, config.hidden_size

    def told(name: str, otherwise: int | None) -> Any:
        return getattr(config, name, None) or otherwise

    intermediate = _largest(config, "intermediate_size") or 4 * hidden
    if of_expert := told("moe_intermediate_size", None):
        intermediate = of_expert * told("num_experts_per_tok", 1)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": told("num_key_value_heads", heads),
        "head_dim": told("qk_head_dim", _largest(config, "head_dim")) or hidden // heads,
        "max_position_embeddings": told("max_position_embeddings", 2**31 - 1),
    }
    check_sizes(**sizes)
    return HuggingFaceSizes(
        **sizes,
        tie_word_embeddings=tied,
        model_type=model_type,
        dtype=stored_dtype({**(fields.get("text_config") or {}), **fields}),
        fields=fields,
        images=tuple(sorted(images)),
    )


def _largest(config: Any, name: str) -> Any:
    fields, sizes = config.to_dict(), list[Any]()
    for part in (fields, *(fields.get("per_layer_config") or {}).values()):
        size = part.get(name)
        sizes += size if isinstance(size, (list, tuple)) else [size]
    return max((size for size in sizes if size is not None), default=None)


def check_supported(config: Any, longest: int) -> None:
    for reason in _reasons(config, longest):
        raise InputError(f"{config.model_type} of transformers is not supported: {reason}")


def _reasons(config: Any, longest: int) -> Iterator[str]:
    parts = {name for name in ("vision_config", "audio_config") if getattr(config, name, None)}
    if config.sub_configs.keys() & _PARTS or (parts and not has_parts(config)):
        yield "it has no separate decoder of text"
    config = config.get_text_config()
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


@dataclass(frozen=True)
class Model:
    """The policy: a new decoder of Qwen2's architecture, or a checkpoint of transformers."""

    model: str | None = None
    """Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION. By default a new model."""
    model_backend: Literal["auto", "native", "transformers"] = "auto"
    """What runs the layers of --model; auto: native for Qwen2, Qwen3, Llama 3 and SmolLM2."""
    hidden_size: Count = 128
    """Size of the hidden states."""
    intermediate_size: Count = 256
    """Size of the feed-forward layers."""
    layers: Count = 4
    """Layers."""
    heads: Count = 8
    """Query heads, each of size hidden_size / heads."""
    kv_heads: Count = 4
    """Key/value heads."""
    rope_theta: Positive = 100.0
    """Base of the rotary embedding; the MaxRL paper has 1e6."""
    lora_rank: CountOrZero = 0
    """Train adapters of this rank (LoRA), merged in checkpoints; 0: the weights."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Linear layers that get adapters."""

    @property
    def directory(self) -> Path | None:
        """Of --model; the hub's weights are downloaded when needed."""
        return None if self.model is None else directory_of(self.model)


def new_policy(
    options: Model, vocab_size: int, max_position_embeddings: int, seed: int, is_empty: bool = False
) -> Decoder:
    """Return a decoder of the Qwen2 architecture, on the CPU in float32, or the meta device."""
    try:
        config = DecoderConfig(
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            head_dim=options.hidden_size // options.heads,
            rope_theta=options.rope_theta,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    empty = Decoder.empty(config, "meta")
    if is_empty:
        return empty
    wanted = sum(x.nbytes for x in empty.parameters())
    memory = memory_bytes(torch.device("cpu"))
    if wanted > memory:
        raise InputError(
            f"a new policy of these sizes has {wanted / 1e9:,.0f} GB of weights, this machine "
            f"{memory / 1e9:,.0f} GB"
        )
    model = Decoder(config)
    model.initialise(seed)
    return model


def backend_of(directory: Path, wanted: str = "auto") -> str:
    if wanted != "auto":
        return wanted
    try:
        read_config(directory / "config.json")
    except UnsupportedModelError as error:
        if importlib.util.find_spec("transformers") is None:
            raise InputError(f"{error}; for other models: pip install transformers") from error
        read_huggingface(directory)
        return "transformers"
    return "native"


def read_sizes(directory: Path) -> PolicySizes:
    if backend_of(directory) == "native":
        return read_config(directory / "config.json")
    return read_huggingface(directory)[1]


def load_policy(
    directory: Path,
    *,
    task: str,
    vocab_size: int,
    prompt_length: int,
    max_new_tokens: int,
    backend: str = "auto",
    is_empty: bool = False,
) -> PolicyModel:
    """Return the policy of a checkpoint directory, on the CPU in float32, or the meta device if
    `is_empty`, for which it need not have weights. prompt_length: of the longest prompt."""
    if backend_of(directory, backend) == "native":
        model: PolicyModel = load_checkpoint(directory, is_empty)
    else:
        model = load_huggingface(directory, prompt_length + max_new_tokens, is_empty)
    if not is_empty and (name := find_nonfinite(dict(model.named_parameters()))):
        raise InputError(f"{directory} has NaN or infinite numbers in the weight {name}")
    if model.config.vocab_size != vocab_size:
        raise InputError(
            f"task {task} needs a vocabulary of {vocab_size}, {directory} has "
            f"{model.config.vocab_size}"
        )
    check_positions(model, directory, prompt_length, max_new_tokens)
    return model


def check_positions(
    model: PolicyModel, directory: Path, prompt_length: int, max_new_tokens: int
) -> None:
    positions, longest = model.config.max_position_embeddings, prompt_length + max_new_tokens
    if positions < longest:
        raise InputError(
            f"prompts of {prompt_length} and responses of {max_new_tokens} tokens need {longest} "
            f"positions, {directory} has {positions} (--max-prompt-tokens, --max-new-tokens)"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars."""
    from transformers.utils import logging

    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()

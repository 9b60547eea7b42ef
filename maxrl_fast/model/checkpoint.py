"""Hugging Face checkpoint directories in and out: config.json, model.safetensors, the tokenizer's files. Nothing is pickled."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import Decoder, DecoderConfig

WEIGHTS = "model.safetensors"


def save_checkpoint(directory: Path, model: Decoder, tokenizer_files: dict[str, Any], stop_ids: tuple[int, ...]) -> None:
    """Write the model so that `transformers` loads it. Written aside and renamed: a kill leaves all of it or nothing.

    Args:
        directory: must not exist.
        tokenizer_files: JSON contents by file name.
        stop_ids: the ids that end a response, for generation_config.json.
    """
    aside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    generation = {"eos_token_id": list(stop_ids), "do_sample": True}
    files = {"config.json": _hf_config(model.config), "generation_config.json": generation, **tokenizer_files}
    for name, content in files.items():
        (aside / name).write_text(json.dumps(content, indent=2) + "\n")
    save_file(_tensors(model), aside / WEIGHTS, metadata={"format": "pt"})
    for path in (*aside.iterdir(), aside):
        _fsync(path)
    aside.rename(directory)
    _fsync(directory.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """The state dict on the CPU, tied weights once, as the format wants them."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items() if name not in tied}


def _hf_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def load_checkpoint(directory: Path) -> Decoder:
    """The decoder of a checkpoint directory, on the CPU in float32.

    Raises:
        InputError: naming the file, and the tensor or key, that is missing, unknown or of the wrong shape.
    """
    config = _read_config(directory / "config.json")
    path = directory / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read the weights {path}: {error}") from error
    model = Decoder(config)
    wanted = _tensors(model)
    for name in wanted.keys() - tensors.keys():
        raise InputError(f"{path} lacks the tensor {name}")
    for name in tensors.keys() - wanted.keys() - {"lm_head.weight"}:
        raise InputError(f"{path} has the tensor {name}, which a {config.num_hidden_layers}-layer Qwen2 decoder does not")
    for name, tensor in wanted.items():
        if tensors[name].shape != tensor.shape:
            raise InputError(f"{path}: {name} must have shape {tuple(tensor.shape)}, got {tuple(tensors[name].shape)}")
    model.load_state_dict({name: tensors[name].float() for name in wanted}, strict=False)
    return model


def _read_config(path: Path) -> DecoderConfig:
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read the checkpoint's {path}: {error}") from error
    fields: dict[str, Any] = content if isinstance(content, dict) else {}
    if fields.get("model_type") != "qwen2":
        raise InputError(f"{path}: model_type must be 'qwen2', got {fields.get('model_type')!r}")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise InputError(f"{path}: scaled rotary embeddings are not supported, got {rope!r}")
    if fields.get("use_sliding_window") or fields.get("hidden_act", "silu") != "silu":
        raise InputError(f"{path}: only full attention and hidden_act 'silu' are supported")
    try:
        heads = fields["num_attention_heads"]
        return DecoderConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=fields.get("num_key_value_heads", heads),
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            max_position_embeddings=fields["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise InputError(f"{path} lacks the key {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: {error}") from error

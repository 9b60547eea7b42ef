"""Hugging Face checkpoint directories in and out: config.json, weights in safetensors, the tokenizer's files. Nothing is
pickled, and no code of a checkpoint is run."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import FAMILIES, Decoder, DecoderConfig, RopeScaling

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 * 10**9  # of a file: written in one call, in which a process says nothing to the other ranks
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_checkpoint(
    directory: Path,
    config: DecoderConfig,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer_files: dict[str, Any],
    stop_ids: tuple[int, ...],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model so that `transformers` loads it. Written aside and renamed: a kill leaves all of it or nothing.

    Args:
        directory: must not exist.
        weights: of Decoder.weights; stored in config.dtype.
        tokenizer_files: by file name, JSON contents or the bytes of the file.
        stop_ids: the ids that end a response, for generation_config.json.
        shard_bytes: of one file of weights; larger models are sharded.
    """
    aside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    generation = {"eos_token_id": list(stop_ids), "do_sample": True}
    files = {"config.json": hf_config(config), "generation_config.json": generation, **tokenizer_files}
    for name, content in files.items():
        text = content if isinstance(content, bytes) else (json.dumps(content, indent=2) + "\n").encode()
        (aside / name).write_bytes(text)
    _save_weights(aside, config, weights, shard_bytes)
    for path in (*aside.iterdir(), aside):
        _fsync(path)
    aside.rename(directory)
    _fsync(directory.parent)


def _save_weights(aside: Path, config: DecoderConfig, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, weight in weights:
        tensor = weight.to("cpu", DTYPES[config.dtype]).contiguous()
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    else:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        (aside / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, aside / file, metadata={"format": "pt"})


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3", "rope_theta": config.rope_theta, **dataclasses.asdict(config.rope_scaling)}
    fields = dataclasses.asdict(config)
    del fields["rope_scaling"], fields["dtype"]
    return {
        "architectures": [ARCHITECTURES[config.model_type]],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "attention_bias": False,  # of Qwen3 and Llama; Qwen2's biases are not an option
        "mlp_bias": False,
        "use_sliding_window": False,
        **fields,
        "rope_parameters": rope,  # transformers 5; below, transformers 4
        "rope_scaling": None if config.rope_scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
        "torch_dtype": config.dtype,
        "dtype": config.dtype,
    }


def load_checkpoint(directory: Path) -> Decoder:
    """The decoder of a checkpoint directory, on the CPU in float32. Everything is checked before any weight is read.

    Raises:
        InputError: naming the file, and the tensor or key, that is missing, unknown, of the wrong shape or broken.
    """
    config = read_config(directory / "config.json")
    model = Decoder.empty(config)
    wanted = {name: tuple(weight.shape) for name, weight in model.weights()}
    where = {name: path for name, path in _find_tensors(directory).items() if not name.endswith(".rotary_emb.inv_freq")}
    for name in sorted(wanted.keys() - where.keys()):
        raise InputError(f"{_named(directory)} lacks the tensor {name}")
    for name in sorted(where.keys() - wanted.keys() - {"lm_head.weight"}):
        layers = f"a {config.num_hidden_layers}-layer {config.model_type} decoder"
        raise InputError(f"{where[name]} has the tensor {name}, which {layers} does not")
    files = {path: _open(path) for path in sorted(set(where.values()))}
    for name, shape in wanted.items():
        tensor = files[where[name]].get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise InputError(f"{where[name]}: {name} must have shape {shape}, got {tuple(tensor.get_shape())}")
        if tensor.get_dtype() not in ("F32", "BF16", "F16"):
            raise InputError(f"{where[name]}: {name} must be F32, BF16 or F16, got {tensor.get_dtype()}")
    with torch.no_grad():
        for name, weight in model.weights():
            try:
                weight.copy_(files[where[name]].get_tensor(name))
            except (OSError, SafetensorError) as error:
                raise InputError(f"cannot read {name} from {where[name]}: {error}") from error
    return model


def _named(directory: Path) -> Path:
    """The file that lists the tensors of a checkpoint."""
    return directory / (INDEX if (directory / INDEX).exists() else WEIGHTS)


def _open(path: Path) -> Any:
    """The tensors of a file; its header is checked against its size."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read the weights {path}: {error}") from error


def _find_tensors(directory: Path) -> dict[str, Path]:
    """The file of every tensor, by the headers of the files themselves, not by the index alone."""
    path = _named(directory)
    if path.name == WEIGHTS:
        return dict.fromkeys(_open(path).keys(), path)
    listed = _read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(x, str) and Path(x).name == x for x in listed.values()):
        raise InputError(f"{path}: weight_map must map tensors to files of the same directory, got {listed!r:.80}")
    where = {name: directory / file for file in sorted(set(listed.values())) for name in _open(directory / file).keys()}  # noqa: SIM118
    for name, file in listed.items():
        if where.get(name) != directory / file:
            raise InputError(f"{directory / file} lacks the tensor {name} that {path} says it has")
    return where


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read the checkpoint's {path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, got {content!r:.80}")
    return content


def read_config(path: Path) -> DecoderConfig:
    """The sizes of a checkpoint from its config.json.

    Raises:
        InputError: on a file that cannot be read, an unknown architecture, or a variant that is not supported.
    """
    fields = _read_json(path)
    model_type = fields.get("model_type")
    if model_type not in FAMILIES:
        raise InputError(f"{path}: model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    wanted = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False, "mlp_bias": False}
    for key, value in wanted.items():
        if key in fields and fields[key] != value and not (model_type == "qwen2" and key == "attention_bias"):
            raise InputError(f"{path}: {key} must be {json.dumps(value)}, got {json.dumps(fields[key])}")
    if any(kind != "full_attention" for kind in fields.get("layer_types") or ()):
        raise InputError(f"{path}: layer_types must all be full_attention, got {fields['layer_types']!r:.80}")
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):  # of transformers 4 and 5
        if not isinstance(fields.get(key) or {}, dict):
            raise InputError(f"{path}: {key} must be an object, got {fields[key]!r:.80}")
        rope |= fields.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or part != 1.0:
        raise InputError(f"{path}: rotary embeddings must be of type default or llama3, and whole, got {rope!r:.200}")
    dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise InputError(f"{path}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        heads = fields["num_attention_heads"]
        return DecoderConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            max_position_embeddings=fields["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            model_type=model_type,
            rope_scaling=_rope_scaling(rope) if kind == "llama3" else None,
            dtype=dtype,
        )
    except KeyError as error:
        raise InputError(f"{path} lacks the key {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: {error}") from error


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling:
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )

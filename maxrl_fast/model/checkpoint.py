"""Hugging Face checkpoints, in a directory or on the hub: config.json, weights in safetensors,
tokenizer files. Nothing else is downloaded, nothing is pickled, and no code is executed."""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maxrl_fast.errors import InputError, UnsupportedModelError, printable
from maxrl_fast.model.decoder import FAMILIES, Decoder, DecoderConfig, RopeScaling
from maxrl_fast.model.huggingface import HuggingFaceSizes
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.tokenizer import FILES
from maxrl_fast.runtime.files import check_regular, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# limit of one file: while one is written, the process sends no sign of life to the other ranks
SHARD_BYTES = 2 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# sizes that config.json must have
_NEEDED = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
max_position_embeddings"""
NEEDED = _NEEDED.split()
# Keys that make transformers run code: Python files of a repository, and attention kernels of the
# Hugging Face hub.
_CODE_KEYS = """auto_map custom_pipelines custom_generate trust_remote_code attn_implementation
_attn_implementation _attn_implementation_internal experts_implementation _experts_implementation
_experts_implementation_internal"""
CODE_KEYS = _CODE_KEYS.split()


def write_policy(
    directory: Path,
    dtype: str,
    weights: Iterable[tuple[str, Tensor]],
    files: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    carried: Mapping[str, "StoredTensor"] = MappingProxyType({}),
) -> None:
    """Write a checkpoint for transformers into an existing directory; `carried` tensors as they
    are."""
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = (json.dumps(content, indent=2) + "\n").encode()
        (directory / name).parent.mkdir(exist_ok=True)  # of additional chat templates
        (directory / name).write_bytes(content)
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    own = ((name, weight.to("cpu", DTYPES[dtype]).contiguous()) for name, weight in weights)
    for name, tensor in itertools.chain(own, ((name, x.read()) for name, x in carried.items())):
        if shards[-1] and sizes[-1] + tensor.nbytes > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        several = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        file = several if len(shards) > 1 else WEIGHTS
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def hf_config(config: DecoderConfig | HuggingFaceSizes) -> dict[str, Any]:
    if not isinstance(config, DecoderConfig):
        return dict(config.fields)
    fields = dataclasses.asdict(config)
    del fields["dtype"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := fields.pop("rope_scaling"):
        scaling = {"rope_type": "llama3", **scaling}
        rope |= scaling
    return {
        "architectures": [f"{config.model_type.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "attention_bias": False,  # an option of Qwen3 and Llama; Qwen2 always has biases
        "mlp_bias": False,
        "use_sliding_window": False,
        **fields,
        "rope_parameters": rope,  # for transformers 5; the next line is for transformers 4
        "rope_scaling": scaling,
        "torch_dtype": config.dtype,
        "dtype": config.dtype,
    }


def new_files(
    config: DecoderConfig | HuggingFaceSizes, stop_ids: Collection[int]
) -> dict[str, Any]:
    return {
        "config.json": hf_config(config),
        "generation_config.json": {"eos_token_id": list(stop_ids), "do_sample": True},
    }


def kept_files(
    directory: Path, stop_ids: Collection[int], dtype: str = "float32"
) -> dict[str, Any]:
    """Return config.json, generation_config.json with `stop_ids`, and the processors of images and
    sound, for checkpoints of a policy loaded from here."""
    config = read_fields(directory / "config.json")
    for part in (config, config.get("text_config") or {}):
        part |= {key: dtype for key in ("dtype", "torch_dtype") if key in part}
    path, names = directory / "generation_config.json", ("bos_token_id", "pad_token_id")
    generation: dict[str, Any] = {key: config[key] for key in names if key in config}
    generation |= {"eos_token_id": list(stop_ids), "do_sample": True}
    if path.exists():
        generation = read_json(path)
        listed = generation.get("eos_token_id")
        listed = listed if isinstance(listed, list) else [listed]
        if sorted(listed, key=repr) != sorted(stop_ids, key=repr):
            generation["eos_token_id"] = list(stop_ids)
            # with it transformers prefers the eos_token_id of config.json
            generation.pop("_from_model_config", None)
    contents = {"config.json": config, "generation_config.json": generation}
    for name in PROCESSORS:
        if (directory / name).exists():
            contents[name] = read_json(directory / name)
    return {name: without_code(fields) for name, fields in contents.items()}


def without_code(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without CODE_KEYS, at any depth."""
    text = json.dumps(fields)
    safe: dict[str, Any] = json.loads(
        text, object_hook=lambda x: {k: x[k] for k in x if k not in CODE_KEYS}
    )
    return safe


class StoredTensor(NamedTuple):
    path: Path
    file: Any  # of safetensors, which has checked the header against the file's size
    name: str

    def read(self) -> Tensor:
        try:
            return self.file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {self.name} from {self.path}: {error}") from error


def carried_tensors(directory: Path, model: PolicyModel) -> dict[str, StoredTensor]:
    """Return the tensors beside the decoder of text, which the policy's own checkpoints keep."""
    stored, own = find_tensors(directory), {name for name, _ in model.weights()}
    if model.config.tie_word_embeddings:
        stored = {name: x for name, x in stored.items() if not name.endswith("lm_head.weight")}
    others = {name: x for name, x in stored.items() if name not in own}
    if others and (renamed := own - stored.keys()):  # under old names, which transformers knows
        if "text_config" not in hf_config(model.config):
            return {}
        raise InputError(
            f"{directory} must name its tensors as transformers saves them, got none "
            f"that is {min(renamed)}"
        )
    return others


def load_checkpoint(directory: Path, is_empty: bool = False) -> Decoder:
    """Return the decoder of a directory, on the CPU in float32, or the meta device."""
    config = read_config(directory / "config.json")
    if is_empty:
        return Decoder.empty(config, "meta")
    stored = find_tensors(directory)
    if config.tie_word_embeddings:
        _join_tied(stored)
    _check_tensors(directory, config, stored)
    try:
        model = Decoder.empty(config)
    except RuntimeError as error:  # from PyTorch's allocator
        raise InputError(f"the model of {directory} does not fit into memory: {error}") from error
    with torch.no_grad():
        for name, weight in model.weights():
            weight.copy_(stored[name].read())
    return model


def _join_tied(stored: dict[str, StoredTensor]) -> None:
    """Leave one of two tied weights, which may be stored under either name or both."""
    if (head := stored.pop("lm_head.weight", None)) is None:
        return
    embedding = stored.setdefault("model.embed_tokens.weight", head)
    if embedding is not head and not torch.equal(embedding.read().float(), head.read().float()):
        raise untied(head.path)


def untied(path: Path) -> InputError:
    return InputError(
        f"{path} has an lm_head.weight that differs from the embedding, with which config.json "
        'ties it; "tie_word_embeddings": false there uses both'
    )


def _check_tensors(directory: Path, config: DecoderConfig, stored: dict[str, StoredTensor]) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in Decoder.empty(config, "meta").weights()}
    if missing := next((name for name in wanted if name not in stored), None):
        raise InputError(f"the checkpoint {directory} lacks the tensor {missing}")
    if unknown := min(stored.keys() - wanted.keys(), default=None):
        layers = f"a {config.num_hidden_layers}-layer {config.model_type} decoder"
        message = f"has the tensor {printable(unknown)}, which {layers} does not"
        raise InputError(f"{stored[unknown].path} {message}")
    for name, shape in wanted.items():
        path, file, own = stored[name]
        tensor, what = file.get_slice(own), f"{path}: {own}"
        got, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if got != shape:
            raise InputError(f"{what} must have shape {shape}, got {printable(got)}")
        if dtype not in ("F32", "BF16", "F16"):
            raise InputError(f"{what} must be F32, BF16 or F16, got {dtype}")


def _open(path: Path) -> dict[str, StoredTensor]:
    try:
        check_regular(path)
        file = safe_open(path, framework="pt")
        return {name: StoredTensor(path, file, name) for name in file.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: from PyTorch's mmap
        reason = printable(error)
        if not path.parent.is_dir():
            reason = "a run removes its older checkpoints, this one meanwhile; start again"
        raise InputError(f"cannot read the weights {printable(path)}: {reason}") from error


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of model*.safetensors; the index does not count."""
    files = sorted(directory.glob("model*.safetensors"))
    stored: dict[str, StoredTensor] = {}
    for file in files or [directory / WEIGHTS]:
        tensors = _open(file)
        if twice := min(stored.keys() & tensors.keys(), default=None):
            raise InputError(
                f"{stored[twice].path} and {file} both have {printable(twice)}: keep the files of "
                "one checkpoint"
            )
        stored |= tensors
    # Old checkpoints store inv_freq, a constant.
    return {name: x for name, x in stored.items() if not name.endswith(".rotary_emb.inv_freq")}


def read_fields(path: Path) -> dict[str, Any]:
    """Check also what transformers does not check."""
    fields = read_json(path)
    for key in ("text_config", "rope_scaling", "rope_parameters", "layer_types"):
        kind = list if key == "layer_types" else dict
        for part in (fields, fields.get("text_config") or {}):
            if not isinstance(value := part.get(key) or kind(), kind):
                raise InputError(f"{path}: {key} must be a JSON {kind.__name__}, got {value!r:.80}")
    return fields


def read_config(path: Path) -> DecoderConfig:
    """Raise UnsupportedModelError if the native decoder does not support the model."""
    fields = read_fields(path)
    model_type = fields.get("model_type")
    if model_type not in [*FAMILIES]:
        raise UnsupportedModelError(
            f"{path}: model_type must be one of {', '.join(FAMILIES)}, got {model_type!r:.80}"
        )
    wanted = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False}
    if model_type != "qwen2":
        wanted["attention_bias"] = False
    for key, value in wanted.items():
        if fields.get(key, value) != value:
            raise UnsupportedModelError(
                f"{path}: {key} must be {json.dumps(value)}, got {json.dumps(fields[key]):.80}"
            )
    layer_types = fields.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModelError(
            f"{path}: layer_types must all be full_attention, got {layer_types!r:.80}"
        )
    # written by transformers 4 and 5
    rope = (fields.get("rope_scaling") or {}) | (fields.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or part != 1.0:
        raise UnsupportedModelError(
            f"{path}: rotary embeddings must be of type default or llama3, and not partial, got "
            f"{rope!r:.200}"
        )
    try:
        heads, scaling = fields["num_attention_heads"], None
        if kind == "llama3":
            names = (f"{name}factor" for name in ("", "low_freq_", "high_freq_"))
            factor, low, high = (float(rope[name]) for name in names)
            original = int(rope["original_max_position_embeddings"])
            scaling = RopeScaling(factor, low, high, original)
        return DecoderConfig(
            **{name: fields[name] for name in NEEDED},
            num_key_value_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            rope_theta=float(({"rope_theta": 10000.0} | fields | rope)["rope_theta"]),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            model_type=model_type,
            rope_scaling=scaling,
            dtype=stored_dtype(fields),
        )
    except KeyError as error:
        raise InputError(f"{path} lacks the key {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{path}: {error}") from error


def stored_dtype(fields: dict[str, Any]) -> str:
    given = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = str(given).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.80}")
    return dtype


HUB = "hf://"
FOLDER = "--model must be the folder of a checkpoint"
SMALL_FILES = ("config.json", "generation_config.json", *PROCESSORS, *FILES)
WEIGHT_FILES = (WEIGHTS, "model-*.safetensors", INDEX)
REACH_SECONDS, STALL_SECONDS = 10, 120  # until the hub answers, and without a byte later
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_model(model: str, wanted: str = FOLDER) -> str | None:
    """Return hf://ORG/NAME[@REVISION] for a model of the hub, None for a directory. ORG/NAME alone
    is of the hub, unless the directory ORG exists. `wanted`: for messages."""
    path, of_the_hub = Path(model), f"a model of the hub is {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION"
    if model.startswith(HUB):
        if not _NAME.fullmatch(model.removeprefix(HUB)):
            raise InputError(f"{wanted}, got {model}; {of_the_hub}")
        return model
    if path.is_dir():
        if (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors")):
            raise InputError(
                f"{wanted}, got the adapters in {model}: merge them into their model first; the "
                "folder around a run's adapters has them merged"
            )
        if not (path / "config.json").exists():
            raise InputError(f"{wanted}, got {model}, which has no config.json")
        return None
    if os.path.lexists(path):
        raise InputError(f"{wanted}, got {model}, which is not a directory")
    if "/" in model and _NAME.fullmatch(model) and not os.path.lexists(path.parent):
        return HUB + model
    raise InputError(f"{wanted}, got {model}, which is not there; {of_the_hub}")


def find_model(model: str, warn: Callable[[str], None], wanted: str = FOLDER) -> str:
    """Return what a run records as its model: the path without links, since a run moves its
    `latest`, or hf://ORG/NAME@COMMIT. `warn` is told where only the cache can be asked."""
    name = check_model(model, wanted)
    if name is None:
        return str(Path(model).resolve())
    repository, revision = _parts(name)
    if revision is not None and _COMMIT.fullmatch(revision):
        return name
    hub, cause = _hub(), ""
    try:
        hub.HfApi().model_info(repository, revision=revision, timeout=REACH_SECONDS)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        missing = "" if model.startswith(HUB) else f"there is no folder {model}, and "
        raise InputError(missing + _sentence(name, error)) from error
    except Exception as error:  # of the network, TLS, a proxy, HTTP, or HF_HUB_OFFLINE
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    commit = _snapshot(name, SMALL_FILES, cause).name  # which notes the branch's for offline runs
    if cause:
        warn(
            f"the hub cannot be reached ({cause}); the model is the copy of {name} in the cache, "
            f"of commit {commit}"
        )
    return f"{HUB}{repository}@{commit}"


@lru_cache(8)
def directory_of(model: str, with_weights: bool = False) -> Path:
    """Download what is not in the cache."""
    if not model.startswith(HUB):
        return Path(model)
    directory = _snapshot(model, SMALL_FILES + WEIGHT_FILES * with_weights)
    if not (directory / "config.json").exists():
        raise InputError(
            f"{model} has no config.json: it must be a model in the format of transformers, with "
            "adapters merged"
        )
    if with_weights and not any(directory.glob("model*.safetensors")):
        raise InputError(
            f"{model} has no weights in safetensors ({', '.join(WEIGHT_FILES[:2])}), and no others "
            "are read"
        )
    return directory


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise InputError(
            f"a model of the hub needs huggingface_hub: pip install huggingface_hub ({error})"
        ) from error
    return huggingface_hub


def _parts(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.removeprefix(HUB).partition("@")
    return repository, revision or None


def _snapshot(name: str, files: tuple[str, ...], offline: str = "") -> Path:
    """Return the folder with these files; `offline`: why only the cache is asked."""
    hub, (repository, revision) = _hub(), _parts(name)
    hub.get_session().timeout = STALL_SECONDS  # requests that list files have no limit otherwise
    chosen = {"allow_patterns": [*files], "local_files_only": bool(offline)}
    try:
        return Path(hub.snapshot_download(repository, revision=revision, **chosen))
    except Exception as error:  # of the network, HTTP, the disk, or an answer that is not valid
        said = f"the hub cannot be reached ({offline}), and its cache does not have {name}"
        raise InputError(said if offline else _sentence(name, error)) from error


def _sentence(name: str, error: Exception) -> str:
    hub, said = _hub(), f"cannot get {name} from the hub: {' '.join(str(error).split()):.300}"
    if isinstance(error, hub.errors.RepositoryNotFoundError):  # also for a gated one
        said += (
            "; for a private or gated model HF_TOKEN must have the access token of an account that "
            f"has accepted the terms at {hub.constants.ENDPOINT}/{_parts(name)[0]}"
        )
    return said

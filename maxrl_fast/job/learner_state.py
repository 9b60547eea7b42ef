"""What a checkpoint holds so that a resumed run is bitwise identical: random states, the learner's
tensors, and batches that are sampled and not learned from."""

import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maxrl_fast.errors import InputError, StorageError
from maxrl_fast.model.checkpoint import DTYPES
from maxrl_fast.model.linear import adapter_config, adapters
from maxrl_fast.records import Inserted, Prompts, Ragged, Rollouts
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner

OBJECTIVE = "objective."  # prefix of the objective's tensors
CRITIC = "critic."
REFERENCE = "reference."
FILE_BYTES = 2 * 10**9  # largest file of tensors; a file is assembled in memory
OFFSETS = "DCP_SHARDING_INFO"  # in the metadata of a file, as torch.distributed.checkpoint has it


def random_states() -> dict[str, Any]:
    """Return the states of the global generators, which tasks' and rewards' code may use."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned, as it was or after a round trip through JSON."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.as_tensor(states["torch"], dtype=torch.uint8))
    if len(states["cuda"]) == torch.cuda.device_count():
        own = [torch.as_tensor(state, dtype=torch.uint8) for state in states["cuda"]]
        torch.cuda.set_rng_state_all(own)


def learner_tensors(learner: Learner) -> dict[str, Tensor]:
    """Return the learner's own tensors by name, this rank's shards if sharded: weights, Adam's
    moments, the objective's state, the critic and the reference policy."""
    model, critic = learner.model, learner.critic
    tensors = _with_moments(model, learner.optimizer)
    tensors |= {f"{OBJECTIVE}{name}": tensor for name, tensor in learner.objective_state.items()}
    if critic is not None:  # its frozen weights belong to the policy
        own = _with_moments(critic.model, critic.optimizer, is_trained=True)
        tensors |= {f"{CRITIC}{name}": tensor for name, tensor in own.items()}
    if learner.reference is not None and learner.copies_policy:
        copied = dict(learner.reference.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # the reference shares the other weights with the policy
                tensors[f"{REFERENCE}{name}"] = copied[name].detach()
    return tensors


def _with_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, is_trained: bool = False
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not is_trained:
            tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


@dataclass(frozen=True)
class Snapshot:
    tensors: dict[str, Tensor]  # from learner_tensors
    # the policy's whole weights, from PolicyModel.weights, on the first rank; they share memory
    # with `tensors`, unless sharded, merged or converted
    weights: list[tuple[str, Tensor]]
    is_sharded: bool  # each rank has its part of `tensors`, which are not copies
    dtype: str  # of the policy's weights in the checkpoint
    adapters: dict[str, Tensor]  # from linear.adapters
    adapter_config: dict[str, Any]

    @classmethod
    def of(cls, learner: Learner, is_first: bool = True) -> "Snapshot":
        """Copy a learner; with sharded weights only whole weights, and all ranks must call this."""
        model, tensors, weights = learner.model, learner_tensors(learner), list[Any]()
        is_sharded, dtype = learner.passes.shares_weights, model.config.dtype
        low_rank = {name: host_copy(weight) for name, weight in adapters(model)}
        own = tensors
        if not is_sharded:
            tensors = {name: host_copy(tensor) for name, tensor in own.items()}
        for name, weight in model.weights():
            if not is_sharded:
                # a transformers model is the module `hf`; merged or converted ones are not stored
                names = f"model.{name}", f"model.hf.{name}"
                copied = [tensors[x] for x in names if x in own and weight.is_set_to(own[x])]
                weights.append((name, copied[0] if copied else host_copy(weight)))
            elif is_first:
                weights.append((name, weight.to("cpu", DTYPES[dtype])))
        return cls(tensors, weights, is_sharded, dtype, low_rank, adapter_config(model))


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in the host's ordinary memory; from a GPU through `_pinned`."""
    if not tensor.is_cuda:
        return tensor.clone(memory_format=torch.contiguous_format)
    copy, pinned = torch.empty(tensor.shape, dtype=tensor.dtype), _pinned()
    both = (x.reshape(-1).view(torch.uint8) for x in (tensor.detach(), copy))
    for part, to in zip(*(x.split(len(pinned)) for x in both), strict=True):
        to.copy_(pinned[: len(part)].copy_(part))  # waits for the GPU
    return copy


@cache
def _pinned() -> Tensor:
    """PyTorch rounds pinned memory up to a power of two, and never returns it to the system."""
    return torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor, in its memory, and the index of the first. Only rows are
    sharded (FSDP2): as many on each rank, except the last ones."""
    if not hasattr(tensor, "to_local"):
        return tensor, 0
    shards: Any = tensor
    (placement,), mesh = shards.placements, shards.device_mesh
    assert placement.is_shard(0)
    start = mesh.get_local_rank() * -(-len(tensor) // mesh.size())
    return shards.to_local(), min(start, len(tensor))


def save_state(folder: Path, tensors: dict[str, Tensor], rank: int = 0) -> None:
    """Write this rank's rows of the tensors, the first rank's also what is not sharded, into files
    of at most FILE_BYTES or one tensor. Metadata says where rows begin, as in the files of
    torch.distributed.checkpoint."""
    folder.mkdir(exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    offsets: dict[str, dict[str, list[int]]] = {}
    size = 0
    for name, tensor in tensors.items():
        own, start = own_rows(tensor)
        if rank and (own is tensor or not len(own)):
            continue
        if files[-1] and size + own.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name], size = own.contiguous(), size + own.nbytes
        offsets[name] = {"saved_offsets": [start, *[0] * (own.dim() - 1)][: own.dim()]}
    for i, content in enumerate(files):
        metadata = {OFFSETS: json.dumps({name: offsets[name] for name in content})}
        save_file(content, folder / f"state-{rank:05d}-{i:05d}.safetensors", metadata)


def load_state(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read this rank's rows of the tensors, whatever number of ranks wrote them."""
    from torch.distributed.checkpoint.state_dict_loader import load  # as the reader below

    reader, saved = _reader(folder)
    for name, tensor in tensors.items():
        rows, shape = sum(x.sizes[:1].numel() for x in saved[name].chunks), [*saved[name].size]
        if shape != [*tensor.shape]:
            raise InputError(f"{folder}: {name} must have shape {[*tensor.shape]}, got {shape}")
        if rows != tensor.shape[:1].numel():
            raise InputError(f"{folder}: {name} must have {len(tensor)} rows, got {rows}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no other rank takes part
        load({**tensors}, storage_reader=reader, no_dist=True)


def _reader(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return PyTorch's reader of the files, and by name the size and the parts of each tensor."""
    # imported here: it takes most of a second
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    return reader, reader.read_metadata().state_dict_metadata


def load_learner(folder: Path, learner: Learner, ranks: Ranks) -> None:
    """Read the learner's tensors, whatever number of ranks wrote them; unless weights are sharded,
    the first rank reads and broadcasts. An objective other than the checkpoint's, which
    --allow-changes permits, keeps its initial state."""
    names = set(ranks.values([*_reader(folder)[1]] if ranks.is_first else [])[0])
    critic, optimizers = learner.critic, {"optimizer.": learner.optimizer}
    if critic is not None:
        optimizers[f"{CRITIC}optimizer."] = critic.optimizer
    for prefix, optimizer in optimizers.items():
        if any(name.startswith(prefix) for name in names):
            # the saved ones are read into these
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                first, second = (torch.zeros_like(p, requires_grad=False) for _ in range(2))
                step = torch.zeros((), device=p.device)
                optimizer.state[p] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    tensors = learner_tensors(learner)
    for name in tensors.keys() ^ names:
        # a session has no reference policy of the run's objective
        if name.startswith((OBJECTIVE, CRITIC)) or (name in names and name.startswith(REFERENCE)):
            tensors.pop(name, None)
            names.discard(name)
    if ranks.is_first and (wrong := names ^ tensors.keys()):
        raise InputError(
            f"{folder} {'has' if min(wrong) in names else 'lacks'} the tensor {min(wrong)}: it was "
            "saved with another model or optimizer"
        )
    if learner.passes.shares_weights:
        load_state(folder, tensors)
        _share_frozen(learner)
    else:
        if ranks.is_first:
            load_state(folder, tensors)
        for tensor in tensors.values():
            ranks.from_first(tensor)
    if critic is not None and not any(name.startswith(CRITIC) for name in names):
        critic.start_from(learner.model)


def _share_frozen(learner: Learner) -> None:
    """Copy frozen weights to the reference and the critic, which do not share them if sharded."""
    weights, models = dict(learner.model.named_parameters()), list[nn.Module]()
    if learner.reference is not None and learner.copies_policy:
        models.append(learner.reference)
    if learner.critic is not None:
        models.append(learner.critic.model)
    with torch.no_grad():
        for name, own in (pair for model in models for pair in model.named_parameters()):
            if not own.requires_grad and not weights[name].requires_grad:
                own.copy_(weights[name])


# holds 0.safetensors and, for all but tensors, 0.json of the next step, 1 of the one after it, ...
FOLDER = "waiting"
RECORDS: dict[str, type[Ragged]] = {x.__name__: x for x in (Prompts, Rollouts, Inserted)}


def save_batches(folder: Path, batches: Sequence[RolloutBatch]) -> None:
    for i, batch in enumerate(batches):
        (folder / FOLDER).mkdir(exist_ok=True)
        tensors: dict[str, Tensor] = {}
        try:
            text = json.dumps(_values(batch, "", tensors))
        except TypeError as error:
            raise StorageError(
                f"--ahead keeps prompts in checkpoints, whose columns must be JSON values: {error}"
            ) from error
        save_file(tensors, folder / FOLDER / f"{i}.safetensors")
        (folder / FOLDER / f"{i}.json").write_text(text)


def load_batches(folder: Path, device: torch.device) -> list[RolloutBatch]:
    paths = sorted((folder / FOLDER).glob("*.json"), key=lambda path: int(path.stem))
    batches = []
    for path in paths:
        tensors = load_file(path.with_suffix(".safetensors"), device=str(device))
        batches.append(_record(RolloutBatch, json.loads(path.read_text()), "", tensors))
    return batches


def _values(record: Ragged, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a record's fields other than tensors, which are added to `tensors`."""
    values: dict[str, Any] = {"": type(record).__name__}
    for name in (field.name for field in fields(record)):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            # a copy: safetensors refuses tensors that share memory
            tensors[prefix + name] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        elif isinstance(value, Ragged):
            values[name] = _values(value, f"{prefix}{name}.", tensors)
        else:
            values[name] = value
    return values


def _record(
    kind: type[Any], values: dict[str, Any], prefix: str, tensors: dict[str, Tensor]
) -> Any:
    given: dict[str, Any] = {}
    for name in (field.name for field in fields(kind)):
        value = values.get(name)
        if prefix + name in tensors:
            value = tensors[prefix + name]
        elif isinstance(value, list):  # of a record's own values, each is a tuple
            value = tuple(value)
        elif isinstance(value, dict) and value.get("") in RECORDS:
            value = _record(RECORDS[value[""]], value, f"{prefix}{name}.", tensors)
        given[name] = value
    return kind(**given)

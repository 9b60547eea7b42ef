"""Random states and the learner's tensors: with them a resumed run is bitwise identical to one that never stopped."""

import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError
from maxrl_fast.training.learner import Learner

FILE_BYTES = 2 * 10**9  # of a file of tensors, which is put together in memory


def random_states() -> dict[str, Any]:
    """Of the global generators. The trainer draws from none of them, but a task's or reward's code may."""
    numbers: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Those of `random_states`, after JSON."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    numbers = states["numpy"]["state"]
    np.random.set_state({**states["numpy"], "state": {**numbers, "key": np.array(numbers["key"], dtype=np.uint32)}})
    torch.set_rng_state(_bytes(states["torch"]))
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(state) for state in states["cuda"]])


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def learner_tensors(learner: Learner) -> dict[str, Tensor]:
    """The policy's weights, Adam's moments and the reference policy by name: the tensors themselves, a rank's parts of them
    where ranks share them."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    if learner.reference is not None:
        trained = {name for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
        for name, parameter in learner.reference.named_parameters():
            if name in trained:  # the others are the policy's own
                tensors[f"reference.{name}"] = parameter.detach()
    return tensors


def save_learner(folder: Path, learner: Learner) -> None:
    """Write its tensors as safetensors; where ranks share weights every rank its own parts, all calling together."""
    tensors = learner_tensors(learner)
    parts = _parts(tensors)
    if learner.shares_weights:
        from torch.distributed.checkpoint.api import CheckpointException  # here: they take two seconds to import
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        where = {name: i for i, names in enumerate(parts, start=1) for name in names}
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=where, save_distributed=True)
        try:
            save(tensors, storage_writer=writer)
        except CheckpointException as error:  # not an Exception; what each rank met
            raise OSError("; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())) from error
        return
    folder.mkdir(exist_ok=True)
    for i, names in enumerate(parts, start=1):
        part = {name: tensors[name].cpu().contiguous() for name in names}
        save_file(part, folder / f"state-{i:05d}-of-{len(parts):05d}.safetensors")


def _parts(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names by file, of at most about FILE_BYTES each."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def load_learner(folder: Path, learner: Learner, ranks: Ranks) -> None:
    """Read its tensors, whatever number of ranks wrote them. Where ranks share weights all read; else the first, for all.

    Raises:
        InputError: where the tensors are not those of this learner.
    """
    names = _names(folder) if ranks.is_first else set()
    if ranks.text_from_first(str(any(name.startswith("optimizer.") for name in names))) == "True":
        for parameter in (p for group in learner.optimizer.param_groups for p in group["params"]):
            moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            learner.optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    tensors = learner_tensors(learner)
    if ranks.is_first and names != tensors.keys():
        name = min(names ^ tensors.keys())
        raise InputError(
            f"{folder} {'has' if name in names else 'lacks'} the tensor {name}: it is of another model or optimizer"
        )
    if learner.shares_weights:
        _load_parts(folder, tensors, no_dist=False)
        _share_frozen(learner)
        return
    if ranks.is_first and any(folder.glob("shard-*")):
        _load_parts(folder, tensors, no_dist=True)
    elif ranks.is_first:
        _load_whole(folder, tensors)
    for tensor in tensors.values():
        ranks.from_first(tensor)


def _share_frozen(learner: Learner) -> None:
    """Give the reference policy the weights that are never trained, of which sharding has made it a copy of its own."""
    if learner.reference is not None:
        weights = dict(learner.model.named_parameters())
        with torch.no_grad():
            for name, own in learner.reference.named_parameters():
                if not weights[name].requires_grad:
                    own.copy_(weights[name])


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _load_parts(folder: Path, tensors: dict[str, Tensor], no_dist: bool) -> None:
    """Of files that ranks wrote together, into whole tensors or parts."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=no_dist)


def _load_whole(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Of files of whole tensors."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tensors[name].shape:
                    raise InputError(f"{path}: {name} must have shape {tuple(tensors[name].shape)}, got {shape}")
                tensors[name].copy_(file.get_tensor(name))

"""The checkpoints of a run (docs/reliability.md): what they hold, so that a resumed run is bitwise
identical, when they are written, and which are kept."""

import dataclasses
import json
import random
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maxrl_fast.errors import InputError, NonFiniteError, StorageError
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.control import Interrupted, StopSignal
from maxrl_fast.job.run_files import Progress, RunFiles, machine_of
from maxrl_fast.model.checkpoint import DTYPES, write_policy
from maxrl_fast.model.linear import adapter_config, adapters, save_adapters
from maxrl_fast.model.policy_model import find_nonfinite
from maxrl_fast.records import Inserted, Prompts, Ragged, Rollouts
from maxrl_fast.runtime.background import Background
from maxrl_fast.runtime.files import (
    RunFolder,
    atomic_file,
    storing,
    temporary_path,
    write_checksums,
)
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner

START = "step-000000"  # written after the warm start; later policies are compared with it
OBJECTIVE, CRITIC, REFERENCE = "objective.", "critic.", "reference."  # prefixes of their tensors
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
    adapters: dict[str, Tensor]  # from linear.adapters

    @classmethod
    def of(cls, learner: Learner, is_first: bool = True) -> "Snapshot":
        """Copy a learner; with sharded weights only whole weights, and all ranks must call this."""
        model, own, weights = learner.model, learner_tensors(learner), list[tuple[str, Tensor]]()
        is_sharded, tensors = learner.passes.shares_weights, own
        low_rank = {name: host_copy(weight) for name, weight in adapters(model)}
        if not is_sharded:
            tensors = {name: host_copy(tensor) for name, tensor in own.items()}
        for name, weight in model.weights():
            if not is_sharded:
                # a transformers model is the module `hf`; merged or converted ones are not stored
                names = f"model.{name}", f"model.hf.{name}"
                copied = [tensors[x] for x in names if x in own and weight.is_set_to(own[x])]
                weights.append((name, copied[0] if copied else host_copy(weight)))
            elif is_first:
                weights.append((name, weight.to("cpu", DTYPES[model.config.dtype])))
        return cls(tensors, weights, is_sharded, low_rank)


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
    weights, critic = dict(learner.model.named_parameters()), learner.critic
    reference = learner.reference if learner.copies_policy else None
    with torch.no_grad():
        for model in filter(None, (reference, critic.model if critic else None)):
            for name, own in model.named_parameters():
                if not own.requires_grad and not weights[name].requires_grad:
                    own.copy_(weights[name])


RECORDS: dict[str, type[Ragged]] = {x.__name__: x for x in (Prompts, Rollouts, Inserted)}


def save_batches(folder: Path, batches: Sequence[RolloutBatch]) -> None:
    """Write batches that are sampled and not learned from: waiting/0.safetensors and, for all but
    tensors, waiting/0.json of the next step, 1 of the one after it, ..."""
    for i, batch in enumerate(batches):
        (place := folder / "waiting" / str(i)).parent.mkdir(exist_ok=True)
        tensors: dict[str, Tensor] = {}
        try:
            text = json.dumps(_values(batch, "", tensors))
        except TypeError as error:
            raise StorageError(
                f"--ahead keeps prompts in checkpoints, whose columns must be JSON values: {error}"
            ) from error
        save_file(tensors, place.with_suffix(".safetensors"))
        place.with_suffix(".json").write_text(text)


def load_batches(folder: Path, device: torch.device) -> list[RolloutBatch]:
    batches = list[RolloutBatch]()
    for path in sorted(folder.glob("waiting/*.json")):  # of one digit
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


def progress_record(
    run: RunContext, progress: Progress, logs: Mapping[str, int], fingerprints: Mapping[str, str]
) -> str:
    parts: dict[str, Any] = {"progress": dataclasses.asdict(progress), "logs": logs}
    parts |= {"random": random_states(), "options": run.config.flat()}
    parts |= {"fingerprints": fingerprints, "machine": machine_of(run.ranks)}
    return json.dumps(parts, default=lambda array: array.tolist())  # of random states


def write_checkpoint(
    directory: Path,
    run: RunContext,
    record: str,
    saved: Snapshot,
    batches: Sequence[RolloutBatch] = (),
) -> None:
    """Write a checkpoint into a new folder: the first rank, in any thread, or with sharded weights
    all ranks together."""
    ranks, policy, (files, carried) = run.ranks, run.policy, run.policy_files
    wait_for_others = ranks.wait_for_all if saved.is_sharded else lambda: None
    # the first rank renames it when all have written into it
    own = atomic_file(directory) if ranks.is_first else nullcontext(temporary_path(directory))
    with storing(f"the checkpoint {directory}"), own as folder:
        if ranks.is_first:
            folder.mkdir(parents=True)
        wait_for_others()
        if not folder.is_dir():
            raise StorageError(f"{directory.parent} must be a folder that all processes share")
        save_state(folder / "state", saved.tensors, ranks.rank)
        if ranks.is_first:
            base = run.config.model.model  # what adapters were trained on
            save_adapters(folder / "adapter", base, adapter_config(policy), saved.adapters)
            write_policy(folder, policy.config.dtype, saved.weights, files, carried=carried)
            (folder / "progress.json").write_text(record)
            save_batches(folder, batches)
        wait_for_others()
        if ranks.is_first:
            write_checksums(folder)


def check_weights(learner: Learner, when: str, ranks: Ranks) -> None:
    """Loss and gradients are checked before the optimizer's step, which may still overflow."""
    tensors = learner_tensors(learner).items()
    name = find_nonfinite({key: x for key, x in tensors if not key.startswith(OBJECTIVE)})
    if ranks.any(name is not None, learner.model.lm_head.weight.device):
        raise NonFiniteError(f"{when}: {name or 'a tensor elsewhere'} is NaN or infinite")


class Checkpoints:
    """Saves the state of a run between steps (every `save_every`; 0: only at the end and when
    stopped) and restores it. The newest `keep_checkpoints` (0: all), the best one and START are
    kept. Every rank must call every method."""

    def __init__(
        self, run: RunContext, files: RunFiles, fingerprints: Mapping[str, str], stop: StopSignal
    ):
        self._run, self._files, self._fingerprints, self._stop = run, files, fingerprints, stop
        self._saved, self._background = run.saved, Background()
        _ = run.policy_files  # which may be refused, or stand in a folder that goes
        # with the seconds that the clock counts
        self.progress = run.saved.progress if run.saved else Progress(seconds=run.clock.seconds)
        # newest complete one; newest started
        self.newest = self._begun = run.saved.directory if run.saved else None

    def begin(self, learner: Learner) -> None:
        """Save this learner from now on. The run's first one and the batches that were waiting get
        the saved state."""
        self._learner, saved, self._saved = learner, self._saved, None
        if saved is None:
            return
        load_learner(saved.directory / "state", learner, self._run.ranks)
        self._run.trainer.waiting += load_batches(saved.directory, self._run.config.run.where[0])
        set_random_states(saved.random)
        if self._run.ranks.is_first:
            with storing(str(saved.directory.parent)):
                found = RunFolder(self._files.out).checkpoints
                for newer in found[found.index(saved.directory) + 1 :]:
                    damaged = newer.with_name(f"damaged-{newer.name}")
                    shutil.rmtree(damaged, ignore_errors=True)
                    newer.rename(damaged)

    def safe_point(self, is_last: bool = False) -> None:
        """Save after a step if a checkpoint is due or it was the last step; then `stop_point`."""
        every = self._run.config.run.save_every
        if is_last or (every and self.progress.step % every == 0):
            self.save()
        self.stop_point()

    def stop_point(self) -> None:
        """Save and raise Interrupted if a signal asked for a stop. The weights must be the ones
        after `progress.step`."""
        self._run.clock.beat()
        self._background.check()
        if number := self._stop.number:
            self.save()
            self.wait()
            raise Interrupted(number)

    def wait(self) -> None:
        """Raise StorageError if the last save failed."""
        with self._run.clock("checkpoint"):
            self._background.wait()

    @property
    def _directory(self) -> Path:
        return self._files.out / "checkpoints" / self.progress.name

    def save(self) -> None:
        """Start to write a checkpoint, unless this step has one: a thread writes a copy on the host
        while training continues; with sharded weights the ranks write before this returns.
        StorageError if this save or the one before fails; NonFiniteError: nothing is written."""
        directory, learner, ranks = self._directory, self._learner, self._run.ranks
        if directory == self._begun:
            return
        batches = [*self._run.trainer.settle()]
        with self._run.clock("checkpoint"):
            self._background.wait()
            check_weights(learner, f"after {self.progress}", ranks)
            self._begun = directory
            record = ""
            if ranks.is_first:
                with storing(f"the checkpoint {directory}"):
                    logs = self._files.sync()
                record = progress_record(self._run, self.progress, logs, self._fingerprints)
            snapshot = Snapshot.of(learner, ranks.is_first)
            write = partial(self._write, directory, record, snapshot, batches)
            if snapshot.is_sharded:
                write()
            elif ranks.is_first:
                self._background.submit(write)
            else:
                self.newest = directory

    def _write(self, directory: Path, *content: Any) -> None:
        write_checkpoint(directory, self._run, *content)
        self.newest = directory
        if self._run.ranks.is_first:
            self._link("latest", directory)
            with storing(str(self._files.out / "config.json")):
                self._files.write_config()  # options may have changed on resuming
            self._remove_old()

    def mark_best(self) -> None:
        """Save this step's policy as the best if its evaluation is the best so far."""
        if self.progress.is_best(self.progress.step):
            self.save()
            if self._run.ranks.is_first:  # after the save
                self._background.submit(partial(self._link, "best", self._directory))

    def _link(self, name: str, directory: Path) -> None:
        path = self._files.out / name
        with storing(str(path)), atomic_file(path) as link:
            link.symlink_to(directory.relative_to(path.parent))

    def _remove_old(self) -> None:
        out, keep = self._files.out, self._run.config.run.keep_checkpoints
        spared = {START, (out / "best").resolve().name}
        for directory in RunFolder(out).checkpoints[: -keep if keep else 0]:
            if directory.name not in spared:
                # a file may be open on a network disk; that must not end the run
                with suppress(OSError):
                    shutil.rmtree(directory.rename(temporary_path(directory)))

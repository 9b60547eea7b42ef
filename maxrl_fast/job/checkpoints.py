"""The checkpoints of a run (docs/reliability.md): when they are written, and which are kept."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from maxrl_fast.errors import NonFiniteError, RewardError, StorageError
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.control import Interrupted, StopSignal
from maxrl_fast.job.learner_state import (
    OBJECTIVE,
    Snapshot,
    learner_tensors,
    load_learner,
    random_states,
    save_state,
    set_random_states,
)
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import machine_of, rename_damaged_after
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.job.waiting_batches import load_batches, save_batches
from maxrl_fast.model.checkpoint import write_policy
from maxrl_fast.model.linear import save_adapters
from maxrl_fast.model.policy_model import find_nonfinite
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
    ranks, (policy_files, carried) = run.ranks, run.policy_files
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
            save_adapters(folder / "adapter", base, saved.adapter_config, saved.adapters)
            write_policy(folder, saved.dtype, saved.weights, policy_files, carried=carried)
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
        self._run.trainer.waiting += load_batches(saved.directory, self._run.device)
        set_random_states(saved.random)
        if self._run.ranks.is_first:
            with storing(str(saved.directory.parent)):
                rename_damaged_after(saved.directory)

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

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Save if a reward fails inside the block, while the weights are still unchanged."""
        try:
            yield
        except RewardError:
            self.save()
            raise

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

"""The checkpoints of a run: what they contain, when they are written, and which are kept. resume.py finds them again.

OUT/checkpoints/step-000090/    warm-start-000040/ during the warm start
    config.json, model.safetensors, tokenizer.json, ...   the policy, a Hugging Face directory, in its dtype
    state/*.safetensors         float32 weights, Adam's moments, the reference policy
    progress.json               step, next prompt, random states, lengths of the logs, configuration, sizes of the decoder
    checksums.json              size and SHA-256 of every file
OUT/latest, OUT/best            links to the newest checkpoint and to the one with the best pass@1
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import RewardError, StorageError
from maxrl_fast.files.durable import atomic_directory, point, temporary_path, write_checksums
from maxrl_fast.model.checkpoint import write_policy
from maxrl_fast.run.control import Interrupted, StopSignal
from maxrl_fast.run.progress import Progress
from maxrl_fast.run.resume import Saved, checkpoints_of, machine_of, rename_damaged_after
from maxrl_fast.run.run_files import RunFiles
from maxrl_fast.run.state import load_learner, random_states, save_learner, set_random_states
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.stopwatch import Stopwatch

START = "step-000000"  # written after the warm start; later policies are compared with it


class Checkpoints:
    """Saves the state of a run between steps, and restores it.

    Args:
        files: the files of the run; a checkpoint stores its options and the length of its logs.
        policy_files: the files of a checkpoint beside its weights, by name: JSON contents or bytes.
        fingerprints: of the files that decide the run's result.
        save_every: number of steps between checkpoints; 0: only at the end and when stopped.
        keep: number of newest checkpoints to keep, besides the best one and the one after the warm start; 0: all.
        ranks: every rank must call every method.
        saved: the checkpoint from which the run resumes.
    """

    def __init__(
        self,
        files: RunFiles,
        policy_files: Mapping[str, Any],
        fingerprints: Mapping[str, str],
        save_every: int,
        keep: int,
        ranks: Ranks,
        stop: StopSignal,
        clock: Stopwatch,
        saved: Saved | None,
    ):
        self.out, self._save_every, self._keep = files.out, save_every, keep
        self._policy_files, self._fingerprints = policy_files, fingerprints
        self._ranks, self._stop, self._clock, self._files = ranks, stop, clock, files
        self._saved = saved
        self.newest = saved.directory if saved else None

    def restore(self, learner: Learner) -> None:
        """Load the saved state into the first learner of the run; later calls do nothing.

        The first learner belongs to the phase (warm start or training) in which the checkpoint was written.
        """
        saved, self._saved = self._saved, None
        if saved is not None:
            load_learner(saved.directory / "state", learner, self._ranks)
            set_random_states(saved.random)
            if self._ranks.is_first:
                with self._stored(str(self.out / "checkpoints")):
                    rename_damaged_after(saved.directory)

    def safe_point(self, progress: Progress, learner: Learner, is_last: bool = False) -> None:
        """Save after a step if a checkpoint is due, if it was the last step, or if a signal asked for a stop.

        Raises:
            Interrupted: after saving, if a signal asked for a stop.
        """
        if is_last or (self._save_every and progress.step % self._save_every == 0):
            self.save(progress, learner)
        self.stop_point(progress, learner)

    def stop_point(self, progress: Progress, learner: Learner) -> None:
        """Save and raise Interrupted if a signal asked for a stop. The weights must be those after `progress.step`."""
        self._clock.beat()
        if number := self._stop.number:
            self.save(progress, learner)
            raise Interrupted(number)

    @contextmanager
    def kept(self, progress: Progress, learner: Learner) -> Iterator[None]:
        """Save if a reward fails inside the block, before its step has changed the weights, so that no step is lost."""
        try:
            yield
        except RewardError:
            self.save(progress, learner)
            raise

    def save(self, progress: Progress, learner: Learner) -> None:
        """Write a checkpoint, unless this step already has one; then remove old ones.

        Raises:
            StorageError: if writing fails, for example because the disk is full; earlier checkpoints are not changed.
        """
        directory = self.out / "checkpoints" / progress.name
        if directory == self.newest:
            return
        with self._clock("checkpoint"):
            with self._stored(f"the checkpoint {directory}"):
                self._write(directory, progress, learner)
            self.newest = directory
            if self._ranks.is_first:
                with self._stored(f"{self.out / 'latest'} or config.json"):
                    point(self.out / "latest", directory)
                    self._files.write_config()  # options may have changed on resuming
                self._remove_old()

    @contextmanager
    def _stored(self, what: str) -> Iterator[None]:
        """Turn an error of the file system into a StorageError."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot write {what}: {error}") from error

    def _write(self, directory: Path, progress: Progress, learner: Learner) -> None:
        weights = learner.model.weights()  # gathered by all ranks together
        with self._temporary(directory, learner.shares_weights) as temporary:
            if self._ranks.is_first or learner.shares_weights:
                save_learner(temporary / "state", learner)
            if not self._ranks.is_first:
                for _ in weights:
                    pass
                return
            write_policy(temporary, learner.model.config.dtype, weights, self._policy_files)
            fields = {
                "progress": dataclasses.asdict(progress),
                "decoder": dataclasses.asdict(learner.model.config),
                "logs": self._files.log_marks(),
                "random": random_states(),
                "options": self._files.options,
                "fingerprints": self._fingerprints,
                "machine": machine_of(self._ranks),
            }
            (temporary / "progress.json").write_text(json.dumps(fields))
            write_checksums(temporary)

    @contextmanager
    def _temporary(self, directory: Path, together: bool) -> Iterator[Path]:
        """Give the temporary folder, which the first rank creates and renames. If `together`, the other ranks write into it."""
        context = atomic_directory(directory) if self._ranks.is_first else nullcontext(temporary_path(directory))
        with context as folder:
            if together:
                self._ranks.wait_for_all()
                if not folder.is_dir():
                    raise StorageError(
                        f"{self.out} must be a folder that all processes share, but rank {self._ranks.rank} does not see it"
                    )
            yield folder
            if together:
                self._ranks.wait_for_all()

    def mark_best(self, progress: Progress, learner: Learner) -> None:
        """Save this step's policy as the best, if its evaluation has the highest pass@1 so far."""
        if progress.is_best(progress.step):
            self.save(progress, learner)
            if self._ranks.is_first:
                with self._stored(str(self.out / "best")):
                    point(self.out / "best", self.out / "checkpoints" / progress.name)

    def _remove_old(self) -> None:
        """Remove all checkpoints but the newest, the best, and the one after the warm start."""
        best = self.out / "best"
        spared = {START, best.resolve().name if best.is_symlink() else ""}
        for directory in checkpoints_of(self.out)[: -self._keep if self._keep else 0]:
            if directory.name not in spared:
                with suppress(OSError):  # a file may be open on a network disk; that must not end the run
                    directory.rename(temporary_path(directory))
                    shutil.rmtree(temporary_path(directory))

"""The checkpoints of a run: what lies in one, when it is written, and which are kept; resume.py finds them again.

OUT/checkpoints/step-000090/    warm-start-000040/ before reinforcement learning
    config.json, model.safetensors, tokenizer.json, ...   the policy, a Hugging Face directory, in its dtype
    state/*.safetensors         float32 weights, Adam's moments, the reference policy
    progress.json               step, next prompt, random states, lengths of the logs, configuration, sizes of the decoder
    checksums.json              size and SHA-256 of every file
OUT/latest, OUT/best            links to the newest one and to the one with the best pass@1
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from safetensors import SafetensorError

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import RewardError, StorageError
from maxrl_fast.files.durable import aside_of, point, write_checksums, written_aside
from maxrl_fast.model.checkpoint import write_policy
from maxrl_fast.run.control import Interrupted, StopSignal
from maxrl_fast.run.progress import Progress
from maxrl_fast.run.resume import Saved, checkpoints_of, machine_of, set_aside_after
from maxrl_fast.run.run_files import RunFiles
from maxrl_fast.run.state import load_learner, random_states, save_learner, set_random_states
from maxrl_fast.tasks import Task
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.stopwatch import Stopwatch

START = "step-000000"  # after the warm start: what later policies are compared with


class Checkpoints:
    """Saves a run where its weights are whole, and puts a saved one back.

    Args:
        files: of the run, whose logs and options belong to a checkpoint.
        save_every: steps between checkpoints; 0: only at the end and when stopped.
        keep: the newest checkpoints to keep, beside the best one and the one after the warm start; 0: all.
        ranks: all of them call every method together.
        saved: the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        files: RunFiles,
        task: Task,
        save_every: int,
        keep: int,
        ranks: Ranks,
        stop: StopSignal,
        clock: Stopwatch,
        saved: Saved | None,
    ):
        self.out, self._task, self._save_every, self._keep = files.out, task, save_every, keep
        self._ranks, self._stop, self._clock, self._files = ranks, stop, clock, files
        self._saved = saved
        self.newest = saved.directory if saved else None

    def restore(self, learner: Learner) -> None:
        """Put what was saved into the first learner of the run, that of the phase in which it was."""
        saved, self._saved = self._saved, None
        if saved is not None:
            load_learner(saved.directory / "state", learner, self._ranks)
            set_random_states(saved.random)
            if self._ranks.is_first:
                with self._stored("what the run goes on with"):
                    set_aside_after(saved.directory)

    def safe_point(self, progress: Progress, learner: Learner, is_last: bool = False) -> None:
        """Save after a step if it is time to, if it was the last one, or if the run is to stop.

        Raises:
            Interrupted: once it is saved, if a signal asked for a stop.
        """
        if is_last or (self._save_every and progress.step % self._save_every == 0):
            self.save(progress, learner)
        self.stop_point(progress, learner)

    def stop_point(self, progress: Progress, learner: Learner) -> None:
        """Save and raise Interrupted, if a signal asked for a stop: where the weights are those after progress.step."""
        self._clock.beat()
        if number := self._stop.number:
            self.save(progress, learner)
            raise Interrupted(number)

    @contextmanager
    def kept(self, progress: Progress, learner: Learner) -> Iterator[None]:
        """Rewards that fail inside, before anything is learned from them, cost no step."""
        try:
            yield
        except RewardError:
            self.save(progress, learner)
            raise

    def save(self, progress: Progress, learner: Learner) -> None:
        """Write a checkpoint, unless this step's is there; then remove old ones.

        Raises:
            StorageError: where the disk is full or does not take it; the checkpoints before are as they were.
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
                    self._files.write_config()  # which may have changed since it was resumed
                self._remove_old()

    @contextmanager
    def _stored(self, what: str) -> Iterator[None]:
        """What the disk refuses becomes a StorageError."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot write {what}: {error}") from error

    def _write(self, directory: Path, progress: Progress, learner: Learner) -> None:
        weights = learner.model.weights()  # gathered by all ranks together
        with self._aside(directory, learner.shares_weights) as aside:
            if self._ranks.is_first or learner.shares_weights:
                save_learner(aside / "state", learner)
            if not self._ranks.is_first:
                for _ in weights:
                    pass
                return
            write_policy(aside, learner.model.config, weights, self._task.tokenizer_files(), self._task.stop_ids)
            fields = {
                "progress": dataclasses.asdict(progress),
                "decoder": dataclasses.asdict(learner.model.config),
                "logs": self._files.log_marks(),
                "random": random_states(),
                "options": self._files.options,
                "data": self._task.fingerprint,
                "machine": machine_of(self._ranks),
            }
            (aside / "progress.json").write_text(json.dumps(fields))
            write_checksums(aside)

    @contextmanager
    def _aside(self, directory: Path, together: bool) -> Iterator[Path]:
        """The folder that the first rank makes and renames, and in which the others may write meanwhile."""
        aside = written_aside(directory) if self._ranks.is_first else nullcontext(aside_of(directory))
        with aside as folder:
            if together:
                self._ranks.wait_for_all()
                if not folder.is_dir():
                    raise StorageError(
                        f"{self.out} must be a folder that all processes see, but rank {self._ranks.rank} does not"
                    )
            yield folder
            if together:
                self._ranks.wait_for_all()

    def mark_best(self, progress: Progress, learner: Learner) -> None:
        """After an evaluation: keep this step's policy if none was better."""
        if progress.is_best(progress.step):
            self.save(progress, learner)
            if self._ranks.is_first:
                with self._stored(str(self.out / "best")):
                    point(self.out / "best", self.out / "checkpoints" / progress.name)

    def _remove_old(self) -> None:
        """All but the newest, the best, and the one after the warm start."""
        best = self.out / "best"
        spared = {START, best.resolve().name if best.is_symlink() else ""}
        for directory in checkpoints_of(self.out)[: -self._keep if self._keep else 0]:
            if directory.name not in spared:
                with suppress(OSError):  # as where a file is open on a network's disk: no reason to end a run
                    directory.rename(aside_of(directory))
                    shutil.rmtree(aside_of(directory))

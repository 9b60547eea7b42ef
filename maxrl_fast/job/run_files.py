"""The files of a run: config.json, logs, curves.png and timings.json; trackers get its numbers."""

import importlib
import json
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from maxrl_fast.config.changes import ended_before_first_step
from maxrl_fast.config.names import PASS_RATES
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.scores import PASS, score_of
from maxrl_fast.job.resume import Saved
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import atomic_file, fsync, remove, storing, write_json
from maxrl_fast.runtime.run_folder import RunFolder
from maxrl_fast.training.objectives.weight import weight_of


class Tracker:
    """A tracker's run, which continues after `step`. After a failure, a warning, nothing is
    sent."""

    def __init__(
        self, name: str, out: Path, options: dict[str, Any], step: int, warn: Callable[[str], None]
    ):
        self._warn = warn
        try:
            if name == "tensorboard":
                self._target: Any = _TensorBoard(out / name, step)
                return
            own = {"project": "maxrl_fast", "name": out.name, "resume": "allow"}
            if name == "wandb":  # folders of the same name in different places are different runs
                identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
                own |= {"id": identity, "dir": str(out)}
            self._target = importlib.import_module(name)
            self._target.init(config=options, **own)
        except Exception as error:  # no API key, no network, bad settings
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"--log-to {name} could not be started: {why}") from error

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        try:
            if self._target is not None:
                getattr(self._target, name)(*arguments, **options)
        except Exception as error:  # of the network, a full disk, or a process that has ended
            self._target = None
            lost = "the tracker, which gets no more numbers (the logs have all)"
            self._warn(f"{type(error).__name__} of {lost}: {error}")


class _TensorBoard:
    """A new event file; TensorBoard drops what earlier files have of later steps."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter  # an extra

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def draw_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path, title: str = ""
) -> None:
    """Plot metrics, as means of a twentieth of the steps too, and the first and last evaluation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    steps, width = [record["step"] for record in metrics], max(1, len(metrics) // 20)
    reward, passes, entropy, length = figure.subplots(2, 2).flat
    for axes, key, title, unit in (
        (reward, "reward_mean", "reward in training", "mean over rollouts"),
        (entropy, "entropy", "entropy of the sampling policy", "nats per token"),
        (length, "response_length_mean", "response length", "tokens"),
    ):
        values = [record[key] for record in metrics]
        means = [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
        axes.plot(steps, values, color="tab:blue", alpha=0.25)
        axes.plot(steps, means, color="tab:blue")
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # those on a part of the prompts are not comparable
    whole = [x for x in evaluations if x["num_prompts"] == evaluations[0]["num_prompts"]]
    score = score_of(whole)
    for record, shade in zip([*whole[:1], *whole[1:][-1:]], ("0.65", "tab:blue"), strict=False):
        ks = [*map(int, record[score])]
        label = f"step {record['step']}"
        passes.plot(ks, [*record[score].values()], marker="o", color=shade, label=label)
        passes.set_xscale("log", base=2)
        passes.set_xticks(ks, [str(k) for k in ks])
    name = "pass@k" if score == PASS else "max@k"
    passes.set(title=f"{name} on held-out prompts", xlabel="k", ylabel=name)
    if evaluations:
        passes.legend(loc="lower right")
    for axes in (reward, passes, entropy, length):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


LOGS = "metrics", "eval", "eval_prompts", "pass_rates", "warnings", "samples", "rollouts"


def cut_log(path: Path, size: int) -> bool:
    """Cut a log off after the last line within `size` bytes; return whether it has fewer."""
    content = path.read_bytes() if path.exists() else b""
    if content:
        os.truncate(path, content[:size].rfind(b"\n") + 1)
    return len(content) < size


class RunFiles:
    """Writes the files of one run into its folder, if `is_writer`. The logs are cut to their
    lengths at the checkpoint `saved`. StorageError if writing fails."""

    def __init__(
        self,
        out: Path,
        options: dict[str, Any],
        log_to: str | None = None,
        is_writer: bool = True,
        is_resumed: bool = False,
        saved: Saved | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ):
        self.out, self.options, self._is_writer = out, options, is_writer
        self._tracker: Tracker | None = None
        if not is_writer:
            return
        if (checkpoints := out / "checkpoints").is_symlink():  # it is removed from, by and by
            raise InputError(f"{checkpoints} must be a folder of this run, got a symbolic link")
        try:
            if not is_resumed and (out / "config.json").exists():
                # another command, or one started at the same time
                if not ended_before_first_step(out, options):
                    raise InputError(
                        f"--out must be a new or empty folder, got {out}, which holds another run; "
                        f"--resume {out} resumes it"
                    )
                for name in ("checkpoints", "tensorboard", "latest", "best", "timings.json"):
                    remove(out / name)
            if saved is None:
                self.write_config()
            for path in (*out.glob(".*.partial"), *out.glob("checkpoints/.*.partial")):
                remove(path)  # of a killed process
            for path in map(self._path, LOGS):
                if cut_log(path, saved.logs.get(path.stem, 0) if saved else 0):
                    warn(f"{path} is shorter than at the checkpoint: the lines before it are lost")
            if log_to is not None:
                is_training = saved and saved.progress.phase == "training"
                step = saved.progress.step if saved and is_training else -1
                self._tracker = Tracker(log_to, out.absolute(), options, step, warn)
        except OSError as error:
            raise InputError(f"cannot write to --out {out}: {error}") from error

    def _path(self, log: str) -> Path:
        return self.out / f"{log}.jsonl"

    def write_config(self) -> None:
        used = {name: value for name, value in self.options.items() if value is not None}
        content = {**used, "versions": versions(), "command": sys.argv}
        write_json(self.out / "config.json", content)
        write_json(self.out / "weight.json", weight_of(self.options, PASS_RATES))

    def write(self, log: str, record: dict[str, Any]) -> None:
        """Append a record to a log, and send its numbers to the tracker."""
        if not self._is_writer:
            return
        # JSON has neither NaN nor infinite numbers: they become null
        text = json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))
        with storing(str(self._path(log))), self._path(log).open("a") as file:
            file.write(text + "\n")
        if self._tracker is not None and log in ("metrics", "eval"):
            numbers = {f"{log}/{k}": x for k, x in flat(record).items() if x is not None}
            self._tracker.call("log", numbers, step=record["step"])

    def sync(self) -> dict[str, int]:
        """Wait until the logs are on the disk; return the size of each in bytes."""
        paths = [path for path in map(self._path, LOGS) if path.exists()]
        for path in paths:
            fsync(path)
        return {path.stem: path.stat().st_size for path in paths}

    def listing(self) -> dict[str, str]:
        found = {"checkpoint": "none was written"}
        for name, link in ("checkpoint", self.out / "latest"), ("best", self.out / "best"):
            if link.is_symlink():
                found[name] = str(self.out / link.readlink())
        files = {"curves": "curves.png", "metrics": "metrics.jsonl", "evaluations": "eval.jsonl"}
        return found | {name: str(self.out / file) for name, file in files.items()}

    def close(self, seconds: dict[str, float]) -> None:
        if not self._is_writer:
            return
        if self._tracker is not None:
            self._tracker.call("finish")
        with storing(f"timings.json or curves.png in {self.out}"):
            self.sync()
            write_json(self.out / "timings.json", seconds)
            with atomic_file(self.out / "curves.png") as path:
                objective, seed = self.options["objective"], self.options["seed"]
                title, logs = f"{self.out.name}: {objective}, seed {seed}", RunFolder(self.out)
                draw_curves(logs.log("metrics"), logs.log("eval"), path, title)


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """Spread dicts: pass_at_k becomes pass_at_1, pass_at_2, ..."""
    spread: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            spread |= {f"{name.removesuffix('_k')}_{key}": x for key, x in value.items()}
        else:
            spread[name] = value
    return spread

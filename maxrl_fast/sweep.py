"""The command `python -m maxrl_fast.sweep`: the runs of a grid of options, one after another, and
one report on them.
"""

from maxrl_fast.__main__ import run_command

if __name__ == "__main__":
    run_command("sweep")

import itertools
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.changes import changes
from maxrl_fast.config.help_page import print_help, split_help
from maxrl_fast.config.names import OF_ONE_START
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import parse
from maxrl_fast.errors import InputError, StorageError
from maxrl_fast.evaluation.seeds import last_record, over_seeds, seeds_table
from maxrl_fast.job.control import SIGNALS
from maxrl_fast.job.screen import Screen
from maxrl_fast.report import command as report
from maxrl_fast.runtime.files import locked, read_json, storing, write_json
from maxrl_fast.runtime.output import command
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.dataset import DatasetOptions

HELP = """Train one run for every combination of values, one after another, and report mean and
standard error over seeds. All options of maxrl_fast.train are accepted: one with several values is
a side of the grid, except --reward and --reward-weights, whose values all belong to every run. The
same command resumes a sweep: finished runs are skipped, stopped ones resumed. Example:
python -m maxrl_fast.sweep --config examples/maze.toml --seeds 0 1 2 --objective maxrl grpo"""
OPTIONS = (
    ("--seeds INT ...", "the seeds of every combination, as --seed INT ..."),
    ("--config FILE", "TOML file of options that all runs share"),
    ("--out DIR", "folder of the sweep (default: runs/sweep, or runs/sweep-NAME of the file)"),
    ("--dry-run", "print the commands of the runs, and stop"),
)

MOST_RUNS = 10_000


@command
def main(arguments: Sequence[str]) -> int:
    """Run the sweep. Return 0; 1 if a run failed; 2 on bad input; 128 and the signal's number if it
    was stopped.
    """
    screen, (words, asks_for_help) = Screen(), split_help(arguments)
    if asks_for_help:
        print_help("python -m maxrl_fast.sweep", HELP, [("options", "", OPTIONS)])
    try:
        options = values_of(words)
        file = options.get("config", [""])
        out = options.pop("out", ["-".join(["runs/sweep", *[Path(x).stem for x in file if x]])])
        is_dry = options.pop("dry_run", None) is not None
        if len(out) != 1:
            raise InputError(f"--out must be one folder, got {' '.join(out) or 'none'}")
        if Ranks.of_environment().size > 1:
            raise InputError(
                "a sweep starts its runs itself and cannot run under torchrun; --dry-run prints "
                "the commands of its runs, each of which torchrun can start"
            )
        runs = sweep_grid(options, Path(*out))
        if is_dry:
            for run in runs:
                screen.info(shlex.join(run.command))
            return 0
        with locked(Path(*out)):
            return Sweep(Path(*out), runs, screen).run()
    except (InputError, StorageError) as error:
        screen.error(str(error))
        return 2 if isinstance(error, InputError) else 1


@dataclass(frozen=True)
class Run:
    group: str  # its name without the seed; runs of one group are averaged
    folder: Path
    command: list[str]
    config: Config

    @property
    def has_begun(self) -> bool:  # else it had ended by a mistake in its options
        return (self.folder / "config.json").exists()

    @property
    def is_finished(self) -> bool:
        """Whether it has its last evaluation and its last checkpoint."""
        steps = self.config.optimizer.steps
        is_saved = (self.folder / "latest").resolve().name == f"step-{steps:06d}"
        return is_saved and last_record(self.folder / "eval.jsonl").get("step") == steps


def values_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        name = "seed" if name == "seeds" else name
        if not argument.startswith("--"):
            if not options:
                raise InputError(f"a sweep takes --option VALUE [VALUE ...], got {argument}")
            options[list(options)[-1]].append(argument)
        elif name in options:
            raise InputError(f"{flag} must be given once, with all its values after it")
        elif name in ("resume", "allow_changes"):
            raise InputError(f"a sweep does not use {flag}: the same command resumes it")
        else:
            options[name] = [value] if equals else []
    return options


def sweep_grid(options: dict[str, list[str]], out: Path) -> list[Run]:
    """Return the runs of all combinations of values, the seeds of one combination one after
    another."""
    several = {
        name
        for group in Config.groups().values()
        for name, x in options_of(group).items()
        if x.takes_several
    }
    several |= {name for name, x in options_of(DatasetOptions).items() if x.takes_several}
    sides = [name for name, values in options.items() if len(values) > 1 and name not in several]
    sides.sort(key=lambda name: name == "seed")
    if (count := math.prod(len(options[name]) for name in sides)) > MOST_RUNS:
        raise InputError(f"a sweep must have at most {MOST_RUNS:,} runs, got {count:,}")
    runs: dict[Path, Run] = {}
    seen = set[str]()  # 1e-4 and 0.0001 are one run
    for values in itertools.product(*(options[name] for name in sides)):
        chosen = options | {name: [value] for name, value in zip(sides, values, strict=True)}
        arguments = []
        for name, texts in chosen.items():
            flag = f"--{name.replace('_', '-')}"
            # a value like "-- think" would be an option as a separate word
            is_one_word = len(texts) == 1 and texts[0].startswith("-")
            arguments += [f"{flag}={texts[0]}"] if is_one_word else [flag, *texts]
        try:
            config = parse(arguments)
            if config.run.dry_run is not None or config.run.resume is not None:
                raise InputError("the file of --config must not have dry_run or resume")
        except InputError as error:
            said = ", ".join(f"{name} {value}" for name, value in zip(sides, values, strict=True))
            raise InputError(f"the run of {said}: {error}" if said else str(error)) from error
        if (shown := repr(config)) in seen:
            continue
        seen.add(shown)
        parts = [config.chosen.short_name]
        for name in sides:
            if name not in ("objective", "seed"):
                parts.append(f"{name.replace('_', '-')}-{chosen[name][0].strip('/')}")
        group = "_".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts)
        folder = out / f"{group}_seed-{config.run.seed}"
        if folder in runs:
            raise InputError(
                f"the folder {folder} is of two runs of the grid: give every value once, under its "
                "own name"
            )
        train = [sys.executable, "-m", "maxrl_fast.train", *arguments]
        train += ["--out", str(folder), "--resume", "auto"]
        runs[folder] = Run(group, folder, train, config)
    return list(runs.values())


class Sweep:
    """Trains the runs of a grid. sweep.json in the folder has every run of this command and of
    earlier ones.
    """

    def __init__(self, out: Path, runs: list[Run], screen: Screen):
        self._out, self._runs, self._screen = out, runs, screen
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = 0  # the signal
        self._states = _states_in(out / "sweep.json")
        for run in runs:
            name = run.folder.name
            if run.has_begun and name not in self._states:
                raise InputError(
                    f"{run.folder} holds a run that is not of this sweep; use another --out"
                )
            options = {x: value for x, value in run.config.flat().items() if x not in OF_ONE_START}
            before = self._states[name]["options"] if run.has_begun else {}
            if changed := changes(before, options):
                raise InputError(
                    f"{run.folder} was begun with other options ({'; '.join(changed)}); use "
                    "another --out"
                )
            state = "finished" if run.is_finished else "waiting"
            record = {"group": run.group, "seed": run.config.run.seed, "state": state}
            self._states[name] = {**record, "options": options}

    def run(self) -> int:
        """Train what is not finished, and report; return the exit code."""
        waiting = [run for run in self._runs if self._states[run.folder.name]["state"] == "waiting"]
        # SIGHUP is, under nohup
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._stop) for number in handled}
        start, done = time.monotonic(), len(self._runs) - len(waiting)
        for i, run in enumerate(waiting):
            if not self._stopped:
                line = f"run {done + i + 1} of {len(self._runs)}: {run.folder.name}"
                if i:
                    seconds = (time.monotonic() - start) / i * (len(waiting) - i)
                    line += f", about {seconds:.0f} s left"
                self._screen.info(line)
                self._write()
                self._train(run)
        for number, handler in before.items():
            signal.signal(number, handler)
        summary = self._write()
        if not self._stopped:
            return self._report(summary)
        self._screen.info(
            f"stopped by {SIGNALS[signal.Signals(self._stopped)]}; the same command resumes the "
            "sweep"
        )
        return 128 + self._stopped

    def _train(self, run: Run) -> None:
        # In a session of its own, it gets a Ctrl-C of the terminal once, from _stop: two would stop
        # it without saving.
        self._child = subprocess.Popen(run.command, start_new_session=True)
        if self._stopped:  # since the run before
            self._child.send_signal(self._stopped)
        code = self._child.wait()
        state = "stopped" if self._stopped else f"failed with exit code {code}"
        state = state if code else "finished"
        self._states[run.folder.name]["state"] = state
        if state.startswith("failed"):
            self._screen.error(f"{run.folder.name} {state}; the sweep continues")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = self._stopped or number
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)

    def _write(self) -> list[dict[str, Any]]:
        """Write sweep.json; return its summary, the last pass@k of the finished runs of each group
        over seeds. Where only some runs of a group were extended, the mean is over those of the
        most steps."""
        rows: dict[str, dict[int, Path]] = {}
        most: dict[str, int] = {}
        for state in self._states.values():
            most[state["group"]] = max(most.get(state["group"], 0), state["options"]["steps"])
        for name, state in self._states.items():
            own = rows.setdefault(state["group"], {})
            if state["state"] == "finished" and state["options"]["steps"] == most[state["group"]]:
                own[state["seed"]] = self._out / name
        summary = [over_seeds(group, own) for group, own in rows.items()]
        with storing(str(self._out / "sweep.json")):
            content = {"command": sys.argv, "runs": self._states, "summary": summary}
            write_json(self._out / "sweep.json", content)
        return summary

    def _report(self, summary: list[dict[str, Any]]) -> int:
        self._screen.console.print(seeds_table(summary))
        folders = [
            str(self._out / name)
            for name in self._states
            if last_record(self._out / name / "metrics.jsonl")
        ]
        code = 0
        if len(folders) > report.MOST_RUNS:
            self._screen.warning(
                f"a page shows at most {report.MOST_RUNS} runs, got {len(folders)}; sweep.json has "
                "all"
            )
        elif folders:
            code = report.main([*folders, "--out", str(self._out / "report.html")])
        names = [run.folder.name for run in self._runs]
        failed = [name for name in names if self._states[name]["state"] != "finished"]
        if failed:
            self._screen.error(f"{len(failed)} of {len(names)} runs failed: {', '.join(failed)}")
        return 1 if failed or code else 0


def _states_in(file: Path) -> dict[str, Any]:
    """Return the runs in sweep.json by the names of their folders."""
    runs: Any = read_json(file).get("runs") if file.exists() else {}
    kinds = {"group": str, "seed": int, "state": str, "options": dict}
    for state in runs.values() if isinstance(runs, dict) else [runs]:
        if not isinstance(state, dict) or not all(
            isinstance(state.get(name), kind) for name, kind in kinds.items()
        ):
            raise InputError(
                f"{file} must hold the runs of a sweep, got {state!r:.80}; restore it, or use "
                "another --out"
            )
    return dict(runs)

"""The command `python -m maxrl_fast.sweep`: the runs of a grid of options, one after another, and
one table and report on them.
"""

from maxrl_fast.__main__ import run_command

if __name__ == "__main__":
    run_command("sweep")

import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.changes import changes
from maxrl_fast.config.help_page import print_help, split_help
from maxrl_fast.config.options import Config
from maxrl_fast.config.parts import short_name
from maxrl_fast.config.read import parse, read_flags
from maxrl_fast.errors import InputError, StorageError
from maxrl_fast.evaluation.scores import score_of
from maxrl_fast.evaluation.seeds import over_seeds
from maxrl_fast.evaluation.tables import add_scores, new_table
from maxrl_fast.job.control import SIGNALS
from maxrl_fast.job.screen import Screen
from maxrl_fast.report import command as report
from maxrl_fast.runtime.files import locked, storing, write_json
from maxrl_fast.runtime.output import command
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.run_folder import RunFolder
from maxrl_fast.tasks.dataset import DatasetOptions

HELP = """Train one run for every combination of values, one after another, and report means over
seeds. All options of maxrl_fast.train are accepted: one with several values is a side of the grid,
except those that take several values themselves, such as --reward, which belong to every run. The
same command resumes a sweep: finished runs are skipped, stopped ones resumed. Example:
python -m maxrl_fast.sweep --config examples/maze.toml --seeds 0 1 2 --objective maxrl grpo"""
OPTIONS = (
    ("--seeds INT ...", "the seeds of every combination, as --seed INT ..."),
    ("--out DIR", "folder of the sweep (default: runs/sweep, or runs/sweep-NAME of --config)"),
    ("--dry-run", "print the commands of the runs, and stop"),
    ("--quiet", "print one line a run and the table, not what the runs print"),
)
OWN = "out", "dry_run", "quiet"  # options of the sweep, not of its runs


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
        name = "-".join(["sweep", *(Path(x).stem for x in options.get("config", []))])
        out, *more = map(Path, options.get("out") or [f"runs/{name}"])
        if more:
            raise InputError(f"--out must be one folder, got {out} and {more[0]}")
        if Ranks.of_environment().size > 1:
            raise InputError(
                "a sweep cannot run under torchrun; start each command of its --dry-run by torchrun"
            )
        runs = sweep_grid({x: own for x, own in options.items() if x not in OWN}, out)
        if "dry_run" in options:
            for run in runs:
                screen.info(shlex.join(run.command))
            return 0
        with locked(out), storing(str(out)):
            if stopped := train_runs(runs, "quiet" in options, screen):
                said = SIGNALS[signal.Signals(stopped)]
                screen.info(f"stopped by {said}; the same command resumes the sweep")
                return 128 + stopped
            return summarize(runs, out, screen)
    except (InputError, StorageError) as error:
        screen.error(str(error))
        return 2 if isinstance(error, InputError) else 1


@dataclass(eq=False)
class Run:
    group: str  # its name without the seed; runs of one group are averaged
    folder: Path
    command: list[str]
    config: Config
    given: set[str]  # the options that flags or --config give; the others have their defaults
    code: int = 0  # the exit code of its process

    @property
    def is_finished(self) -> bool:
        """Whether it finished with the options that are given."""
        run, options = RunFolder(self.folder), self.config.flat()
        if not run.is_run or run.options.get("steps") != options["steps"] or not run.is_finished:
            return False
        return not changes(run.options, {name: options[name] for name in self.given})


def values_of(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option by its name."""
    flags = read_flags(["--seed" if word == "--seeds" else word for word in words])
    if len(flags) < sum(word.startswith("--") for word in words):
        raise InputError("each option must be given once, with all its values after it")
    if "resume" in flags:
        raise InputError("a sweep takes no --resume: the same command resumes it")
    return {name: x.value for name, x in flags.items()}


def sweep_grid(options: dict[str, list[str]], out: Path) -> list[Run]:
    """Return the runs of all combinations of values, the seeds of one combination one after
    another. Options that a run refuses are refused here, before the first run."""
    several = {
        name
        for group in (*Config.groups().values(), DatasetOptions)
        for name, x in options_of(group).items()
        if x.takes_several
    }
    sides = [name for name, values in options.items() if len(values) > 1 and name not in several]
    sides.sort(key=lambda name: name == "seed")
    runs: dict[Path, Run] = {}
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
        except InputError as error:
            said = ", ".join(f"{name} {value}" for name, value in zip(sides, values, strict=True))
            raise InputError(f"the run of {said}: {error}" if said else str(error)) from error
        parts = [short_name(config.chosen.objective)]
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
        given = {*chosen, *config.places} & config.flat().keys()
        runs[folder] = Run(group, folder, train, config, given)
    return list(runs.values())


def train_runs(runs: Sequence[Run], is_quiet: bool, screen: Screen) -> int:
    """Train the runs that are not finished, each in a process, to which signals are passed on;
    return the signal that ended the sweep, or 0."""
    child: subprocess.Popen[bytes] | None = None
    stopped = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = number
        if child is not None:
            child.send_signal(number)

    # SIGHUP is ignored under nohup
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in handled}
    for i, run in enumerate(runs, start=1):
        if stopped or run.is_finished:
            continue
        screen.info(f"run {i} of {len(runs)}: {run.folder.name}")
        # in a session of its own, it gets a Ctrl-C of the terminal once: two would stop it without
        # a checkpoint
        output = subprocess.DEVNULL if is_quiet else None
        child = subprocess.Popen(run.command, stdout=output, start_new_session=True)
        if stopped:  # since the run before
            child.send_signal(stopped)
        run.code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return stopped


def summarize(runs: Sequence[Run], out: Path, screen: Screen) -> int:
    """Print the table of the finished runs, write sweep.json and report.html; return the exit
    code."""
    failed = [f"{run.folder.name} (exit code {run.code})" for run in runs if run.code]
    done = [run for run in runs if not run.code]
    if failed:
        screen.error(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    if not done:
        return 1
    groups: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in done:
        records = RunFolder(run.folder).log("eval")
        groups.setdefault(run.group, {})[run.config.run.seed] = [records[0], records[-1]]
    summary = {group: over_seeds(own) for group, own in groups.items()}
    score = score_of(x for own in groups.values() for ends in own.values() for x in ends)
    table = new_table("mean over seeds", "before", "after", "change (95% interval)")
    for group, row in summary.items():
        table.add_section()
        num_seeds = len(row["seeds"])
        table.add_row(f"{group}, {num_seeds} seed{'s' * (num_seeds > 1)}")
        names = ("before", "after", "change")
        before, after, change = ({k: x[name] for k, x in row[score].items()} for name in names)
        add_scores(table, score, [before, after], [change])
    screen.console.print(table)
    write_json(out / "sweep.json", {"command": sys.argv, "summary": summary})
    if len(done) > report.MOST_RUNS:
        screen.warning(f"a report shows at most {report.MOST_RUNS} runs, got {len(done)}")
        return int(bool(failed))
    folders = [str(run.folder) for run in done]
    return report.main([*folders, "--out", str(out / "report.html")]) or int(bool(failed))

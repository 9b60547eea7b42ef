"""The command `python -m maxrl_fast.sweep`: the runs of a grid, and one table of them."""

from maxrl_fast.runtime.output import run_command

if __name__ == "__main__":
    run_command("sweep")

import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from maxrl_fast.config.changes import differing
from maxrl_fast.config.read import names_of_lists, parse, read_flags
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation import score_of
from maxrl_fast.evaluation.tables import add_scores, new_table
from maxrl_fast.runtime.files import RunFolder
from maxrl_fast.runtime.output import command, show_help
from maxrl_fast.runtime.ranks import Ranks

HELP = """usage: python -m maxrl_fast.sweep --seeds INT ... [OPTIONS OF maxrl_fast.train]

Train one run for every combination of values, one after another, and print means over seeds. An
option with several values is a side of the grid, except those that take several values themselves,
such as --reward. The same command resumes a sweep.

--out DIR    folder of the runs (default: runs/sweep)
--dry-run    print the commands of the runs, and stop
--quiet      print one line a run and the table, not what the runs print"""
TRAIN = [sys.executable, "-m", "maxrl_fast.train"]
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# 97.5% quantiles of Student's t distribution of 1 to 10 degrees of freedom; those of more are lower
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@command
def main(arguments: Sequence[str]) -> int:
    """Return 0, 1 if a run failed, or the exit code of a run that was stopped."""
    show_help(arguments, HELP)
    given = read_flags(["--seed" if word == "--seeds" else word for word in arguments])
    if len(given) < sum(word.startswith("--") for word in arguments):
        raise InputError("each option must be given once, with all its values after it")
    if "resume" in given or Ranks.of_environment().size > 1:
        raise InputError(
            "a sweep takes no --resume, because the same command resumes it, and no torchrun: "
            "start the commands of its --dry-run"
        )
    options = {name: x.value for name, x in given.items()}
    is_dry, is_quiet = (options.pop(x, None) is not None for x in ("dry_run", "quiet"))
    runs = sweep_grid(options, Path(*options.pop("out", ["runs/sweep"])))
    if is_dry:
        print(*(shlex.join([*TRAIN, *words]) for _, words in runs), sep="\n")
        return 0
    done, failed = list[Path](), list[str]()
    for number, (folder, words) in enumerate(runs, start=1):
        run, code = RunFolder(folder), 0
        if not run.is_finished or differing(run.options, parse(words).flat()):
            print(f"run {number} of {len(runs)}: {folder.name}", flush=True)
            code = train(words, is_quiet)
        if code - 128 in SIGNALS:
            print("stopped; the same command resumes the sweep")
            return code
        if code:
            failed.append(f"{folder.name} (exit code {code})")
        else:
            done.append(folder)
    if failed:
        text = f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}"
        print(f"error: {text}", file=sys.stderr)
    show_means(done)
    return int(bool(failed))


def sweep_grid(options: dict[str, list[str]], out: Path) -> list[tuple[Path, list[str]]]:
    """Return folders and arguments of the runs, for all combinations of values, seeds last. What a
    run would refuse is refused here, before the first run."""
    several, runs = names_of_lists(), list[tuple[Path, list[str]]]()
    sides = [name for name, values in options.items() if len(values) > 1 and name not in several]
    sides.sort(key=lambda name: name == "seed")
    for values in itertools.product(*(options[name] for name in sides)):
        own, words = dict(zip(sides, values, strict=True)), list[str]()
        for name, texts in (options | {name: [x] for name, x in own.items()}).items():
            flag = f"--{name.replace('_', '-')}"
            # a separate word like "-- think" would be an option
            words += [f"{flag}={texts[0]}"] if len(texts) == 1 else [flag, *texts]
        own.setdefault("seed", str(parse(words).run.seed))
        parts = (f"{name.replace('_', '-')}-{x.strip('/')}" for name, x in own.items())
        folder = out / re.sub(r"[^\w.+-]+", "-", "_".join(parts))
        runs.append((folder, [*words, "--out", str(folder), "--resume", "auto"]))
    return runs


def train(words: Sequence[str], is_quiet: bool) -> int:
    """Train in a process, to which signals are passed on; return its exit code, or a signal's, also
    where the process was ending already."""
    child = subprocess.Popen([*TRAIN, *words], stdout=subprocess.DEVNULL if is_quiet else None)
    asked = list[int]()

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        child.send_signal(number)

    # SIGHUP is ignored under nohup
    before = {x: signal.getsignal(x) for x in SIGNALS if signal.getsignal(x) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, pass_on)
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return 128 + asked[0] if asked else code if code >= 0 else 128 - code


def mean_over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Return the mean with its 95% interval by Student's t distribution, if there are several."""
    mean, free = fmean(values), len(values) - 1
    if not free:
        return {"mean": mean}
    half = T_QUANTILES[min(free, len(T_QUANTILES)) - 1] * stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def show_means(folders: Sequence[Path]) -> None:
    """Print the score before and after training and its change, as means over seeds, at the k that
    all of them have."""
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for folder in folders:
        log = RunFolder(folder).log("eval")
        groups.setdefault(folder.name.rpartition("seed-")[0], []).append([log[0], log[-1]])
    score = score_of(record for own in groups.values() for ends in own for record in ends)
    table = new_table("mean over seeds", "before", "after", "change (95% interval)")
    for name, own in groups.items():
        table.add_section()
        table.add_row(f"{name.strip('_')} {len(own)} seed{'s' * (len(own) > 1)}".strip())
        ks = [k for k in own[0][0][score] if all(k in x[score] for ends in own for x in ends)]
        pairs = {k: [[x[score][k] for x in ends] for ends in own] for k in ks}
        means = [{k: fmean(x[i] for x in pairs[k]) for k in ks} for i in (0, 1)]
        changes = {k: mean_over_seeds([y - x for x, y in pairs[k]]) for k in ks}
        add_scores(table, score, means, [changes])
    Console().print(table)

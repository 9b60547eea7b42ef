"""Read the files of a run or an evaluation into columns of numbers. The files may be unfinished or
damaged.

A line that cannot be read is skipped and noted, never guessed. What would make the page too large
is thinned.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxrl_fast.config.names import PASS_RATES
from maxrl_fast.errors import InputError
from maxrl_fast.report.samples import Thinned, read_samples
from maxrl_fast.report.values import Number, finite, is_count, is_number, text_of
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, printable

FILE_BYTES = 1 << 30
ROLLOUT_BYTES = 1 << 32
EVALUATION_BYTES = 1 << 28  # eval.json and pass_rates.jsonl have numbers for each prompt
MOST_POINTS = 100_000  # diagnosed prompts of one run
MOST_COUNTS = 200_000  # correct samples of a prompt in an evaluation
MOST_TEXTS, PROMPT_LENGTH = 1_000, 2_000  # of held-out prompts
_REASON = 200  # characters
_TIMED = ("rollout_seconds", "train_seconds")
_NO_OPTIONS = ("versions", "command")  # entries of config.json that are not options
_OF_TRAINING = ("eval_prompts", "samples", "k")  # options with another meaning in an evaluation


@dataclass
class Folder:
    """The data of one folder. A number that is missing from its files or not finite is None."""

    name: str
    kind: str = "run"  # or "evaluation"
    options: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)  # of metrics.jsonl, ascending
    metrics: dict[str, list[Number]] = field(default_factory=dict)  # by column, one number per step
    eval_steps: list[int] = field(default_factory=list)
    # by column, one number per evaluation
    eval_metrics: dict[str, list[Number]] = field(default_factory=dict)
    # for each evaluation: step, and rows of k, pass@k, low, high
    coverage: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    points: dict[str, list[Any]] = field(
        default_factory=lambda: {key: [] for key in ("step", "id", "pass_rate", "grad_norm")}
    )
    # ids, and for each evaluation the correct samples of each prompt
    prompts: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)  # of evaluations
    rollouts: list[dict[str, Any]] = field(default_factory=list)  # of training
    # number of samples and rollouts in the files
    in_files: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_from: str = ""
    weight: dict[str, Any] = field(
        default_factory=dict
    )  # W_N(p) of the objective, or why there is none
    notes: list[str] = field(default_factory=list)  # data that was skipped


def read_folder(path: Path, name: str) -> Folder:
    """Read the folder of a training run or of an evaluation.

    Raises:
        InputError: if it is neither, or a file that it must have cannot be read.
    """
    try:
        if not path.is_dir():
            raise InputError(
                f"RUN must be the folder of a run or of an evaluation, got {printable(path)}, "
                "which is not a folder"
            )
        folder = Folder(name)
        is_run, is_evaluation = (path / "metrics.jsonl").exists(), (path / "eval.json").exists()
        if is_run:
            _read_run(path, folder)
        elif is_evaluation:
            _read_evaluation(path, folder)
        else:
            wanted = "metrics.jsonl of a run or eval.json of an evaluation"
            raise InputError(
                f"RUN must be a folder that holds {wanted}, got {printable(path)}, "
                "which has neither"
            )
        _read_samples(path, folder)
        return folder
    except OSError as error:
        raise InputError(f"cannot read {printable(path)}: {error}") from error


def _read_run(path: Path, folder: Folder) -> None:
    folder.options = {
        key: value
        for key, value in _object(path / "config.json", folder).items()
        if key not in _NO_OPTIONS
    }
    folder.steps, folder.metrics, _ = _columns(path / "metrics.jsonl", folder)
    if not folder.steps:
        raise InputError(
            f"{printable(path / 'metrics.jsonl')} must hold at least one step, and has none"
        )
    folder.eval_steps, folder.eval_metrics, records = _columns(
        path / "eval.jsonl", folder, ("pass_at_k",)
    )
    sizes = [size or 0 for size in folder.eval_metrics.get("num_prompts", [])]
    whole = [i for i, size in enumerate(sizes) if size == max(sizes)]
    if len(whole) < len(sizes):  # one on a part of the prompts is not comparable
        folder.eval_steps = [folder.eval_steps[i] for i in whole]
        folder.eval_metrics = {
            name: [values[i] for i in whole] for name, values in folder.eval_metrics.items()
        }
        records = [records[i] for i in whole]
    for step, record in zip(folder.eval_steps, records, strict=True):
        if rows := coverage_rows(record.get("pass_at_k")):
            folder.coverage.append({"step": step, "rows": rows})
    _read_weight(path, folder)
    _read_pass_rates(path, folder)
    _read_warnings(path, folder)
    _read_points(path, folder)
    _read_seconds(path, folder)


def _read_evaluation(path: Path, folder: Folder) -> None:
    folder.kind = "evaluation"
    record = _object(path / "eval.json", folder, EVALUATION_BYTES)
    rows = coverage_rows(record.get("coverage")) or coverage_rows(record.get("pass_at_k"))
    if not rows:
        why = f" ({folder.notes[-1]})" if folder.notes else ""
        raise InputError(
            f"{printable(path / 'eval.json')} must hold pass@k of an evaluation as numbers by k, "
            f"and does not{why}"
        )
    folder.coverage = [{"step": None, "rows": rows}]
    options = record.get("options")
    folder.options = (
        {key: options[key] for key in options if key not in _OF_TRAINING}
        if isinstance(options, dict)
        else {}
    )
    counts = record.get("per_prompt")
    if isinstance(counts, dict):
        _take_counts([(None, record | counts, counts.get("id"))], folder, "eval.json")
    folder.seconds, folder.seconds_from = _durations(record.get("seconds")), "eval.json"


def _object(path: Path, folder: Folder, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; {} and a note if there is none."""
    if not path.exists():
        folder.notes.append(f"{path.name} is missing")
        return {}
    try:
        check_regular(path, most_bytes)
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        folder.notes.append(
            f"{path.name} cannot be read: {str(error) or 'it is nested too deeply'}"
        )
        return {}
    if not isinstance(content, dict):
        folder.notes.append(f"{path.name} does not hold a JSON object")
        return {}
    return content


def _lines(path: Path, folder: Folder, most_bytes: int = FILE_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, if it exists; the last line may be incomplete."""
    if not path.exists():
        return
    check_regular(path, most_bytes)
    damaged = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            elif not line.endswith(b"\n"):
                why = "the run was still writing, or was killed"
                folder.notes.append(
                    f"the last line of {path.name} is incomplete and was skipped: {why}"
                )
            elif line.strip():
                damaged.append(number)
    if damaged:
        lines = (
            f"line {damaged[0]:,}"
            if len(damaged) == 1
            else f"{len(damaged):,} lines, the first of them {damaged[0]:,},"
        )
        folder.notes.append(
            f"{lines} of {path.name} cannot be read and {'was' if len(damaged) == 1 else 'were'} "
            "skipped"
        )


def _columns(
    path: Path, folder: Folder, kept: tuple[str, ...] = ()
) -> tuple[list[int], dict[str, list[Number]], list[dict[str, Any]]]:
    """Return the steps, the numbers of each key by step, and each step's record with the keys in
    `kept` unchanged.

    If two lines have the same step, the later one counts.
    """
    by_step: dict[int, dict[str, Any]] = {}
    columns: dict[str, None] = {}
    without_step = 0
    for record in _lines(path, folder):
        step = record.get("step")
        if not is_count(step):
            without_step += 1
            continue
        columns |= dict.fromkeys(
            key for key, value in record.items() if is_number(value) and key != "step"
        )
        by_step[step] = {
            key: value for key, value in record.items() if key in columns or key in kept
        }
    if without_step:
        folder.notes.append(f"{without_step:,} lines of {path.name} have no step and were skipped")
    steps = sorted(by_step)
    ordered = [by_step[step] for step in steps]
    return steps, {key: [finite(record.get(key)) for record in ordered] for key in columns}, ordered


def coverage_rows(passes: Any) -> list[list[Number]]:
    """Return rows [k, pass@k, low, high] by ascending k, from {k: pass@k} (no interval) or {k:
    {"mean", "low", "high"}}.
    """
    rows: dict[int, list[Number]] = {}
    for k, value in passes.items() if isinstance(passes, dict) else ():
        if not (k.isascii() and k.isdecimal() and int(k) > 0):
            continue
        estimate = value if isinstance(value, dict) else {"mean": value}
        mean, low, high = (finite(estimate.get(name)) for name in ("mean", "low", "high"))
        if mean is not None:
            rows[int(k)] = [int(k), mean, low, None if low is None else high]
    return [rows[k] for k in sorted(rows)]


def _read_warnings(path: Path, folder: Folder) -> None:
    for record in _lines(path / "warnings.jsonl", folder):
        step, kind = record.get("step"), record.get("kind", record.get("name"))
        folder.warnings.append(
            {
                "step": step if is_count(step) else None,
                "kind": text_of(kind)[0],
                "message": text_of(record.get("message"))[0],
            }
        )


def _read_points(path: Path, folder: Folder) -> None:
    """Read the pass rate and the gradient norm of each diagnosed prompt."""
    thinned = Thinned(MOST_POINTS)
    for record in _lines(path / "diagnostics.jsonl", folder):
        rates, norms, ids = (record.get(key) for key in ("pass_rate", "grad_norm", "ids"))
        if (
            not is_count(record.get("step"))
            or not isinstance(rates, list)
            or not isinstance(norms, list)
        ):
            continue
        ids = ids if isinstance(ids, list) and len(ids) == len(rates) else [None] * len(rates)
        known = [
            (prompt if is_count(prompt) else None, rate, norm)
            for prompt, rate, norm in zip(ids, map(finite, rates), map(finite, norms), strict=False)
            if rate is not None and norm is not None
        ]
        thinned.add(len(known), (record["step"], known))
    for step, known in thinned.items:
        for prompt, rate, norm in known:
            for key, value in zip(folder.points, (step, prompt, rate, norm), strict=True):
                folder.points[key].append(value)
    _note_thinned(thinned, "diagnostics", folder)


def _note_thinned(thinned: Thinned, log: str, folder: Folder) -> None:
    if thinned.every > 1:
        note = f"one of {thinned.every} lines of {log}.jsonl is shown, because there are many"
        folder.notes.append(note)


def _read_samples(path: Path, folder: Folder) -> None:
    """Read the samples of evaluations, and the rollouts of training that the run kept."""
    sources = {"samples": _lines(path / "samples.jsonl", folder)}
    if folder.kind == "run":
        sources["rollouts"] = _lines(path / "rollouts.jsonl", folder, ROLLOUT_BYTES)
    for name, records in sources.items():
        try:
            thinned = read_samples(records)
        except (ValueError, RecursionError) as error:
            folder.notes.append(
                f"{name}.jsonl cannot be read: {str(error) or 'it is nested too deeply'}"
            )
            continue
        setattr(folder, name, thinned.items)
        folder.in_files[name] = thinned.seen
        _note_thinned(thinned, name, folder)


def _read_pass_rates(path: Path, folder: Folder) -> None:
    """Read the number of correct samples of each prompt at each evaluation."""
    records = _lines(path / "pass_rates.jsonl", folder, EVALUATION_BYTES)
    by_step = {record["step"]: record for record in records if is_count(record.get("step"))}
    _take_counts(
        [(step, by_step[step], by_step[step].get("ids")) for step in sorted(by_step)],
        folder,
        "pass_rates.jsonl",
    )
    if folder.prompts:
        texts = itertools.islice(_lines(path / "eval_prompts.jsonl", folder), MOST_TEXTS)
        folder.prompts["texts"] = [
            [x["id"], text_of(x.get("prompt"), PROMPT_LENGTH)[0]]
            for x in texts
            if is_count(x.get("id"))
        ]


def _take_counts(
    records: list[tuple[int | None, dict[str, Any], Any]], folder: Folder, file: str
) -> None:
    """Take the counts of evaluations (step, record, ids) that have the last one's prompts."""
    evaluations, known = [], [_ids(ids) for _, _, ids in records]
    for (step, record, _), ids in zip(records, known, strict=True):
        num_samples, counts = record.get("num_samples"), record.get("num_correct")
        if (
            not ids
            or ids != known[-1]
            or not is_count(num_samples)
            or not isinstance(counts, list)
            or len(counts) != len(ids)
        ):
            continue
        if all(is_count(number) and number <= num_samples for number in counts):
            evaluations.append({"step": step, "num_samples": num_samples, "num_correct": counts})
    if len(evaluations) < len(records):
        skipped = len(records) - len(evaluations)
        folder.notes.append(
            f"{skipped:,} evaluations in {file} have other prompts or wrong counts and were skipped"
        )
    if not evaluations:
        return
    num_read = len(evaluations)
    while len(evaluations) > 2 and len(evaluations) * len(known[-1]) > MOST_COUNTS:
        evaluations = [*evaluations[:-1:2], evaluations[-1]]  # the first and the last stay
    if len(evaluations) < num_read:
        folder.notes.append(
            f"{len(evaluations)} of {num_read} evaluations in {file} are shown, because there are "
            "many"
        )
    total = records[-1][1].get("num_prompts")
    total = total if is_count(total) else len(known[-1])
    folder.prompts |= {"ids": known[-1], "num_prompts": total, "evaluations": evaluations}


def _ids(ids: Any) -> list[int]:
    """Return the distinct ids of prompts, or [] for anything else."""
    is_valid = (
        isinstance(ids, list)
        and len(ids) <= MOST_COUNTS // 2
        and all(map(is_count, ids))
        and len(set(ids)) == len(ids)
    )
    return ids if is_valid else []


def _read_seconds(path: Path, folder: Folder) -> None:
    """Read the seconds by stage from timings.json, or else sum those in metrics.jsonl."""
    if (path / "timings.json").exists():
        folder.seconds = _durations(_object(path / "timings.json", folder))
        folder.seconds_from = "timings.json"
    if not folder.seconds:
        sums = {
            key: sum(value for value in folder.metrics.get(key, ()) if value is not None)
            for key in _TIMED
        }
        folder.seconds = {
            key.removesuffix("_seconds"): value for key, value in sums.items() if value > 0
        }
        folder.seconds_from = "metrics.jsonl"


def _read_weight(path: Path, folder: Folder) -> None:
    """Read W_N(p) of the objective, or the reason why there is none, from weight.json."""
    content = _object(path / "weight.json", folder)
    values = content.get("values")
    numbers = [*map(finite, values)] if isinstance(values, list) else []
    if len(numbers) == len(PASS_RATES) and None not in numbers:
        folder.weight = {"values": values}
    else:
        reason, _ = text_of(content.get("reason", "weight.json does not have it"), _REASON)
        folder.weight = {"reason": reason}


def _durations(stages: Any) -> dict[str, float]:
    named = stages.items() if isinstance(stages, dict) else ()
    return {key: value for key, value in named if finite(value) is not None and value >= 0}

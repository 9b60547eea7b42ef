"""Read the files of a run or an evaluation into columns of numbers. The files may be unfinished or
damaged.

A line that is not as the trainer writes it is skipped and noted, never guessed. What would make the
page too large is thinned.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from maxrl_fast.config.names import PASS_RATES
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.scores import MAX, PASS, score_of
from maxrl_fast.report.samples import Number, Thinned, finite, read_samples, sample_of, text_of
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, printable, read_json

FILE_BYTES = 1 << 30
ROLLOUT_BYTES = 1 << 32
EVALUATION_BYTES = 1 << 28  # eval.json and pass_rates.jsonl have numbers for each prompt
MOST_POINTS = 100_000  # diagnosed prompts of one run
MOST_COUNTS = 200_000  # correct samples of a prompt in an evaluation
MOST_TEXTS, PROMPT_LENGTH = 1_000, 2_000  # of held-out prompts
T = TypeVar("T")
# what reading a line raises that is not as the trainer writes it
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_TIMED = ("rollout", "train")
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
    score: str = PASS  # or MAX
    # for each evaluation: step, and rows of k, score, low, high
    coverage: list[dict[str, Any]] = field(default_factory=list)
    sets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # of held-out sets by name
    warnings: list[dict[str, Any]] = field(default_factory=list)
    points: dict[str, list[Any]] = field(
        default_factory=lambda: {"step": [], "id": [], "pass_rate": [], "grad_norm": []}
    )
    # ids, and for each evaluation the correct samples of each prompt
    prompts: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)  # of evaluations
    rollouts: list[dict[str, Any]] = field(default_factory=list)  # of training
    # number of samples and rollouts in the files
    in_files: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_from: str = ""
    weight: dict[str, Any] = field(default_factory=dict)  # W_N(p), or why there is none
    notes: list[str] = field(default_factory=list)  # data that was skipped


def read_folder(path: Path, name: str) -> Folder:
    try:
        if not path.is_dir():
            wanted = "RUN must be the folder of a run or of an evaluation"
            raise InputError(f"{wanted}, got {printable(path)}, which is not a folder")
        folder = Folder(name)
        if any((path / name).exists() for name in ("metrics.jsonl", "weight.json")):
            _read_run(path, folder)
        elif (path / "eval.json").exists():
            _read_evaluation(path, folder)
        else:
            wanted = "RUN must be a folder that holds metrics.jsonl of a run or eval.json of an"
            raise InputError(f"{wanted} evaluation, got {printable(path)}, which has neither")
        _read_samples(path, folder)
        return folder
    except InputError:
        raise
    except (OSError, *_DAMAGE) as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"cannot read {printable(path)}: {why:.200}") from error


def _read_run(path: Path, folder: Folder) -> None:
    options = _object(path / "config.json", folder)
    folder.options = {key: options[key] for key in options if key not in _NO_OPTIONS}
    folder.steps, folder.metrics, _ = _columns(path / "metrics.jsonl", folder)
    if not folder.steps:
        raise InputError(
            f"{printable(path / 'metrics.jsonl')} must hold at least one step, and has none"
        )
    steps, columns, records = _columns(path / "eval.jsonl", folder)
    sizes = [record.get("num_prompts", 0) for record in records]
    # one on a part of the prompts is not comparable
    whole = [i for i, size in enumerate(sizes) if size == max(sizes)]
    folder.eval_steps = [steps[i] for i in whole]
    folder.eval_metrics = {name: [values[i] for i in whole] for name, values in columns.items()}
    folder.score = score_of([records[i] for i in whole])
    keys = {key.removesuffix(PASS) for i in whole for key in records[i] if key.endswith(PASS)}
    for key, i in itertools.product(sorted(keys), whole):
        if rows := coverage_rows(records[i].get(key + folder.score, records[i].get(key + PASS))):
            own = folder.sets.setdefault(key[:-1], []) if key else folder.coverage
            own.append({"step": steps[i], "rows": rows})
    _read_weight(path, folder)
    _read_pass_rates(path, folder)
    _read_warnings(path, folder)
    _read_points(path, folder)
    _read_seconds(path, folder)


def _read_evaluation(path: Path, folder: Folder) -> None:
    folder.kind = "evaluation"
    record = _object(path / "eval.json", folder, EVALUATION_BYTES)
    wanted = f"{printable(path / 'eval.json')} must hold pass@k of an evaluation as numbers by k"
    try:
        rows = coverage_rows(record.get("coverage")) or coverage_rows(record.get(PASS))
        folder.score = MAX if record.get("score") == MAX else PASS
        if not rows:
            raise ValueError(*folder.notes[-1:])
        folder.coverage = [{"step": None, "rows": rows}]
        options = record.get("options", {})
        folder.options = {key: options[key] for key in options if key not in _OF_TRAINING}
        if "per_prompt" in record:
            own = record["per_prompt"]
            if rewards := own.get("rewards"):
                means, largest = [*map(fmean, rewards)], [*map(max, rewards)]
                own = {"reward_mean": means, "reward_max": largest, "id": own["id"]}
            counts = _counts(record | own, own["id"])
            _take_counts(folder, own["id"], len(own["id"]), [{"step": None} | counts])
        folder.seconds, folder.seconds_from = _durations(record.get("seconds")), "eval.json"
    except _DAMAGE as error:
        raise InputError(f"{wanted}, and does not ({error})") from error


def _object(path: Path, folder: Folder, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file; {} and a note if there is none."""
    if not path.exists():
        folder.notes.append(f"{path.name} is missing")
        return {}
    try:
        return read_json(path, most_bytes)
    except InputError as error:
        folder.notes.append(str(error))
        return {}


def _lines(
    path: Path, folder: Folder, read: Callable[[Any], T], most_bytes: int = FILE_BYTES
) -> Iterator[T]:
    """Yield `read` of each line of a JSON Lines file, if it exists. The last line may be
    incomplete; others that cannot be read are noted.
    """
    if not path.exists():
        return
    check_regular(path, most_bytes)
    damaged = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = read(json.loads(line))
            except _DAMAGE:
                if line.endswith(b"\n"):
                    damaged.append(number)
                    continue
                why = "the run was still writing, or was killed"
                torn = f"the last line of {path.name} is incomplete and was skipped: {why}"
                folder.notes.append(torn)
            else:
                yield record
    if damaged:
        lines = f"{len(damaged):,} line{'s' * (len(damaged) > 1)}, the first {damaged[0]:,},"
        folder.notes.append(f"{lines} of {path.name} cannot be read and are skipped")


def _columns(
    path: Path, folder: Folder
) -> tuple[list[int], dict[str, list[Number]], list[dict[str, Any]]]:
    """Return the steps, the numbers of each key by step, and each step's record. Of two lines of
    the same step, the later one counts."""
    by_step = dict(_lines(path, folder, _at_step))
    steps = sorted(by_step)
    ordered = [by_step[step] for step in steps]
    names = dict.fromkeys(
        key for own in by_step.values() for key in own if key != "step" and _is_number(own[key])
    )
    return steps, {key: [finite(record.get(key)) for record in ordered] for key in names}, ordered


def _at_step(record: Any) -> tuple[int, dict[str, Any]]:
    for key, value in record.items():
        if key.endswith((PASS, MAX)):
            coverage_rows(value)
    if type(record["step"]) is not int or type(record.get("num_prompts", 0)) is not int:
        raise TypeError
    return record["step"], record


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def coverage_rows(passes: Any) -> list[list[Number]]:
    """Return rows [k, score, low, high] by ascending k, from {k: score} (no interval) or {k:
    {"mean", "low", "high"}}."""
    rows = dict[int, list[Number]]()
    for k, value in (passes or {}).items():
        estimate = value if isinstance(value, dict) else {"mean": value}
        rows[int(k)] = [int(k), *(finite(estimate.get(name)) for name in ("mean", "low", "high"))]
    return [rows[k] for k in sorted(rows) if rows[k][1] is not None]


def _read_warnings(path: Path, folder: Folder) -> None:
    def read(record: Any) -> dict[str, Any]:
        message = text_of(record["message"])[0]
        return {"step": _at_step(record)[0], "kind": record["kind"], "message": message}

    folder.warnings = [*_lines(path / "warnings.jsonl", folder, read)]


def _read_points(path: Path, folder: Folder) -> None:
    def read(record: Any) -> list[tuple[Any, ...]]:
        rates, norms = map(finite, record["pass_rate"]), map(finite, record["grad_norm"])
        step = itertools.repeat(_at_step(record)[0])
        points = zip(step, record["ids"], rates, norms, strict=False)
        return [point for point in points if None not in point[2:]]

    thinned = Thinned(MOST_POINTS)
    for points in _lines(path / "diagnostics.jsonl", folder, read):
        thinned.add(len(points), points)
    for point in itertools.chain(*thinned.items):
        for key, value in zip(folder.points, point, strict=True):
            folder.points[key].append(value)
    _note_thinned(thinned, "diagnostics", folder)


def _note_thinned(thinned: Thinned, log: str, folder: Folder) -> None:
    if thinned.every > 1:
        note = f"one of {thinned.every} lines of {log}.jsonl is shown, because there are many"
        folder.notes.append(note)


def _read_samples(path: Path, folder: Folder) -> None:
    sizes = {"samples": FILE_BYTES}
    if folder.kind == "run":
        sizes["rollouts"] = ROLLOUT_BYTES
    for name, most_bytes in sizes.items():
        thinned = read_samples(_lines(path / f"{name}.jsonl", folder, sample_of, most_bytes))
        setattr(folder, name, thinned.items)
        folder.in_files[name] = thinned.seen
        _note_thinned(thinned, name, folder)


def _read_pass_rates(path: Path, folder: Folder) -> None:
    def read(record: Any) -> tuple[int, tuple[dict[str, Any], int]]:
        return _at_step(record)[0], (_counts(record, record["ids"]), record["num_prompts"])

    by_step = dict(_lines(path / "pass_rates.jsonl", folder, read, EVALUATION_BYTES))
    if not by_step:
        return
    steps = sorted(by_step)
    ids, total = by_step[steps[-1]][0]["ids"], by_step[steps[-1]][1]
    same = [step for step in steps if by_step[step][0]["ids"] == ids]
    if len(same) < len(steps):
        skipped = f"{len(steps) - len(same):,} evaluations in pass_rates.jsonl"
        folder.notes.append(f"{skipped} have other prompts and were skipped")
    kept = same
    while len(kept) > 2 and len(kept) * len(ids) > MOST_COUNTS:
        kept = [*kept[:-1:2], kept[-1]]  # the first and the last stay
    if len(kept) < len(same):
        shown_here = f"{len(kept)} of {len(same)} evaluations in pass_rates.jsonl are shown"
        folder.notes.append(f"{shown_here}, because there are many")
    _take_counts(folder, ids, total, [{"step": step} | by_step[step][0] for step in kept])

    def read_text(record: Any) -> list[Any]:
        return [record["id"], text_of(record["prompt"], PROMPT_LENGTH)[0]]

    texts = _lines(path / "eval_prompts.jsonl", folder, read_text)
    folder.prompts["texts"] = [*itertools.islice(texts, MOST_TEXTS)]


def _counts(record: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Return the ids and the counts of correct samples, or the rewards, in an evaluation."""
    names = ["num_correct"] if "num_correct" in record else ["reward_mean", "reward_max"]
    numbers = {name: [*map(finite, record[name])] for name in names}
    if any(len(x) != len(ids) or None in x for x in numbers.values()):
        raise ValueError("each prompt must have a number")
    return {"ids": ids, "num_samples": record["num_samples"], **numbers}


def _take_counts(
    folder: Folder, ids: list[int], num_prompts: int, counts: list[dict[str, Any]]
) -> None:
    evaluations = [{name: x for name, x in own.items() if name != "ids"} for own in counts]
    folder.prompts = {"ids": ids, "num_prompts": num_prompts, "evaluations": evaluations}


def _read_seconds(path: Path, folder: Folder) -> None:
    if (path / "timings.json").exists():
        folder.seconds = _durations(_object(path / "timings.json", folder))
        folder.seconds_from = "timings.json"
    if not folder.seconds:
        numbers = {name: folder.metrics.get(f"{name}_seconds", ()) for name in _TIMED}
        folder.seconds = _durations({name: sum(filter(None, x)) for name, x in numbers.items()})
        folder.seconds_from = "metrics.jsonl"


def _read_weight(path: Path, folder: Folder) -> None:
    """Read W_N(p) of the objective, or the reason why there is none, from weight.json."""
    content = _object(path / "weight.json", folder)
    values = content.get("values") or []
    if len(values) == len(PASS_RATES) and None not in map(finite, values):
        folder.weight = {"values": values}
    else:
        folder.weight = {"reason": content.get("reason", "weight.json does not have it")}


def _durations(stages: Any) -> dict[str, float]:
    return {name: seconds for name, seconds in (stages or {}).items() if finite(seconds)}

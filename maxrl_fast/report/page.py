"""Reads runs and evaluations, which may be in progress, and writes the page: data, style and
scripts in one HTML file that makes no network requests."""

import base64
import gzip
import hashlib
import json
import math
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from maxrl_fast.config.changes import OF_ONE_START, PASS_RATES
from maxrl_fast.errors import InputError, printable
from maxrl_fast.evaluation import PASS, score_of
from maxrl_fast.runtime.files import TASK_OPTIONS, RunFolder, read_json

EVALUATION_BYTES = 1 << 28  # eval.json has numbers for each prompt
MOST_TEXTS, PROMPT_LENGTH = 1_000, 2_000  # of held-out prompts
SAMPLE_BYTES = 1 << 24  # all texts of one file of one run
TEXT_LENGTH, ANSWER_LENGTH, COLUMNS_LENGTH = 20_000, 500, 2_000  # characters of one sample
SHOWN = ("step", "id", "tokens", "turns", "reward", "advantage")  # of a sample, beside its texts
_OF_TRAINING = ("eval_prompts", "samples", "k")  # options with another meaning in an evaluation

Record = dict[str, Any]
Number = int | float | None


class Folder:
    """The data of one folder; a number that is missing or not finite is None."""

    def __init__(self, name: str) -> None:
        self.name, self.kind, self.score = name, "run", PASS  # or "evaluation", or MAX
        self.options: Record = {}
        self.prompt_set = name
        self.steps: list[int] = []  # of metrics.jsonl, ascending
        self.metrics: dict[str, list[Number]] = {}  # by column, one number per step
        self.eval_steps: list[int] = []
        self.eval_metrics: dict[str, list[Number]] = {}
        self.coverage: list[Record] = []  # step, and rows of k, score, low, high
        self.sets: dict[str, list[Record]] = {}  # of held-out sets by name
        self.warnings: list[Record] = []
        self.prompts: Record = {}  # ids, and for each evaluation each prompt's correct samples
        self.samples: list[Record] = []  # of evaluations
        self.rollouts: list[Record] = []  # of training
        self.in_files: dict[str, int] = {}  # number of samples and rollouts
        self.weight: Record = {}  # W_N(p), or why there is none
        self.notes: list[str] = []  # what is left out


def read_folder(path: Path, name: str) -> Folder:
    folder, run = Folder(name), RunFolder(path)
    try:
        if (path / "metrics.jsonl").exists():
            _read_run(run, folder)
        elif (path / "eval.json").exists():
            _read_evaluation(path / "eval.json", folder)
        else:
            raise InputError(
                "RUN must be a folder with metrics.jsonl of a run or eval.json of an evaluation, "
                f"got {printable(path)}, which has neither"
            )
        for kind in ("samples", "rollouts"):
            samples = [*map(_sample, run.log(kind))]
            setattr(folder, kind, _thinned(samples, kind, folder))
            folder.in_files[kind] = len(samples)
    except (OSError, TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"cannot read {printable(path)}: {why:.200}") from error
    return folder


def _read_run(run: RunFolder, folder: Folder) -> None:
    if (config := run.path / "config.json").exists():
        folder.options = run.options
        folder.prompt_set = _prompt_set(read_json(config), run.options, folder.name)
    records = _by_step(run.log("metrics"))
    if not records:
        file = printable(run.path / "metrics.jsonl")
        raise InputError(f"{file} must hold at least one step, and has none")
    folder.steps, folder.metrics = [x["step"] for x in records], _columns(records)
    weight, unknown = run.path / "weight.json", {"reason": "weight.json does not have it"}
    folder.weight = read_json(weight) if weight.exists() else unknown
    folder.warnings = run.log("warnings")
    evaluations = _by_step(run.log("eval"))
    most = max((x.get("num_prompts", 0) for x in evaluations), default=0)
    # one on a part of the prompts is not comparable
    whole = [x for x in evaluations if x.get("num_prompts", 0) == most]
    folder.eval_steps, folder.eval_metrics = [x["step"] for x in whole], _columns(whole)
    folder.score = score_of(whole)
    for key in sorted({key.removesuffix(PASS) for x in whole for key in x if key.endswith(PASS)}):
        for x in whole:
            if rows := _coverage(x.get(key + folder.score, x.get(key + PASS))):
                own = folder.sets.setdefault(key[:-1], []) if key else folder.coverage
                own.append({"step": x["step"], "rows": rows})
    if counts := _by_step(run.log("pass_rates")):
        ids = counts[-1]["ids"]
        same = [x for x in counts if x["ids"] == ids]
        if skipped := len(counts) - len(same):
            said = "evaluations in pass_rates.jsonl have other prompts and are left out"
            folder.notes.append(f"{skipped:,} {said}")
        _take_counts(same, ids, counts[-1]["num_prompts"], folder)
        prompts = run.log("eval_prompts")[:MOST_TEXTS]
        folder.prompts["texts"] = [[x["id"], _text(x["prompt"], PROMPT_LENGTH)] for x in prompts]


def _read_evaluation(file: Path, folder: Folder) -> None:
    record = read_json(file, EVALUATION_BYTES)
    rows = _coverage(record.get("coverage")) or _coverage(record.get(PASS))
    if not rows:
        raise InputError(f"{printable(file)} must hold pass@k of an evaluation as numbers by k")
    folder.kind, folder.coverage = "evaluation", [{"step": None, "rows": rows}]
    folder.score = record.get("score", PASS)
    options = record.get("options", {})
    folder.options = {
        key: x for key, x in options.items() if x is not None and key not in _OF_TRAINING
    }
    folder.prompt_set = _prompt_set(record, options, folder.name)
    if own := record.get("per_prompt"):
        if rewards := own.get("rewards"):
            own |= {"reward_mean": [*map(fmean, rewards)], "reward_max": [*map(max, rewards)]}
        _take_counts([record | own | {"step": None}], own["id"], len(own["id"]), folder)


def _take_counts(records: list[Record], ids: list[int], total: int, folder: Folder) -> None:
    has_rewards = "reward_mean" in records[0]  # eval.json has both
    kinds = ("reward_mean", "reward_max") if has_rewards else ("num_correct",)
    names = ("step", "num_samples", *kinds)
    evaluations = [{name: x[name] for name in names} for x in records]
    folder.prompts = {"ids": ids, "num_prompts": total, "evaluations": evaluations}


def _by_step(records: list[Record]) -> list[Record]:
    """Return the records by step; of one step the last counts."""
    found = {record["step"]: record for record in records}
    return [found[step] for step in sorted(found)]


def _columns(records: list[Record]) -> dict[str, list[Number]]:
    names = {
        key: None for record in records for key, x in record.items() if type(x) in (int, float)
    }
    names.pop("step", None)
    return {name: [_finite(record.get(name)) for record in records] for name in names}


def _coverage(passes: Record | None) -> list[list[Number]]:
    """Return rows [k, score, low, high] of {k: score} or {k: {"mean", "low", "high"}}."""
    rows = list[list[Number]]()
    for k, x in (passes or {}).items():
        estimate = x if isinstance(x, dict) else {"mean": x}
        rows.append([int(k), *(estimate.get(name) for name in ("mean", "low", "high"))])
    return sorted(row for row in rows if row[1] is not None)


def _finite(value: Any) -> Number:
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _text(value: Any, most: int) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text[:most]


def _sample(record: Record) -> Record:
    texts = {name: _text(record[name], TEXT_LENGTH) for name in ("prompt", "response")}
    return {
        **{key: record.get(key) for key in SHOWN},
        **texts,
        "truncated": record.get("truncated", False),
        "left_out": sum(len(record[name]) - len(text) for name, text in texts.items()),
        "components": record.get("components", {}),
        "answer": _text(record.get("answer"), ANSWER_LENGTH),
        "columns": _text(record.get("columns") or None, COLUMNS_LENGTH),
    }


def _thinned(lines: list[Record], kind: str, folder: Folder) -> list[Record]:
    """Return all samples if they fit, else every second, fourth and so on, with a note."""
    texts = ("prompt", "response", "answer", "columns")
    sizes, every = [200 + 2 * sum(len(x[name]) for name in texts) for x in lines], 1
    while every < len(lines) and sum(sizes[::every]) > SAMPLE_BYTES:
        every *= 2
    if every > 1:
        note = f"one of {every} lines of {kind}.jsonl is shown, because there are many"
        folder.notes.append(note)
    return lines[::every]


_KEY_OPTIONS = "objective k order rollouts prompts task model lr steps seed"
KEY_OPTIONS = _KEY_OPTIONS.split()
STYLES = ("vendor/uPlot.min.css", "page.css")
_SCRIPTS = """vendor/uPlot.iife.min.js dom.js chart.js lines.js curves.js panels.js bars.js maze.js
prompts.js rewards.js samples.js main.js"""
SCRIPTS = _SCRIPTS.split()
# fields of a folder that the page unpacks when it is open
LAZY = ("prompts", "samples", "rollouts")
_SHOWN_OPTION = 200  # characters shown of an option's value
_NAMED_OPTIONS = 3


def render(folders: list[Folder]) -> str:
    style = "\n".join(map(_asset, STYLES))
    script = "'use strict';\n" + "\n".join(map(_asset, SCRIPTS))
    # Scripts and styles are allowed by digest: text of a run would not be executed even if a bug
    # let it become markup.
    allowed = f"script-src {_digest(script)}; style-src {_digest(style)}"
    marks = {
        "policy": f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "samples": _packed(folders),
        # last: its texts may contain a mark, and </script> or <!--, whose letters are escaped
        "data": _json(page_data(folders)).translate({ord(x): f"\\u{ord(x):04x}" for x in "<>&"}),
    }
    page = _asset("page.html")
    for mark, text in marks.items():
        page = page.replace(f"{{{{{mark}}}}}", text, 1)
    return page


def page_data(folders: list[Folder]) -> Record:
    key_options, differing = _shown_options(folders)
    shown, runs = [*key_options, *differing], list[Record]()
    for folder in folders:
        own = {key: value for key, value in vars(folder).items() if key not in LAZY}
        own["options"] = {key: _value(folder.options.get(key)) for key in shown}
        own["shown"] = {key: len(getattr(folder, key)) for key in LAZY}
        runs.append(own)
    return {
        "pass_rates": PASS_RATES,
        "key_options": key_options,
        "differing": differing,
        "groups": groups_of(folders, shown),
        "runs": runs,
    }


def _packed(folders: list[Folder]) -> str:
    """Return samples, rollouts and prompts, each prompt's text once, as base64 of gzip of JSON: 20
    times smaller, and without a meaning in HTML."""
    texts, runs = dict[str, int](), list[Record]()
    for folder in folders:
        own: Record = {"prompts": folder.prompts}
        for kind in ("samples", "rollouts"):
            own[kind] = [
                x | {"prompt": texts.setdefault(x["prompt"], len(texts))}
                for x in getattr(folder, kind)
            ]
        runs.append(own)
    content = _json({"texts": [*texts], "runs": runs}).encode()
    return base64.b64encode(gzip.compress(content, compresslevel=9, mtime=0)).decode()


def _prompt_set(content: Record, options: Record, name: str) -> str:
    """Where this is equal, held-out prompts can be compared by id. content: of config.json or
    eval.json."""
    if (names := content.get(TASK_OPTIONS)) is None:
        return name
    seed = options.get("task_seed", options.get("seed"))
    own = {x: options.get(x) for x in sorted({"task", *names} - {"sft_data"})}
    return json.dumps([own, options.get("split", "test"), seed])


def _shown_options(folders: list[Folder]) -> tuple[list[str], list[str]]:
    """Return the key options that any run has, and others in which the runs differ."""
    runs = [folder.options for folder in folders if folder.options and folder.kind == "run"]
    known = runs or [folder.options for folder in folders if folder.options]
    others = {key: None for options in known for key in options}
    shared = [x for x in KEY_OPTIONS if x == "model" or any(x in options for options in known)]
    differing = [key for key in others if key not in (*KEY_OPTIONS, *OF_ONE_START)]
    return shared if known else [], [key for key in differing if _differs(key, known)]


def _differs(key: str, options: list[Record]) -> bool:
    return len({json.dumps(own.get(key)) for own in options}) > 1


def groups_of(folders: list[Folder], named: list[str]) -> list[Record]:
    """Return the groups of at least two runs whose options differ in their seeds alone: their
    places and a name, from the first options in `named`. The same seed twice does not count."""
    members = dict[str, dict[Any, int]]()  # places by seed, by configuration
    for i, folder in enumerate(folders):
        if folder.kind == "run" and folder.options:
            own = {x: y for x, y in folder.options.items() if x not in (*OF_ONE_START, "seed")}
            by_seed = members.setdefault(json.dumps(own, sort_keys=True), {})
            by_seed.setdefault(folder.options.get("seed"), i)
    found = [[*by_seed.values()] for by_seed in members.values() if len(by_seed) > 1]
    options = [folders[places[0]].options for places in found]
    differing = [key for key in named if key != "seed" and _differs(key, options)] or ["objective"]
    names: list[str] = []
    for number in range(1, _NAMED_OPTIONS + 1):  # as few options as tell the groups apart
        names = [_name(own, differing[:number]) for own in options]
        if len(set(names)) == len(names):
            break
    return [
        {"runs": places, "name": f"{name}, {len(places)} seeds"}
        for name, places in zip(names, found, strict=True)
    ]


def _name(options: Record, keys: list[str]) -> str:
    known = [(key, options[key]) for key in keys if key in options]
    parts = (str(x) if key == "objective" else f"{key} {x}" for key, x in known)
    return ", ".join(part[:40] for part in parts) or "one configuration"


def _value(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and abs(value) < 2**53):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_OPTION else f"{text[:_SHOWN_OPTION]} …"


def _json(data: Record) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("maxrl_fast.report") / "page" / name).read_text(encoding="utf-8")

"""The page: data, style and scripts in one HTML file that makes no network requests."""

import base64
import gzip
import hashlib
import json
from importlib.resources import files
from typing import Any

from maxrl_fast.config.changes import OF_ONE_START, OF_TASK, PASS_RATES
from maxrl_fast.report.reading import Folder, Record

KEY_OPTIONS = (
    *("objective", "k", "order", "rollouts", "prompts", "task", "model", "lr", "steps", "seed"),
)
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = (
    *("vendor/uPlot.iife.min.js", "dom.js", "chart.js", "lines.js", "curves.js", "panels.js"),
    *("bars.js", "maze.js", "prompts.js", "rewards.js", "samples.js", "main.js"),
)
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
    """Return what the page reads at once: the number of samples and prompts."""
    key_options, differing = _shown_options(folders)
    shown, runs = [*key_options, *differing], list[Record]()
    for folder in folders:
        own = {key: value for key, value in vars(folder).items() if key not in LAZY}
        own["options"] = {key: _value(folder.options.get(key)) for key in shown}
        own["shown"] = {key: len(getattr(folder, key)) for key in LAZY}
        runs.append(own | {"prompt_set": _prompt_set(folder)})
    return {
        "pass_rates": PASS_RATES,
        "key_options": key_options,
        "differing": differing,
        "groups": groups_of(folders, shown),
        "runs": runs,
    }


def _packed(folders: list[Folder]) -> str:
    """Return samples, rollouts and prompts, each prompt's text once, as base64, which has no
    meaning in HTML, of gzip of JSON: 20 times smaller."""
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


def _prompt_set(folder: Folder) -> str:
    """Where this text is equal, held-out prompts can be compared by id."""
    if not (options := folder.options):
        return folder.name
    own = [options.get(name) for name in OF_TASK]
    own += [options.get("split", "test"), options.get("task_seed", options.get("seed"))]
    return json.dumps(own)


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
    """Return a name like "maxrl, k 4"."""
    known = [(key, options[key]) for key in keys if key in options]
    parts = (str(x) if key == "objective" else f"{key} {x}" for key, x in known)
    return ", ".join(part[:40] for part in parts) or "one configuration"


def _value(value: Any) -> Any:
    """Return anything but a number as shortened text."""
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

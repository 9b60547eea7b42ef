"""The page: data, style and scripts in one HTML file that makes no network requests."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from maxrl_fast.config.names import OF_ONE_START, OF_TASK, PASS_RATES
from maxrl_fast.report.reading import Folder
from maxrl_fast.report.samples import in_columns, packed
from maxrl_fast.report.seeds import groups_of

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


def render(folders: list[Folder]) -> str:
    style = "\n".join(_asset(name) for name in STYLES)
    script = "'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS)
    # Scripts and styles are allowed by digest: text of a run would not be executed even if a bug
    # let it become markup.
    allowed = f"script-src {_digest(script)}; style-src {_digest(style)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page = _asset("page.html")
    marks = {
        "policy": policy,
        "style": style,
        "script": script,
        "samples": packed(lazy_data(folders)),
    }
    marks["data"] = _embedded(page_data(folders))  # last: its texts may contain a mark
    for mark, text in marks.items():
        before, found, after = page.partition(f"{{{{{mark}}}}}")
        assert found
        page = before + text + after
    return page


def page_data(folders: list[Folder]) -> dict[str, Any]:
    key_options, differing = _shown_options(folders)
    shown = [*key_options, *differing]
    return {
        "pass_rates": PASS_RATES,
        "key_options": key_options,
        "differing": differing,
        "groups": groups_of(folders, shown),
        "runs": [_eager(folder, shown) for folder in folders],
    }


def _eager(folder: Folder, options: list[str]) -> dict[str, Any]:
    """Return what the page reads at once; of samples and prompts, only their number."""
    numbers = {key: value for key, value in vars(folder).items() if key not in LAZY}
    return numbers | {
        "options": {key: _value(folder.options.get(key)) for key in options},
        "shown": {key: len(getattr(folder, key)) for key in LAZY},
        "prompt_set": _prompt_set(folder),
    }


def lazy_data(folders: list[Folder]) -> dict[str, Any]:
    """Return each folder's samples, rollouts and prompts, and each prompt's text once."""
    texts: dict[str, int] = {}
    runs = [
        {key: in_columns(getattr(folder, key), texts) for key in ("samples", "rollouts")}
        | {"prompts": folder.prompts}
        for folder in folders
    ]
    return {"texts": list(texts), "runs": runs}


def _prompt_set(folder: Folder) -> str:
    """Return an id of the held-out prompts; where it is equal, prompts can be compared by id."""
    options = folder.options
    if not options:
        return folder.name
    own = [options.get(name) for name in OF_TASK]
    seed = options.get("task_seed", options.get("seed"))
    return hashlib.sha256(
        json.dumps([*own, options.get("split", "test"), seed]).encode()
    ).hexdigest()[:16]


def _shown_options(folders: list[Folder]) -> tuple[list[str], list[str]]:
    """Return the key options that any run has, and the other options in which the runs differ."""
    runs = [folder.options for folder in folders if folder.options and folder.kind == "run"]
    known = runs or [folder.options for folder in folders if folder.options]
    own = (*KEY_OPTIONS, *OF_ONE_START)
    others = dict.fromkeys(key for options in known for key in options if key not in own)
    key_options = [
        key
        for key in KEY_OPTIONS
        if key == "model" or any(options.get(key) is not None for options in known)
    ]
    values = {key: {json.dumps(_value(options.get(key))) for options in known} for key in others}
    return key_options if known else [], [key for key in others if len(values[key]) > 1]


def _value(value: Any) -> Any:
    """Return null, booleans and numbers unchanged, other values as shortened text."""
    if (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, (int, float)) and abs(value) < 2**53)
    ):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_OPTION else f"{text[:_SHOWN_OPTION]} …"


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside HTML: texts may contain </script> or <!--."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("maxrl_fast.report") / "page" / name).read_text(encoding="utf-8")

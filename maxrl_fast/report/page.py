"""The page: data, style and scripts in one HTML file that makes no network requests."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from maxrl_fast.config.changes import OF_ONE_START
from maxrl_fast.report.reading import Folder
from maxrl_fast.report.weights import PASS_RATES, weight_of

KEY_OPTIONS = ("objective", "k", "order", "rollouts", "prompts", "task", "model", "lr", "steps", "seed")
SCRIPTS = ("svg.js", "chart.js", "curves.js", "panels.js", "samples.js", "main.js")
_SHOWN_OPTION = 200  # characters shown of an option's value
_MOST_OPTIONS = 200


def render(folders: list[Folder]) -> str:
    """Return the HTML document."""
    style = _asset("page.css")
    script = "'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS)
    # Scripts and styles are allowed by digest: text of a run would not be executed even if a bug let it become markup.
    allowed = f"script-src {_digest(script)}; style-src {_digest(style)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    page = _asset("page.html")
    for mark, text in (("policy", policy), ("style", style), ("script", script), ("data", _embedded(page_data(folders)))):
        before, found, after = page.partition(f"{{{{{mark}}}}}")
        assert found
        page = before + text + after
    return page


def page_data(folders: list[Folder]) -> dict[str, Any]:
    """Return the data that the scripts read."""
    for folder in folders:
        if folder.kind == "run":
            folder.weight = weight_of(folder.options)
    key_options, differing = _shown_options(folders)
    shown = [*key_options, *differing]
    return {
        "pass_rates": PASS_RATES,
        "key_options": key_options,
        "differing": differing,
        "runs": [vars(folder) | {"options": {key: _value(folder.options.get(key)) for key in shown}} for folder in folders],
    }


def _shown_options(folders: list[Folder]) -> tuple[list[str], list[str]]:
    """Return the key options that any run has, and the other options in which the runs differ."""
    runs = [folder.options for folder in folders if folder.options and folder.kind == "run"]
    known = runs or [folder.options for folder in folders if folder.options]
    own = (*KEY_OPTIONS, *OF_ONE_START)
    others = dict.fromkeys(key for options in known for key in list(options)[:_MOST_OPTIONS] if key not in own)
    key_options = [key for key in KEY_OPTIONS if key == "model" or any(options.get(key) is not None for options in known)]
    values = {key: {json.dumps(_value(options.get(key))) for options in known} for key in others}
    return key_options if known else [], [key for key in others if len(values[key]) > 1][:_MOST_OPTIONS]


def _value(value: Any) -> Any:
    """Return an option's value for the page: null, booleans and numbers unchanged, others as shortened text."""
    if value is None or isinstance(value, bool) or (isinstance(value, (int, float)) and abs(value) < 2**53):
        return value
    return (value if isinstance(value, str) else json.dumps(value))[:_SHOWN_OPTION]


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside HTML: a text in it may contain </script>, <!-- or a line separator."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("maxrl_fast.report") / "page" / name).read_text(encoding="utf-8")

"""How a reward function wants to be called, found from the names of its parameters.

Its worker detects this (`signature_of`) and the trainer makes the arguments, so this module imports little, as `worker` does.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Signature = dict[str, Any]  # as JSON: "style", "names", "required" and "takes_any"

ROW = "row"  # f(prompt, response, **columns) -> number
ROWS = "rows"  # async def f(prompt, response, **columns) -> number: several run at a time
BATCH = "batch"  # f(completions, prompts, **columns) -> list of numbers, for all responses to a prompt
STYLES = {
    ROW: "called with each response",
    ROWS: "async, called with each response, at most {concurrency} at a time in each process",
    BATCH: "called with all responses to a prompt at once",
}
OF_BATCHES = ("completions", "responses", "prompts")
# What other trainers and other people call the arguments.
RENAMED = {
    **dict.fromkeys(("completion", "solution_str", "solution", "output", "generation", "generated", "text"), "response"),
    **dict.fromkeys(("prompt_str", "input", "query", "instruction"), "prompt"),
}
NOT_GIVEN = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "extra_info")


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return how to call a function, by its parameters and by whether it is async.

    One that names `response` is called with each response, and one that names `completions`, `responses` or `prompts` with
    lists.
    """
    import inspect  # the workers of data sets of prompts need not wait for it

    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # written in C
        return {"style": ROW, "names": [], "required": [], "takes_any": True}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    takes_lists = "response" not in names and any(name in names for name in OF_BATCHES)
    return {
        "style": BATCH if takes_lists else ROWS if is_async else ROW,
        "names": names,
        "required": [p.name for p in named if p.default is p.empty],
        "takes_any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def is_valid(signature: Any) -> bool:
    """Return whether a signature is one, and nothing that the reward code wrote in its place."""
    return (
        isinstance(signature, dict)
        and signature.get("style") in STYLES
        and all(isinstance(signature.get(key), list) for key in ("names", "required"))
        and all(isinstance(name, str) for name in (*signature["names"], *signature["required"]))
    )


def batch_arguments(rows: Sequence[Mapping[str, Any]], signature: Signature) -> dict[str, Any]:
    """Return the arguments of a function of lists: `prompts`, every column, and `completions`, or `responses` if it names them.

    As in TRL, a completion of a chat prompt is a list with the assistant's message. Responses are always text.
    """
    columns = dict.fromkeys(key for row in rows for key in row if key not in ("prompt", "response"))
    arguments = {key: [row.get(key) for row in rows] for key in columns}
    arguments["prompts"] = [row["prompt"] for row in rows]
    if "responses" in signature["names"]:
        arguments["responses"] = [row["response"] for row in rows]
    if "completions" in signature["names"] or "responses" not in signature["names"]:
        arguments["completions"] = [
            row["response"] if isinstance(row["prompt"], str) else [{"role": "assistant", "content": row["response"]}]
            for row in rows
        ]
    return arguments


def mismatch(signature: Signature, given: Sequence[str]) -> str:
    """Return a sentence on the first parameter that does not fit the arguments, with the nearest fix; "" if all fit."""
    extra = [name for name in given if name not in signature["names"]]
    for name in signature["required"]:
        if name not in given:
            return f"your function asks for `{name}`: {_fix(name, given, extra)}"
    if extra and not signature["takes_any"]:
        return (
            f"your function does not take `{extra[0]}`: add **columns to its parameters, which collects what they do not name"
        )
    return ""


def _fix(name: str, given: Sequence[str], extra: Sequence[str]) -> str:
    """Return the nearest fix. A new name must be one of `extra`: those that the function has already cannot be given twice."""
    if (own := RENAMED.get(name)) in extra:
        return f"rename it to `{own}`"
    if (one := name.removesuffix("s")) in extra:
        return f"rename it to `{one}`, or ask for `completions` and return a list"
    if name in NOT_GIVEN:
        return "this trainer does not give it; leave it out, or give it a default"
    close = get_close_matches(name, extra, n=1, cutoff=0.5)
    nearest = f"did you mean `{close[0]}`? " if close else ""
    return f"{nearest}the arguments are {', '.join(given)}; give it a default, or name a column of the data"

"""Built-in reward functions: boxed answers, programs, and the scores of reasoning-gym. They run in
worker processes, where a response that exceeds the time limit is wrong, not a failed reward. Each
test of a program is a new process with the worker's limits; this is no sandbox."""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from decimal import Decimal
from functools import lru_cache
from textwrap import dedent
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards.mathematics import equal

# A block without another: indentation, fence, language, code. What is indented by 4 more belongs to
# the code, and a fence may end a line of code, but not of a string.
BLOCK = re.compile(
    r"^([ \t]*)(?:(?:[-*+]|\d+[.)]) +)?(`{3,}|~{3,})([^\n`~]*)\n"
    r"((?:(?!\1? {0,3}(?:```|~~~)\w).*\n)*?(?:.*[^\s\"'`~])?)\1? {0,3}\2[`~]*[ \t\r]*$",
    re.M,
)
OPTIONS = ["-I", "-X", "utf8", "-X", "int_max_str_digits=0"]
# The whole program, or its function with arguments from standard input, after the names that
# LiveCodeBench gives.
RUN = """
import json, sys
from types import ModuleType
name, program = sys.argv.pop(), sys.argv.pop()
if name:
    given, output, sys.stdout = json.load(sys.stdin), sys.stdout, sys.stderr
main = ModuleType("program" if name else "__main__")
scope = vars(main)
for x in "from {} import *", "import {}":
    for y in ("string re datetime collections heapq bisect copy math random statistics itertools "
              "functools operator io sys json builtins typing").split():
        exec(x.format(y), scope)
scope.pop(name, None)
sys.setrecursionlimit(50_000)
sys.modules[main.__name__] = main
exec(compile(program, "program.py", "exec"), scope)
if name:
    owner = scope["Solution"]() if "Solution" in scope else None
    value = (getattr(owner, name, None) or scope[name])(*given)
    json.dump(value, output, default=lambda x: x.tolist() if hasattr(x, "tolist") else float(x))
"""


def program_of(response: str, name: str = "") -> str:
    """Return the last block that defines the function, or without a name reads standard input; else
    the last of Python, or the last; "" if there is none."""
    own = rf"\b(def|class)\s+({re.escape(name)}|Solution)\b" if name else r"\binput\(|stdin|open\(0"
    blocks = [(x[3].lower(), x[4]) for x in BLOCK.finditer(response)][::-1]
    best = max(blocks, key=lambda x: (bool(re.search(own, x[1])), "py" in x[0]), default=("", ""))
    return dedent(best[1]).strip()


def run_tests(response: str, answer: str) -> float:
    """Return 1 if the program passes all tests, which `tests_of` has made, else 0."""
    sys.set_int_max_str_digits(0)  # of this process, a reward worker
    name, tests = json.loads(answer)
    program = program_of(response, name)
    is_given = 0 < len(program) <= 30_000  # an argument of a process has at most 128 KB
    return float(is_given and all(_passes(program, name, *test) for test in tests))


def _passes(program: str, name: str, given: Any, accepted: list[Any]) -> bool:
    command, null = [sys.executable, *OPTIONS, "-c", RUN, program, name], subprocess.DEVNULL
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as output:
        try:
            file.write((json.dumps(given) if name else given).encode())
            file.seek(0)
            ended = subprocess.run(command, stdin=file, stdout=output, stderr=null, cwd="/")
            output.seek(0)
            text = output.read(50 * len(json.dumps(accepted)) + 10_000).decode()
            texts = map(json.dumps, accepted) if name else accepted
            passes = any(_is_equal(_exact(text, name), _exact(x, name)) for x in texts)
        # no UTF-8, no JSON, a null byte, a number that is infinite or beyond Decimal
        except (ValueError, ArithmeticError, RecursionError, MemoryError):
            return False
    return passes and ended.returncode == 0


def _exact(text: str, name: str) -> Any:
    if name:
        return json.loads(text, parse_int=Decimal, parse_float=Decimal, parse_constant=Decimal)
    return [[*map(_number, line.split())] for line in text.strip().splitlines()]


def _number(word: str) -> Decimal | str:
    try:
        return Decimal(re.sub("[_nN]", "-", word))  # 1_0, inf and sNaN are words
    except ArithmeticError:
        return word


def _is_equal(given: Any, wanted: Any) -> bool:
    """Whether values differ by rounding alone: by 1e-9 of a number, by 1e-12, or in the last of at
    least six decimals; integers are equal or not."""
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_is_equal, given, wanted))
    if given == wanted or not (isinstance(given, Decimal) and isinstance(wanted, Decimal)):
        return bool(given == wanted)
    unit = max(int(x.as_tuple().exponent) for x in (given, wanted))
    allowed = max(abs(wanted) / 10**9, Decimal("1e-12"))
    if unit == 0:  # one is an integer
        allowed = min(allowed, Decimal("1e-6"))
    elif unit < -5:
        allowed = max(allowed, min(Decimal(10) ** unit, abs(wanted) / 10**5))
    return abs(given - wanted) < allowed


def tests_of(value: Any, metadata: Any) -> str:
    """Return tests as JSON: name of the function or "", [[input, accepted outputs], ...]. `value`
    is TACO's {"inputs", "outputs", "fn_name"}, or LiveCodeBench's [{"input", "output", "testtype"}]
    with the name in `metadata`; also as JSON text."""
    sys.set_int_max_str_digits(0)  # TACO has integers of any length
    try:
        value, metadata = (json.loads(x) if isinstance(x, str) else x for x in (value, metadata))
        if isinstance(value, dict):
            name = value.get("fn_name") or ""
            pairs = [*zip(value["inputs"], value["outputs"], strict=True)]
            # an output of a call may be in a list of its own
            tests = [[x, [y, *y * (len(y) == 1)] if isinstance(y, list) else [y]] for x, y in pairs]
        else:
            name = metadata["func_name"] if value[0]["testtype"] == "functional" else ""
            tests = [[x["input"], [x["output"]]] for x in value]
            if name:  # an argument on each line
                tests = [[[*map(json.loads, x.splitlines())], [json.loads(*y)]] for x, y in tests]
        if not name:  # text, or lines of text
            tests = [[_text(x), [_text(y[0])]] for x, y in tests]
        if not tests:
            raise ValueError("it has none")
        return json.dumps([name, tests])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            "each line must have tests in the form of TACO or LiveCodeBench (--answer-key), got "
            f"{value!r:.80}: {type(error).__name__}: {error}"
        ) from error


def _text(lines: Any) -> str:
    return lines if isinstance(lines, str) else "\n".join(lines)


# What a box without braces holds: to the end of the formula or the line, or to the next word.
BARE = re.compile(
    r"(?![A-Za-z]{2})(?:(?![$\n]|\\[\])]|[.,;]?(?:\s+[A-Za-z]{2}|\s*$)).)+", re.MULTILINE
)


def __getattr__(name: str) -> Any:
    """Import a function's library, which takes seconds, before the limits of a call."""
    if name == "mathematics":
        for library in ("math_verify", "sympy.physics.units"):
            importlib.import_module(library)
        return _score_mathematics
    if name == "gym":
        importlib.import_module("reasoning_gym")
        return _score_gym
    if name == "code":
        return run_tests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def boxed(text: str) -> str:
    """Return the content of the last \\boxed{...}, or else \\fbox{...}, stripped; "" if there is no
    box, or the last is not closed. A box inside another is part of its content. A box may have no
    braces, such as \\boxed 5."""
    found, end = "", 0
    name = "boxed" if "\\boxed" in text else "fbox"
    while box := re.compile(rf"\\{name}(?![A-Za-z])\s*(\{{)?").search(text, end):
        end = start = box.end()
        if not box[1]:
            if bare := BARE.match(text, start):
                found, end = bare[0].strip(), bare.end()
            continue
        depth = 1
        while end < len(text) and depth:
            if text[end] == "\\":
                end += 1
            elif text[end] in "{}":
                depth += 1 if text[end] == "{" else -1
            end += 1
        found = "" if depth else text[start : end - 1].strip()
    return found


def _score_mathematics(response: str, answer: str, given: str | None = None) -> float:
    """given: what the last box holds, if the trainer has found it."""
    given = boxed(response) if given is None else given
    return float(bool(given) and equal(answer, given))


@lru_cache(64)
def gym_dataset(name: str, config: str, seed: int) -> Any:
    """`config` is a JSON object of options; "datasets" of composite lists name, weight, config."""
    import reasoning_gym
    from reasoning_gym import composite

    options = json.loads(config)
    if name == "composite":
        options["datasets"] = [composite.DatasetSpec(**x) for x in options.get("datasets", [])]
    return reasoning_gym.create_dataset(name, seed=seed, **options)


@lru_cache(1024)
def gym_entry(name: str, config: str, seed: int, index: int) -> dict[str, Any]:
    found: dict[str, Any] = gym_dataset(name, config, seed)[index]
    return found


def gym_answer(response: str) -> str:
    """Return the content of the last <answer>, else of the last box, else the whole response."""
    from reasoning_gym.utils import extract_answer

    tagged: str | None = extract_answer(response)
    return tagged if tagged is not None else boxed(response) or response.strip()


def _score_gym(
    response: str, question: str, name: str, config: str, seed: int, index: int
) -> float:
    expected = gym_entry(name, config, seed, index)
    if expected["question"] != question:
        raise ValueError(
            f"reasoning-gym's {name} must repeat its question for seed {seed} and index {index}, "
            "got another one"
        )
    return float(gym_dataset(name, config, seed).score_answer(gym_answer(response), expected))

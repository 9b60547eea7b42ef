"""Python programs in responses, run against tests. Each test is a new process with the limits of
the reward worker that starts it; this is not a sandbox."""

import json
import re
import subprocess
import sys
import tempfile
from decimal import Decimal, InvalidOperation
from typing import Any

from maxrl_fast.errors import InputError

BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
OUTPUT_BYTES = 1 << 24  # of a program that are read
# the whole program, or its function with arguments from standard input
RUN = """
import json, sys
program, name = sys.argv[1:]
scope = {"__name__": "program" if name else "__main__"}
if name:
    exec("from collections import *; from typing import *; import heapq, math", scope)
    output, sys.stdout = sys.stdout, sys.stderr
exec(compile(program, "program.py", "exec"), scope)
if name:
    owner = scope["Solution"]() if "Solution" in scope else None
    json.dump((getattr(owner, name, None) or scope[name])(*json.load(sys.stdin)), output)
"""


def program_of(response: str) -> str:
    """Return the last block of code, "" if there is none."""
    return (BLOCK.findall(response) or [""])[-1].strip()


def run_tests(prompt: Any, response: str, answer: str, **line: Any) -> float:
    """Return 1 if the program passes all tests of `tests_of`, else 0."""
    (name, tests), program = json.loads(answer), program_of(response)
    return float(bool(program) and all(_passes(program, name, *test) for test in tests))


def _passes(program: str, name: str, given: Any, accepted: list[Any]) -> bool:
    command, null = [sys.executable, "-I", "-c", RUN, program, name], subprocess.DEVNULL
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as output:
        file.write((json.dumps(given) if name else given).encode())
        file.seek(0)
        try:
            ended = subprocess.run(command, stdin=file, stdout=output, stderr=null, cwd="/")
            output.seek(0)
            text = output.read(OUTPUT_BYTES).decode()
            passes = json.loads(text) in accepted if name else _is_equal(text, accepted[0])
        except (ValueError, RecursionError):  # a null byte in the program; no UTF-8; no JSON
            return False
    return passes and ended.returncode == 0


def _is_equal(given: str, wanted: str) -> bool:
    """Return whether all lines have the same words, or equal numbers, as in LiveCodeBench."""
    lines = [[x.split() for x in text.strip().splitlines()] for text in (given, wanted)]
    return len(lines[0]) == len(lines[1]) and all(
        x == y or (_numbers(x) is not None and _numbers(x) == _numbers(y))
        for x, y in zip(*lines, strict=True)
    )


def _numbers(words: list[str]) -> list[Decimal] | None:
    try:
        return [*map(Decimal, words)]
    except InvalidOperation:
        return None


def tests_of(value: Any, metadata: Any) -> str:
    """Return tests as JSON: name of the function or "", [[input, accepted outputs], ...].

    Args:
        value: TACO's {"inputs", "outputs", "fn_name"}, or LiveCodeBench's [{"input", "output",
            "testtype"}] with the name in `metadata`; also as JSON text.
    """
    try:
        value, metadata = (json.loads(x) if isinstance(x, str) else x for x in (value, metadata))
        if isinstance(value, dict):
            name = value.get("fn_name") or ""
            pairs = [*zip(value["inputs"], value["outputs"], strict=True)]
            # an output of a call may be in a list
            tests = [[x, [y, *y[:1]] if isinstance(y, list) else [y]] for x, y in pairs]
        else:
            name = metadata["func_name"] if value[0]["testtype"] == "functional" else ""
            tests = [[x["input"], [x["output"]]] for x in value]
            if name:  # an argument on each line
                tests = [[[*map(json.loads, x.splitlines())], [json.loads(*y)]] for x, y in tests]
        if not name:  # text, or lines of text
            tests = [["\n".join(_lines(x)), ["\n".join(_lines(y[0]))]] for x, y in tests]
        json.dumps([tests[0], tests], ensure_ascii=False).encode()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            "each line must have tests in the form of TACO or LiveCodeBench (--answer-key), got "
            f"{value!r:.80}: {type(error).__name__}: {error}"
        ) from error
    return json.dumps([name, tests])


def _lines(text: Any) -> Any:
    return [text] if isinstance(text, str) else text

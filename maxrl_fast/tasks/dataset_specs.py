"""The built-in data sets: where they are, how lines become prompts, and what scores responses; and
the other names that --task takes."""

import ast
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from maxrl_fast.errors import InputError
from maxrl_fast.rewards.verifiers import boxed, program_of, tests_of
from maxrl_fast.runtime.loading import is_code, is_file

AsLine = Callable[[dict[str, Any]], dict[str, Any]]
GoldAnswer = Callable[[dict[str, Any], str | None], str]  # (line, key of --answer-key)


class AnswerForm(NamedTuple):
    """How a response gives its answer: after the reasoning come `marker`, `opening`, which
    tokenizers merge with the answer, the answer and `closing` (VeriFree, Zhou et al. 2025)."""

    marker: str
    opening: str
    closing: str


BOX = AnswerForm("\\boxed", "{", "}")
TAGS = AnswerForm("<answer", ">", "</answer>")


@dataclass(frozen=True)
class DatasetSpec:
    """The format of a data set; `reward`, `answer` and what follows are as of a Task."""

    prompt_key: str = "prompt"
    is_question: bool = False  # text is the user message of a chat template, not the whole prompt
    suffix: str = ""  # of prompts that are text
    code_key: str = ""  # of code that follows the question of a line that has it
    hub: tuple[str, str] | None = None  # the default sets to train on and held out, of NAMED_SETS
    gold: GoldAnswer | None = None  # the right answer of a line; None: only the reward reads it
    form: AnswerForm | None = None  # how a response gives the answer that `gold` returns
    reward: str | None = None  # None: the user must name one
    answer: Callable[[str], str] = str.strip
    answer_limit: int | None = None
    max_new_tokens: int = 512


def keys_of(line: dict[str, Any]) -> str:
    return f"it has the keys {', '.join(map(repr, line))}"[:300] if line else "it has no keys"


def look_up(line: dict[str, Any], key: str) -> Any:
    """Return the value at a key, or a path such as reward_model.ground_truth, or None."""
    value: Any = line
    for part in [key] if key in line else key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _answer_text(line: dict[str, Any], key: str) -> str:
    value = look_up(line, key)
    is_scalar = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if not is_scalar or not str(value).strip():
        wanted = f"each line must have an answer in {key!r}"
        raise InputError(f"{wanted}, got {value!r:.80} (--answer-key); {keys_of(line)}")
    if isinstance(value, float):  # the shortest decimal text that reads back, never 1e-05
        return f"{Decimal(str(value)):f}".removesuffix(".0")
    return str(value).strip()


def gsm8k_answer(line: dict[str, Any], key: str | None) -> str:
    """Return the number after the last #### of a solution, or the whole text."""
    return _answer_text(line, key or "answer").rpartition("####")[2].strip().replace(",", "")


def math_answer(line: dict[str, Any], key: str | None) -> str:
    """Return the last boxed answer of the solution, if the line has no answer."""
    solution = line.get("solution")
    if key is None and look_up(line, "answer") is None and isinstance(solution, str):
        if answer := boxed(solution):
            return answer
        raise InputError(f"a solution must have its answer in \\boxed{{}}, got {solution!r:.200}")
    return _answer_text(line, key or "answer")


def code_tests(line: dict[str, Any], key: str | None) -> str:
    return tests_of(look_up(line, key or "input_output"), line.get("metadata"))


def _first_answer(row: dict[str, Any]) -> dict[str, Any]:
    answers = row.get("final_answer")
    return {**row, "answer": answers[0] if isinstance(answers, list) and answers else answers}


def _with_choices(row: dict[str, Any]) -> dict[str, Any]:
    """Return a question of GPQA with its answers in a fixed order."""
    names = ["Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    for name in names:
        if not isinstance(row.get(name), str):
            raise InputError(f"it must have text at {name!r}, got {row.get(name)!r:.80}")
    right, *_ = answers = [row[name] for name in names[1:]]
    choices = sorted(answers, key=lambda text: zlib.crc32(text.encode()))
    listed = "".join(f"\n{x}) {text}" for x, text in zip("ABCD", choices, strict=True))
    problem = f"{row['Question']}\n{listed}\n\nAnswer with the letter."
    return {"problem": problem, "answer": "ABCD"[choices.index(right)]}


@dataclass(frozen=True)
class NamedSet:
    """NAME[:CONFIG][@SPLIT] of the hub; prompts and answers as of DatasetSpec; a row as a line."""

    hub: str
    prompt_key: str | None = "problem"
    gold: GoldAnswer | None = math_answer
    as_line: AsLine = dict


UNNAMED = NamedSet("", None, None)
NAMED_SETS = {
    "aime24": NamedSet("HuggingFaceH4/aime_2024@train"),
    "aime25": NamedSet("math-ai/aime25"),
    "beyond_aime": NamedSet("ByteDance-Seed/BeyondAIME"),
    "amc23": NamedSet("math-ai/amc23", "question"),
    "minerva": NamedSet("math-ai/minervamath", "question"),
    "olympiad": NamedSet("math-ai/olympiadbench", "question", as_line=_first_answer),
    "math": NamedSet("nlile/hendrycks-MATH-benchmark"),
    "math500": NamedSet("HuggingFaceH4/MATH-500"),
    "gsm8k": NamedSet("openai/gsm8k:main", "question", gsm8k_answer),
    "gsm8k_platinum": NamedSet("madrylab/gsm8k-platinum:main", "question", gsm8k_answer),
    "gpqa_diamond": NamedSet("Idavidrein/gpqa:gpqa_diamond@train", as_line=_with_choices),
}

_MATHEMATICS = DatasetSpec(
    is_question=True,
    form=BOX,
    reward="maxrl_fast.rewards.verifiers:mathematics",
    answer=boxed,
    answer_limit=256,
)
DATASETS = {
    "dataset": DatasetSpec(),
    # MaxRL, appendix on GSM8K: SmolLM2, evaluated on GSM8K-Platinum.
    "gsm8k": replace(
        _MATHEMATICS,
        prompt_key="question",
        suffix=" Let's think step by step and output the final answer within \\boxed{}.",
        hub=("gsm8k", "gsm8k_platinum"),
        gold=gsm8k_answer,
    ),
    # MaxRL on POLARIS, PACS on DeepScaleR, and MATH itself.
    "math": replace(
        _MATHEMATICS,
        prompt_key="problem",
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
        hub=("math", "math500"),
        gold=math_answer,
        max_new_tokens=2048,
    ),
    # TACO, LiveCodeBench
    "code": DatasetSpec(
        prompt_key="question",
        is_question=True,
        suffix="\n\nWrite a Python program, and put it into a block ```python ... ```.",
        code_key="starter_code",
        gold=code_tests,
        reward="maxrl_fast.rewards.verifiers:code",
        answer=program_of,
        answer_limit=30_000,  # an argument of a process has at most 128 KB
        max_new_tokens=2048,
    ),
}


GYM = "gym:"


def is_plugin(name: str) -> bool:
    """Whether it is FILE.py:CLASS or package.module:CLASS."""
    return _is_class(name) if is_file(name) else is_code(name)


def is_dataset(name: str) -> bool:
    return name in DATASETS or is_reward(name)


def spec_of(name: str) -> DatasetSpec:
    """Return that of a data set, or of prompts for the reward FILE.py:FUNCTION."""
    return DATASETS.get(name) or DatasetSpec(reward=name)


def is_reward(name: str) -> bool:
    """Whether it is FILE.py:FUNCTION, a reward for the prompts of --data."""
    return is_file(name) and not _is_class(name)


def _is_class(name: str) -> bool:
    """The file is not run: rewards run in separate processes."""
    file, _, wanted = name.rpartition(":")
    try:
        statements = ast.parse(Path(file).read_bytes()).body
    except SyntaxError as error:
        why = f"syntax error in {file}, line {error.lineno}: {error.msg}"
        raise InputError(f"--task {name} cannot be read: {why}") from error
    except (OSError, ValueError):  # whoever loads it reports this
        return False
    return any(isinstance(x, ast.ClassDef) and x.name == wanted for x in statements)

"""The data sets that the trainer knows: where they are, how they are asked, and what is an answer to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards.boxed import boxed

Gold = Callable[[dict[str, Any], str | None], str]


@dataclass(frozen=True)
class DatasetSpec:
    """What the lines of a data set are.

    Args:
        prompt_key: of the question, where --prompt-key names none.
        asks: whether text is a question, for the user's message of a chat template; otherwise it is a prompt as it is.
        suffix: is added to prompts that are text.
        hub, test_hub: data sets of the Hugging Face hub, as NAME or NAME:CONFIG, where no file is given.
        gold: the right answer of a line, by the key of --answer-key; None: there is none, but for the user's own function.
        reward: the function that scores responses in worker processes; None: the user names one.
        answer: what a response answers; "" where it does not.
        answer_limit: characters of an answer, longer ones are wrong without being looked at; None: no limit.
    """

    prompt_key: str = "prompt"
    asks: bool = False
    suffix: str = ""
    hub: str | None = None
    test_hub: str | None = None
    gold: Gold | None = None
    reward: str | None = None
    answer: Callable[[str], str] = str.strip
    answer_limit: int | None = None
    max_new_tokens: int = 512


def look_up(line: dict[str, Any], key: str) -> Any:
    """The value of a key, or of a path of keys as reward_model.ground_truth; None where there is none."""
    if key in line:
        return line[key]
    value: Any = line
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text_of(line: dict[str, Any], key: str) -> str:
    value = look_up(line, key)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise InputError(f"each line must have an answer in {key!r}, got {value!r:.80} in {line!r:.200}")
    return str(value).strip()


def gsm8k_answer(line: dict[str, Any], key: str | None) -> str:
    """The number after #### of a solution as GSM8K writes it, or the whole where there is no ####."""
    return _text_of(line, key or "answer").rpartition("####")[2].strip().replace(",", "")


def math_answer(line: dict[str, Any], key: str | None) -> str:
    """The answer, or, where a line has only a solution, what its last box holds."""
    if key is None and look_up(line, "answer") is None and isinstance(solution := line.get("solution"), str):
        if answer := boxed(solution):
            return answer
        raise InputError(f"a solution must have its answer in \\boxed{{}}, got {solution!r:.200}")
    return _text_of(line, key or "answer")


DATASETS = {
    "dataset": DatasetSpec(),
    # MaxRL, appendix on GSM8K: SmolLM2, evaluated on GSM8K-Platinum.
    "gsm8k": DatasetSpec(
        prompt_key="question",
        asks=True,
        suffix=" Let's think step by step and output the final answer within \\boxed{}.",
        hub="openai/gsm8k:main",
        test_hub="madrylab/gsm8k-platinum:main",
        gold=gsm8k_answer,
        reward="maxrl_fast.rewards.mathematics:score",
        answer=boxed,
        answer_limit=256,
    ),
    # MaxRL on POLARIS, PACS on DeepScaleR, and MATH itself.
    "math": DatasetSpec(
        prompt_key="problem",
        asks=True,
        suffix="\nPlease reason step by step, and put your final answer within \\boxed{}.",
        hub="nlile/hendrycks-MATH-benchmark",
        test_hub="HuggingFaceH4/MATH-500",
        gold=math_answer,
        reward="maxrl_fast.rewards.mathematics:score",
        answer=boxed,
        answer_limit=256,
        max_new_tokens=2048,
    ),
}

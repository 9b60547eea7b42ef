"""Tasks produce prompts and score the responses to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rewards import Outcome, Progress, no_progress


class Task(Protocol):
    """The interface between a task and the trainer; docs/adding_a_task.md explains each member. A
    split is "train", "test" or, if the task has it, a key of `held_out`, a dict of sizes."""

    name: str
    fingerprint: str  # changes with what decides the prompts besides the options
    vocab_size: int
    stop_ids: tuple[int, ...]
    prompt_length: int  # of the longest prompt, in tokens
    max_new_tokens: int
    num_test_prompts: int | None  # None: unlimited
    has_demonstrations: bool
    reward: str | None  # PACKAGE.MODULE:FUNCTION; None: `score` scores responses
    answer_limit: int | None  # in characters; None: no limit

    def prompts(self, split: str, start: int, count: int) -> Prompts: ...

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Return training prompts by index and one correct response to each."""

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Return rewards [S] float32 of N responses to each prompt."""

    def answer(self, response: str) -> str:
        """Return the answer in a response, "" if it has none."""

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        """Return text as rewards read it, or as samples show it, with special tokens."""

    def tokenizer_files(self) -> dict[str, Any]:
        """Return JSON contents by file name, for `transformers`."""


def describe_task(task: Task) -> list[str]:
    """Return what the task's `describe`, which is optional, says at the start of a run."""
    lines: list[str] = getattr(task, "describe", list)()
    return lines


def held_out_sets(task: Task, most: int, num_samples: int) -> dict[str, tuple[int, int]]:
    """Return the prompts, up to `most`, and the samples of each held-out set."""
    sizes: dict[str, int | None] = getattr(task, "held_out", {"test": task.num_test_prompts})
    samples: dict[str, int] = getattr(task, "set_samples", {})
    return {x: (min(n or most, most), samples.get(x, num_samples)) for x, n in sizes.items()}


@dataclass(frozen=True)
class ReferenceAnswer:
    """The reference answer to a prompt, as tokens that continue the reasoning of a response."""

    length: int | None  # of the reasoning, in tokens; None: it does not lead to an answer
    lead: list[int]  # tokens between a response that does not lead to an answer and the answer
    answer: list[int]  # at least one token


@runtime_checkable
class AnsweredTask(Task, Protocol):
    """A task that knows the reference answer to every prompt."""

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """Return the reference answer to each of the S responses, N to each prompt. Where the
        reasoning ends must not depend on the tokens that follow it: only then is the probability of
        the answer after it an unbiased estimate of that of a response that gives it."""


@dataclass(frozen=True)
class Reply:
    sample: int  # s = g N + n of the S in this call of generate
    tokens: list[int]  # that the policy reads next, at least one unless `is_last`
    is_last: bool  # the episode ends; the tokens are ignored


class Environments(Protocol):
    """The environments of the S samples of one call of generate, one each."""

    def submit(self, sample: int, turn: list[int]) -> None:
        """Take a finished turn, its stop token included."""

    def replies(self, wait: bool) -> list[Reply]:
        """Return the replies that are there; with `wait`, at least one of those that are due."""

    def finish(self) -> list[Outcome]:
        """Wait for the calls that are due, end the environments, and return the outcomes [S]."""

    def close(self) -> None:
        """End the environments without rewards, after an error."""


@runtime_checkable
class EpisodeTask(Task, Protocol):
    """A task whose responses are episodes: turns of the policy, each answered by an environment."""

    max_turns: int

    def environments(
        self, prompts: Prompts, num_samples: int, beat: Progress = no_progress
    ) -> Environments:
        """Return those of `num_samples` episodes of each prompt; they call `beat` while they
        wait."""


OPEN, CLOSE = "⟦", "⟧"  # around what was inserted
_PLAIN = str.maketrans({OPEN: "[[", CLOSE: "]]"})  # what they are in the texts themselves


def response_texts(task: Task, rollouts: Rollouts, with_special: bool = False) -> list[str]:
    """Return each response as rewards read it, with what was inserted."""
    whole = ([x for part in parts for x in part] for parts in rollouts.turns())
    return [task.decode(tokens, with_special) for tokens in whole]


def shown_text(task: Task, parts: list[list[int]]) -> str:
    """Return a response, one of Rollouts.turns, as samples show it: with special tokens, and what
    was inserted between marks."""
    texts = [task.decode(part, with_special=True) for part in parts]
    if len(texts) == 1:
        return texts[0]
    plain = enumerate(text.translate(_PLAIN) for text in texts)
    return "".join(f"{OPEN}{text}{CLOSE}" if i % 2 else text for i, text in plain)


def decode_words(words: Sequence[str], tokens: Sequence[int]) -> str:
    return " ".join(words[i] if i < len(words) else f"<reserved_{i}>" for i in tokens)


def word_tokenizer_files(words: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """Return the JSON files, by name, of a Hugging Face tokenizer with one token per word, which
    ignores spaces and decodes without them. The first words are <pad>, <bos>, <eos> and <unk>; ids
    from len(words) on are reserved."""
    all_words = [*words, *(f"<reserved_{i}>" for i in range(len(words), vocab_size))]
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    how = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
    # Every word is an added token: transformers 5 loads the tokenizer of a qwen2 checkpoint as a
    # byte-level one, which ignores words.
    added = [
        {"id": i, "content": word, "special": word in special.values(), **how}
        for i, word in enumerate(all_words)
    ]
    off = ("add_prefix_space", "trim_offsets", "use_regex")
    byte_level: dict[str, Any] = {"type": "ByteLevel"} | dict.fromkeys(off, False)
    vocabulary = {word: i for i, word in enumerate(all_words)}
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"},
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 10**9, **special}
    config["clean_up_tokenization_spaces"] = False
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}

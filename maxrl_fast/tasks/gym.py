"""The procedural data sets of reasoning-gym, as gym:NAME: questions without end, each with a checker, and no download."""

import importlib.metadata
import json
import os
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks.text_codec import TextCodec, prompts_of

TEST_SHARE = 5  # one question in about this many is held out
TRIES = 200  # draws for a question on its side of the split: of 10 million test questions one would find none
SEEDS = 2**31  # those that the data sets take
# Of version 0.1.25, all run under two seeds of hashing: these take words or terms in the order of a set.
HASHED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")


class GymTask:
    """Questions by index, made as they are asked for.

    The split is decided by a question's content, so that no test question can be met in training. Question i is the first of
    its own stream of draws that falls on its side; the t-th draw is question i mod n of the t-th data set for these n, each
    with a seed of its own, where n is the size that the data set has by default: some make all of it at once.

    Args:
        name: of the data set.
        seed: of the questions.
        model: the checkpoint directory with the tokenizer.
        config: options of the data set, a JSON object as text.
        prompt_suffix: added to every question.
        plain_prompts: questions are prompts as they are, even where the tokenizer has a chat template.
        max_prompt_tokens: longer questions are left out.

    Raises:
        InputError: where reasoning-gym is missing, or does not take the name or the options.
    """

    num_test_prompts: int | None = None
    max_new_tokens = 256
    reward: str | None = "maxrl_fast.rewards.gym_score:score"
    answer_limit: int | None = None

    def __init__(
        self,
        name: str,
        seed: int,
        model: Path,
        *,
        config: str = "",
        prompt_suffix: str | None = None,
        plain_prompts: bool = False,
        max_prompt_tokens: int = 1024,
    ):
        try:
            from maxrl_fast.rewards import gym_score as gym
        except ImportError as error:
            raise InputError(f"--task gym:{name} needs reasoning-gym: pip install 'maxrl_fast[gym]' ({error})") from error
        hashed = [known for known in HASHED if known == name or (name == "composite" and f'"{known}"' in config)]
        if hashed and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
            raise InputError(
                f"reasoning-gym's {hashed[0]} asks other questions in every process, unless Python's hashes are the same: "
                "start with PYTHONHASHSEED=0 in the environment"
            )
        self._gym, self._dataset, self._config, self._seed = gym, name, config or "{}", seed
        try:
            first = gym.dataset(name, self._config, 0)
            sample = gym.entry(name, self._config, 0, 0)
        except Exception as error:  # whatever its checks raise, assertions among them
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"reasoning-gym makes no data set {name!r} with --gym-config {self._config!r}: {what}") from error
        self._size = max(len(first), 1)
        self.has_demonstrations = isinstance(sample["answer"], str)
        self._text = TextCodec(model, max_prompt_tokens, plain_prompts)
        self._suffix = prompt_suffix or ""
        self.vocab_size, self.stop_ids = self._text.vocab_size, self._text.stop_ids
        version = importlib.metadata.version("reasoning-gym")
        self.fingerprint = f"reasoning-gym {version}"
        self.name = f"{name} of reasoning-gym {version}"
        self.prompt_length = max_prompt_tokens
        self._question = lru_cache(4096)(self._find)

    def _find(self, split: str, i: int) -> tuple[list[int], dict[str, Any]]:
        """Token ids of a question that is not too long, and what the reward function is told."""
        for t in range(TRIES):
            seed = zlib.crc32(f"{self._seed} {split} {i // self._size} {t}".encode()) % SEEDS
            question = self._gym.entry(self._dataset, self._config, seed, i % self._size)["question"]
            is_test = zlib.crc32(question.encode()) % TEST_SHARE == 0
            if is_test == (split == "test"):
                prompt = self._text.prompt(question + self._suffix)
                if (tokens := self._text.encode(prompt)) is not None:
                    origin = {"name": self._dataset, "config": self._config, "seed": seed, "index": i % self._size}
                    return tokens, {"prompt": prompt, "question": question, **origin}
        raise InputError(
            f"{self.name} must have questions of at most {self.prompt_length} tokens to {split} with, got none in {TRIES} "
            "draws; it needs longer ones (--max-prompt-tokens) or has too few different questions"
        )

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Prompts `start` to `start + count - 1` of `split`; each carries where its question comes from."""
        found = [self._question(split, i) for i in range(start, start + count)]
        return prompts_of([tokens for tokens, _ in found], range(start, start + count), [line for _, line in found])

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Training prompts and, as the one rollout of each, the data set's answer."""
        prompts = self.prompts("train", start, count)
        assert prompts.columns is not None
        entries = [self._gym.entry(self._dataset, self._config, line["seed"], line["index"]) for line in prompts.columns]
        answers = [made["answer"] for made in entries]
        if None in answers:
            raise InputError(f"{self.name} has questions without an answer to learn from; --sft-steps must be 0")
        return prompts, Rollouts.given([self._text.encode_response(answer) for answer in answers])

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """None here: `reward` does, in worker processes."""
        raise InputError(f"{self.name} is scored by {self.reward}")

    def answer(self, response: str) -> str:
        """What stands in its answer tags or its box, else all of it."""
        return self._gym.answer(response)

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        return self._text.decode(tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        """Those of the checkpoint that the run started from."""
        return self._text.files()


def check_config(text: str) -> None:
    """InputError where --gym-config is no JSON object."""
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise InputError(f'--gym-config must be a JSON object, as {{"min_terms": 2}}, got {text!r:.80}')

"""The procedural data sets of reasoning-gym: generated questions, each with a verifier."""

import importlib
import importlib.metadata
import json
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from maxrl_fast.algorithms.options import Option, options_of
from maxrl_fast.errors import InputError, nearest
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rewards import verifiers
from maxrl_fast.tasks.conversation import TextOptions
from maxrl_fast.tasks.dataset_specs import TAGS
from maxrl_fast.tasks.text_codec import TextTask, prompts_of

TEST_SHARE = 5  # about one question in this many is held out
TRIES = 200  # draws for a question of its split
SEEDS = 2**31  # data sets accept seeds below this


@dataclass(frozen=True)
class GymOptions(TextOptions):
    """Questions of reasoning-gym, whose generators have options of their own."""


def generator_options(name: str) -> dict[str, Option]:
    """Return those of a data set's generator; other than numbers and texts they are JSON."""
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise InputError(
            f"--task gym:{name} needs reasoning-gym: pip install reasoning-gym ({error})"
        ) from error
    if name not in factory.DATASETS:
        raise InputError(
            f"--task gym:NAME must name a data set of reasoning-gym, got {name!r:.80}"
            f"{nearest(name, factory.DATASETS)}"
        )
    found = {}
    for key, option in options_of(factory.DATASETS[name][1]).items():
        if key not in ("seed", "size"):  # which are the run's
            has_default = isinstance(option.default, int | float | str | tuple)
            default = option.default if has_default else None
            found[key] = replace(option, default=default, help=option.help or f"Option of {name}.")
    return found


class GymTask(TextTask):
    """Questions by index. Question i is the first draw t of its split, which a CRC of the question
    decides: entry i mod n of a data set of the default size n, because some generate all entries at
    once, whose seed is a CRC of the run's seed, the split, i // n and t. Options are those of
    TextOptions and of the generator."""

    num_test_prompts: int | None = None
    max_new_tokens = 256
    form = TAGS
    reward: str | None = "maxrl_fast.rewards.verifiers:gym"

    def __init__(self, name: str, seed: int, model: Path, **options: Any):
        text = {key: options.pop(key) for key in options.keys() & options_of(TextOptions)}
        generator = generator_options(name)
        own = {key: x for key, x in options.items() if x != generator[key].default}
        self._dataset, self._config, self._seed = name, json.dumps(own), seed
        try:
            self._size = max(len(verifiers.gym_dataset(name, self._config, 0)), 1)
            answer = verifiers.gym_entry(name, self._config, 0, 0)["answer"]
        except Exception as error:  # its checks raise any exception, AssertionError too
            why, what = f"{type(error).__name__}: {error}", f"{name!r} with {self._config}"
            raise InputError(f"reasoning-gym cannot create {what}: {why}") from error
        self.has_demonstrations = isinstance(answer, str)
        super().__init__(model, TextOptions(**text))
        version = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
        encoded = self.encode_prompt(self.prompt("1 + 1 =" + self._suffix), "a question")
        # with what the tokenizer and its chat template make of a question
        self.fingerprint, self.name = f"{version}, {encoded}", f"{name} of {version}"
        self.prompt_length = self.options.max_prompt_tokens
        self._question = lru_cache(4096)(self._find)
        self._turn = Lock()  # some generators seed NumPy, and a thread makes training prompts

    def _find(self, split: str, i: int) -> tuple[list[int], dict[str, Any]]:
        epoch, index = divmod(i, self._size)
        for t in range(TRIES):
            seed = zlib.crc32(f"{self._seed} {split} {epoch} {t}".encode()) % SEEDS
            entry = verifiers.gym_entry(self._dataset, self._config, seed, index)
            question, answer = entry["question"], entry["answer"]
            is_test = zlib.crc32(question.encode()) % TEST_SHARE == 0
            if is_test != (split == "test"):
                continue
            prompt = self.prompt(question + self._suffix)
            tokens = self.encode_prompt(prompt, f"{self.name}, question {i}")
            if self.fits(tokens):
                line = {"prompt": prompt, "question": question, "name": self._dataset}
                line |= {"config": self._config, "seed": seed, "index": index}
                # some data sets have no answer
                return tokens, line | ({"answer": answer} if isinstance(answer, str) else {})
        raise InputError(
            f"{self.name} must have questions of at most {self.prompt_length} tokens for the "
            f"{split} split, got none in {TRIES} draws: its questions are longer (raise "
            "--max-prompt-tokens) or too few of them are distinct"
        )

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        ids = range(start, start + count)
        with self._turn:
            found = [self._question(split, i) for i in ids]
        return prompts_of([tokens for tokens, _ in found], ids, [line for _, line in found])

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        prompts, shown = self.prompts("train", start, count), []
        for line in prompts.columns or ():
            if "answer" not in line:
                why = f"{self.name} has questions without an answer"
                raise InputError(f"--sft-steps must be 0, as {why}")
            shown.append(self.encode_demonstration(line["prompt"], line["answer"], self.name)[1])
        return prompts, Rollouts.given(shown)

    def answer(self, response: str) -> str:
        return verifiers.gym_answer(response)

"""Prompts from a file or the Hugging Face hub, encoded with the tokenizer of a checkpoint: any data
set, GSM8K, mathematics.
"""

import hashlib
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.dataset_specs import DatasetSpec
from maxrl_fast.tasks.jsonl import Line, read_demonstrations, read_hub, read_lines
from maxrl_fast.tasks.text_answers import text_answers
from maxrl_fast.tasks.text_codec import TextTask, prompts_of

TEST_SHARE = 10  # about one prompt in this many is held out if no test prompts are given

Fields = dict[str, Any]


class DatasetTask(TextTask):
    """The lines of a data set, reshuffled in every epoch. Training prompt i is line i mod n of the
    order of epoch i // n, which depends only on the seed and the epoch. Arguments are the options
    of these names; what is not given is as in `spec`. Demonstrations are asked as the prompts of
    `data` are."""

    num_test_prompts: int | None

    def __init__(
        self,
        spec: DatasetSpec,
        seed: int,
        model: Path,
        *,
        data: Path | None = None,
        test_data: Path | None = None,
        hub: str | None = None,
        prompt_key: str | None = None,
        answer_key: str | None = None,
        prompt_suffix: str | None = None,
        max_prompt_tokens: int = 1024,
        sft_data: Path | None = None,
        max_new_tokens: int | None = None,
        needs_reward: bool = True,
        **options: Any,
    ):
        suffix = spec.suffix if prompt_suffix is None else prompt_suffix
        super().__init__(
            model, suffix, needs_reward, max_prompt_tokens=max_prompt_tokens, **options
        )
        self._seed, self._spec, self._key = seed, spec, prompt_key or spec.prompt_key
        self.max_new_tokens = spec.max_new_tokens
        self.reward, self.answer_limit = spec.reward, spec.answer_limit
        source, lines, test = _read(spec, self._key, data, test_data, hub)
        if not test:
            parts: tuple[list[Line], list[Line]] = [], []
            for place, line in lines:
                prompt = json.dumps(line[self._key]).encode()
                parts[zlib.crc32(prompt) % TEST_SHARE == 0].append((place, line))
            lines, test = parts
        odd: list[str] = []
        lines, test = (self._columns(part, answer_key, odd) for part in (lines, test))
        self._lines = {"train": self._encoded(lines), "test": self._encoded(test)}
        for split, kept in self._lines.items():
            if not kept:
                raise InputError(
                    f"{source} must have prompts of at most {max_prompt_tokens} tokens for the "
                    f"{split} split, got none in {len(lines)} training lines and {len(test)} test "
                    "lines"
                )
        num_long = len(lines) + len(test) - sum(map(len, self._lines.values()))
        self.prompt_length = max(len(tokens) for kept in self._lines.values() for tokens, _ in kept)
        # The token ids too: another chat template or tokenizer encodes the same lines otherwise.
        contents = [[line for _, line in part] for part in (lines, test)]
        encoded = [[tokens for tokens, _ in part] for part in self._lines.values()]
        self.num_train_prompts = len(self._lines["train"])
        self.num_test_prompts = len(self._lines["test"])
        self.name = (
            f"{source}: {self.num_train_prompts} prompts and {self.num_test_prompts} held out"
        )
        if num_long:
            self.name += f", {num_long} longer than {max_prompt_tokens} tokens left out"
        if odd:
            self.name += f", {len(odd)} without an answer left out, such as {odd[0]}"
        self._demonstrations: list[tuple[list[int], list[int]]] = []
        if sft_data is not None:
            most_tokens = max_new_tokens or spec.max_new_tokens
            self._read_demonstrations(sft_data, most_tokens, max_prompt_tokens)
            encoded += [[tokens for pair in self._demonstrations for tokens in pair]]
        self.num_demonstrations = len(self._demonstrations)
        self.has_demonstrations = bool(self._demonstrations)
        self.fingerprint = hashlib.sha256(json.dumps([*contents, encoded]).encode()).hexdigest()
        self._order = lru_cache(4)(self._shuffle)

    def _read_demonstrations(self, path: Path, most_tokens: int, most_prompt_tokens: int) -> None:
        # A run lowers its limit to this number, and a resumed run must find the same demonstrations
        # with the lower limit.
        if (room := self.positions - self.prompt_length) > 0:
            most_tokens = min(most_tokens, room)
        lines = read_demonstrations(path, self._key)
        places = [place for place, _, _ in lines]
        pairs = [(self._asked(prompt), response) for _, prompt, response in lines]
        held_out = {tuple(tokens) for tokens, _ in self._lines["test"]}
        num_held_out, positions = 0, self.positions
        for prompt, response in self.encode_demonstrations(pairs, places):
            lengths = len(prompt), len(response)
            if tuple(prompt) in held_out:
                num_held_out += 1
            elif (
                0 < lengths[0] <= most_prompt_tokens
                and lengths[1] <= most_tokens
                and sum(lengths) <= positions
            ):
                self._demonstrations.append((prompt, response))
        limits = (
            f"{most_prompt_tokens} tokens of prompt, {most_tokens} of response or {positions} of "
            "both"
        )
        if not self._demonstrations:
            raise InputError(
                f"{path.name} must have demonstrations with at most {limits}, whose prompts are "
                f"not held out, got none in {len(lines)} lines"
            )
        self.name += f"; {len(self._demonstrations)} demonstrations of {path.name}"
        if num_long := len(lines) - len(self._demonstrations) - num_held_out:
            self.name += f", {num_long} left out with more than {limits}"
        if num_held_out:
            self.name += f", {num_held_out} left out with held-out prompts"

    def _asked(self, prompt: Any) -> Any:
        if isinstance(prompt, str) and self._spec.is_question:
            return self.prompt(prompt + self._suffix)
        return prompt + self._suffix if isinstance(prompt, str) else prompt

    def _columns(self, lines: list[Line], answer_key: str | None, odd: list[str]) -> list[Line]:
        """Return lines as the reward function gets them, without those whose answer cannot be read;
        `odd` gets their errors.
        """
        found: list[Line] = []
        for place, line in lines:
            columns = {**line, "prompt": self._asked(line[self._key])}
            try:
                gold = self._spec.gold
                answer = {} if gold is None else {"answer": gold(line, answer_key)}
                found.append((place, columns | answer))
            except InputError as error:
                odd.append(f"{place}: {error}")
        if lines and not found:
            raise InputError(odd[-1])
        return found

    def _encoded(self, lines: list[Line]) -> list[tuple[list[int], Fields]]:
        """Leave out prompts that are too long."""
        encoded = self.encode([line["prompt"] for _, line in lines], [place for place, _ in lines])
        return [
            (tokens, line)
            for tokens, (_, line) in zip(encoded, lines, strict=True)
            if tokens is not None
        ]

    def _shuffle(self, epoch: int, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {epoch}".encode()))
        return torch.randperm(count, generator=generator).tolist()

    def _shuffled(self, lines: list[Any], i: int) -> Any:
        """Return line i of an endless stream that has all lines in a new order in each epoch."""
        return lines[self._order(i // len(lines), len(lines))[i % len(lines)]]

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        lines, indices = self._lines[split], range(start, start + count)
        chosen = [self._shuffled(lines, i) if split == "train" else lines[i] for i in indices]
        return prompts_of([tokens for tokens, _ in chosen], indices, [line for _, line in chosen])

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        if not self._demonstrations:
            raise InputError(
                f"--sft-steps must be 0 without --sft-data, as {self.name} has no solutions for a "
                "warm start"
            )
        chosen = [self._shuffled(self._demonstrations, i) for i in range(start, start + count)]
        prompts = prompts_of(
            [prompt for prompt, _ in chosen], range(start, start + count), [{}] * count
        )
        return prompts, Rollouts.given([response for _, response in chosen])

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """Return the answer of each response's line, after the first box that a response opens."""
        if self._spec.form is None:
            raise InputError(
                "the reference answer must be known, but only the reward function reads the lines "
                f"of {self.name}"
            )
        return text_answers(self, self._spec.form, prompts, rollouts)

    def answer(self, response: str) -> str:
        return self._spec.answer(response)


def _read(
    spec: DatasetSpec, key: str, data: Path | None, test_data: Path | None, hub: str | None
) -> tuple[str, list[Line], list[Line]]:
    """There are no test lines if they are split off later."""
    test = [] if test_data is None else read_lines(test_data, key, "--test-data")
    if data is not None:
        return data.name, read_lines(data, key), test
    hub, test_hub = (hub, None) if hub else (spec.hub, spec.test_hub)
    assert hub is not None  # a spec without a hub requires `data`
    lines = read_hub(hub, "train", key)
    if not test and test_hub is not None:
        test = read_hub(test_hub, "test", key)
    return hub, lines, test

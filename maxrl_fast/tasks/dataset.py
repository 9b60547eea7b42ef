"""Prompts of a file or of the Hugging Face hub, read by the tokenizer of a checkpoint: any data set, GSM8K, mathematics."""

import hashlib
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks.dataset_specs import DatasetSpec
from maxrl_fast.tasks.lines import read_hub, read_lines
from maxrl_fast.tasks.text_codec import TextCodec, prompts_of

TEST_SHARE = 10  # one prompt in about this many is held out, where no test prompts are given

Line = dict[str, Any]


class DatasetTask:
    """The lines of a data set, shuffled anew in every epoch.

    Prompt i of training is line i mod n of its epoch's order, which the seed and the number of the epoch alone decide.

    Args:
        spec: what the lines are.
        seed: of the order.
        model: the checkpoint directory with the tokenizer.
        data, test_data: files of prompts; without `test_data`, a tenth of `data` is held out.
        hub: a data set of the Hugging Face hub in place of `data`; default: that of the spec.
        prompt_key, answer_key: keys of the prompt and of the right answer in a line; default: those of the spec.
        prompt_suffix: added to prompts that are text; default: that of the spec.
        plain_prompts: text is a prompt as it is, even where the tokenizer has a chat template.
        max_prompt_tokens: longer prompts are left out.

    Raises:
        InputError: where a file cannot be read, a line is not what it should be, or no prompt is short enough.
    """

    num_test_prompts: int | None
    has_demonstrations = False

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
        plain_prompts: bool = False,
        max_prompt_tokens: int = 1024,
    ):
        self._seed, self._spec = seed, spec
        self._text = TextCodec(model, max_prompt_tokens, plain_prompts)
        self._suffix = spec.suffix if prompt_suffix is None else prompt_suffix
        self.vocab_size, self.stop_ids, self.max_new_tokens = self._text.vocab_size, self._text.stop_ids, spec.max_new_tokens
        self.reward, self.answer_limit = spec.reward, spec.answer_limit
        self._key = prompt_key or spec.prompt_key
        source, lines, test = _read(spec, self._key, data, test_data, hub)
        if not test:
            is_held_out = [zlib.crc32(json.dumps(line[self._key]).encode()) % TEST_SHARE == 0 for line in lines]
            test = [line for line, is_test in zip(lines, is_held_out, strict=True) if is_test]
            lines = [line for line, is_test in zip(lines, is_held_out, strict=True) if not is_test]
        lines, test = ([self._known(line, answer_key) for line in part] for part in (lines, test))
        self.fingerprint = hashlib.sha256(json.dumps([lines, test]).encode()).hexdigest()
        self._lines = {"train": self._tokenized(lines), "test": self._tokenized(test)}
        self._order = lru_cache(2)(self._shuffled)
        limit, num_long = max_prompt_tokens, len(lines) + len(test) - sum(map(len, self._lines.values()))
        for split, kept in self._lines.items():
            if not kept:
                raise InputError(
                    f"{source} must leave some prompts of at most {limit} tokens to {split} with, got none of "
                    f"{len(lines)} and {len(test)} lines"
                )
        self.prompt_length = max(len(tokens) for kept in self._lines.values() for tokens, _ in kept)
        self.num_test_prompts = len(self._lines["test"])
        self.name = f"{source}: {len(self._lines['train'])} prompts and {self.num_test_prompts} held out" + (
            f", {num_long} longer than {limit} tokens left out" if num_long else ""
        )

    def _known(self, line: Line, answer_key: str | None) -> Line:
        """What the reward function is told of a line, its prompt and answer by these names."""
        prompt = line[self._key]
        if isinstance(prompt, str) and self._spec.asks:
            prompt = self._text.prompt(prompt + self._suffix)
        elif isinstance(prompt, str):
            prompt += self._suffix
        known = {**line, "prompt": prompt}
        return known if self._spec.gold is None else known | {"answer": self._spec.gold(line, answer_key)}

    def _tokenized(self, lines: list[Line]) -> list[tuple[list[int], Line]]:
        """Token ids of the prompts that are not too long, and their lines."""
        encoded = [(self._text.encode(line["prompt"]), line) for line in lines]
        return [(tokens, line) for tokens, line in encoded if tokens is not None]

    def _shuffled(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {epoch}".encode()))
        return torch.randperm(len(self._lines["train"]), generator=generator).tolist()

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Prompts `start` to `start + count - 1` of `split`; each carries its line."""
        lines, indices = self._lines[split], range(start, start + count)
        if split == "train":
            chosen = [lines[self._order(i // len(lines))[i % len(lines)]] for i in indices]
        else:
            chosen = [lines[i] for i in indices]
        return prompts_of([tokens for tokens, _ in chosen], indices, [line for _, line in chosen])

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """None: whoever wants to learn from solutions starts from a checkpoint that has."""
        raise InputError(f"{self.name} has no solutions for a warm start; --sft-steps must be 0")

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """None here: a function in worker processes does, the user's or `reward`."""
        raise InputError(f"{self.name} needs a --reward FILE:FUNCTION")

    def answer(self, response: str) -> str:
        """What the response answers, such as the content of its last box; "" where it does not."""
        return self._spec.answer(response)

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        return self._text.decode(tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        """Those of the checkpoint that the run started from."""
        return self._text.files()


def _read(
    spec: DatasetSpec, key: str, data: Path | None, test_data: Path | None, hub: str | None
) -> tuple[str, list[Line], list[Line]]:
    """Return the data set's name, its lines, and the test lines; none where they are to be split off."""
    test = [] if test_data is None else read_lines(test_data, key, "--test-data")
    if data is not None:
        return data.name, read_lines(data, key), test
    hub, test_hub = (hub, None) if hub else (spec.hub, spec.test_hub)
    assert hub is not None  # else `data` is required
    lines = read_hub(hub, "train", key)
    if not test and test_hub is not None:
        test = read_hub(test_hub, "test", key)
    return hub, lines, test

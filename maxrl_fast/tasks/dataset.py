"""Prompts of a file or of the Hugging Face hub, read by the tokenizer of a checkpoint: any data set, GSM8K, mathematics."""

import hashlib
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.config.options import TaskOptions
from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks.dataset_specs import Kind
from maxrl_fast.tasks.lines import read_hub, read_lines
from maxrl_fast.tasks.text_codec import Text, prompts_of

TEST_SHARE = 10  # one prompt in about this many is held out, where no test prompts are given

Line = dict[str, Any]


class DatasetTask:
    """The lines of a data set, shuffled anew in every epoch.

    Prompt i of training is line i mod n of its epoch's order, which the seed and the number of the epoch alone decide.

    Args:
        options: data, test_data, hub, prompt_key, answer_key, prompt_suffix, plain_prompts, max_prompt_tokens.
        seed: of the order.
        model: the checkpoint directory with the tokenizer.
        kind: what the lines are.

    Raises:
        InputError: where a file cannot be read, a line is not what it should be, or no prompt is short enough.
    """

    num_test_prompts: int | None
    has_demonstrations = False

    def __init__(self, options: TaskOptions, seed: int, model: Path, kind: Kind):
        self._seed, self._kind = seed, kind
        self._text = Text(model, options.max_prompt_tokens, options.plain_prompts)
        self._suffix = kind.suffix if options.prompt_suffix is None else options.prompt_suffix
        self.vocab_size, self.stop_ids, self.max_new_tokens = self._text.vocab_size, self._text.stop_ids, kind.max_new_tokens
        self.reward, self.answer_limit = kind.reward, kind.answer_limit
        self._key = options.prompt_key or kind.prompt_key
        source, lines, test = _read(options, kind, self._key)
        if not test:
            is_held_out = [zlib.crc32(json.dumps(line[self._key]).encode()) % TEST_SHARE == 0 for line in lines]
            test = [line for line, is_test in zip(lines, is_held_out, strict=True) if is_test]
            lines = [line for line, is_test in zip(lines, is_held_out, strict=True) if not is_test]
        lines, test = ([self._known(line, options.answer_key) for line in part] for part in (lines, test))
        self.fingerprint = hashlib.sha256(json.dumps([lines, test]).encode()).hexdigest()
        self._lines = {"train": self._tokenized(lines), "test": self._tokenized(test)}
        self._order = lru_cache(2)(self._shuffled)
        limit, num_long = options.max_prompt_tokens, len(lines) + len(test) - sum(map(len, self._lines.values()))
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
        if isinstance(prompt, str) and self._kind.asks:
            prompt = self._text.prompt(prompt + self._suffix)
        elif isinstance(prompt, str):
            prompt += self._suffix
        known = {**line, "prompt": prompt}
        return known if self._kind.gold is None else known | {"answer": self._kind.gold(line, answer_key)}

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
        return self._kind.answer(response)

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        return self._text.decode(tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        """Those of the checkpoint that the run started from."""
        return self._text.files()


def _read(options: TaskOptions, kind: Kind, key: str) -> tuple[str, list[Line], list[Line]]:
    """The data set's name, its lines, and the test lines; none where they are to be split off."""
    test = [] if options.test_data is None else read_lines(options.test_data, key, "--test-data")
    if options.data is not None:
        return options.data.name, read_lines(options.data, key), test
    hub, test_hub = (options.hub, None) if options.hub else (kind.hub, kind.test_hub)
    assert hub is not None  # else `data` is required
    lines = read_hub(hub, "train", key)
    if not test and test_hub is not None:
        test = read_hub(test_hub, "test", key)
    return hub, lines, test

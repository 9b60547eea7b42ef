"""Prompts of a user's file, read by the tokenizer of a checkpoint, whose responses a Python function scores."""

import hashlib
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import read_config
from maxrl_fast.model.files import read_json
from maxrl_fast.model.tokenizer import encode_chat, load_tokenizer, tokenizer_files
from maxrl_fast.options import TaskOptions
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.tasks.lines import read_lines

TEST_SHARE = 10  # one line in about this many is held out, where no file of test prompts is given


class DatasetTask:
    """The lines of a JSON Lines file, shuffled anew in every epoch.

    Prompt i of training is line i mod n of its epoch's order, which the seed and the number of the epoch alone decide.

    Args:
        options: data, test_data, prompt_key, max_prompt_tokens.
        seed: of the order.
        model: the checkpoint directory with the tokenizer.

    Raises:
        InputError: where a file cannot be read, or no prompt is short enough.
    """

    num_test_prompts: int | None
    has_demonstrations = False
    max_new_tokens = 512

    def __init__(self, options: TaskOptions, seed: int, model: Path):
        assert options.data is not None
        self._seed, self._key, self._model = seed, options.prompt_key, model
        self._tokenizer = load_tokenizer(model)
        self.vocab_size = read_config(model / "config.json").vocab_size
        if len(self._tokenizer) > self.vocab_size:
            raise InputError(f"{model} must have a vocabulary of its tokenizer's {len(self._tokenizer)}, got {self.vocab_size}")
        self.stop_ids = _stop_ids(model, self._tokenizer)
        lines = read_lines(options.data, options.prompt_key)
        if options.test_data is None:
            held_out = [zlib.crc32(json.dumps(line[self._key]).encode()) % TEST_SHARE == 0 for line in lines]
            test = [line for line, is_held_out in zip(lines, held_out, strict=True) if is_held_out]
            lines = [line for line, is_held_out in zip(lines, held_out, strict=True) if not is_held_out]
        else:
            test = read_lines(options.test_data, options.prompt_key)
        self.fingerprint = hashlib.sha256(json.dumps([lines, test]).encode()).hexdigest()
        self._limit, self._num_long = options.max_prompt_tokens, 0
        self._lines = {"train": self._tokenized(lines), "test": self._tokenized(test)}
        self._order = lru_cache(2)(self._shuffled)
        for split, kept in self._lines.items():
            if not kept:
                raise InputError(
                    f"{options.data} must leave some prompts of at most {self._limit} tokens to {split} with, got none of "
                    f"{len(lines)} and {len(test)} lines"
                )
        self.prompt_length = max(len(tokens) for kept in self._lines.values() for tokens, _ in kept)
        self.num_test_prompts = len(self._lines["test"])
        self.name = f"{options.data.name}: {len(self._lines['train'])} prompts and {self.num_test_prompts} held out" + (
            f", {self._num_long} longer than {self._limit} tokens left out" if self._num_long else ""
        )

    def _tokenized(self, lines: list[dict[str, Any]]) -> list[tuple[list[int], dict[str, Any]]]:
        """Token ids of the prompts that are not too long, and their lines."""
        encoded = [(self._encode(line[self._key]), line) for line in lines]
        kept = [(tokens, line) for tokens, line in encoded if 0 < len(tokens) <= self._limit]
        self._num_long += len(encoded) - len(kept)
        return kept

    def _encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt)["input_ids"]
            return ids
        for message in prompt:
            for token in self._tokenizer.all_special_tokens:
                if token in message["content"]:  # it would end the message, and begin another in another role
                    raise InputError(
                        f"a message must not have the special token {token!r} in its content, got {message!r:.200}"
                    )
        return encode_chat(self._tokenizer, prompt)

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
        tokens, cu_seqlens = pack([tokens for tokens, _ in chosen])
        columns = tuple({**line, "prompt": line[self._key]} for _, line in chosen)
        return Prompts(tokens, cu_seqlens, torch.tensor(indices, dtype=torch.int64), columns)

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """None: the file has no solutions."""
        raise InputError(f"{self.name} has no solutions for a warm start; --sft-steps must be 0")

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """None of its own: the reward is the user's function."""
        raise InputError(f"{self.name} needs a --reward FILE:FUNCTION")

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def tokenizer_files(self) -> dict[str, Any]:
        """Those of the checkpoint that the run started from."""
        return dict(tokenizer_files(self._model))


def _stop_ids(model: Path, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end, and those of generation_config.json."""
    path = model / "generation_config.json"
    listed = read_json(path).get("eos_token_id") if path.exists() else None
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    stops = tuple(sorted({stop for stop in ids if isinstance(stop, int)}))
    if not stops:
        raise InputError(f"{model} must name the token that ends a response, in its tokenizer or generation_config.json")
    return stops

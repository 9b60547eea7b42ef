"""What tasks of text have in common: prompts, responses and their end by the tokenizer of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.files.untrusted import read_json
from maxrl_fast.model.checkpoint import read_config
from maxrl_fast.model.tokenizer import encode_chat, load_tokenizer, tokenizer_files
from maxrl_fast.records import Prompts, pack

Message = dict[str, str]  # {"role": ..., "content": ...}


class TextCodec:
    """Token ids of prompts, and back.

    Args:
        model: the checkpoint directory with the tokenizer.
        max_prompt_tokens: longer prompts are None.
        is_plain: text is a prompt as it is, even where the tokenizer has a chat template.

    Raises:
        InputError: where the directory has no tokenizer that can be read and fits the policy, or names no end of a response.
    """

    def __init__(self, model: Path, max_prompt_tokens: int, is_plain: bool):
        self.model = model
        self.tokenizer = load_tokenizer(model)
        self.vocab_size = read_config(model / "config.json").vocab_size
        if len(self.tokenizer) > self.vocab_size:
            raise InputError(f"{model} must have a vocabulary of its tokenizer's {len(self.tokenizer)}, got {self.vocab_size}")
        self.stop_ids = _stop_ids(model, self.tokenizer)
        self._limit = max_prompt_tokens
        self._uses_chat = self.tokenizer.chat_template is not None and not is_plain

    def prompt(self, question: str) -> str | list[Message]:
        """A question as one message of a user, or as it is where there is no chat template."""
        return [{"role": "user", "content": question}] if self._uses_chat else question

    def encode(self, prompt: str | Sequence[Message]) -> list[int] | None:
        """Token ids; None where they are more than max_prompt_tokens."""
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
        else:
            for message in prompt:
                for token in self.tokenizer.all_special_tokens:
                    if token in message["content"]:  # it would end the message, and begin another in another role
                        raise InputError(
                            f"a message must not have the special token {token!r} in its content, got {message!r:.200}"
                        )
            ids = encode_chat(self.tokenizer, prompt)
        return ids if 0 < len(ids) <= self._limit else None

    def encode_response(self, response: str) -> list[int]:
        """Token ids of a response, and its end."""
        end = self.tokenizer.eos_token_id
        return [*self.tokenizer(response, add_special_tokens=False)["input_ids"], self.stop_ids[0] if end is None else end]

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def files(self) -> dict[str, Any]:
        """The tokenizer's files, for checkpoints."""
        return dict(tokenizer_files(self.model))


def prompts_of(tokens: Sequence[list[int]], ids: Sequence[int], columns: Sequence[dict[str, Any]]) -> Prompts:
    """Token ids, indices and what a reward function is told of each prompt, as a record."""
    packed, cu_seqlens = pack(tokens)
    return Prompts(packed, cu_seqlens, torch.tensor(ids, dtype=torch.int64), tuple(columns))


def _stop_ids(model: Path, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end, and those of generation_config.json."""
    path = model / "generation_config.json"
    listed = read_json(path).get("eos_token_id") if path.exists() else None
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    stops = tuple(sorted({stop for stop in ids if isinstance(stop, int)}))
    if not stops:
        raise InputError(f"{model} must name the token that ends a response, in its tokenizer or generation_config.json")
    return stops

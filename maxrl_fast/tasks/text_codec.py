"""Tokenization for tasks whose prompts are text: prompts, responses and stop tokens by the
tokenizer of a checkpoint.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.policy import read_sizes
from maxrl_fast.model.tokenizer import (
    ControlTokens,
    Message,
    Prompt,
    encode_prompt,
    encode_response,
    load_tokenizer,
    tokenizer_files,
)
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.runtime.files import read_json


class TextCodec:
    """Encodes prompts and responses with the tokenizer of a checkpoint, and decodes them. is_plain:
    prompts that are text have no chat template. allow_special: encode control tokens in the text of
    a prompt; otherwise they are refused."""

    def __init__(
        self, model: Path, max_prompt_tokens: int, is_plain: bool, allow_special: bool = False
    ):
        self.model = model
        sizes = read_sizes(model)
        self.vocab_size, self.positions = sizes.vocab_size, sizes.max_position_embeddings
        self.tokenizer, self._max_prompt_tokens = load_tokenizer(model), max_prompt_tokens
        if len(self.tokenizer) > self.vocab_size:
            needed = len(self.tokenizer)
            raise InputError(
                f"the policy in {model} must have a vocabulary of at least {needed}, got "
                f"{self.vocab_size}"
            )
        self.stop_ids = _stop_ids(model, self.tokenizer)
        self._control_tokens = None if allow_special else ControlTokens(self.tokenizer)
        self._uses_chat = self.tokenizer.chat_template is not None and not is_plain

    def prompt(self, question: str) -> str | list[Message]:
        """Return one user message, or the question unchanged if no chat template is used."""
        return [{"role": "user", "content": question}] if self._uses_chat else question

    def encode(
        self, prompts: Sequence[Prompt], places: Sequence[str], limit: int | None = None
    ) -> list[list[int] | None]:
        """Return the token ids of each prompt; None if there are none, or too many. places: where
        each comes from, for messages."""
        return self._encode_each(
            encode_prompt, "a prompt", prompts, places, limit or self._max_prompt_tokens
        )

    def encode_chats(
        self,
        encode: Callable[[Sequence[Message]], list[int]],
        chats: Sequence[Sequence[Message]],
        places: Sequence[str],
        limit: int | None = None,
    ) -> list[list[int] | None]:
        """Encode prompts otherwise than by the chat template; the rest is as in `encode`."""
        most = limit or self._max_prompt_tokens
        return self._encode_each(lambda _, chat: encode(chat), "a prompt", chats, places, most)

    def encode_response(self, response: str) -> list[int]:
        return self._stopped(encode_response(self.tokenizer, response))

    def encode_responses(
        self, responses: Sequence[str], places: Sequence[str], limit: int
    ) -> list[list[int] | None]:
        """Each is followed by its stop token; None for more than `limit` tokens."""
        encoded = self._encode_each(encode_response, "a response", responses, places, limit - 1)
        return [None if ids is None else self._stopped(ids) for ids in encoded]

    def encode_pieces(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        """Encode texts within a response, without a stop token."""
        encoded = self._encode_each(encode_response, "a response", texts, places, 2**31)
        return [ids or [] for ids in encoded]

    def _encode_each(
        self,
        encode: Callable[[Any, Any], list[int]],
        what: str,
        texts: Sequence[Prompt],
        places: Sequence[str],
        limit: int,
    ) -> list[list[int] | None]:
        encoded: list[list[int] | None] = []
        for text, place in zip(texts, places, strict=True):
            try:
                if self._control_tokens is not None:
                    self._control_tokens.refuse(text, what)
                ids = encode(self.tokenizer, text)
            except InputError as error:
                raise InputError(f"{place}: {error}") from error
            encoded.append(ids if 0 < len(ids) <= limit else None)
        return encoded

    def _stopped(self, ids: list[int]) -> list[int]:
        if ids and ids[-1] in self.stop_ids:
            return ids
        end = self.tokenizer.eos_token_id
        return [*ids, self.stop_ids[0] if end is None else end]

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=not with_special)
        return text


class TextTask:
    """What tasks share whose prompts are text.

    Args:
        model, max_prompt_tokens, is_plain, allow_special: as of TextCodec.
        suffix: of prompts that are text.
        needs_reward: False: without --reward, every response has the reward 0.
    """

    name: str

    def __init__(
        self,
        model: Path,
        suffix: str,
        is_plain: bool,
        max_prompt_tokens: int,
        allow_special: bool,
        needs_reward: bool = True,
    ):
        self._text = TextCodec(model, max_prompt_tokens, is_plain, allow_special)
        self._suffix, self._needs_reward = suffix, needs_reward
        self.vocab_size, self.stop_ids = self._text.vocab_size, self._text.stop_ids

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """`reward` or the user's function scores responses, in worker processes."""
        if not self._needs_reward:
            return torch.zeros(len(rollouts))
        raise InputError(f"--reward FILE:FUNCTION is needed to score {self.name}, got none")

    def encode_prompt(self, prompt: Prompt, place: str) -> list[int]:
        """Return the token ids of a prompt of any length; `place` is for messages."""
        return self._encode([prompt], [place], 2**31)[0] or []

    def _encode(
        self, prompts: Sequence[Prompt], places: Sequence[str], limit: int | None = None
    ) -> list[list[int] | None]:
        return self._text.encode(prompts, places, limit)

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        return self._text.decode(tokens, with_special)

    def tokenizer_files(self) -> dict[str, Any]:
        return dict(tokenizer_files(self._text.model))


def prompts_of(
    tokens: Sequence[list[int]], ids: Sequence[int], columns: Sequence[dict[str, Any]]
) -> Prompts:
    packed, cu_seqlens = pack(tokens)
    return Prompts(packed, cu_seqlens, torch.tensor(ids, dtype=torch.int64), tuple(columns))


def _stop_ids(model: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the end-of-sequence token and the tokens in generation_config.json."""
    path = model / "generation_config.json"
    listed = read_json(path).get("eos_token_id") if path.exists() else None
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    stop_ids = tuple(sorted({stop for stop in ids if isinstance(stop, int)}))
    if not stop_ids:
        raise InputError(
            f"{model} must name a stop token in its tokenizer or in generation_config.json, got "
            "none"
        )
    return stop_ids

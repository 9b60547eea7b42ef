"""What tasks share whose prompts are text."""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.policy import read_sizes
from maxrl_fast.model.tokenizer import ControlTokens, Message, Prompt, load_tokenizer, saved_files
from maxrl_fast.records import Prompts, Rollouts, pack, unpack
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, read_json
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.conversation import Conversation, TextOptions, common
from maxrl_fast.tasks.dataset_specs import AnswerForm


class TextTask:
    """Prompts, responses and stop tokens by the tokenizer of a checkpoint. suffix: of prompts that
    are text, where the options have none; tools: as of Conversation, prompts are then messages."""

    name = fingerprint = ""
    form: AnswerForm | None = None  # how a response gives the answer in the column "answer"
    reward: str | None = None
    answer_limit: int | None = None
    has_demonstrations = False

    def __init__(
        self,
        model: Path,
        options: TextOptions,
        suffix: str = "",
        tools: Sequence[dict[str, Any]] = (),
    ):
        self.model, self.options, sizes = model, options, read_sizes(model)
        self._suffix = suffix if options.prompt_suffix is None else options.prompt_suffix
        self.vocab_size, self.positions = sizes.vocab_size, sizes.max_position_embeddings
        self.tokenizer, file = load_tokenizer(model), options.chat_template
        if (needed := len(self.tokenizer)) > self.vocab_size:
            wanted = f"the policy in {model} must have a vocabulary of at least {needed}"
            raise InputError(f"{wanted}, got {self.vocab_size}")
        self._template = None if file is None else _read_template(file)
        if self._template is not None:
            self.tokenizer.chat_template = self._template
        listed, added = self._listed_stops(), self.tokenizer.added_tokens_decoder
        self.stop_texts = list[str]()
        for x in options.stop:
            ids = self.tokenizer(x, add_special_tokens=False)["input_ids"]
            is_one = len(ids) == 1 and x in self.tokenizer.decode(ids)
            listed |= {*ids} if is_one else set()  # it ends a response as a token, too
            if tools and not is_one:
                raise InputError(
                    f"--stop must be single tokens with --environment, got {x!r}, which the "
                    f"tokenizer of {model} divides"
                )
            if not (tools or (is_one and ids[0] in added)):  # no other tokens spell an added one
                self.stop_texts.append(x)
        self.conversation = Conversation(self.tokenizer, listed, tools, options)
        self.stop_ids = self.conversation.stop_ids
        control = None if options.allow_special_tokens else ControlTokens(self.tokenizer)
        self._refuse = control.refuse if control else lambda prompt, what: None
        self._has_tools, self._has_template = bool(tools), self.tokenizer.chat_template is not None

    def _listed_stops(self) -> set[int]:
        """Return the end-of-sequence tokens, from wherever transformers looks for them."""
        listed = [self.tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            path = self.model / name
            fields = read_json(path) if path.exists() else {}
            text = fields.get("text_config")  # of a model that reads images too
            for part in (fields, text if isinstance(text, dict) else {}):
                ids = part.get("eos_token_id")
                listed += ids if isinstance(ids, list) else [ids]
        return {i for i in listed if type(i) is int and 0 <= i < self.vocab_size}

    def prompt(self, question: str) -> str | list[Message]:
        """Return one user message, or the question itself if no chat template is used."""
        uses_chat = self._has_template and not self.options.plain_prompts
        return [{"role": "user", "content": question}] if uses_chat else question

    def encode_prompt(self, prompt: Prompt, place: str) -> list[int]:
        with _at(place):
            return self.conversation.prompt(self._checked(prompt))

    def fits(self, tokens: list[int]) -> bool:
        return 0 < len(tokens) <= self.options.max_prompt_tokens

    def encode_demonstration(
        self, prompt: Prompt, response: str | Message, place: str
    ) -> tuple[list[int], list[int]]:
        """Encode a prompt, and the response with the token that ends it."""
        with _at(place):
            self._refuse(response if isinstance(response, str) else [response], "a response")
            return self.conversation.demonstration(self._checked(prompt), response)

    def encode_piece(self, text: str, place: str) -> list[int]:
        """Encode text within a response, without a stop token."""
        with _at(place):
            self._refuse(text, "a response")
        return self.conversation.encode_within(text)

    def _checked(self, prompt: Prompt) -> Prompt:
        if isinstance(prompt, str) and self._has_tools:
            prompt = [{"role": "user", "content": prompt}]
        if (system := self.options.system_prompt) is not None:
            if isinstance(prompt, str):
                raise InputError("--system-prompt needs prompts that are chats, got text")
            if not prompt or prompt[0]["role"] not in ("system", "developer"):
                prompt = [{"role": "system", "content": system}, *prompt]
        self._refuse(prompt, "a prompt")
        return prompt

    def decode(self, tokens: Sequence[int], with_special: bool = False) -> str:
        return self.conversation.text(tokens, raw=with_special)

    def length_to_stop(self, tokens: list[int]) -> int | None:
        """Return the length of the shortest beginning of a response whose text, with special
        tokens, has one of the stop texts, None if it has none."""

        def has_stop(beginning: list[int]) -> bool:
            text = self.decode(beginning, with_special=True)
            return any(stop in text for stop in self.stop_texts)

        return shortest(tokens, has_stop)

    @property
    def end_of(self) -> Callable[[list[int]], int | None] | None:
        """Where stop texts end responses, for `Sampling`; None without such."""
        return self.length_to_stop if self.stop_texts else None

    def describe(self) -> list[str]:
        names = [repr(self.decode([i], with_special=True)) for i in self.stop_ids]
        names += [f"the text {x!r}" for x in self.stop_texts]
        return [f"responses end with {', '.join(names)}"]

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Only for a run without `reward` and a function, which needs no rewards, as distill."""
        return torch.zeros(len(rollouts))

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """Return the reference answer after the first marker of each response: where a token
        reaches beyond the marker, its text must begin the answer. The answer's tokens are the
        tokenizer's for marker and answer together. A response without the marker, or that continues
        otherwise within a token, has the marker as its lead."""
        if self.form is None:
            why = f"only the reward function reads the lines of {self.name}"
            raise InputError(f"the reference answer must be known, but {why}")
        num_rollouts, ids = len(rollouts) // len(prompts), prompts.ids.tolist()
        (marker, opening, closing), wholes = self.form, list[str]()
        for i, line in zip(ids, prompts.columns or ({},) * len(ids), strict=True):
            if not isinstance(answer := line.get("answer"), str):
                raise InputError(
                    f"every prompt must have a reference answer as text, got none for prompt {i}"
                )
            wholes.append(f"{marker}{opening}{answer}{closing}")
        pairs = zip(wholes, ids, strict=True)
        encoded = [self.encode_piece(x, f"the reference answer to prompt {i}") for x, i in pairs]
        responses = unpack(rollouts.tokens, rollouts.lengths)
        ends = [self._marker_end(marker, tokens) for tokens in responses]
        # of answers; only those that have been checked above
        texts = {x for s, (_, x) in enumerate(ends) if wholes[s // num_rollouts].startswith(x)}
        starts = {x: self.encode_piece(x, "an answer") for x in {marker, *texts}}
        found = []
        for s, (length, start) in enumerate(ends):
            whole, lead = encoded[s // num_rollouts], starts.get(start)
            if length is None or lead is None or whole[: len(lead)] != lead or whole == lead:
                # the tokens with which the marker and the whole begin, but not all of the whole
                length, lead = None, whole[: common(starts[marker], whole[:-1])]
            found.append(ReferenceAnswer(length, lead, whole[len(lead) :]))
        return found

    def _marker_end(self, marker: str, tokens: list[int]) -> tuple[int | None, str]:
        """Return how many tokens have the marker in their text, and their text from it on."""
        length = shortest(tokens, lambda beginning: marker in self.decode(beginning))
        after = "" if length is None else self.decode(tokens[:length]).partition(marker)[2]
        return length, marker + after

    @cached_property
    def _files(self) -> dict[str, bytes]:
        return saved_files(self.tokenizer, self.model, self._template)

    def tokenizer_files(self) -> dict[str, Any]:
        return {**self._files}


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def shortest(tokens: list[int], fits: Callable[[list[int]], bool]) -> int | None:
    """Return the length of the shortest beginning that fits; all longer ones then do."""
    if not fits(tokens):
        return None
    return bisect.bisect_left(range(len(tokens) + 1), True, key=lambda n: fits(tokens[:n]))


def prompts_of(
    tokens: Sequence[list[int]], ids: Sequence[int], columns: Sequence[dict[str, Any]]
) -> Prompts:
    packed, cu_seqlens = pack(tokens)
    return Prompts(packed, cu_seqlens, torch.tensor(ids, dtype=torch.int64), tuple(columns))


def _read_template(path: Path) -> str:
    try:
        check_regular(path, JSON_BYTES)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        wanted = "--chat-template must be a file of a Jinja template"
        raise InputError(f"{wanted}, got {path}: {error}") from error

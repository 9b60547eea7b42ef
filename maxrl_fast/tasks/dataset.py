"""Prompts from a file or the Hugging Face hub, encoded with the tokenizer of a checkpoint: any data
set, GSM8K, mathematics.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any

import torch

from maxrl_fast.algorithms.options import Count, Limit
from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.dataset_specs import DatasetSpec
from maxrl_fast.tasks.jsonl import Line, read_demonstrations
from maxrl_fast.tasks.sources import TEST, Part, read_sources
from maxrl_fast.tasks.text_answers import text_answers
from maxrl_fast.tasks.text_codec import TextOptions, TextTask, prompts_of

Fields = dict[str, Any]


@dataclass(frozen=True)
class DatasetOptions(TextOptions):
    """Prompts of files or the Hugging Face hub."""

    data: tuple[Path, ...] = ()
    """JSON Lines or Parquet files of prompts: text, or chat messages; the other keys are arguments
    of the reward function. NAME=3 repeats every line three times per epoch."""
    hub: tuple[str, ...] = ()
    """Data sets of the hub, as NAME[:CONFIG][@SPLIT][=INT], by their split train; =3 as of a file.
    By default the task's."""
    test_data: tuple[Path, ...] = ()
    """Held-out prompts; each file is a separate set. Without them and --test-hub: the test splits
    of --hub, or else a tenth of the training prompts."""
    test_hub: tuple[str, ...] = ()
    """Held-out sets of the hub, by their split test, or by a name: aime24, aime25, beyond_aime,
    amc23, minerva, olympiad, math500, gsm8k, gsm8k_platinum, gpqa_diamond. =INT, also of a
    file: its samples per prompt. By default the task's."""
    allow_overlap: bool = False
    """Train on prompts that are held out too, by their tokens."""
    where: Annotated[
        tuple[str, ...], Limit("NAME=VALUE, such as level=1", lambda x: x.find("=") > 0)
    ] = ()
    """Train only on the lines with this value in a column, as NAME=VALUE, or one of these."""
    prompt_key: str | None = None
    """Key of the prompt in a line. By default prompt; question for gsm8k and code, problem for
    math."""
    answer_key: str | None = None
    """Key of the right answer in a line, or a path of keys such as reward_model.ground_truth. By
    default answer; input_output for code."""
    sft_data: Path | None = None
    """JSON Lines or Parquet file of demonstrations: each line has a prompt, as in --data, and a
    response; or messages, of which the last is the assistant's."""
    environment: str | None = None
    """Class FILE:CLASS of environments with tools, as TRL's environment_factory takes it, for
    episodes of several turns (docs/episodes.md)."""
    max_turns: Count = 8
    """Most turns of an episode; --max-new-tokens limits all of its tokens."""


class DatasetTask(TextTask):
    """The lines of a data set, reshuffled in every epoch. Training prompt i is line i mod n of the
    order of epoch i // n, which depends only on the seed and the epoch. Arguments are the options
    of these names; what is not given is as in `spec`. Demonstrations are asked as the prompts of
    training are. The split "test" is all held-out sets."""

    num_test_prompts: int | None

    def __init__(
        self,
        spec: DatasetSpec,
        seed: int,
        model: Path,
        *,
        data: Sequence[Path] = (),
        hub: Sequence[str] = (),
        test_data: Sequence[Path] = (),
        test_hub: Sequence[str] = (),
        where: Sequence[str] = (),
        test_only: bool = False,
        allow_overlap: bool = False,
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
        given = data, hub, test_data, test_hub, where
        train, held_out = read_sources(spec, self._key, *given, test_only)
        source = ", ".join(str(x) for x, _ in train or held_out.values())
        odd: list[str] = []
        read = [self._columns(x, answer_key, odd) for x in (*train, *held_out.values())]
        parts, n = [self._encoded(x) for x in read], len(train)
        num_long = sum(map(len, read)) - sum(map(len, parts))
        held = {tuple(tokens) for part in parts[n:] for tokens, _ in part}
        num_shared = sum(tuple(tokens) in held for part in parts[:n] for tokens, _ in part)
        self._left_out = set() if allow_overlap else held
        for part in parts[:n]:
            part[:] = [x for x in part if tuple(x[0]) not in self._left_out]
        lines: dict[str, Any] = {"train": [*chain(*read[:n])]}
        kept: dict[str, Any] = {"train": [*chain(*parts[:n])]}
        lines |= dict(zip(held_out, read[n:], strict=True))
        kept |= dict(zip(held_out, parts[n:], strict=True))
        for split, own in kept.items():
            if not own and (train or split != "train"):
                why = "; a tenth of different prompts is held out: add some, or give --test-data"
                why *= not lines[split]
                if num_shared and split == "train":
                    why = f" that are not held out ({num_shared} are); --allow-overlap keeps them"
                raise InputError(
                    f"{source} must have prompts of at most {max_prompt_tokens} tokens for the "
                    f"{split} split, got none in {len(lines[split])} lines{why}"
                )
        self.prompt_length = max(len(tokens) for own in kept.values() for tokens, _ in own)
        # The token ids too: another chat template or tokenizer encodes the same lines otherwise.
        contents = [[line for _, line in part] for part in lines.values()]
        encoded = [[tokens for tokens, _ in own] for own in kept.values()]
        self.set_samples = {name: x.number for name, (x, _) in held_out.items() if x.number}
        self.held_out = {name: len(kept[name]) for name in held_out}
        starts = accumulate(self.held_out.values(), initial=0)
        self._starts = dict(zip(held_out, starts, strict=False))
        times = [x * (source.number or 1) for x, (source, _) in zip(parts, train, strict=False)]
        self._lines = {"train": [*chain(*times)], TEST: [*chain(*parts[n:])]}
        self.num_train_prompts = len(self._lines["train"])
        self.num_test_prompts = len(self._lines[TEST])
        self.name = (
            f"{source}: {self.num_train_prompts} prompts and {self.num_test_prompts} held out"
        )
        if len(held_out) > 1:
            self.name += f" ({', '.join(f'{n} of {x}' for x, n in self.held_out.items())})"
        if num_long:
            self.name += f", {num_long} longer than {max_prompt_tokens} tokens left out"
        if num_shared:
            what = "kept" if allow_overlap else "left out of training"
            self.name += f", {num_shared} that are held out too {what}"
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
        num_held_out, positions = 0, self.positions
        for prompt, response in self.encode_demonstrations(pairs, places):
            lengths = len(prompt), len(response)
            if tuple(prompt) in self._left_out:
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

    def _columns(self, part: Part, answer_key: str | None, odd: list[str]) -> list[Line]:
        """Return lines as the reward function gets them, without those whose answer cannot be read;
        `odd` gets their errors.
        """
        found: list[Line] = []
        source, lines = part
        gold = source.form.gold or self._spec.gold
        answer_key = None if source.form.gold else answer_key
        for place, line in lines:
            prompt, code = line[source.key], line.get(self._spec.code_key)
            if isinstance(prompt, str) and code:
                prompt += f"\n\n```python\n{code}\n```"
            columns = {**line, "prompt": self._asked(prompt)}
            try:
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
        start += self._starts.get(split, 0)
        lines = self._lines["train" if split == "train" else TEST]
        indices = range(start, start + count)
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

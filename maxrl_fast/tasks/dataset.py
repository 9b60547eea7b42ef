"""Prompts from files or the Hugging Face hub: any data set, GSM8K, mathematics, programs."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch

from maxrl_fast.algorithms.options import Code, Count, Limit
from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks.conversation import TextOptions
from maxrl_fast.tasks.dataset_specs import spec_of
from maxrl_fast.tasks.sources import (
    TEST,
    Line,
    Part,
    divided,
    file_part,
    filtered,
    hub_parts,
    read_demonstrations,
)
from maxrl_fast.tasks.text_codec import TextTask, prompts_of

# prompts of lines that are not too long, by their tokens, with the line
Kept = list[tuple[list[int], dict[str, Any]]]


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
    environment: Code | None = None
    """Class FILE:CLASS of environments with tools, as TRL's environment_factory takes it, for
    episodes of several turns (docs/episodes.md)."""
    max_turns: Count = 8
    """Most turns of an episode; --max-new-tokens limits all of its tokens."""


class DatasetTask(TextTask):
    """The lines of a data set. Training prompt i, as demonstration i, is line i mod n of the order
    of epoch i // n, which depends only on the seed and the epoch. The split "test" is all held-out
    sets. max_new_tokens: of demonstrations, None: the task's limit of a response; needs_reward:
    whether the run needs one that it does not have itself; test_only: read only held-out sets,
    where they are given; options: those of DatasetOptions."""

    options: DatasetOptions
    num_test_prompts: int | None

    def __init__(
        self,
        name: str,
        seed: int,
        model: Path,
        *,
        max_new_tokens: int | None = None,
        needs_reward: bool = True,
        test_only: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        **options: Any,
    ):
        spec, own = spec_of(name), DatasetOptions(**options)
        self._seed, self._spec, self._key = seed, spec, own.prompt_key or spec.prompt_key
        if not (own.data or own.hub or spec.hub or (test_only and (own.test_data or own.test_hub))):
            file, _, wanted = name.rpartition(":")
            other = f", or a class {wanted} in {file} that makes its own prompts" if file else ""
            raise InputError(f"--task {name} needs --data FILE or --hub NAME{other}")
        if needs_reward and spec.reward is None:
            raise InputError(f"--task {name} needs --reward FILE:FUNCTION")
        super().__init__(model, own, spec.suffix, tools)
        self.max_new_tokens = spec.max_new_tokens
        self.reward, self.answer_limit, self.form = spec.reward, spec.answer_limit, spec.form
        self._num_long, self._odd = 0, list[str]()
        train, held_out = self._sources(test_only)
        self.name = ", ".join(x.shown for x in train or held_out)
        self._arrange(train, held_out)
        self._demonstrations: list[tuple[list[int], list[int]]] = []
        if own.sft_data is not None:
            self._read_demonstrations(own.sft_data, max_new_tokens or spec.max_new_tokens)
        self.num_demonstrations = len(self._demonstrations)
        self.has_demonstrations = bool(self._demonstrations)
        # with token ids: another chat template or tokenizer encodes the same lines otherwise
        content = json.dumps([*self._lines.values(), self._demonstrations]).encode()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._order = lru_cache(4)(self._shuffle)

    def _sources(self, test_only: bool) -> tuple[list[Part], list[Part]]:
        """Return training and held-out lines: given, the task's, of test splits, or a tenth."""
        own, spec, key, train = self.options, self._spec, self._key, list[Part]()
        hub, test_hub = [*own.hub], [*own.test_hub]
        if spec.hub and not own.data and not hub:
            hub = [spec.hub[0]]
            test_hub = test_hub or [spec.hub[1]] * (not own.test_data)
        held_out = [file_part(x, key, "--test-data") for x in own.test_data]
        held_out += [part for x in test_hub for part in hub_parts(x, key, TEST)]
        splits = ["train"] if held_out else ["train", TEST]
        if not (held_out and test_only):
            train = [file_part(x, key, "--data") for x in own.data]
            for x in hub:
                first, *tests = hub_parts(x, key, *splits)
                train.append(first)
                held_out += [replace(part, number=None) for part in tests]
            train = filtered(own.where, train)
        if not held_out:
            train, held_out = map(list, zip(*map(divided, train), strict=True))
        if not held_out[1:]:
            held_out = [replace(part, name=TEST) for part in held_out]
        names = [part.name for part in held_out]
        if len({*names}) < len(names):
            raise InputError(f"held-out sets must have different names, got {', '.join(names)}")
        return train, held_out

    def _arrange(self, train: list[Part], held_out: list[Part]) -> None:
        own, asked, most = self.options, Kept(), self.options.max_prompt_tokens
        self._lines = {"train": asked, TEST: (shown := Kept())}
        self._starts, self.held_out = dict[str, int](), dict[str, int]()
        self.set_samples = {x.name: x.number for x in held_out if x.number}
        every = [self._kept(part) for part in train]
        for part in held_out:
            kept = self._kept(part)
            self._starts[part.name], self.held_out[part.name] = len(shown), len(kept)
            shown += kept
        held = {tuple(tokens) for tokens, _ in shown}
        self._left_out = set() if own.allow_overlap else held
        for part, kept in zip(train, every, strict=True):
            left = [x for x in kept if tuple(x[0]) not in self._left_out]
            asked += left * (part.number or 1)
        self.num_train_prompts, self.num_test_prompts = len(asked), len(shown)
        for split, number in {"train": len(asked) or not train, **self.held_out}.items():
            if not number:
                raise InputError(
                    f"{self.name} must have prompts of at most {most} tokens for the {split} "
                    "split, got none; without --test-data a tenth of the prompts is held out, "
                    "which are not trained on without --allow-overlap"
                )
        self.prompt_length = max(len(tokens) for tokens, _ in asked + shown)
        told = f"{self.name}: {self.num_train_prompts} prompts and {self.num_test_prompts} held out"
        sets = ", ".join(f"{n} of {x}" for x, n in self.held_out.items())
        self._told = [told + f" ({sets})" * (len(held_out) > 1)]
        if num_shared := sum(tuple(tokens) in held for part in every for tokens, _ in part):
            what = "kept" if own.allow_overlap else "left out of training"
            self._told.append(f"{num_shared} prompts that are held out too are {what}")
        if long := self._num_long:
            self._told.append(f"{long} prompts longer than {most} tokens are left out")
        if odd := self._odd:
            self._told.append(f"{len(odd)} without an answer left out, such as {odd[0]}")

    def describe(self) -> list[str]:
        is_text = any(isinstance(line["prompt"], str) for _, line in self._lines[TEST])
        plain = ["prompts are plain text, although the tokenizer has a chat template"]
        return [*self._told, *plain * (is_text and self._has_template), *super().describe()]

    def _read_demonstrations(self, path: Path, most_tokens: int) -> None:
        # a run lowers its limit to this, and a resumed one must find the same demonstrations
        if (room := self.positions - self.prompt_length) > 0:
            most_tokens = min(most_tokens, room)
        most, positions = self.options.max_prompt_tokens, self.positions
        for place, asked, shown in (lines := read_demonstrations(path, self._key)):
            prompt, response = self.encode_demonstration(self._asked(asked), shown, place)
            is_short = len(response) <= min(most_tokens, positions - len(prompt))
            if is_short and self.fits(prompt) and tuple(prompt) not in self._left_out:
                self._demonstrations.append((prompt, response))
        wanted = (
            f"at most {most} tokens of prompt, {most_tokens} of response and {positions} of both, "
            "whose prompts are not held out"
        )
        if not (found := len(self._demonstrations)):
            got = f"got none in {len(lines)} lines"
            raise InputError(f"{path.name} must have demonstrations with {wanted}, {got}")
        others = f" of {len(lines)}: those with {wanted}" * (found < len(lines))
        self._told.append(f"{found} demonstrations of {path.name}{others}")

    def _asked(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        return (self.prompt if self._spec.is_question else str)(prompt + self._suffix)

    def _kept(self, part: Part) -> Kept:
        """Return prompts that are not too long and whose answer can be read, with their lines as
        the reward gets them."""
        lines, gold = list[Line](), part.form.gold or self._spec.gold
        answer_key = None if part.form.gold else self.options.answer_key
        for place, line in part.lines:
            prompt, code = line[part.key], line.get(self._spec.code_key)
            if isinstance(prompt, str) and code:
                prompt += f"\n\n```python\n{code}\n```"
            columns = {**line, "prompt": self._asked(prompt)}
            try:
                columns |= {"answer": gold(line, answer_key)} if gold else {}
                lines.append((place, columns))
            except InputError as error:
                self._odd.append(f"{place}: {error}")
        if part.lines and not lines:
            raise InputError(self._odd[-1])
        kept = self._encoded(lines)
        self._num_long += len(lines) - len(kept)
        return kept

    def _encoded(self, lines: list[Line]) -> Kept:
        encoded = ((self.encode_prompt(line["prompt"], place), line) for place, line in lines)
        return [(tokens, line) for tokens, line in encoded if self.fits(tokens)]

    def _shuffle(self, epoch: int, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {epoch}".encode()))
        return torch.randperm(count, generator=generator).tolist()

    def _shuffled(self, lines: list[Any], i: int) -> Any:
        return lines[self._order(i // len(lines), len(lines))[i % len(lines)]]

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        start += self._starts.get(split, 0)
        lines = self._lines["train" if split == "train" else TEST]
        ids = range(start, start + count)
        chosen = [self._shuffled(lines, i) if split == "train" else lines[i] for i in ids]
        return prompts_of([tokens for tokens, _ in chosen], ids, [line for _, line in chosen])

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        ids = range(start, start + count)
        chosen = [self._shuffled(self._demonstrations, i) for i in ids]
        prompts = prompts_of([prompt for prompt, _ in chosen], ids, [{}] * count)
        return prompts, Rollouts.given([response for _, response in chosen])

    def answer(self, response: str) -> str:
        return self._spec.answer(response)

"""What a teacher reads in place of the policy's prompts (--teacher-prompt): the reference answer,
or what the group of a rollout has found (SDPO, Huebotter et al. 2026, arXiv:2601.20802)."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import Prompt
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.rollout import sample_keys, uniforms
from maxrl_fast.runtime.loading import describe_error, is_code, load_code
from maxrl_fast.tasks import AnsweredTask, Task
from maxrl_fast.tasks.sources import read_prompt
from maxrl_fast.tasks.text_codec import TextTask
from maxrl_fast.training.answers import check_answers
from maxrl_fast.training.collect import RolloutBatch

_AGAIN = "\n\nCorrectly solve the original question."
TEMPLATES = {  # of --teacher-prompt by name; SDPO's, but for the answer's
    "answer": "{prompt}\n\nThe reference answer is: {text}",
    "sibling": "{prompt}\n\nCorrect solution:\n\n{text}" + _AGAIN,
    "feedback": "{prompt}\n\nThe following is feedback from your unsuccessful earlier attempt:\n\n"
    "{text}" + _AGAIN,
}
CORRECT = 0.5  # rewards above it, as in pass@k
NUM_TRIED = 64  # prompts that are checked before the first step, of a task that makes them
GROUP = frozenset(["group", "index"])
# of each rollout: "response" is its last turn, of which "tokens" are the ids
Group = Sequence[dict[str, Any]]
NOTHING = dict[str, Any](response="", reward=0.0, components={}, message="", tokens=[])


@cache
def names_asked(source: str | None) -> frozenset[str]:
    """Return which of GROUP a value of --teacher-prompt reads besides the columns of the prompt."""
    if source is None or source in TEMPLATES:
        return GROUP if source in ("sibling", "feedback") else frozenset()
    if not is_code(source):
        names = f"{', '.join(TEMPLATES)}, or FILE.py:FUNCTION"
        raise InputError(f"--teacher-prompt must be one of {names}, got {source!r:.80}")
    function = load_code("teacher-prompt", source, "FUNCTION")
    return GROUP.intersection(inspect.signature(function).parameters)


@dataclass(frozen=True)
class TeacherPrompts:
    task: Task
    source: str  # a key of TEMPLATES, or FILE.py:FUNCTION
    limit: int  # the longest prompt in tokens, which leaves room for the response
    template: str | None = None  # in place of the source's
    seed: int = 0

    def check(self) -> None:
        if self.source == "answer":
            check_answers(self.task, "--teacher-prompt answer")
        reads_tokens = self.source in ("answer", "sibling") and not self.template
        if not (reads_tokens or isinstance(self.task, TextTask)):
            raise InputError(
                "--teacher-prompt must be answer or sibling, without --teacher-template, for task "
                f"{self.task.name}, whose prompts are not text, got {self.source}"
            )
        for i in range(getattr(self.task, "num_train_prompts", NUM_TRIED)):
            self._made(i, self.task.prompts("train", i, 1), [NOTHING] * 2)

    def __call__(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with what the teacher reads: a prompt for each rollout, if it depends on
        the group. A rollout without one has the policy's, and the weight 0."""
        asked, device = names_asked(self.source), batch.rewards.device
        rollouts = self._rollouts(batch) if asked else [NOTHING] * len(batch.prompts)
        count = batch.num_rollouts if asked else 1
        ids = batch.prompts.ids.cpu().repeat_interleave(count)
        keys = sample_keys(self.seed, batch.step, ids, torch.arange(len(ids)) % count)
        draws = uniforms(keys, -1).tolist()  # those of tokens have the positions from 0 on
        tokens, weights = list[list[int]](), torch.ones(len(ids))
        for s, i in enumerate(ids.tolist()):
            if s % count == 0:  # the task's, because prompts from other ranks have no columns
                own, group = self.task.prompts("train", i, 1), rollouts[s : s + count]
            made = self._made(i, own, group, s % count, draws[s])
            weights[s] = bool(made)
            tokens.append(made or own.tokens.tolist())
        batch = replace(batch, teacher_prompts=Prompts(*pack(tokens), ids).to(device))
        if not asked:
            return batch
        metrics = batch.metrics | {"frac_with_teacher": float(weights.mean())}
        return replace(batch, teacher_weights=weights.to(device), metrics=metrics)

    def _rollouts(self, batch: RolloutBatch) -> Group:
        task, turns = self.task, batch.raw_rollouts.turns()
        # what looks like a control token is none
        plain = task.conversation.as_text if isinstance(task, TextTask) else str
        read = [x[-1] if isinstance(task, TextTask) else [*chain(*x)] for x in turns]
        responses = map(plain, map(task.decode, read))
        messages = map(plain, batch.messages or [""] * len(read))
        rewards = batch.task_rewards.flatten().tolist()
        found = zip(responses, rewards, batch.components, messages, read, strict=True)
        return [dict(zip(NOTHING, x, strict=True)) for x in found]

    def _made(
        self, i: int, prompt: Prompts, group: Group, index: int = 0, draw: float = 0.0
    ) -> list[int]:
        """Return what the teacher reads for rollout `index` of prompt i; nothing if it has none."""
        others = [x for j, x in enumerate(group) if j != index and x["reward"] > CORRECT]
        own, sibling = group[index], others[int(draw * len(others))] if others else NOTHING
        asked, task, tokens = names_asked(self.source), self.task, list[int]()
        if isinstance(task, TextTask):
            assert prompt.columns is not None
            columns, given = prompt.columns[0], {"group": group, "index": index}
            hints = {
                "answer": str(columns.get("answer", "")),
                "sibling": sibling["response"],
                "feedback": "" if own["reward"] > CORRECT else own["message"],
            }
            if (hint := hints.get(self.source)) is None:
                made = self._called(i, columns | {name: given[name] for name in asked})
            else:
                made = hint and self.filled(columns["prompt"], hint)
            tokens = task.encode_prompt(made, f"prompt {i}") if made else []
        elif self.source == "answer":
            assert isinstance(task, AnsweredTask)
            (answer,) = task.reference_answers(prompt, Rollouts.given([[]]))
            tokens = prompt.tokens.tolist() + answer.answer
        elif others:
            tokens = sibling["tokens"] + prompt.tokens.tolist()
        if 0 < len(tokens) <= self.limit:
            return tokens
        if asked:  # no teacher, or a response that is too long for it
            return []
        raise InputError(
            f"--teacher-prompt must give prompts of 1 to {self.limit} tokens, which leave room for "
            f"the response, got {len(tokens)} for prompt {i}"
        )

    def filled(self, own: Prompt, hint: str) -> Prompt:
        asked = own if isinstance(own, str) else own[-1]["content"]
        parts = (self.template or TEMPLATES[self.source]).split("{text}")
        text = hint.join(part.replace("{prompt}", asked) for part in parts)
        return text if isinstance(own, str) else [*own[:-1], {**own[-1], "content": text}]

    def _called(self, i: int, arguments: dict[str, Any]) -> Prompt | None:
        who = f"--teacher-prompt {self.source}"
        try:
            made = load_code("teacher-prompt", self.source, "FUNCTION")(**arguments)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{who} fails for prompt {i}: {describe_error(error)}") from error
        if made is None and names_asked(self.source):
            return None
        prompt = read_prompt(made, f"what {who} returns for prompt {i}")
        is_turn = isinstance(prompt, str) and not isinstance(arguments["prompt"], str)
        return [{"role": "user", "content": prompt}] if is_turn else prompt

"""What a teacher reads in place of the policy's prompts (--teacher-prompt): the reference answer,
or what the group of a rollout has found (SDPO, Huebotter et al. 2026, arXiv:2601.20802)."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
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
NOTHING = {"response": "", "reward": 0.0, "components": {}, "message": "", "tokens": []}


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
        is_fine = isinstance(self.task, TextTask) or self.source == "answer"
        if not is_fine and (self.source != "sibling" or self.template):
            raise InputError(
                "--teacher-prompt must be answer or sibling, without --teacher-template, for task "
                f"{self.task.name}, whose prompts are not text, got {self.source}"
            )
        for i in range(getattr(self.task, "num_train_prompts", NUM_TRIED)):
            self._made(i, self.task.prompts("train", i, 1), [NOTHING] * 2, 0, 0.0)

    def __call__(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with what the teacher reads: a prompt for each rollout, if it depends on
        the group. A rollout without one has the policy's, and the weight 0."""
        asked, device = names_asked(self.source), batch.rewards.device
        count, rollouts = (batch.num_rollouts, self._rollouts(batch)) if asked else (1, [])
        ids = batch.prompts.ids.cpu().repeat_interleave(count)
        keys = sample_keys(self.seed, batch.step, ids, torch.arange(len(ids)) % count)
        draws = uniforms(keys, -1).tolist()  # those of tokens have the positions from 0 on
        tokens, weights = list[list[int]](), torch.ones(len(ids))
        for s, i in enumerate(ids.tolist()):
            if s % count == 0:  # the task's, because prompts from other ranks have no columns
                own, group = self.task.prompts("train", i, 1), rollouts[s : s + count]
            made = self._made(i, own, group, s % count, draws[s])
            weights[s] = made is not None
            tokens.append(made or own.tokens.tolist())
        batch = replace(batch, teacher_prompts=Prompts(*pack(tokens), ids).to(device))
        if not asked:
            return batch
        metrics = batch.metrics | {"frac_with_teacher": float(weights.mean())}
        return replace(batch, teacher_weights=weights.to(device), metrics=metrics)

    def _rollouts(self, batch: RolloutBatch) -> Group:
        task, turns, said = self.task, batch.raw_rollouts.turns(), batch.messages
        rewards, components = batch.task_rewards.flatten().tolist(), batch.components
        found = list[dict[str, Any]]()
        for s, parts in enumerate(turns):
            tokens = parts[-1] if isinstance(task, TextTask) else [i for x in parts for i in x]
            texts = [task.decode(tokens), said[s] if said else ""]
            if isinstance(task, TextTask):  # what looks like a control token is none
                texts = [*map(task.conversation.as_text, texts)]
            values = texts[0], rewards[s], components[s], texts[1], tokens
            found.append(dict(zip(NOTHING, values, strict=True)))
        return found

    def _made(
        self, i: int, prompt: Prompts, group: Group, index: int, draw: float
    ) -> list[int] | None:
        """Return what the teacher reads for rollout `index` of prompt i; None if it has none."""
        others = [x for j, x in enumerate(group) if j != index and x["reward"] > CORRECT]
        sibling = others[int(draw * len(others))] if others else NOTHING
        asked, task = names_asked(self.source), self.task
        if isinstance(task, TextTask):
            assert prompt.columns is not None
            own, columns = group[index] if group else NOTHING, dict(prompt.columns[0])
            said = "" if own["reward"] > CORRECT else own["message"]
            hints = {"sibling": sibling["response"], "feedback": said}
            if self.source in TEMPLATES:
                hint = str(hints.get(self.source, columns.get("answer")))
                made = self._filled(columns["prompt"], hint) if hint else None
            else:
                given = {"group": group, "index": index}
                made = self._called(i, columns | {name: given[name] for name in asked})
            tokens = [] if made is None else task.encode_prompt(made, f"prompt {i}")
        elif self.source == "answer":
            assert isinstance(task, AnsweredTask)
            (answer,) = task.reference_answers(prompt, Rollouts.given([[]]))
            tokens = prompt.tokens.tolist() + answer.answer
        else:
            tokens = [] if sibling is NOTHING else sibling["tokens"] + prompt.tokens.tolist()
        if 0 < len(tokens) <= self.limit:
            return tokens
        if asked:  # no teacher, or a response that is too long for it
            return None
        raise InputError(
            f"--teacher-prompt must give prompts of 1 to {self.limit} tokens, which leave room for "
            f"the response, got {len(tokens)} for prompt {i}"
        )

    def _filled(self, own: Prompt, hint: str) -> Prompt:
        asked = own if isinstance(own, str) else own[-1]["content"]
        values, form = {"{prompt}": asked, "{text}": hint}, self.template or TEMPLATES[self.source]
        text = re.sub("{prompt}|{text}", lambda found: values[found[0]], form)
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

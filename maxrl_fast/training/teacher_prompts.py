"""What a teacher reads in place of the policy's prompts (--teacher-prompt)."""

from dataclasses import dataclass
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import Prompt
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.runtime.loading import describe_error, load_code
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.sources import read_prompt
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.training.policy_reward import check_answers

ANSWER = "answer"  # the value of --teacher-prompt
NUM_TRIED = 64  # prompts that are checked before the first step, of a task that makes them


@dataclass(frozen=True)
class TeacherPrompts:
    task: Task
    source: str  # ANSWER, the prompt with the reference answer after it, or FILE.py:FUNCTION
    limit: int  # the longest prompt in tokens, which leaves room for the response

    def __call__(self, prompts: Prompts) -> Prompts:
        return self._of(prompts.ids.tolist()).to(prompts.tokens.device)

    def check(self) -> None:
        if self.source == ANSWER:
            check_answers(self.task, f"--teacher-prompt {ANSWER}")
        elif not isinstance(self.task, TextTask):
            raise InputError(
                f"--teacher-prompt must be {ANSWER} for task {self.task.name}, whose prompts are "
                f"not text, got {self.source}"
            )
        count = getattr(self.task, "num_train_prompts", NUM_TRIED)
        self._of([*range(count)])

    def _of(self, ids: list[int]) -> Prompts:
        # the task's, because prompts from other ranks have no columns
        encoded = [self._encoded(i, self.task.prompts("train", i, 1)) for i in ids]
        for i, tokens in zip(ids, encoded, strict=True):
            if not 0 < len(tokens) <= self.limit:
                raise InputError(
                    f"--teacher-prompt must give prompts of 1 to {self.limit} tokens, which leave "
                    f"room for the response, got {len(tokens)} for prompt {i}"
                )
        return prompts_of(encoded, ids, [{}] * len(ids))

    def _encoded(self, i: int, prompt: Prompts) -> list[int]:
        if isinstance(self.task, TextTask):
            assert prompt.columns is not None
            return self.task.encode_prompt(self._text(i, prompt.columns[0]), f"prompt {i}")
        # of words: the moves through a maze
        (answer,) = check_answers(self.task, self.source).reference_answers(
            prompt, Rollouts.given([[]])
        )
        return prompt.tokens.tolist() + answer.answer

    def _text(self, i: int, columns: dict[str, Any]) -> Prompt:
        own = columns["prompt"]
        if self.source == ANSWER:
            hint = f"\n\nThe reference answer is: {columns['answer']}"
            if isinstance(own, str):
                return own + hint
            return [*own[:-1], {**own[-1], "content": own[-1]["content"] + hint}]
        try:
            made = load_code("teacher-prompt", self.source, "FUNCTION")(**columns)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"--teacher-prompt {self.source} fails for prompt {i}: {describe_error(error)}"
            ) from error
        prompt = read_prompt(made, f"what --teacher-prompt {self.source} returns for prompt {i}")
        is_turn = isinstance(prompt, str) and not isinstance(own, str)
        return [{"role": "user", "content": prompt}] if is_turn else prompt

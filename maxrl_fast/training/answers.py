"""Reference answers: rewards from the policy, which are the probability of the answer given each
response's reasoning, and what a teacher reads in place of the policy's prompts."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import Prompt
from maxrl_fast.records import Prompts, Rollouts, Samples, ranges, sequence_sums, unpack
from maxrl_fast.runtime.device import to_device
from maxrl_fast.runtime.loading import describe_error, load_code
from maxrl_fast.tasks import AnsweredTask, Task
from maxrl_fast.tasks.sources import read_prompt
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.training.learner import Learner

LIKELIHOODS = ("logprob", "mean_logprob", "rlpr")  # of --reward-source
PROBABILITY = "probability"
ANSWER = "answer"  # the value of --teacher-prompt
NUM_TRIED = 64  # prompts that are checked before the first step, of a task that makes them
_FORMAT_SHARE = 0.1  # weight of the format term in RLPR's reward, as the authors set it


@dataclass(frozen=True)
class Answered:
    tokens: list[int]  # the reasoning, perhaps cut, the lead-in of the answer, and the answer
    num_answer: int  # number of answer tokens, at the end
    leads: bool  # whether the response itself leads to an answer and leaves room for it


@dataclass(frozen=True)
class AnswerScores:
    rewards: Tensor  # [S] float32
    components: list[dict[str, float]]  # [S]
    answered: Rollouts  # S responses that are trained on: other ones for "probability" (VeriFree)
    answer_lengths: Tensor | None = None  # [S] int64, of `answered`: see RolloutBatch


@dataclass(frozen=True)
class PolicyReward:
    """Scores responses by the probability of the reference answer y* given their reasoning z, at
    the temperature of the loss: docs/tasks.md, "Rewards from the policy". PROBABILITY is VeriFree's
    reward pi(y* | x, z), and 0 if the response does not lead to an answer or its reasoning leaves
    no room for one."""

    kind: str  # one of LIKELIHOODS, or PROBABILITY
    task: AnsweredTask
    learner: Learner
    limit: int  # the longest response, in tokens, with its answer; longer answers are cut

    def score(self, prompts: Prompts, rollouts: Rollouts) -> AnswerScores:
        """Score N responses to each prompt; all ranks must call this, and get the same."""
        answered = self._answered(prompts, rollouts)
        logprobs, lengths, continued = self._answer_logprobs(prompts, answered)
        sums = sequence_sums(logprobs, lengths)
        leads = torch.tensor([float(a.leads) for a in answered], device=sums.device)
        parts = {"answer_logprob": sums, "answer_leads": leads}
        if self.kind == PROBABILITY:
            parts["answer_logprob"] = sums = torch.where(lengths > 0, sums, -inf)
            # z gets the sampler's log-probs in place of the policy's
            reasoning = continued.lengths - lengths
            own = ranges(rollouts.cu_seqlens[:-1], reasoning)
            of_z = ranges(continued.cu_seqlens[:-1], reasoning)
            continued.logprobs[of_z] = rollouts.logprobs[own]
            return AnswerScores(sums.exp(), _components(parts), continued, lengths)
        rewards = sums if self.kind == "logprob" else sums / lengths
        if self.kind == "rlpr":
            probability = sequence_sums(logprobs.exp(), lengths) / lengths
            nothing = self._answered(prompts, Rollouts.given([[]] * len(prompts)))
            alone, sizes, _ = self._answer_logprobs(prompts, nothing)
            alone = sequence_sums(alone.exp(), sizes) / sizes  # [G]
            alone = alone.repeat_interleave(len(rollouts) // len(prompts))
            gain = (probability - alone).clamp_min(0.0)
            rewards = (1 - _FORMAT_SHARE) * gain + _FORMAT_SHARE * leads
            parts |= {"answer_prob": probability, "answer_prob_alone": alone}
        return AnswerScores(rewards, _components(parts), rollouts)

    def _answered(self, prompts: Prompts, rollouts: Rollouts) -> list[Answered]:
        references, found = self.task.reference_answers(prompts, rollouts), list[Answered]()
        responses = unpack(rollouts.tokens, rollouts.lengths)
        for reference, response in zip(references, responses, strict=True):
            if not reference.answer:
                index = int(prompts.ids[len(found) * len(prompts) // len(responses)])
                raise InputError(
                    f"a reference answer must have at least 1 token, got none for prompt {index}"
                )
            answer, end = reference.answer[: self.limit], reference.length
            room, is_whole = self.limit - len(answer), len(answer) == len(reference.answer)
            leads = end is not None and end <= room and is_whole
            if self.kind == PROBABILITY and not leads:
                found.append(Answered(response, 0, False))
                continue
            if end is None:  # without its stop token
                end = len(response) - (response[-1:] != [] and response[-1] in self.task.stop_ids)
            lead = [] if leads else reference.lead[:room]
            tokens = response[:end][: room - len(lead)] + lead + answer
            found.append(Answered(tokens, len(answer), leads))
        return found

    def _answer_logprobs(
        self, prompts: Prompts, answered: list[Answered]
    ) -> tuple[Tensor, Tensor, Rollouts]:
        """Return packed log-probs of the answers, their lengths [S], and the sequences with the
        policy's log-probs."""
        device = prompts.tokens.device
        sequences = Rollouts.given([a.tokens for a in answered]).to(device)
        (lengths,) = to_device(device, torch.tensor([a.num_answer for a in answered]))
        samples = Samples(prompts, sequences)
        logprobs = self.learner.passes.logprobs(self.learner.model, samples, samples.sequences)
        at = ranges(sequences.cu_seqlens[1:] - lengths, lengths)
        return logprobs[at], lengths, replace(sequences, logprobs=logprobs)


def check_answers(task: Task, who: str) -> AnsweredTask:
    """Return the task if it knows reference answers, which its first prompt shows."""
    if not isinstance(task, AnsweredTask):
        raise InputError(
            f"{who} needs the reference answer to every prompt, which the task {task.name} does "
            "not give"
        )
    try:
        task.reference_answers(task.prompts("train", 0, 1), Rollouts.given([[]]))
    except InputError as error:
        raise InputError(f"{who}: {error}") from error
    return task


def _components(parts: dict[str, Tensor]) -> list[dict[str, float]]:
    rows = torch.stack([*parts.values()], 1).tolist()
    return [{name: x for name, x in zip(parts, row, strict=True) if x > -inf} for row in rows]


@dataclass(frozen=True)
class TeacherPrompts:
    task: Task
    source: str  # ANSWER, the prompt with the reference answer after it, or FILE.py:FUNCTION
    limit: int  # the longest prompt in tokens, which leaves room for the response

    def check(self) -> None:
        if self.source == ANSWER:
            check_answers(self.task, f"--teacher-prompt {ANSWER}")
        elif not isinstance(self.task, TextTask):
            raise InputError(
                f"--teacher-prompt must be {ANSWER} for task {self.task.name}, whose prompts are "
                f"not text, got {self.source}"
            )
        self([*range(getattr(self.task, "num_train_prompts", NUM_TRIED))])

    def __call__(self, ids: list[int]) -> Prompts:
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

"""Rewards from the policy: the probability of the reference answer given each response's
reasoning."""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts, Samples, ranges, sequence_sums, unpack
from maxrl_fast.runtime.device import to_device
from maxrl_fast.tasks import AnsweredTask, EpisodeTask, Task
from maxrl_fast.training.learner import Learner

LIKELIHOODS = ("logprob", "mean_logprob", "rlpr")  # of --reward-source
PROBABILITY = "probability"
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

    @classmethod
    def of(
        cls, source: str, task: Task, learner: Learner, limit: int, objective: str = ""
    ) -> "PolicyReward | None":
        """Return that of a --reward-source, or of an `objective` that learns from reference
        answers; None if the policy rewards nothing."""
        is_own = objective or source in LIKELIHOODS
        who = f"--objective {objective}" if objective else f"--reward-source {source}"
        if (is_own or source == "vote") and isinstance(task, EpisodeTask):
            raise InputError(f"{who} needs responses of one turn, got episodes of {task.name}")
        kind = PROBABILITY if objective else source
        return cls(kind, check_answers(task, who), learner, limit) if is_own else None

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

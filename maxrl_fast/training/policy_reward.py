"""Rewards from the policy: the probability of the reference answer, given each response's
reasoning.

One forward pass over every response's reasoning, followed by the reference answer in place of the
response's own. All ranks take part.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts, Samples, ranges, sequence_sums
from maxrl_fast.runtime.device import to_device
from maxrl_fast.tasks import AnsweredTask, ReferenceAnswer, Task
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
    # [S] int64, tokens of the reference answer at the end of each response; 0: no answer
    answer_lengths: Tensor | None = None


@dataclass(frozen=True)
class PolicyReward:
    """Scores responses by the probability of the reference answer y* given their reasoning z, at
    the temperature of the loss.

    "logprob" is log pi(y* | x, z), "mean_logprob" its mean over the tokens of y*. "rlpr" is the
    reward of RLPR (Yu et al. 2025, arXiv:2506.18254), where p(z) is the mean probability of the
    tokens of y*:

        .9 max(0, p(z) - p(nothing)) + .1 [the response leads to an answer].

    "probability" is pi(y* | x, z), the reward of VeriFree (Zhou et al. 2025, arXiv:2505.21493). It
    is 0 if the response does not lead to an answer, or its reasoning leaves no room for one; the
    others append the lead-in of an answer to such a response, whose reasoning is cut if needed.

    Args:
        kind: one of LIKELIHOODS, or PROBABILITY.
        limit: the longest response, in tokens, with its answer; longer answers are cut.
    """

    kind: str
    task: AnsweredTask
    learner: Learner
    limit: int

    def score(self, prompts: Prompts, rollouts: Rollouts) -> AnswerScores:
        """Return the rewards of N responses to each prompt, the same on all ranks, which must all
        call this."""
        responses = [
            part.tolist() for part in rollouts.tokens.cpu().split(rollouts.lengths.tolist())
        ]
        references = self._references(prompts, rollouts)
        answered = [self._answered(*pair) for pair in zip(references, responses, strict=True)]
        if self.kind == PROBABILITY:
            pairs = zip(answered, responses, strict=True)
            return self._probabilities(
                prompts, rollouts, [a if a.leads else Answered(own, 0, False) for a, own in pairs]
            )
        logprobs, lengths, _ = self._answer_logprobs(prompts, answered)
        sums = sequence_sums(logprobs, lengths)
        leads = torch.tensor([float(a.leads) for a in answered], device=sums.device)
        parts = {"answer_logprob": sums, "answer_leads": leads}
        if self.kind != "rlpr":
            rewards = sums if self.kind == "logprob" else sums / lengths
            return AnswerScores(rewards, _components(parts), rollouts)
        probability = sequence_sums(logprobs.exp(), lengths) / lengths
        alone = self._alone(prompts).repeat_interleave(len(rollouts) // len(prompts))
        rewards = (1 - _FORMAT_SHARE) * (probability - alone).clamp_min(0.0) + _FORMAT_SHARE * leads
        parts |= {"answer_prob": probability, "answer_prob_alone": alone}
        return AnswerScores(rewards, _components(parts), rollouts)

    def _alone(self, prompts: Prompts) -> Tensor:
        """Return the mean token probability [G] of each prompt's answer without any reasoning."""
        references = self._references(prompts, Rollouts.given([[]] * len(prompts)))
        logprobs, lengths, _ = self._answer_logprobs(
            prompts, [self._answered(reference, []) for reference in references]
        )
        return sequence_sums(logprobs.exp(), lengths) / lengths

    def _probabilities(
        self, prompts: Prompts, rollouts: Rollouts, answered: list[Answered]
    ) -> AnswerScores:
        """Return pi(y* | x, z), and the responses z + y* with the sampler's log-probs of z and the
        policy's of y*."""
        # [answer tokens], [S]
        logprobs, lengths, continued = self._answer_logprobs(prompts, answered)
        has_answer = lengths > 0
        sums = torch.where(has_answer, sequence_sums(logprobs, lengths), -torch.inf)
        reasoning = continued.lengths - lengths
        own = ranges(rollouts.cu_seqlens[:-1], reasoning)  # positions of z in the sampled tokens
        # in z + y*
        kept = torch.cat(
            [ranges(continued.cu_seqlens[:-1], reasoning), _answer_positions(continued, lengths)]
        )
        values = torch.cat([rollouts.logprobs[own], logprobs])
        continued = replace(
            continued, logprobs=torch.zeros_like(values).index_copy(0, kept, values)
        )
        parts = {"answer_logprob": sums, "answer_leads": has_answer.float()}
        return AnswerScores(sums.exp(), _components(parts), continued, lengths)

    def _references(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        references = self.task.reference_answers(prompts, rollouts)
        num_rollouts = len(rollouts) // len(prompts)
        for s, reference in enumerate(references):
            if not reference.answer:
                index = int(prompts.ids[s // num_rollouts])
                raise InputError(
                    f"a reference answer must have at least 1 token, got none for prompt {index}"
                )
        return references

    def _answered(self, reference: ReferenceAnswer, response: list[int]) -> Answered:
        answer = reference.answer[: self.limit]
        room = self.limit - len(answer)
        if (
            reference.length is not None
            and reference.length <= room
            and len(answer) == len(reference.answer)
        ):
            return Answered(response[: reference.length] + answer, len(answer), True)
        lead = reference.lead[:room]
        is_stopped = bool(response) and response[-1] in self.task.stop_ids
        reasoning = response[
            : len(response) - is_stopped if reference.length is None else reference.length
        ]
        return Answered(reasoning[: room - len(lead)] + lead + answer, len(answer), False)

    def _answer_logprobs(
        self, prompts: Prompts, answered: list[Answered]
    ) -> tuple[Tensor, Tensor, Rollouts]:
        """Return packed log-probs of the answers, their lengths [S], and the sequences."""
        device = prompts.tokens.device
        sequences = Rollouts.given([a.tokens for a in answered]).to(device)
        (lengths,) = to_device(device, torch.tensor([a.num_answer for a in answered]))
        samples = Samples(prompts, sequences)
        logprobs = self.learner.passes.logprobs(self.learner.model, samples, samples.sequences)
        return logprobs[_answer_positions(sequences, lengths)], lengths, sequences


def check_answers(task: Task, who: str) -> AnsweredTask:
    """Return the task if it knows reference answers; its first prompt is tried."""
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


def _answer_positions(rollouts: Rollouts, lengths: Tensor) -> Tensor:
    """Return the packed positions of the last `lengths` [S] tokens of each response."""
    return ranges(rollouts.cu_seqlens[1:] - lengths, lengths)


def _components(parts: dict[str, Tensor]) -> list[dict[str, float]]:
    columns = torch.stack([*parts.values()], 1).tolist()
    return [
        {name: x for name, x in zip(parts, row, strict=True) if x > float("-inf")}
        for row in columns
    ]

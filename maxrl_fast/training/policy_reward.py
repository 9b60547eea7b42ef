"""Rewards from the policy: the probability of the reference answer, given each response's
reasoning, by one forward pass over it and that answer in place of the response's own."""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts, Samples, ranges, sequence_sums, unpack
from maxrl_fast.runtime.device import to_device
from maxrl_fast.tasks import AnsweredTask, Task
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
    tokens of y*: .9 max(0, p(z) - p(nothing)) + .1 [the response leads to an answer].

    "probability" is pi(y* | x, z), the reward of VeriFree (Zhou et al. 2025, arXiv:2505.21493). It
    is 0 if the response does not lead to an answer, or its reasoning leaves no room for one; the
    others append the lead-in of an answer to such a response, whose reasoning is cut if needed."""

    kind: str  # one of LIKELIHOODS, or PROBABILITY
    task: AnsweredTask
    learner: Learner
    limit: int  # the longest response, in tokens, with its answer; longer answers are cut

    def score(self, prompts: Prompts, rollouts: Rollouts) -> AnswerScores:
        """Score N responses to each prompt; the same on all ranks, which must all call this."""
        answered = self._answered(prompts, rollouts)
        logprobs, lengths, continued = self._answer_logprobs(prompts, answered)
        sums = sequence_sums(logprobs, lengths)
        leads = torch.tensor([float(a.leads) for a in answered], device=sums.device)
        parts = {"answer_logprob": sums, "answer_leads": leads}
        if self.kind == PROBABILITY:
            parts["answer_logprob"] = sums = torch.where(lengths > 0, sums, -inf)
            # z + y* with the sampler's log-probs of z and the policy's of y*
            reasoning = continued.lengths - lengths
            own = ranges(rollouts.cu_seqlens[:-1], reasoning)  # positions of z in the samples
            kept = ranges(continued.cu_seqlens[:-1], reasoning)
            whole = torch.zeros_like(continued.logprobs)
            whole[kept] = rollouts.logprobs[own]
            whole[_answer_positions(continued, lengths)] = logprobs
            continued = replace(continued, logprobs=whole)
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
        """Return packed log-probs of the answers, their lengths [S], and the sequences."""
        device = prompts.tokens.device
        sequences = Rollouts.given([a.tokens for a in answered]).to(device)
        (lengths,) = to_device(device, torch.tensor([a.num_answer for a in answered]))
        samples = Samples(prompts, sequences)
        logprobs = self.learner.passes.logprobs(self.learner.model, samples, samples.sequences)
        return logprobs[_answer_positions(sequences, lengths)], lengths, sequences


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


def _answer_positions(rollouts: Rollouts, lengths: Tensor) -> Tensor:
    # of the last `lengths` [S] tokens of each response
    return ranges(rollouts.cu_seqlens[1:] - lengths, lengths)


def _components(parts: dict[str, Tensor]) -> list[dict[str, float]]:
    rows = torch.stack([*parts.values()], 1).tolist()
    return [{name: x for name, x in zip(parts, row, strict=True) if x > -inf} for row in rows]

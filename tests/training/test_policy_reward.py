from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.maze import DONE, MazeTask
from maxrl_fast.training.answers import LIKELIHOODS, PROBABILITY, PolicyReward
from maxrl_fast.training.learner import LossSettings
from maxrl_fast.training.objectives.classes import VerifreeObjective
from tests.batches import collected, make_prompts
from tests.models import save_checkpoint, tiny_decoder
from tests.tables import refused
from tests.training.test_learner import learner

STOP, MARKER, LIMIT = 3, 9, 8
PROMPTS = [[5, 6, 7, 8], [9, 1]]  # a marker in a prompt means nothing
ANSWERS = [[4, 5], [7, 8, 2]]
# Each response, its reasoning up to the reference answer, and whether it leads to an answer within
# LIMIT tokens.
CASES = [
    [
        ([10, 9, 4, 5, 3], [10, 9], True),
        ([9, 11, 3], [9], True),
        ([10, 11, 3], [10, 11, 9], False),  # no marker
        # cut off by the limit, without one
        ([10, 11, 12, 13, 14, 15, 16, 17], [10, 11, 12, 13, 14, 9], False),
        # the marker comes too late
        ([10, 11, 12, 13, 14, 15, 16, 9], [10, 11, 12, 13, 14, 9], False),
    ],
    [
        ([9, 9, 3], [9], True),  # the first marker counts
        ([10, 11, 12, 13, 9], [10, 11, 12, 13, 9], True),  # with the answer as long as the limit
        ([3], [9], False),  # nothing
        ([16, 9, 7, 8, 2, 3], [16, 9], True),
        ([10, 11, 12, 13, 14, 9], [10, 11, 12, 13, 9], False),
    ],
]


class MarkedTask:
    """The answer of a response begins behind the first MARKER; prompt i has the answer
    `answers[i]`.
    """

    name, stop_ids = "marked", (STOP,)

    def __init__(self, answers=ANSWERS):
        self.answers = answers

    def reference_answers(self, prompts, rollouts):
        num_rollouts, found = len(rollouts) // len(prompts), []
        for s, part in enumerate(rollouts.tokens.split(rollouts.lengths.tolist())):
            tokens, answer = part.tolist(), self.answers[int(prompts.ids[s // num_rollouts])]
            length = tokens.index(MARKER) + 1 if MARKER in tokens else None
            found.append(ReferenceAnswer(length, [MARKER], answer))
        return found


def alone(model, folder):
    """Return a function: the log-probs, in float64, of tokens behind a prompt, by transformers."""
    save_checkpoint(folder, model.config, model.weights(), {}, (STOP,))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def logprobs(before, tokens, temperature):
        with torch.no_grad():
            logits = oracle(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]

    return logprobs


def reward_of(model, kind, task=None, temperature=1.0, limit=LIMIT):
    settings = LossSettings("reinforce", "seq_mean_token_sum", temperature=temperature)
    return PolicyReward(kind, task or MarkedTask(), learner(model, settings, budget=24), limit)


def rollouts_of(cases):
    rollouts = Rollouts.given([response for group in cases for response, _, _ in group])
    return replace(rollouts, logprobs=-torch.arange(1.0, len(rollouts.tokens) + 1))


def test_rewards_are_those_of_each_sequence_alone(tmp_path):
    temperature = 0.6
    model = tiny_decoder()
    oracle, prompts, rollouts = alone(model, tmp_path), make_prompts(PROMPTS), rollouts_of(CASES)
    expected = {kind: [] for kind in (*LIKELIHOODS, PROBABILITY)}
    parts, sequences, sampled = [], [], iter(rollouts.logprobs.split(rollouts.lengths.tolist()))
    for prompt, answer, group in zip(PROMPTS, ANSWERS, CASES, strict=True):
        base = oracle([*prompt, MARKER], answer, temperature).exp().mean()
        for response, reasoning, leads in group:
            logprobs = oracle([*prompt, *reasoning], answer, temperature)
            probability = logprobs.exp().mean()
            expected["logprob"].append(logprobs.sum())
            expected["mean_logprob"].append(logprobs.mean())
            expected["rlpr"].append(0.9 * max(0.0, probability - base) + 0.1 * leads)
            expected[PROBABILITY].append(logprobs.sum().exp() if leads else 0.0)
            parts.append({"answer_logprob": logprobs.sum(), "answer_leads": float(leads)})
            parts[-1] |= {"answer_prob": probability, "answer_prob_alone": base}
            own = next(sampled)
            of_z = (reasoning + answer, torch.cat([own[: len(reasoning)], logprobs]))
            sequences.append(of_z if leads else (response, own))
    for kind, values in expected.items():
        scores = reward_of(model, kind, temperature=temperature).score(prompts, rollouts)
        assert scores.rewards.dtype == torch.float32
        wanted = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(scores.rewards.double(), wanted, rtol=2e-5, atol=1e-7)
        for actual, part in zip(scores.components, parts, strict=True):
            names = ["answer_leads"]
            names += ["answer_logprob"] * (kind != PROBABILITY or part["answer_leads"] > 0)
            names += ["answer_prob", "answer_prob_alone"] * (kind == "rlpr")
            assert actual == pytest.approx({x: float(part[x]) for x in names}, rel=2e-5)
    # some reasoning makes the answer more probable, and some less
    assert max(expected["rlpr"]) > 0.102
    assert min(expected["rlpr"]) == 0.0
    groups = zip(ANSWERS, CASES, strict=True)
    lengths = [len(answer) * leads for answer, group in groups for *_, leads in group]
    assert scores.answer_lengths.tolist() == lengths
    answered, wanted = scores.answered, [token for tokens, _ in sequences for token in tokens]
    assert answered.lengths.tolist() == [len(tokens) for tokens, _ in sequences]
    assert answered.tokens.tolist() == wanted
    logprobs = torch.cat([x.double() for _, x in sequences])
    torch.testing.assert_close(answered.logprobs.double(), logprobs, rtol=2e-5, atol=1e-6)


def test_an_answer_that_is_longer_than_the_limit_is_cut(tmp_path):
    model, prompts = tiny_decoder(), make_prompts([PROMPTS[0]])
    task, rollouts = MarkedTask([[7, 8, 2]]), Rollouts.given([[9, 3], [11, 3]])
    rewards = reward_of(model, "logprob", task, limit=2).score(prompts, rollouts).rewards
    expected = alone(model, tmp_path)(PROMPTS[0], [7, 8], 1.0).sum().expand(2)
    torch.testing.assert_close(rewards.double(), expected, rtol=2e-5, atol=0)
    scores = reward_of(model, PROBABILITY, task, limit=2).score(prompts, rollouts)
    assert scores.rewards.tolist() == scores.answer_lengths.tolist() == [0, 0]
    assert torch.equal(scores.answered.tokens, rollouts.tokens)


def test_an_empty_answer_is_refused():
    reward = reward_of(tiny_decoder(), "logprob", MarkedTask([[], []]))
    with refused("must have at least 1 token, got none for prompt 0"):
        reward.score(make_prompts(PROMPTS), rollouts_of(CASES))


def test_an_update_has_the_factors_of_verifree():
    """Of reasoning, the reward less the mean of the others; of the answer, the reward."""
    model, prompts, rollouts = tiny_decoder(), make_prompts(PROMPTS), rollouts_of(CASES)
    scores = reward_of(model, PROBABILITY).score(prompts, rollouts)
    samples = collected(Samples(prompts, rollouts), scores.rewards.view(2, -1))
    samples = replace(samples, rollouts=scores.answered, answer_lengths=scores.answer_lengths)
    step = VerifreeObjective().begin(samples, None)
    assert step.advantages(samples.sequences).tolist() == [1.0] * 10
    trained = learner(model, LossSettings("reinforce", "seq_mean_token_sum"))
    logprobs = trained.passes.logprobs(model, samples, samples.sequences)
    logprobs = iter(logprobs.split(samples.rollouts.lengths.tolist()))
    expected = []
    for answer, group in zip(ANSWERS, CASES, strict=True):
        rewards = [
            float(next(logprobs)[len(reasoning) :].sum().exp()) * leads
            for _, reasoning, leads in group
        ]
        for reward, (response, reasoning, leads) in zip(rewards, group, strict=True):
            centred = reward - (sum(rewards) - reward) / 4
            length = len(reasoning) if leads else len(response)
            expected += [centred] * length + [reward] * len(answer) * leads
    actual = step.batch.rollouts.importance_weights
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-3, atol=1e-7)
    assert step.finish() == {}


def test_the_answers_of_mazes():
    task = MazeTask(7)
    prompts = task.prompts("train", 5, 3)
    references = task.reference_answers(prompts, Rollouts.given([[DONE]] * 6))
    rollouts = Rollouts.given([reference.answer for reference in references])
    assert task.score(prompts, rollouts).tolist() == [1] * 6
    assert references[0] == references[1] != references[2]
    for x in references:
        assert (x.length, *x.lead) == (0,)
        assert x.answer.index(DONE) == len(x.answer) - 1

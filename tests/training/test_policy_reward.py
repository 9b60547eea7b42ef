"""Rewards from the policy against transformers' forward pass of each sequence alone, and VeriFree
against its definition.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from maxrl_fast import train
from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.parse import parse
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks import ReferenceAnswer
from maxrl_fast.tasks.chain import ChainTask
from maxrl_fast.tasks.maze import DONE, MazeTask
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.objectives.objective import Needs
from maxrl_fast.training.objectives.verifree import VerifreeObjective
from maxrl_fast.training.policy_reward import LIKELIHOODS, PROBABILITY, PolicyReward, check_answers
from tests.batches import collected, make_prompts, one_batch
from tests.models import response_logits, save_checkpoint, tiny_decoder
from tests.tables import refused, table
from tests.training.test_learner import learner

SORT = Path(__file__).parents[2] / "examples" / "sort_task.py"
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

    def __init__(self, answers=ANSWERS, marker=MARKER, stop=STOP):
        self.answers, self.marker, self.stop_ids = answers, marker, (stop,)

    def reference_answers(self, prompts, rollouts):
        num_rollouts, found = len(rollouts) // len(prompts), []
        for s, part in enumerate(rollouts.tokens.split(rollouts.lengths.tolist())):
            tokens = part.tolist()
            length = tokens.index(self.marker) + 1 if self.marker in tokens else None
            found.append(
                ReferenceAnswer(
                    length, [self.marker], self.answers[int(prompts.ids[s // num_rollouts])]
                )
            )
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


def reward_of(model, kind, task=None, temperature=1.0, limit=LIMIT, budget=24):
    settings = LossSettings(
        loss="reinforce", aggregation="seq_mean_token_sum", temperature=temperature
    )
    return PolicyReward(kind, task or MarkedTask(), learner(model, settings, budget), limit)


def rollouts_of(cases):
    rollouts = Rollouts.given([response for group in cases for response, _, _ in group])
    return replace(rollouts, logprobs=-torch.arange(1.0, len(rollouts.tokens) + 1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rewards_are_those_of_each_sequence_alone(tmp_path, temperature):
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
        torch.testing.assert_close(
            scores.rewards.double(), torch.tensor(values, dtype=torch.float64), rtol=2e-5, atol=1e-7
        )
        names = {"answer_logprob", "answer_leads"} | (
            {"answer_prob", "answer_prob_alone"} if kind == "rlpr" else set()
        )
        for actual, part in zip(scores.components, parts, strict=True):
            left_out = (
                {"answer_logprob"} if kind == PROBABILITY and not part["answer_leads"] else set()
            )
            assert actual == pytest.approx(
                {name: float(part[name]) for name in names - left_out}, rel=2e-5
            )
    # some reasoning makes the answer more probable, and some less
    assert max(expected["rlpr"]) > 0.102
    assert min(expected["rlpr"]) == 0.0
    assert scores.answer_lengths.tolist() == [
        len(a) * leads for a, g in zip(ANSWERS, CASES, strict=True) for *_, leads in g
    ]
    for tokens, logprobs, (wanted, at) in zip(
        scores.answered.tokens.split(scores.answered.lengths.tolist()),
        scores.answered.logprobs.split(scores.answered.lengths.tolist()),
        sequences,
        strict=True,
    ):
        assert tokens.tolist() == wanted
        torch.testing.assert_close(logprobs.double(), at.double(), rtol=2e-5, atol=1e-6)


def test_an_answer_that_is_longer_than_the_limit_is_cut(tmp_path):
    model = tiny_decoder()
    oracle, prompts = alone(model, tmp_path), make_prompts([PROMPTS[0]])
    task, rollouts = MarkedTask([[7, 8, 2]]), Rollouts.given([[9, 3], [11, 3]])
    rewards = reward_of(model, "logprob", task, limit=2).score(prompts, rollouts).rewards
    torch.testing.assert_close(
        rewards.double(), oracle(PROMPTS[0], [7, 8], 1.0).sum().expand(2), rtol=2e-5, atol=0
    )
    scores = reward_of(model, PROBABILITY, task, limit=2).score(prompts, rollouts)
    assert scores.rewards.tolist() == scores.answer_lengths.tolist() == [0, 0]
    assert torch.equal(scores.answered.tokens, rollouts.tokens)


def test_an_empty_answer_is_refused():
    with refused("must have at least 1 token, got none for prompt 0"):
        reward_of(tiny_decoder(), "logprob", MarkedTask([[], []])).score(
            make_prompts(PROMPTS), rollouts_of(CASES)
        )


def scored(model, task=None, cases=CASES, prompts=PROMPTS):
    """Return a step's samples as the collector and the trainer make them for VeriFree."""
    prompts, rollouts = make_prompts(prompts), rollouts_of(cases)
    scores = reward_of(model, PROBABILITY, task).score(prompts, rollouts)
    samples = collected(Samples(prompts, rollouts), scores.rewards.view(len(prompts), -1))
    return replace(samples, rollouts=scores.answered, answer_lengths=scores.answer_lengths)


@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
def test_an_update_has_the_gradient_of_verifree(loss):
    model = tiny_decoder()
    samples = scored(model)
    if loss == "ppo":  # at ratios of 1
        samples = replace(
            samples, rollouts=replace(samples.rollouts, logprobs=own_logprobs(model, samples))
        )
    total, count = 0.0, 0
    for prompt, answer, group in zip(PROMPTS, ANSWERS, CASES, strict=True):
        terms = []
        for response, reasoning, leads in group:
            tokens = reasoning + answer if leads else response
            batch = one_batch(make_prompts([prompt]), Rollouts.given([tokens]))
            logprobs = response_logits(model, batch, torch.float32).log_softmax(-1)
            logprobs = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            of_answer = logprobs[len(reasoning) :].sum() if leads else torch.tensor(0.0)
            terms.append(
                (
                    logprobs[: len(reasoning) if leads else None].sum(),
                    of_answer,
                    float(of_answer.detach().exp()) * leads,
                )
            )
        for i, (of_reasoning, of_answer, reward) in enumerate(terms):
            others = [other for j, (_, _, other) in enumerate(terms) if j != i]
            total = total - (reward - sum(others) / len(others)) * of_reasoning - reward * of_answer
            count += 1
    expected = torch.autograd.grad(total / count, [*model.parameters()])
    objective, trained = (
        VerifreeObjective(),
        learner(model, LossSettings(loss=loss, aggregation="seq_mean_token_sum")),
    )
    step = objective.begin(samples, trained)
    advantages = step.advantages(samples.sequences)
    assert advantages.tolist() == [1.0] * 10
    trained.update(step.batch, advantages, samples.sequences, when="step 1", lr=0.0)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-4
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-3, atol=3e-4 * float(gradient.abs().max())
        )
    assert step.finish() == {}


def own_logprobs(model, samples):
    trained = learner(model, LossSettings(loss="reinforce", aggregation="seq_mean_token_sum"))
    return trained.passes.logprobs(model, samples, samples.sequences)


def test_verifree_is_unbiased():
    """Over all pairs of responses to a prompt, the mean gradient is that of the probability of a
    response with the answer.
    """
    model, limit, stop, marker, prompt = tiny_decoder(vocab_size=4), 3, 0, 1, [2, 3]
    responses = [
        [*tokens]
        for length in range(1, limit + 1)
        for tokens in itertools.product(range(4), repeat=length)
        if stop not in tokens[:-1] and (tokens[-1] == stop or length == limit)
    ]
    assert len(responses) == 1 + 3 + 9 * 4
    parameters = [*model.parameters()]

    def log_probs(prompts, rollouts):
        batch = one_batch(prompts, rollouts)
        return (
            response_logits(model, batch, torch.float32)
            .log_softmax(-1)
            .gather(1, batch.targets[:, None])[:, 0]
        )

    probs = torch.stack(
        [
            part.sum().exp()
            for part in log_probs(make_prompts([prompt]), Rollouts.given(responses)).split(
                [*map(len, responses)]
            )
        ]
    )
    assert float(probs.detach().sum()) == pytest.approx(1.0, rel=1e-5)
    is_right = torch.tensor(
        [marker in r and r[r.index(marker) + 1 :][:1] == [2] for r in responses]
    )
    expected = torch.autograd.grad(probs[is_right].sum(), parameters, retain_graph=True)

    pairs = list(itertools.product(range(len(responses)), repeat=2))
    prompts = make_prompts([prompt] * len(pairs))
    rollouts = Rollouts.given([responses[i] for pair in pairs for i in pair])
    task = MarkedTask([[2]] * len(pairs), marker, stop)
    scores = reward_of(model, PROBABILITY, task, limit=limit, budget=100_000).score(
        prompts, rollouts
    )
    samples = collected(Samples(prompts, rollouts), scores.rewards.view(-1, 2))
    samples = replace(samples, rollouts=scores.answered, answer_lengths=scores.answer_lengths)
    factors = VerifreeObjective().begin(samples, None).batch.rollouts.importance_weights
    weight = torch.stack([probs[i] * probs[j] for i, j in pairs]).detach().repeat_interleave(2)
    weighted = factors * log_probs(prompts, samples.rollouts)
    total = (weighted * weight.repeat_interleave(samples.rollouts.lengths)).sum() / 2
    actual = torch.autograd.grad(total, parameters)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-2
    for mine, gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            mine, gradient, rtol=1e-3, atol=2e-3 * float(gradient.abs().max()) + 1e-6
        )


def test_groups_with_equal_rewards_learn_the_answer_alone():
    model = tiny_decoder(vocab_size=8)
    task = ChainTask(3, seed=1)
    prompts = task.prompts("train", 0, 2)
    rollouts = Rollouts.given([[4, 4, 4], [5, 2], [5, 5, 5], [5, 4, 2]])
    scores = reward_of(model, PROBABILITY, task, limit=3).score(prompts, rollouts)
    samples = collected(Samples(prompts, rollouts), scores.rewards.view(2, 2))
    samples = replace(samples, rollouts=scores.answered, answer_lengths=scores.answer_lengths)
    assert samples.rollouts.tokens.tolist() == task.actions.tolist() * 4
    assert float(task.score(prompts, samples.rollouts).min()) == 1
    objective = VerifreeObjective()
    learned = objective.begin(samples, None).batch
    reward = own_logprobs(model, samples).view(4, 3).sum(1).exp()
    assert float(reward.min()) > 0
    torch.testing.assert_close(learned.rollouts.importance_weights, reward.repeat_interleave(3))
    # Without an answer and with equal rewards nothing is learned.
    nothing = MarkedTask([[1], [1]], marker=7, stop=2)
    samples = scored(model, nothing, [[([4, 2], [], False), ([5, 5], [], False)]] * 2, [[1], [1]])
    step = objective.begin(samples, None)
    assert step.batch.rollouts.importance_weights.tolist() == [0] * 8
    assert step.advantages(samples.sequences).tolist() == [0] * 4


def test_the_answers_of_mazes_and_of_the_chain():
    task = MazeTask(7)
    prompts = task.prompts("train", 5, 3)
    references = task.reference_answers(prompts, Rollouts.given([[DONE]] * 6))
    rollouts = Rollouts.given([reference.answer for reference in references])
    assert task.score(prompts, rollouts).tolist() == [1] * 6
    assert references[0] == references[1] != references[2]
    assert {(reference.length, *reference.lead) for reference in references} == {(0,)}
    assert all(
        reference.answer[-1] == DONE and reference.answer.count(DONE) == 1
        for reference in references
    )


def test_a_task_without_reference_answers_is_refused():
    class NoAnswers:
        name = "words"

    with refused("--reward-source rlpr needs the reference answer to every prompt, which the task"):
        check_answers(NoAnswers(), "--reward-source rlpr")
    assert isinstance(check_answers(MazeTask(5), "--objective verifree"), MazeTask)


def test_a_run_on_such_a_task_ends_before_its_folder_is_made(tmp_path, capfd):
    flags = [
        "--task",
        f"{SORT}:SortTask",
        *"--objective verifree --sft-steps 0 --out".split(),
        str(tmp_path / "run"),
    ]
    assert train.main(flags) == 2
    assert (
        "--objective verifree needs the reference answer to every prompt, which the task sort 6 "
        "digits" in capfd.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_options():
    made = objective_of(parse(["--objective", "verifree"]))
    assert made == VerifreeObjective()
    assert made.needs == Needs(answers=True, token_weights=True, logprob_passes=1)
    assert (made.loss, made.aggregation) == ("reinforce", "seq_mean_token_sum")
    for flags, message in table("""
        --objective verifree --rollouts 1 | verifree needs at least 2 rollouts per prompt, got 1
        --objective verifree --loss gspo | verifree weights single tokens, so loss cannot be gspo
        --objective verifree --dynamic-sampling 2 | rewards are equal, from which verifree learns
        --objective verifree --reward-source vote | reward_source must be given for verifree, which
            computes its own reward, got vote
        --objective verifree --overlong-buffer 2 | verifree does not support --overlong-buffer: its
            reward is a probability
        --objective pacs --reward-source rlpr | reward_source cannot be rlpr for pacs, which needs
            rewards of 0 or 1
        --objective remax --reward-source logprob | --reward-source logprob does not support remax:
            it needs individual rewards
        --objective rloo --reward-source logprob | reward_source cannot be logprob for task maze,
            whose responses are answers without
        --objective rloo --task chain --reward-source rlpr | reward_source cannot be rlpr for task
            chain
        """):
        with refused(message):
            check(parse(flags.split()))

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.config.read import parse, parse_options
from maxrl_fast.config.resolve import resolve
from maxrl_fast.config.rules import objective_of
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.objectives import classes
from maxrl_fast.training.objectives.group import GroupObjective, Needs
from tests.batches import collected, make_prompts
from tests.models import tiny_decoder
from tests.tables import refused
from tests.training.test_ahead import build
from tests.training.test_learner import PROMPTS, learner, sampled

ROLLOUTS = dataclasses.replace(
    Rollouts.given([[0], [0] * 2, [0] * 3, []]), logprobs=torch.tensor([-1.0, -2, -4, -1, -2, -3])
)
REWARDS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def values(estimator, greedy_correct=None, **options):
    objective = GroupObjective(estimator, options)
    greedy_rewards = None if greedy_correct is None else greedy_correct.float()
    samples = Samples(make_prompts([[1], [2]]), ROLLOUTS)
    step = objective.begin(collected(samples, REWARDS, None, greedy_rewards), None)
    assert step.finish() == {}
    return step.advantages(torch.arange(4)).view(2, 2)


def test_an_estimator_gets_its_inputs_from_the_rollouts():
    lengths = torch.tensor([[1, 2], [3, 0]])
    for name in ("opo", "reinforce_pp_tokens"):
        assert torch.equal(values(name), ops.group_advantage(REWARDS, name, lengths=lengths))
    logprobs = torch.tensor([[-1.0, -3], [-2, 0]])
    expected = ops.group_advantage(REWARDS, "unlikeliness", logprobs=logprobs)
    assert torch.equal(values("unlikeliness"), expected)
    assert torch.equal(values("maxpo", k=1), ops.maxpo_advantage(REWARDS, 1))
    solved = torch.tensor([True, False])
    assert GroupObjective("self", {}).needs == Needs(greedy=True)
    assert GroupObjective("grpo", {}).needs == Needs()
    assert (values("self", solved) != 0).tolist() == [[False, False], [True, True]]
    assert GroupObjective("remax", {}).needs == Needs(greedy=True)
    assert values("remax", torch.tensor([0.25, 1.0])).tolist() == [[0.75, -0.25], [-1.0, 0.0]]


@pytest.mark.parametrize("objective", ["rloo", "ppo"])
def test_mask_leaves_out_tokens_of_truncated_responses_of_groups(objective, monkeypatch):
    learned = []
    monkeypatch.setattr(
        classes, "update_critic", lambda *given, when: (learned.append(given[-1]), (0.0, 0.0))[1]
    )
    flags = "--loss reinforce --truncated mask --max-new-tokens 5 --rollouts 8 --objective"
    trainer, _ = build(*flags.split(), objective)
    record = trainer.step(1, 0)
    rollouts, rewards = record.batch.raw_rollouts, record.batch.rewards
    kept = (~rollouts.truncated).nonzero()[:, 0].tolist()
    assert 4 < len(kept) < 28
    if objective == "ppo":
        assert [x.tolist() for x in learned] == [kept]
        return
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten() * 8 / 7
    sums = [x.sum() for x in rollouts.logprobs.split(rollouts.lengths.tolist())]
    num_tokens = int(rollouts.lengths[kept].sum())
    expected = -sum(float(advantages[s] * sums[s]) for s in kept) / num_tokens
    assert abs(expected) > 0.1
    assert record.metrics["loss"] == pytest.approx(expected, rel=1e-3)
    share = 1 - num_tokens / len(rollouts.tokens)
    assert record.metrics["tokens_masked"] == pytest.approx(share)
    assert record.metrics["truncated"] == 1 - len(kept) / 32


EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_advantage.py"
FUNCTIONS = """
import torch

def all_inputs(rewards, k, lengths, logprobs, valid, prompts, texts, components, truncated):
    assert lengths.shape == logprobs.shape == valid.shape == truncated.shape == rewards.shape
    assert len(prompts) == len(rewards)
    values = [[parts.get("half", 0.0) for parts in row] for row in components]
    values = torch.tensor(values) + torch.tensor([[len(x) for x in group] for group in texts])
    return rewards - rewards.mean(1, keepdim=True) + values + 9 * truncated

def fails(rewards):
    raise KeyError("no idea")

def raw(rewards):
    return rewards * 1.0

def two_ratios(rewards, log_ratios, ref_log_ratios):
    return rewards

def with_all_of_a_run(rewards, lengths, old_log_ratios, metrics):
    metrics["largest"] = old_log_ratios.amax()
    return rewards * old_log_ratios.exp() + lengths

def by_entropy(rewards, lengths, entropies):
    return entropies(rewards > 0)

def alternating(rewards, lengths):
    t = torch.cat([torch.arange(n) for n in lengths.flatten().tolist()])
    return rewards.flatten().repeat_interleave(lengths.flatten()) * (1.0 - t % 2 * 3)

def of_valid(rewards, lengths, valid):
    assert not lengths[~valid].any()
    return alternating(rewards, lengths)

def one_short(rewards, lengths):
    return alternating(rewards, lengths)[1:]

def with_ratios(rewards, log_ratios, lengths):
    return alternating(rewards * log_ratios, lengths)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def made(file, name, *flags):
    return objective_of(parse(["--objective", f"{file}:{name}", *flags]))


def test_samples_without_a_reward_have_no_advantage(file):
    rewards, valid = torch.ones(2, 3), torch.tensor([[True, True, False], [True, False, True]])
    rollouts = dataclasses.replace(Rollouts.given([[5, 6]] * 6), truncated=torch.arange(6) == 4)
    samples = Samples(make_prompts([[1], [2]]), rollouts)
    samples = collected(samples, rewards * valid, valid)
    step = made(file, "raw").begin(samples, None)
    assert step.advantages(samples.minibatches(1)[0]).tolist() == [1, 1, 0, 1, 0, 1]
    # all that a function may ask for, with which it checks its shapes
    parts = tuple({"half": i / 2} for i in range(6))
    samples = dataclasses.replace(samples, texts=("", "b", "cc", "ddd", "", "f"), components=parts)
    objective = made(file, "all_inputs", "--k", "2")
    assert objective.needs == Needs(texts=True)
    values = torch.tensor([[0, 1.5, 3], [4.5, 11, 3.5]])
    values += samples.rewards - samples.rewards.mean(1, keepdim=True)
    actual = objective.begin(samples, None).advantages(samples.sequences)
    torch.testing.assert_close(actual, (values * valid).flatten())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("two_ratios", "two_ratios may ask for one kind of log-ratios, got log_ratios, ref_log"),
        ("fails", "fails fails on a small example: KeyError: 'no idea'"),
        ("raw --k 3", "--k is not used by objective .*raw"),
        ("raw --dynamic-sampling 2", "equal rewards, from which .*raw learns"),
    ],
)
def test_a_bad_function_is_refused_before_any_work(file, function, message):
    parse(["--objective", f"{EXAMPLE}:short_and_right"])
    with refused(message):
        parse(["--objective", *f"{file}:{function}".split()])


OWN_OPTIONS = """
from typing import Annotated, Literal

from maxrl_fast.algorithms.estimators import Group
from maxrl_fast.algorithms.options import Help, Positive

def sharp(
    g: Group,
    *,
    sharpness: Annotated[Positive, Help("Exponent of the centred rewards.")] = 2.0,
    side: Literal["both", "above"] = "both",
    temperature: float = 5.0,
):
    assert temperature == 5
    return g.centre(g.rewards) * sharpness * (2 if side == "above" else 1)
"""


def test_the_options_of_a_users_function_are_options_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_OPTIONS)
    name, own = f"{tmp_path / 'mine.py'}:sharp", {"temperature": 5.0}
    (tmp_path / "run.toml").write_text(f'objective = "{name}"\nsharpness = 3\n')
    # a name that a group has follows the function's
    flags = f"--config {tmp_path}/run.toml --side above --temperature 0.5"
    config = parse(flags.split())
    assert config.parts["objective"] == {"sharpness": 3.0, "side": "above", **own}
    assert config.sampling.temperature == 0.5
    options = {"objective": name, "sharpness": 3, "side": "above", "temperature": 0.5}
    assert {**parse_options(options).flat(), "config": flags.split()[1]} == config.flat()
    resolved = resolve(parse(["--objective", name]), MazeTask(9))
    assert resolved.parts["objective"] == {"sharpness": 2.0, "side": "both", **own}
    (tmp_path / "config.json").write_text(json.dumps(config.flat()))
    monkeypatch.chdir(tmp_path)
    resumed = parse("--resume . --objective mine.py:sharp --side both".split())
    assert resumed.parts["objective"] == {"sharpness": 3.0, "side": "both", **own}
    other = parse(["--resume", str(tmp_path), "--objective", "maxpo"])
    assert other.parts["objective"] == {"k": None}
    with refused("--sharpness must be a finite number above 0, got 0"):
        parse(["--objective", name, "--sharpness", "0"])


TOKEN_REWARDS = torch.tensor([[1.0, 0, 2, 1], [0, 0, 0, 0], [-1, 0, 0, 0.5]])


@pytest.mark.parametrize(("name", "is_corrected"), [("alternating", False), ("of_valid", True)])
def test_advantages_of_tokens_become_weights_of_tokens(file, name, is_corrected):
    rollouts, valid = sampled(tiny_decoder()), torch.ones(3, 4, dtype=torch.bool)
    valid[0, 1] = valid[0, 2] = valid[2, 3] = False
    weights = torch.ones(len(rollouts.tokens))
    samples = collected(Samples(PROMPTS, rollouts), TOKEN_REWARDS * valid, valid)
    if is_corrected:
        weights = torch.linspace(0.2, 1.5, len(weights))
        samples = samples.weighted(weights)
    objective = made(file, name, "--loss", "reinforce")
    assert objective.needs.token_weights
    step = objective.begin(samples, None)
    advantages = step.advantages(samples.minibatches(1)[0])
    wanted = [[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]  # 0: nothing to learn
    assert advantages.view(3, 4).tolist() == wanted
    by_hand = [
        reward * (1 if t % 2 == 0 else -2)
        for reward, length in zip(
            (TOKEN_REWARDS * valid).flatten().tolist(), rollouts.lengths.tolist(), strict=True
        )
        for t in range(length)
    ]
    actual = advantages.repeat_interleave(rollouts.lengths) * step.batch.rollouts.importance_weights
    torch.testing.assert_close(actual, torch.tensor(by_hand) * weights)


def test_a_function_may_ask_for_what_only_a_run_has(file):
    model = tiny_decoder()
    rollouts, one = sampled(model), learner(model)
    samples = collected(Samples(PROMPTS, rollouts), TOKEN_REWARDS)
    objective = made(file, "with_all_of_a_run", "--updates-per-step=3", "--prompts=3")
    assert (objective.loss, objective.owns_loss) == ("reinforce", True)
    step = objective.begin(samples, one)
    with torch.no_grad():
        model.lm_head.weight *= 1.2
    now = one.passes.logprobs(model, samples, samples.sequences) - rollouts.logprobs
    ratios = torch.stack([part.sum() for part in now.split(rollouts.lengths.tolist())])
    shares = samples.minibatches(3)
    for share in shares:
        step.advantages(share)
    wanted = (TOKEN_REWARDS.flatten() * ratios.exp() + rollouts.lengths).float()
    torch.testing.assert_close(step.advantages(shares[0]), wanted, rtol=1e-3, atol=1e-3)
    largest = [ratios[share].max() for share in (*shares, shares[0])]
    assert step.finish()["largest"] == pytest.approx(float(sum(largest)) / 4, abs=1e-3)
    step = made(file, "by_entropy").begin(samples, one)
    passes, given = one.passes, (model, samples, samples.sequences)
    entropies = passes.compute(passes.logprobs_and_entropies, *given)[:, 1]
    is_right = (TOKEN_REWARDS > 0).flatten().repeat_interleave(rollouts.lengths)
    weights = step.batch.rollouts.importance_weights
    torch.testing.assert_close(weights, entropies * is_right, rtol=1e-4, atol=1e-5)


def test_advantages_of_another_shape_are_refused_in_a_sentence(file):
    wanted = r"one_short must return a floating tensor of shape \(4, 16\) or, for the tokens of its"
    with refused(wanted + r" lengths, \(\d+,\) on cpu, got torch.float32 of shape \(\d+,\) on cpu"):
        made(file, "one_short")
    with refused("asks for log-ratios of responses, so it must return"):
        made(file, "with_ratios")

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.build_parts import build_policy, build_run_task
from maxrl_fast.records import Rollouts, Samples, unpack
from maxrl_fast.training.teacher import TeacherPrompts
from tests.batches import collected, make_prompts

# An enumerable task: every response of two tokens, of which three, one and none are correct.
PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [4, 4, 2]])
RESPONSES = [[a, b] for a in (1, 2, 3) for b in (1, 2, 3)]
REWARDS = torch.tensor([[float(sum(x) == total) for x in RESPONSES] for total in (4, 2, 9)])
TASK = SimpleNamespace(
    name="pairs",
    prompts=lambda split, i, count: PROMPTS.select(torch.tensor([i])),
    decode=lambda tokens: " ".join(map(str, tokens)),
)


def batch_of(step=1):
    return collected(Samples(PROMPTS, Rollouts.given(RESPONSES * 3)), REWARDS, step=step)


def siblings(read, prompts=PROMPTS):
    """Return the sibling that the teacher of each rollout reads before its prompt; None: none."""
    found = []
    for s, tokens in enumerate(unpack(read.teacher_prompts.tokens, read.teacher_prompts.lengths)):
        prompt = unpack(prompts.tokens, prompts.lengths)[s // 9]
        assert tokens[-len(prompt) :] == prompt
        found.append(tokens[: -len(prompt)] or None)
    assert [x is not None for x in found] == read.teacher_weights.bool().tolist()
    return found


def test_a_sibling_is_a_correct_response_of_the_group_and_never_the_own_one():
    made, drawn = TeacherPrompts(TASK, "sibling", 6), []
    for step in range(60):
        read = made(batch_of(step))
        assert read.metrics["frac_with_teacher"] == pytest.approx(17 / 27)
        for s, sibling in enumerate(siblings(read)):
            others = [x for x in ([1, 3], [2, 2], [3, 1]) if x != RESPONSES[s % 9]]
            allowed = [others, [[1, 1]] * (s > 9), []][s // 9]
            assert sibling in allowed if allowed else sibling is None
        drawn.append(siblings(read))
        assert siblings(made(batch_of(step))) == drawn[-1]
    for s in (0, 2):  # of three siblings and of two
        counts = [sum(x[s] == y for x in drawn) for y in ([1, 3], [2, 2], [3, 1])]
        assert sorted(counts)[-2] > 12, counts
    assert any(x[0] != x[1] for x in drawn)
    other = replace(made, seed=1)
    assert [siblings(other(batch_of(n))) for n in range(60)] != drawn
    some = read.select(torch.tensor([1, 2]))  # as an update chooses groups
    assert siblings(some, some.prompts) == drawn[-1][9:]
    cut = replace(made, limit=5)(batch_of())  # a prompt of 4 tokens leaves no room for a sibling
    assert siblings(cut)[:9] == [None] * 9
    assert siblings(cut)[10:18] == [[1, 1]] * 8


@pytest.mark.parametrize("flags", ["distill", "maxpo --lora-rank 2 --teacher-ema .25"])
def test_the_trainer_reads_siblings_of_its_own_rollouts(flags, tmp_path):
    """So does a copy that follows the policy."""
    (tmp_path / "even.py").write_text("def f(response):\n    return len(response.split()) % 2\n")
    flags = f"--objective {flags} --kl full --kl-coef 1 --lr .1 --reward {tmp_path}/even.py:f"
    flags += " --task maze --maze-size 7 --prompts 3 --rollouts 9 --hidden-size 32 --layers 1"
    flags += " --threads 1 --sft-steps 0 --device cpu --dtype float32 --reward-workers 1"
    config = parse([*flags.split(), "--teacher-prompt", "sibling"])
    task = build_run_task(config)
    config = resolve(config, task)
    run = RunContext(config, task, build_policy(config, task))
    run.learner.set_reference()
    policy, reference = [*run.policy.parameters()], run.learner.reference
    copies = [x.detach().clone() for x in policy]
    for n in (1, 2):
        record = run.trainer.step(n, 3 * n)
        copies = [(0.75 * x + 0.25 * y).detach() for x, y in zip(copies, policy, strict=True)]
        batch, correct = record.batch, record.batch.task_rewards.flatten() > 0.5
        responses = unpack(batch.rollouts.tokens, batch.rollouts.lengths)
        found = siblings(batch, batch.prompts)
        assert sum(x is not None for x in found) > 9
        for s, sibling in enumerate(found):
            group = range(s - s % 9, s - s % 9 + 9)
            others = [responses[j] for j in group if j != s and correct[j]]
            assert sibling in others if others else sibling is None
        assert 0 < record.metrics["frac_with_teacher"] <= 1
        assert record.metrics["kl"] > 0
    run.scorer.close()
    assert (reference is None) == ("distill" in flags)
    for own, x, y in zip(reference.parameters(), copies, policy, strict=True) if reference else ():
        torch.testing.assert_close(own, x)
        assert (own != y).any() == y.requires_grad

from dataclasses import replace

import pytest
import torch

from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.build_parts import build_policy, build_run_task
from maxrl_fast.records import unpack


def siblings(batch):
    """Return the sibling that the teacher of each rollout reads before its prompt; None: none."""
    found, prompts = [], unpack(batch.prompts.tokens, batch.prompts.lengths)
    read = batch.teacher_prompts
    for s, tokens in enumerate(unpack(read.tokens, read.lengths)):
        prompt = prompts[s // 9]
        assert tokens[-len(prompt) :] == prompt
        found.append(tokens[: -len(prompt)] or None)
    assert [x is not None for x in found] == batch.teacher_weights.bool().tolist()
    return found


@pytest.mark.parametrize("flags", ["distill", "maxpo --lora-rank 2 --teacher-ema .25"])
def test_a_sibling_is_a_correct_response_of_the_group_and_never_the_own_one(flags, tmp_path):
    """With a copy that follows the policy too."""
    (tmp_path / "even.py").write_text("def f(response):\n    return len(response) % 3 > 0\n")
    flags = f"--objective {flags} --kl full --kl-coef 1 --lr 1e-3 --reward {tmp_path}/even.py:f"
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
        responses, found = unpack(batch.rollouts.tokens, batch.rollouts.lengths), siblings(batch)
        groups = [[j for j in range(27) if j // 9 == s // 9 and j != s] for s in range(27)]
        others = [[responses[j] for j in group if correct[j]] for group in groups]
        own_or_none = zip(found, others, strict=True)
        assert all(x in own if own else x is None for x, own in own_or_none)
        with_others = sum(map(bool, others))
        assert record.metrics["frac_with_teacher"] == pytest.approx(with_others / 27)
        assert with_others > 20
        assert record.metrics["kl"] > 0
    run.scorer.close()
    assert (reference is None) == ("distill" in flags)
    for own, x, y in zip(reference.parameters(), copies, policy, strict=True) if reference else ():
        torch.testing.assert_close(own, x)
        assert (own != y).any() == y.requires_grad
    assert siblings(batch.select(torch.tensor([1, 2]))) == found[9:]  # as an update chooses groups
    made, size = run.teacher_prompts, int(batch.prompts.lengths[0])
    cut = siblings(replace(made, limit=size + 3)(batch))  # which leaves room for three tokens
    assert cut == [x if x and len(x) < 4 else None for x in found] != found
    rewards, one = torch.zeros(3, 9), [responses[13]]
    rewards[1, 4] = 1.0
    few = made(replace(batch, task_rewards=rewards))
    assert siblings(few) == [*[None] * 9, *one * 4, None, *one * 4, *[None] * 9]
    assert few.metrics["frac_with_teacher"] == pytest.approx(8 / 27)
    drawn, other = (
        [siblings(x(replace(batch, step=n))) for n in range(150)]
        for x in (made, replace(made, seed=1))
    )
    assert drawn[2] == found
    assert drawn != other
    assert len({*map(str, found)}) > 9
    for s, own in enumerate(others):  # of at most 8; with equal chances 2 of 150 are one in 10^6
        assert all(sum(x[s] == y for x in drawn) > 2 for y in own)

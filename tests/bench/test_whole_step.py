"""The benchmark of a whole step calls the trainer's own step."""

import pytest
import torch

from bench.whole_step import timed_trainer, warm_started, whole_step
from maxrl_fast.config.options import Config

TINY = Config().replace(
    **{"objective": "grpo", "maze_size": 5, "max_new_tokens": 8, "prompts": 2, "rollouts": 4},
    **{"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 4, "kv_heads": 2},
    **{"sft_steps": 1, "device": "cpu", "dtype": "float32"},
)
STAGES = {"prompts", "rollout", "reward", "advantage", "update", "weights to rollout"}


def test_every_rollout_has_a_gradient_and_every_stage_a_time():
    (figures,) = whole_step(TINY, rounds=2, compiles=False)
    assert figures["share_with_gradient"] == 1.0
    assert figures["milliseconds_by_stage"].keys() == STAGES
    assert all(time > 0 for time in figures["milliseconds_by_stage"].values())
    assert figures["response_tokens"] > 0
    assert 0 < figures["floor_milliseconds"] < figures["step_milliseconds"]


@pytest.mark.parametrize("trains", [True, False])
def test_steps_train_only_when_asked(trains):
    config, task, model = warm_started(
        TINY.replace(objective="reinforce_raw", lr=1e-2, kl_coef=0.1)
    )
    timed = timed_trainer(config, task, model, trains=trains)
    before = model.lm_head.weight.detach().clone()
    for _ in range(3):
        timed.step()
    assert torch.equal(before, model.lm_head.weight) != trains
    assert timed.tokens() == sum(record.metrics["num_tokens"] for record in timed.records) / 3
    assert timed.stages[0].keys() == STAGES

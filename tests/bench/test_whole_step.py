from bench.whole_step import whole_step
from maxrl_fast.config.read import parse_options

TINY = parse_options(
    {
        **{"objective": "grpo", "maze_size": 7, "max_new_tokens": 8, "prompts": 2, "rollouts": 4},
        **{"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 4, "kv_heads": 2},
        **{"sft_steps": 1, "device": "cpu", "dtype": "float32"},
    }
)
STAGES = {"prompts", "rollout", "reward", "advantage", "update", "weights to rollout"}


def test_every_rollout_has_a_gradient_and_every_stage_a_time():
    figures = whole_step(TINY, rounds=2)
    assert figures["share_with_gradient"] == 1.0
    assert figures["milliseconds_by_stage"].keys() == STAGES
    assert all(time > 0 for time in figures["milliseconds_by_stage"].values())
    assert figures["response_tokens"] > 0
    assert 0 < figures["floor_milliseconds"] < figures["step_milliseconds"]

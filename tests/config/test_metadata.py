import pytest

from maxrl_fast.config.changes import FREE, ROUNDING, changes
from maxrl_fast.config.options import SHAPE, Config
from maxrl_fast.config.read import ELSEWHERE, hint, parse
from maxrl_fast.config.rules import unused_options
from tests.tables import refused

BELOW = float.fromhex("0x1.fffffffffffffp-1")  # the largest number below 1
OPTIONS = Config.options()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("prompts", (1, 2**31 - 1), (0, 2**31)),
        ("steps", (0, 2**31 - 1), (-1, 2**31)),
        ("threads", (1, None), (0,)),
        ("seed", (0, 2**63 - 1), (-1, 2**63)),
        ("lr", (1e-300, None), (0, float("nan"), float("inf"))),
        ("kl_coef", (0, 1e300), (-1e-9, float("inf"))),
        ("reward_threshold", (-1, None), (float("inf"), float("nan"))),
        ("max_reward_error_rate", (0, 1), (-1e-9, 1.001)),
        ("top_p", (1e-9, 1), (0, 1.001)),
        ("temperature", (1e-9, None), (0,)),
        ("kv_cache_gb", (1e-9, None), (0,)),
        ("beta2", (0, BELOW), (-1e-9, 1)),
    ],
)
def test_limits_on_both_sides(name, right, wrong):
    for value in right:
        assert OPTIONS[name].convert(value, name) == value
    for value in wrong:
        with refused(f"{name} must be .*, got {value}"):
            OPTIONS[name].convert(value, name)


def test_a_condition_that_refuses_says_what_the_option_needs():
    def said(name, *flags, **options):
        return unused_options({**parse(flags).values, **options}).get(name)

    vllm = "--rollout", "vllm"
    assert said("vllm_tensor_parallel", *vllm, vllm_url="x") == "cannot be used with --vllm-url"
    assert said("vllm_tensor_parallel", *vllm) is None
    assert (said("kl"), said("kl", kl_coef=0.1)) == ("needs --kl-coef", None)
    assert said("divergence", kl="full") == "needs --kl full"
    assert said("hidden_size", model="x") == ""


def test_what_a_resumed_run_may_change():
    before = {"lr": 1e-3, "steps": 90, "threads": 2, "save_every": 50, "layers": 4, "out": "a"}
    assert changes(before, dict.fromkeys(before, 77)) == [
        "lr: 0.001 before, 77 now",
        "steps: 90 before, 77 now",
        "layers: 4 before, 77 now",
    ]
    assert ROUNDING < FREE
    assert {"lr", "eval_prompts", "seed"}.isdisjoint(FREE)
    assert "layers" in SHAPE
    assert Config.options().keys() >= SHAPE | (FREE - {"vllm_url", "vllm_tensor_parallel"})


def test_a_misspelled_option_is_found_by_its_spelling():
    assert hint("maze_sise", {"maze_size"}) == "; did you mean --maze-size?"
    assert hint("xyzzy", Config.options()) == ""
    assert hint("use_vllm", Config.options()) == "; did you mean --rollout vllm?"
    assert ELSEWHERE["num_generations"] == "rollouts"

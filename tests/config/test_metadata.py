"""What the fields of options say: limits, the runs that take them, changes on resume, names of
other libraries.
"""

import json

import pytest

from maxrl_fast.config.aliases import OTHER_NAMES
from maxrl_fast.config.changes import changes
from maxrl_fast.config.metadata import check_limits, inapplicable_options, options_of
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import hint, parse
from tests.tables import refused

BELOW = float.fromhex("0x1.fffffffffffffp-1")  # the largest number below 1


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
        ("beta2", (0, BELOW), (-1e-9, 1)),
    ],
)
def test_limits_on_both_sides(name, right, wrong):
    for value in right:
        check_limits(Config, {name: value})
    for value in wrong:
        with refused(f"{name} must be .*, got {value}"):
            check_limits(Config, {name: value})


def test_the_first_condition_that_refuses_says_what_the_option_needs():
    def said(name, **options):
        return inapplicable_options(Config, Config().flat() | options).get(name)

    option = "vllm_tensor_parallel"
    assert said(option) == "needs --rollout vllm"
    assert said(option, rollout="vllm", vllm_url="x") == "cannot be used with --vllm-url"
    assert said(option, rollout="vllm") is None
    assert (said("kl"), said("kl", kl_coef=0.1)) == ("needs --kl-coef", None)
    assert said("clip_low", loss="sapo") == "is not used by loss sapo"
    assert said("clip_low", objective="pacs") == "is not used by loss reinforce"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lr", "semantic"),
        ("eval_prompts", "semantic"),
        ("layers", "policy"),
        ("threads", "rounding"),
        ("log_to", None),
    ],
)
def test_a_change_on_resume_means_what_the_field_says(name, kind):
    before = Config().flat()
    found = vars(changes(before, before | {name: 77}))
    assert {key: len(texts) for key, texts in found.items() if texts} == ({kind: 1} if kind else {})


def test_another_objective_takes_its_own_defaults_on_resume(tmp_path):
    options = {"objective": "maxpo", "k": 3, "aggregation": "token_mean", "lr": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(options))
    config = parse(["--resume", str(tmp_path), "--objective", "maxrl"])
    assert (config.objective.options, config.loss.aggregation) == ({}, None)
    assert config.optimizer.lr == 0.5


def test_another_name_can_stand_for_a_value():
    assert [OTHER_NAMES[name] for name in ("use_vllm", "bf16")] == [
        "rollout vllm",
        "dtype bfloat16",
    ]


def test_a_misspelled_option_is_found_by_its_spelling():
    assert hint("maze_sise", options_of(Config)) == "; did you mean --maze-size?"
    assert hint("xyzzy", options_of(Config)) == ""

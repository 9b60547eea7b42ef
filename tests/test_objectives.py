"""The command `python -m maxrl_fast.objectives`: its list and its details."""

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import ALIASES
from maxrl_fast.objectives import KINDS, WIDEST, main, purpose_of
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.training.objectives.registry import (
    OBJECTIVES,
    explain_name,
    make_objective,
    objective_defaults,
    weight_of,
)


@pytest.mark.parametrize(
    ("name", "of", "aggregation", "options"),
    [
        ("dr_grpo", "reinforce", "seq_sum_constant", {}),
        ("grpo_trl", "grpo", "token_mean", {"eps": 1e-4}),
        ("grpo_verl", "grpo", "token_mean", {}),
        ("pkpo_sloo_minus_one", "pkpo", "token_mean", {}),
        ("psr", "reinforce_raw", "token_mean", {}),
    ],
)
def test_another_name_has_the_advantages_of_what_it_stands_for(name, of, aggregation, options):
    rewards = torch.rand(20, 7, generator=torch.Generator().manual_seed(0))
    size = {"k": 3} if of == "pkpo" else {}
    expected = ops.group_advantage(rewards, of, **size, **options)
    assert torch.equal(ops.group_advantage(rewards, name, **size), expected)
    made, p = make_objective(name, {}, 7), torch.tensor([0.1, 0.6])
    assert made.aggregation == aggregation
    default = ESTIMATORS[of].options["eps"].default if of == "grpo" else None
    assert made.options.get("eps") == options.get("eps", default)
    weight = ops.effective_weight(of, 7, p, **size, **options)
    assert torch.equal(ops.effective_weight(name, 7, p, **size), weight)
    assert explain_name(name).startswith(f"{name} is {of}")
    assert name not in ESTIMATORS
    assert name in ALIASES


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n in ESTIMATORS and ESTIMATORS[n].size])
def test_the_default_size_fits_the_number_of_rollouts(name):
    make_objective(name, {}, 3)
    size = ESTIMATORS[name].size
    assert objective_defaults(name, 16)[size.name] == (4 if size.name == "k" else 15)
    assert objective_defaults(name, 3)[size.name] == 3 - size.below_n


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"objective": "pacs", "k": None}, "has no W_N"),
        ({"rollouts": 10**6}, "must be 1 to 2,048"),
        ({"k": [4]}, "maxpo needs"),
    ],
)
def test_a_run_whose_weight_is_not_known_says_why(options, reason):
    run = {"objective": "maxpo", "k": 4, "rollouts": 16} | options
    assert reason in weight_of(run, [0.5])["reason"]


def test_methods_are_listed_and_explained(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name in ("maxpo", "pacs", "kl_cov", "tis_sequence"):
        [line] = [line for line in listed if line.split()[:1] == [name]]
        assert len(line.split()) > 3
    for kind, (methods, *_) in KINDS.items():
        own = [x for x in methods if methods[x].function.__module__.startswith("maxrl_fast.")]
        assert all(0 < len(purpose_of(kind, name)) <= WIDEST for name in own)
    assert main(["luspo", "tis"]) == 0
    printed = capsys.readouterr().out
    assert "--loss luspo is gspo, by default with aggregation" in printed
    assert "factor of a token's advantage: min(w_t, importance_cap)" in printed
    assert "options: importance_cap=2" in printed
    assert main(["maxpoo"]) == 2
    assert "has the name 'maxpoo'; did you mean 'maxpo'?" in capsys.readouterr().err

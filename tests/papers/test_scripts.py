"""What the experiments share: they refuse settings before they write, and a seed repeats."""

import pytest

from tests.papers.load import load
from tests.tables import table


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    table("""
    bandit | --k 15 --rollouts-swept 15 32 | --k must be below every number of rollouts
    bandit | --k 1 | --k must be at least 2, got 1
    bandit | --seeds 1 | --seeds must be at least 2, got 1
    bandit | --bias-batches 1 | --bias-batches must be at least 10, got 1
    bandit | --actions-swept 5 1 | of actions at least 2
    bandit | --rollouts-swept | must name at least one number each
    chain_maze | --ks 1 | --ks must be at least 2
    chain_maze | --ks 8 --batch-sizes 8 | below each of --batch-sizes
    chain_maze | --learning-rates -1 | --learning-rates must be above 0
    chain_maze | --seeds 1 | --seeds must be at least 2, got 1
    chain_maze | --length 1 | --length must be at least 2, got 1
    continuous_maxrl | --seeds 1 | --seeds must be at least 2, got 1
    continuous_maxrl | --rate 0 | --rate must be above 0 and finite, got 0.0
    continuous_maxrl | --objectives maxrl-16 | maxrl needs 1 <= order <= N-1 = 15 for N = 16
    continuous_maxrl | --objectives best | --objectives must be names of estimators
    continuous_maxrl | --objectives grpo-2 | --objectives grpo-2: grpo does not use k
    continuous_maxrl | --objectives rloo rloo | must be different ones, got rloo rloo
    continuous_maxrl | --maze 6 | maze size must be an odd number from 5 to 31, got 6
    continuous_maxrl | --arms 40 | must give at most 500000 groups to enumerate
    distillation | --teacher-steps 0 | --teacher-steps must be at least 1, got 0
    exact_likelihood | --seeds 1 | --seeds must be at least 2, got 1
    guessing | --seeds 0 | --seeds must be at least 1, got 0
    guessing | --objectives best | objective must be one that
    guessing | --objectives maxpo-k32 | k
    maze_scaling | --rollouts 2 | --rollouts must be at least 4 each, got 2
    objectives_league | --objectives rloo gdpo | got gdpo; gdpo needs several rewards
    objectives_league | --objectives nosuch | got nosuch
    objectives_league | --seeds 0 | --seeds must be at least 1, got 0
    objectives_league | --variance-steps 1 | --variance-steps must be at least 2, got 1
    objectives_league | --hours 0 | --hours must be above 0, got 0
    weights | --k 1 | --k must be from 2 to the smallest of --rollouts less 1, got 1
    """),
)
def test_bad_settings_are_refused(script, flags, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(script).main(["--out", str(tmp_path), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert not list(tmp_path.iterdir())


CHAIN = {"length": 20, "iterations": 5, "batch_sizes": (4,), "ks": (2,), "learning_rates": (0.1,)}
CHAIN |= {"search_seeds": 1, "seeds": 2, "records": 2, "variance_batches": 4}
BANDIT = {"seeds": 3, "num_actions": 6, "num_rollouts": 5, "k": 3, "bias_batches": 100}
BANDIT |= {"variance_batches": 50, "rollouts_swept": (4, 6), "actions_swept": (2, 5)}
CONTINUOUS = {"rollouts": 4, "groups": 32, "repeats": 2, "learned": 3, "updates": 3}


@pytest.mark.parametrize(
    ("script", "settings", "sizes"),
    [
        ("bandit", "BanditSettings", BANDIT),
        ("chain_maze", "ChainMaze", CHAIN),
        ("continuous_maxrl", "ContinuousMaxRL", {**CONTINUOUS, "maze_steps": 0}),
    ],
)
def test_the_same_seed_gives_the_same_results(script, settings, sizes):
    module = load(script)
    first, again, other = (
        module.experiment(getattr(module, settings)(seed=seed, **sizes)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build_parts import build_policy
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.objectives.registry import OBJECTIVES
from tests.tables import table
from tests.tasks.test_dataset import save_byte_level_policy

FOLDER = Path(__file__).parents[2] / "examples" / "papers"
RECIPE = """task = "maze"
maze_size = 7
max_new_tokens = 8
hidden_size = 32
intermediate_size = 48
layers = 1
sft_steps = 3
prompts = 2
rollouts = 4
eval_every = 2
eval_prompts = 3
eval_samples = 2
save_every = 0
lr_schedule = "constant"
threads = 1
device = "cpu"
"""
# The script, the flags of a tiny run, a bad flag, and the sentence that refuses it.
SCRIPTS = """
    ahead | --seeds 1 --maze-size 7 --sft-steps 40 --tokens 700 --prompts 4 --evaluations 1
      --eval-mazes 4 --eval-samples 4 --methods grpo --lags 0 1 | --lags 5 | must be 0 to 4
    bandit | --seeds 3 --num-actions 6 --num-rollouts 5 --k 3 --bias-batches 150
      --variance-batches 50 --rollouts-swept 4 6 --actions-swept 2 5 | --k 1 | must be at least 2
    chain_maze | --length 30 --iterations 40 --batch-sizes 4 8 --ks 2 4 --learning-rates 0.01 0.3
      --search-seeds 2 --seeds 3 --records 4 --variance-batches 8 | --ks 8 | below each of --batch
    continuous_maxrl | --arms 3 --rollouts 4 --groups 64 --repeats 2 --learned 3 --updates 3
      --maze 7 --warm-steps 2 --maze-steps 1 --maze-prompts 2 --eval-mazes 3 --eval-samples 4
      --objectives maxrl-2 | --objectives grpo-2 | --objectives grpo-2: grpo does not use k
    exact_likelihood | --steps 4 --rollouts 4 --sweep 1 --classes 5 --test-images 9 --batch 8
      --seeds 2 | --seeds 1 | at least 2
    weights | --rollouts 8 --points 5 | --k 8 | --k must be from 2 to the smallest of --rollouts
    data_scarce | --seeds 1 --maze-size 7 --sft-steps 20 --prompts 2 --training-mazes 4 --epochs 2
      --evaluations 1 --eval-mazes 4 --eval-samples 16 --methods maxrl | --epochs 0 | a multiple of
    distillation | --seeds 1 --maze-size 7 --sft-steps 20 --teacher-steps 1 --prompts 2 --tokens 100
      --evaluations 1 --eval-mazes 4 --coefficients 0.5 | --teacher-steps 0 | must be at least 1
    gradient_norms | --seeds 1 --maze-size 7 --sft-steps 40 --mazes 4 --rollouts 8 --methods rloo
      maxrl | --mazes 0 | at least 1
    guessing | --objectives maxpo-k4 --seeds 1 --sft-steps 60 --tokens 500 --rollouts 8
      --evaluations 1 --eval-samples 16 | --objectives best | objective must be one that
    language_objectives | --problems problems --objectives grpo --seeds 1 --tokens 20 --prompts 2
      --rollouts 2 --eval-samples 2 --training-problems 8 | --training-problems 9 | at most 8
    league_settings | --seeds 1 --maze-size 7 --sft-steps 20 --prompts 2 --steps 54 --eval-mazes 4
      --methods pacs_paper | --steps 2 | must be a multiple of 6
    maze_scaling | --maze-size 7 --sft-steps 20 --steps 2 --prompts 2 --rollouts 4 --seeds 1
      --objectives maxpo --eval-mazes 4 --eval-samples 4 | --rollouts 2 | must be at least 4 each
    maze_table | --recipe {recipe} --objectives maxrl --steps 2 | --steps 0 | must be at least 1
    moment_variance | --seeds 1 --maze-size 7 --sft-steps 20 --prompts 2 --steps 10
      --methods pkpo | --steps 9 | of 10
    never_give_up | --seeds 1 --maze-size 7 --sft-steps 20 --tokens 300 --evaluations 1
      --eval-mazes 4 --eval-samples 4 --methods ngu-mean | --part draws | must be of grpo-uniform
    pacs_ablations | --seeds 1 --maze-size 7 --sft-steps 20 --prompts 4 --steps 6 --eval-mazes 4
      --eval-samples 4 --methods pacs beta-10 | --steps 2 | must be a multiple of 6
    pacs_bandit | --seeds 1 --actions 3 --rollouts 2 | --actions 2 | must be above 2
    self_distillation | --seeds 1 --sft-steps 20 --prompts 2 --tokens 100 --eval-mazes 2
      | --tokens 0 | must be at least 1
    stopping | --seeds 1 --maze-size 7 --sft-steps 20 --tokens 300 --prompts 2 --evaluations 1
      --eval-mazes 4 --eval-samples 4 --training-mazes 8 --methods maxrl-stop | --methods best | of
    objectives_league | --maze-size 7 --sft-steps 40 --prompts 4 --tokens 300 --variance-steps 2
      --eval-mazes 4 --eval-samples 16 --seeds 1 --objectives pacs | --objectives gdpo | got gdpo
"""
QUICK = ("bandit", "chain_maze", "weights")


def load(name):
    return importlib.import_module(name)


def gaps(results):
    return [results["minima"][f"reference {x} 0.1"][0]["gap"] for x in ("rloo", "dr_grpo")]


def as_rloo(one):  # of 8 rollouts
    pairs = zip(one["grad_norm"], one["reward_mean"], strict=True)
    return pytest.approx([norm * p * 8 / 7 for norm, p in pairs], rel=1e-5)


# A number of each result that is known beforehand.
KNOWN = {
    "ahead": lambda x: x["runs"][0]["logprob_diff"] < 1e-5 < 1e-3 < x["runs"][1]["logprob_diff"],
    "bandit": lambda x: x["variance_by_k"]["6"]["k"] == [2, 3, 4, 5],
    "chain_maze": lambda x: x["arms"][0]["curves"]["rarer"]["median"][0] == 0.5,
    "continuous_maxrl": lambda x: max(x["shifts"]["bias_by_order"].values()) < 1e-12,
    "exact_likelihood": lambda x: (
        x["curves"][0]["curves"]["pass@1"]["mean"][0] == pytest.approx(0.2)
    ),
    "weights": lambda x: (
        x["estimators"]["8"].keys() | x["without_weight"].keys()
        == {name for name, row in ESTIMATORS.items() if not row.of_run}
    ),
    "data_scarce": lambda x: [len(x["runs"][0][y]) for y in ("entropy", "pass@16")] == [1, 2],
    "distillation": lambda x: x["runs"][0]["evaluations"][-1]["step"] == len(x["runs"][0]["kl"]),
    "gradient_norms": lambda x: x["runs"][0]["grad_norm"] == as_rloo(x["runs"][1]),
    "guessing": lambda x: [len(counts) for counts in x["runs"][0]["num_correct"]] == [31] * 2,
    "language_objectives": lambda x: [len(one["num_correct"]) for one in x["runs"]] == [4, 4],
    "moment_variance": lambda x: len(x["runs"][0]["moment_variance"]) == 10,
    "league_settings": lambda x: len(x["runs"][0]["entropy"]) == 6,
    "maze_scaling": lambda x: [step for step, _ in x["runs"][0]["reward"]] == [1, 2],
    "maze_table": lambda x: x["runs"]["maxrl"]["pass_at_k"].keys() == {"0", "2"},
    "pacs_ablations": lambda x: [len(one["entropy"]) for one in x["runs"]] == [6, 6],
    "never_give_up": lambda x: sum(of for _, of in x["runs"][0]["solved_by_bin"]) == 4,
    # in groups of two psi is the gap between actions with rloo, and half of it with dr_grpo
    "pacs_bandit": lambda x: gaps(x) == pytest.approx([math.log(9), 2 * math.log(9)], rel=1e-4),
    "self_distillation": lambda x: [one["steps"] > 0 for one in x["runs"]] == [False] + [True] * 13,
    "stopping": lambda x: 8 <= min(x["runs"][0]["draws"]) <= max(x["runs"][0]["draws"]) <= 128,
    "objectives_league": lambda x: x["runs"][0]["tokens"] == 0 < 300 <= x["runs"][1]["tokens"],
}


@pytest.mark.parametrize(
    ("script", "tiny", "bad", "sentence"),
    [
        pytest.param(*row, marks=() if row[0] in QUICK else pytest.mark.slow, id=row[0])
        for row in table(SCRIPTS)
    ],
)
def test_a_script_runs_and_refuses_a_bad_setting(
    script, tiny, bad, sentence, tmp_path, capsys, monkeypatch
):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)  # where --work is
    recipe, module = tmp_path / "recipe.toml", load(script)
    recipe.write_text(RECIPE)
    problems = tmp_path / "problems"
    problems.mkdir()
    save_byte_level_policy(tmp_path).rename(problems / "smollm2")
    for name, count in (("train", 8), ("test", 4)):
        lines = [json.dumps({"prompt": f"{i} + 1 = ", "answer": f"{i + 1}"}) for i in range(count)]
        (problems / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    flags = [*tiny.format(recipe=recipe).split(), "--threads", "1", "--out", "out"]
    assert module.main([*flags, *bad.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert not [*(tmp_path / "out").iterdir()]
    assert module.main(flags) == 0
    text = (tmp_path / "out" / f"{script}.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert KNOWN[script](record["results"])
    assert (tmp_path / "out" / f"{script}.png").read_bytes().startswith(b"\x89PNG")


def test_a_mix_scores_solutions_and_rules_end_visits(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    study = load("never_give_up")
    mix, rounds = study.Mix(11), []
    prompts, solutions = mix.demonstrations(254, 7)
    assert mix.score(prompts, solutions).tolist() == [1.0] * 7
    assert set(prompts.lengths.tolist()) == {60, 94, 136}
    epochs = [mix.prompts("train", start, 2).tokens for start in (0, 256)]
    assert torch.equal(*epochs)
    for rule in (study.Half, study.Falls):
        carried = rule(torch.tensor([[0, 2], [1, 1], [2, 0], [3, 4]]), 8)
        carried.steps = 72  # Falls: R = 2
        for rewards in ([1.0, 0, 0, 0], [1, 0, 1, 1]):
            carried.observe(torch.tensor(rewards)[:, None])
            rounds.append(carried.table[:, 1].tolist())
    assert rounds == [[0, 2, 1, 0], [0, 3, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]


def test_every_objective_is_in_the_league_or_is_left_out_for_a_reason(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    league = load("objectives_league")
    assert {*league.LEAGUE} ^ {*league.LEFT_OUT} == {*OBJECTIVES}


def test_the_recipe_has_the_papers_settings(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    recipe = ["--config", str(FOLDER / "maze_paper.toml"), "--out", "none"]
    for flags in load("maze_table").OBJECTIVES.values():
        parse([*recipe, *flags])
    config = parse(recipe)
    task = MazeTask(config.parts["task"]["maze_size"])
    config = resolve(config, task)
    assert sum(x.numel() for x in build_policy(config, task).parameters()) == 3_944_704
    expected = {
        **{"objective": "maxrl", "order": 127, "maze_size": 17, "max_new_tokens": 180},
        **{"sft_steps": 1500, "sft_batch": 32, "sft_lr": 5e-4, "sft_beta2": 0.95},
        **{"steps": 20000, "prompts": 32, "rollouts": 128, "updates_per_step": 1},
        **{"lr": 1e-4, "lr_schedule": "constant", "warmup_steps": 0, "beta2": 0.999},
        **{"weight_decay": 0.01, "temperature": 1.0, "kl_coef": 0.0, "entropy_coef": 0.0},
        **{"eval_prompts": 256, "eval_samples": 256},
    }
    assert {name: config.flat()[name] for name in expected} == expected

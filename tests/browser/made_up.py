"""Write folders of runs and evaluations as the trainer does, with numbers of many digits and with
hostile texts."""

import json
import random
from pathlib import Path
from typing import Any

from maxrl_fast.config.changes import PASS_RATES
from maxrl_fast.training.objectives.registry import weight_of

HOSTILE = "</script><script>window.broken = 1</script><!-- <script> <img src=x onerror="
HOSTILE += "'window.broken = 2'> ]]> &lt; \u2028\u2029 \ud800 \x00 {{data}}"
CONFIG = {
    **{"objective": "maxpo", "k": 4, "order": None, "rollouts": 16, "prompts": 32, "task": "maze"},
    **{"lr": 3e-4, "steps": 30, "seed": 0, "eps": None, "out": "somewhere", "maze_size": 9},
    **{"versions": {"python": "3"}, "command": ["train"], "model": None},
}
KEYS = "reward_mean frac_prompts_solved frac_groups_zero_variance entropy grad_norm kl".split()
KEYS += ["tokens_per_second", "loss"]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(
    folder: Path, *, steps: int = 30, seed: int = 0, **options: Any
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"seed": seed} | options))
    (folder / "weight.json").write_text(json.dumps(weight_of(CONFIG | options, PASS_RATES)))
    records = [
        {"step": step, **{key: rng.gauss(0.5, 0.1) for key in KEYS}} for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", records)
    ks = (1, 2, 4, 8)
    evaluations = [
        {"step": s, "pass_at_k": {k: rng.random() for k in ks}, "truncated": rng.random()}
        for s in (0, 10, steps)
    ]
    write_lines(folder / "eval.jsonl", evaluations)
    warning = {"step": 12, "kind": "entropy", "value": 0.1, "message": f"it fell {HOSTILE}"}
    counted = {"num_samples": 8, "num_prompts": 30, "ids": list(range(30))}
    counts = [
        counted | {"step": s, "num_correct": [rng.randint(0, 8) for _ in range(30)]}
        for s in (0, 10, steps)
    ]
    prompts = [{"id": i, "prompt": f"held out {i} {HOSTILE}"} for i in range(29)]
    rollouts = [rollout(rng, step, i) for step in (1, 9) for i in (100, 101) for _ in range(6)]
    samples = [sample(rng, step, i) for step in (10, 20) for i in range(13)]
    for name, lines in {
        **{"warnings": [warning], "pass_rates": counts},
        **{"eval_prompts": prompts, "rollouts": rollouts, "samples": samples},
    }.items():
        write_lines(folder / f"{name}.jsonl", lines)
    return records


def sample(rng: random.Random, step: int, i: int) -> dict[str, Any]:
    response = f"needle {HOSTILE}" if i == 3 else f"response {i}"
    reward = None if i == 5 else float(i % 2)
    long = "\n".join(f"line {line}" for line in range(400)) if i == 0 else f"prompt {i}"
    own = {"step": step, "id": i, "prompt": long, "response": response, "reward": reward}
    return own | {"truncated": i == 7, "tokens": i + 1}


def rollout(rng: random.Random, step: int, i: int) -> dict[str, Any]:
    reward = rng.choice((0.0, 0.25, 1.0))
    return {
        **{"step": step, "id": i, "prompt": f"question {i}", "response": f"try {rng.random()}"},
        **{"reward": reward, "truncated": False, "tokens": 5, "advantage": rng.gauss(0, 1)},
        "components": {"right": reward, "short": None},
        **{"answer": f"answer {i} {HOSTILE}", "columns": {"level": i, "hostile": HOSTILE}},
    }


def write_evaluation(out: Path) -> dict[str, Any]:
    out.mkdir(parents=True)
    rates = {str(k): k / 20 for k in (1, 2, 4, 8, 16)}
    coverage = {k: {"mean": x, "low": x - 0.05, "high": x + 0.04} for k, x in rates.items()}
    content = {"name": "step 90", "options": {"task": "maze", "samples": 16}, "coverage": coverage}
    content |= {"pass_at_k": {k: coverage[k] for k in ("1", "16")}}
    (out / "eval.json").write_text(json.dumps(content))
    sample = {"id": 1, "prompt": "p", "response": "r", "reward": 1.0, "truncated": False}
    write_lines(out / "samples.jsonl", [sample | {"tokens": 3}])
    return content

"""`python -m bench.language MODEL`: a real language model, beside TRL, transformers and vLLM where
these are installed.

MODEL is a Hugging Face folder, such as the one that examples/language/prepare.py makes. The prompts
are those of examples/language/word_problems.py, all computes in --dtype on a CPU. Parts:

    sampling   16 prompts x 16 samples x 32 tokens by the native engine, by transformers' generate
               and by vLLM, in turn in one process
    step       a step of GRPO, 8 prompts x 16 rollouts x 24 tokens: ours and TRL's, in turn in one
               process, their peak memory, and the share that an update has of the measured
               throughput of a matrix multiplication

TRL and vLLM need separate environments: `make peers` and `make test-vllm` make them. The last line
is one JSON document. It takes about ten minutes on two cores.
"""

import importlib.util
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench import peers, rollout
from bench.measure import argument_parser, describe, keep, machine, prepare, run_command
from bench.whole_step import time_steps, warm_started
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import parse
from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.runtime.device import resolve_dtype

PROBLEMS = Path(__file__).parent.parent / "examples/language/word_problems.py"
STEP = "--prompts 8 --rollouts 16 --max-new-tokens 24"
TRL_ROWS = 16  # of a micro-batch: all 128 rows need more than 24 GB
SAMPLING = "--prompts 16 --rollouts 16 --max-new-tokens 32"


def job(model: Path, folder: Path, sizes: str, dtype: torch.dtype) -> list[str]:
    """Write prompts into `folder`, and return the options of a job that trains `model` on them."""
    problems = runpy.run_path(str(PROBLEMS))["problems"]
    data = folder / "train.jsonl"
    data.write_text("\n".join(json.dumps(line) for line in problems("train", 400)) + "\n")
    name = str(dtype).removeprefix("torch.")
    fixed = f"--objective grpo --device cpu --dtype {name} --lr 2e-6 --lr-schedule constant"
    files = ["--task", f"{PROBLEMS}:number", "--data", str(data), "--model", str(model)]
    return [*fixed.split(), "--warmup-steps", "0", *sizes.split(), *files]


def sampling(config: Config, rounds: int, names: list[str]) -> dict[str, Any]:
    resolved, task, model = warm_started(config)
    if not isinstance(model, Decoder):
        raise InputError("bench.language needs a model of the native engine")
    prompts = task.prompts("train", 0, resolved.sampling.prompts)
    options = resolved.sampling
    *_, figures = rollout.measure(
        model, task, prompts, options.rollouts, options.max_new_tokens, names, False, rounds,
        resolved.run.where[1],
    )  # fmt: skip
    rollout.report("sampling", figures)
    return figures


def step(config: Config, rounds: int) -> dict[str, Any]:
    """Return the figures of a step in which every rollout has a gradient, and beside TRL's."""
    resolved, task, model = warm_started(config)
    ours = time_steps(resolved, task, model, rounds)
    # the floor is that of rollout and update: a third and three thirds of an update's products
    floor = ours["floor_milliseconds"] * 3 / 4
    ours["update_of_gemm_rate"] = floor / ours["milliseconds_by_stage"]["update"]
    stages = ", ".join(f"{k} {v:,.0f}" for k, v in ours["milliseconds_by_stage"].items())
    print(
        f"step: {ours['response_tokens']:,.0f} response tokens, {ours['step_milliseconds']:,.0f} "
        f"ms ({stages}); the update runs at {ours['update_of_gemm_rate']:.2f} of the GEMM rate"
    )
    if not importlib.util.find_spec("trl"):
        return {"ours": ours}
    beside = peers.measure(config, rounds * peers.TURN, TRL_ROWS)
    peers.report(beside)
    return {"ours": ours, "trl": beside}


def main() -> int:
    parser = argument_parser("language", __doc__, rounds=3, has_dtype=True)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face folder")
    parts = ("sampling", "step")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    device = prepare(options)
    if device.type != "cpu":
        raise InputError("bench.language measures a CPU: leave out --device")
    dtype = resolve_dtype(options.dtype, device)
    names = [name for name in ("transformers", "vllm") if importlib.util.find_spec(name)]
    result: dict[str, Any] = {"benchmark": "language", "machine": machine(device, dtype)}
    print(describe(result["machine"]))
    with tempfile.TemporaryDirectory() as folder:
        if "sampling" in options.parts:
            config = parse(job(options.model, Path(folder), SAMPLING, dtype))
            result["sampling"] = sampling(config, options.rounds, names)
            keep(result)
        if "step" in options.parts:
            config = parse(job(options.model, Path(folder), STEP, dtype))
            result["step"] = step(config, options.rounds)
            keep(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

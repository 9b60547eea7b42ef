"""`python -m bench.train_step`: a training step of the default job by stage, and the update in three layouts.

The layouts compute the same loss, gradients and optimizer step from the same rollouts, in one process, in turn, and their
gradients are compared first:

    shared     packed, each prompt once for all its responses: what the trainer does
    repeated   packed, each response with its own copy of the prompt
    padded     each response with its own copy of the prompt, all padded to one length: what is usual

Cases: `job`, the default job after a short warm start, with rollouts of its own; `maze17`, the MaxRL paper's maze, 32
prompts of 17x17 and 128 rollouts about as long as solutions; `step17`, a whole step of the same size, from prompts to weights
back in the rollout engine, after a warm start, as if every rollout taught; `qwen-0.5b` and `qwen-1.5b`, layers and vocabulary
of those sizes with random weights, of which a CPU takes two layers. The floor of an update is the operations its products need,
at the machine's measured matrix rate; model FLOPs utilisation is floor over time. The last line is one JSON document.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.layouts import LAYOUTS, Case, update_in_layouts
from bench.measure import milliseconds
from bench.whole_step import whole_step
from maxrl_fast.config.checks import check
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse, resolve
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import memory_bytes, resolve_device, resolve_dtype, versions
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.policy import build_policy
from maxrl_fast.objectives import OBJECTIVES
from maxrl_fast.ops import group_advantage
from maxrl_fast.records import Prompts, Rollouts, cumulative, gather_sequences
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.run.screen import Screen
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.warm_start import warm_start


def job(config: Config) -> tuple[Case, dict[str, Any]]:
    """The default job, or what its flags make of it, and the figures of its stages."""
    task = build_task(config.task, config.run.seed)
    config = resolve(config, task)
    estimator = OBJECTIVES[config.objective.objective].estimator
    if estimator is None:
        raise InputError(f"--objective must be a group advantage here, got {config.objective.objective}")
    device, dtype = torch.device(config.run.device), getattr(torch, config.run.dtype)
    model = build_policy(config, task).to(device)
    warm_start(config, task, model, Screen())
    num_prompts, num_rollouts = config.rollout.prompts, config.rollout.rollouts
    engine, sampling = NativeEngine(model, dtype), Sampling.of(config, task)
    prompts = task.prompts("train", 10**6, num_prompts).to(device)
    rollouts = engine.generate(prompts, num_rollouts, sampling, seed=0, step=1)
    rewards = task.score(prompts, rollouts).view(num_prompts, num_rollouts)

    def advantage() -> Tensor:
        return group_advantage(rewards, estimator, k=config.objective.k, order=config.objective.order).flatten()

    advantages = advantage()
    everything = torch.arange(len(advantages))
    learner = Learner.of(config, copy.deepcopy(model), LossSettings.of(config))
    stages = milliseconds(
        {
            "prompts": lambda: task.prompts("train", 10**6, num_prompts),
            "rollout": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "reward": lambda: task.score(prompts, rollouts),
            "advantage": advantage,
            "update": lambda: learner.update(prompts, rollouts, advantages, everything, when="bench", lr=0.0),
            "weights to rollout": lambda: engine.load_weights(model),
        },
        5,
        device,
    )
    repeated = repeat_prompts(prompts, num_rollouts)
    rollout_ways = milliseconds(
        {
            "shared": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "repeated": lambda: engine.generate(repeated, 1, sampling, seed=0, step=1),
        },
        3,
        device,
    )
    figures = {
        "milliseconds_by_stage": stages,
        "rollouts_that_teach": int((advantages != 0).sum()),
        "rollout_tokens_per_second": len(rollouts.tokens) / stages["rollout"] * 1e3,
        "step_tokens_per_second": len(rollouts.tokens) / sum(stages.values()) * 1e3,
        "rollout_milliseconds": rollout_ways,
        "rollout_ratio": rollout_ways["repeated"] / rollout_ways["shared"],
    }
    return Case(model, prompts, rollouts, config.optimizer.token_budget), figures


def repeat_prompts(prompts: Prompts, times: int) -> Prompts:
    """Every prompt `times` times, each with an id of its own: the engine then computes each of them."""
    copies = torch.arange(len(prompts), device=prompts.ids.device).repeat_interleave(times)
    index, cu_seqlens = gather_sequences(prompts.cu_seqlens, copies)
    return Prompts(prompts.tokens[index], cu_seqlens, torch.arange(len(copies), device=copies.device))


def maze17(num_prompts: int, num_rollouts: int) -> Case:
    """The MaxRL paper's policy and batch. Responses are solutions, shortened by up to a third so that lengths differ."""
    task = MazeTask(17, 0)
    config = DecoderConfig(32, 256, 1024, 4, 4, 2, 64, max_position_embeddings=512, rope_theta=1e6)
    model = Decoder(config)
    model.initialise(0)
    prompts, solutions = task.demonstrations(0, num_prompts)
    generator = torch.Generator().manual_seed(0)
    lengths = solutions.lengths.repeat_interleave(num_rollouts)
    lengths = (lengths * (1 - torch.rand(len(lengths), generator=generator) / 3)).long()
    starts = solutions.cu_seqlens[:-1].repeat_interleave(num_rollouts)
    cu_seqlens = cumulative(lengths)
    index = torch.arange(int(cu_seqlens[-1])) + (starts - cu_seqlens[:-1]).repeat_interleave(lengths)
    return Case(model, prompts, made_up(solutions.tokens[index], cu_seqlens), 16384)


QWEN = {"qwen-0.5b": (896, 4864, 24, 14, 2, 64), "qwen-1.5b": (1536, 8960, 28, 12, 2, 128)}


def qwen(name: str, num_prompts: int, num_rollouts: int, device: torch.device) -> Case:
    """Prompts of 512 tokens, responses of 256 to 1024 on a GPU; a quarter of both, and two layers, on a CPU.

    Activations are computed again in the backward pass where a GPU would not hold those of a prompt and its 16 responses.
    """
    hidden, intermediate, layers, heads, kv_heads, head_dim = QWEN[name]
    small = device.type == "cpu"
    config = DecoderConfig(
        *(151936, hidden, intermediate, 2 if small else layers, heads, kv_heads, head_dim), max_position_embeddings=32768
    )
    model = Decoder(config) if small else on_device(config, device)
    if small:
        model.initialise(0)
    generator = torch.Generator().manual_seed(0)
    prompt, longest = (128, 256) if small else (512, 1024)
    lengths = torch.randint(longest // 4, longest + 1, (num_prompts * num_rollouts,), generator=generator)
    tokens = torch.randint(0, 151936, (num_prompts * prompt + int(lengths.sum()),), generator=generator)
    prompt_tokens, response_tokens = tokens.split([num_prompts * prompt, int(lengths.sum())])
    prompts = Prompts(prompt_tokens, torch.arange(num_prompts + 1) * prompt, torch.arange(num_prompts))
    rollouts = made_up(response_tokens, cumulative(lengths))
    if small:
        return Case(model, prompts, rollouts, 2048)
    return Case(model, prompts, rollouts, *((12288, False) if memory_bytes(device) > 1e11 else (16384, True)))


def on_device(config: DecoderConfig, device: torch.device) -> Decoder:
    """A policy with random weights drawn on the device: a CPU takes half a minute for a billion."""
    model = Decoder.empty(config, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def step17(num_prompts: int, num_rollouts: int, warm_up: int, device: torch.device, dtype: torch.dtype) -> Config:
    """The MaxRL paper's policy and batch, by GRPO; on a GPU one pass holds the whole batch."""
    config = Config().replace(
        objective="grpo",
        maze_size=17,
        prompts=num_prompts,
        rollouts=num_rollouts,
        hidden_size=256,
        intermediate_size=1024,
        heads=4,
        kv_heads=2,
        sft_steps=warm_up,
        token_budget=4096 if device.type == "cpu" else 131072,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        out=Path("unused"),
    )
    check(config)
    return config


def made_up(tokens: Tensor, cu_seqlens: Tensor) -> Rollouts:
    """Rollouts that no policy sampled."""
    return Rollouts(tokens, cu_seqlens, torch.zeros(len(tokens)), torch.zeros(len(cu_seqlens) - 1, dtype=torch.bool))


def report(name: str, case: dict[str, Any]) -> None:
    """The figures for people."""
    print(
        f"\n{name}: {case['parameters']:,} parameters, {case['prompts']} prompts x {case['rollouts']} rollouts, "
        f"{case['prompt_tokens']:,} prompt and {case['response_tokens']:,} response tokens; "
        f"products at {case['matrix_gflops']:,.0f} GFLOP/s"
    )
    for stage, value in case.get("milliseconds_by_stage", {}).items():
        print(f"  {stage:<20}{value:9.1f} ms")
    if "milliseconds_by_stage" in case:
        print(
            f"  response tokens/s: {case['rollout_tokens_per_second']:,.0f} in rollout, {case['step_tokens_per_second']:,.0f} "
            f"in the whole step; {case['rollouts_that_teach']} rollouts can teach; "
            f"rollout with prompts repeated takes {case['rollout_ratio']:.2f} times as long"
        )
    print(f"  {'update':<12}{'ms':>10}{'x shared':>10}{'tokens':>12}{'tokens/s':>12}{'floor ms':>10}{'MFU':>7}{'peak MiB':>10}")
    for layout, x in case["layouts"].items():
        peak = "" if x["peak_mib"] is None else f"{x['peak_mib']:,.0f}"
        print(
            f"  {layout:<12}{x['milliseconds']:10,.1f}{x['times_shared']:10.2f}{x['tokens']:12,}{x['tokens_per_second']:12,.0f}"
            f"{x['floor_milliseconds']:10,.1f}{x['model_flops_utilisation']:7.1%}{peak:>10}"
        )


def report_step(case: dict[str, Any]) -> None:
    """The whole step's figures for people."""
    print(
        f"\nwhole step of {case['maze_size']}x{case['maze_size']} mazes, {case['prompts']} x {case['rollouts']} rollouts, "
        f"{case['response_tokens']:,.0f} response tokens, all learned from: {case['step_milliseconds']:,.1f} ms, "
        f"{case['step_tokens_per_second']:,.0f} tokens/s"
    )
    print("  stage by stage: " + ", ".join(f"{k} {v:,.1f} ms" for k, v in case["milliseconds_by_stage"].items()))
    if "compiled" in case:
        print(f"  by torch.compile: {case['compiled']['step_milliseconds']:,.1f} ms")


def main() -> int:
    """The command line: the cases, and for `job` every option of the trainer."""
    cases = ["job", "maze17", "step17", *QWEN]
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=cases, default=["job", "maze17"], help="default: job maze17")
    parser.add_argument("--rounds", type=int, help="calls after the first (default: 3; maze17: 0, the first is timed)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of the update (default: all)")
    parser.add_argument("--warm-start", type=int, default=100, help="its steps in step17 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="prompts of a step (default: the case's)")
    parser.add_argument("--rollouts", type=int, help="rollouts of each prompt (default: the case's)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    options, flags = parser.parse_known_args()
    try:
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, device)
        machine = versions() | {"threads": torch.get_num_threads(), "device": str(device), "dtype": str(dtype)}
        print(f"{machine['platform']}, {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {dtype}")
        result: dict[str, Any] = {"benchmark": "train_step", "machine": machine, "cases": {}}
        for name in options.cases:
            figures: dict[str, Any] = {}
            sizes = {"maze17": (32, 128), "step17": (32, 128), "qwen-0.5b": (4, 16), "qwen-1.5b": (4, 16)}.get(name, (32, 16))
            prompts, rollouts = options.prompts or sizes[0], options.rollouts or sizes[1]
            rounds = (0 if name == "maze17" else 3) if options.rounds is None else options.rounds
            if name == "step17":
                config = step17(prompts, rollouts, options.warm_start, device, dtype)
                for figures in whole_step(config, max(rounds, 1)):
                    result["cases"][name] = figures
                    if device.type == "cuda":
                        print(json.dumps(result), flush=True)  # so far: to compile may outlast a limit
                report_step(figures)
                continue
            if name == "job":
                given = ["--prompts", str(prompts), "--rollouts", str(rollouts), "--sft-steps", "40", "--out", "unused"]
                given += ["--dtype", str(dtype).removeprefix("torch."), "--device", device.type]
                config = parse([*given, *flags])
                check(config)
                case, figures = job(config)
            else:
                case = maze17(prompts, rollouts) if name == "maze17" else qwen(name, prompts, rollouts, device)
            layouts = [layout for layout in LAYOUTS if layout in {"shared", *options.layouts}]
            result["cases"][name] = figures | update_in_layouts(case, rounds, device, dtype, layouts)
            report(name, result["cases"][name])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result), flush=True)
    disagreeing = [name for name, case in result["cases"].items() if not case.get("gradients_agree", True)]
    if disagreeing:
        print(f"error: the layouts' gradients disagree in {' and '.join(disagreeing)}", file=sys.stderr)
    return 1 if disagreeing else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.train_step`: a training step of the default job by stage, and the update in
two layouts.

The layouts compute the same loss, gradients and optimizer step from the same rollouts, in turn, in
one process. Their gradients are compared first.

    shared     packed, what responses begin with alike once: the trainer's layout
    padded     each response with its own copy of the prompt, all padded to one length: the usual
               layout

Cases:

    job        the default job after a short warm start, with its own rollouts; takes every option
               of the trainer
    step17     a whole step of the MaxRL paper's size, 32 prompts of 17x17 mazes, 128 rollouts each,
               after a warm start, in which every rollout has a gradient
    qwen-0.5b, qwen-1.5b   layers and vocabulary of those sizes with random weights; on a CPU two
                           layers

The floor of an update is the FLOPs of its matrix multiplications at the machine's measured GEMM
throughput; model FLOPs utilisation is floor over time. The last line is one JSON document.

It takes some minutes on two cores; a case has 30 to 60 seconds in `make gpu`.
"""

import argparse
import json
import sys
from typing import Any

import torch
from torch import Tensor

from bench.layouts import LAYOUTS, Case, update_in_layouts
from bench.measure import (
    argument_parser,
    describe,
    keep,
    machine,
    prepare,
    run_command,
)
from bench.whole_step import FIRST_PROMPT, timed_trainer, warm_started, whole_step
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import parse, parse_options
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts, Rollouts, cumulative
from maxrl_fast.runtime.device import resolve_dtype

STEPS = 5  # timed steps of the job, after the first


def job(config: Config) -> tuple[Case, dict[str, Any]]:
    """Return the rollouts of the default job, or of the job of these flags, and the figures of its
    stages.
    """
    resolved, task, model = warm_started(config)
    timed = timed_trainer(resolved, task, model, trains=False)
    for _ in range(1 + STEPS):
        timed.step()
    tokens, stages = timed.tokens(STEPS), timed.median_stages(STEPS)
    collected = timed.trainer.collector.collect(1, FIRST_PROMPT)
    figures = {
        "milliseconds_by_stage": stages,
        "rollouts_that_teach": round(timed.metric("num_sequences_trained", STEPS)),
        "rollout_tokens_per_second": tokens / stages["rollout"] * 1e3,
        "step_tokens_per_second": tokens / sum(stages.values()) * 1e3,
    }
    return Case(
        model, collected.prompts, collected.rollouts, config.optimizer.token_budget
    ), figures


QWEN = {"qwen-0.5b": (896, 4864, 24, 14, 2, 64), "qwen-1.5b": (1536, 8960, 28, 12, 2, 128)}


def qwen(
    name: str, num_prompts: int, num_rollouts: int, token_budget: int, device: torch.device
) -> Case:
    """Return a policy of Qwen2.5's size with prompts of 512 tokens and responses of 256 to 1024.

    On a CPU: two layers, a quarter of these lengths, and at most 2048 tokens a pass. By arithmetic
    four prompts a pass, 49,152 tokens, take 38 GB (0.5B) and 56 GB (1.5B).
    """
    hidden, intermediate, layers, heads, kv_heads, head_dim = QWEN[name]
    small = device.type == "cpu"
    config = DecoderConfig(
        *(151936, hidden, intermediate, 2 if small else layers, heads, kv_heads, head_dim),
        max_position_embeddings=32768,
    )
    model = Decoder(config) if small else on_device(config, device)
    if small:
        model.initialise(0)
    generator = torch.Generator().manual_seed(0)
    prompt, longest = (128, 256) if small else (512, 1024)
    lengths = torch.randint(
        longest // 4, longest + 1, (num_prompts * num_rollouts,), generator=generator
    )
    tokens = torch.randint(
        0, 151936, (num_prompts * prompt + int(lengths.sum()),), generator=generator
    )
    prompt_tokens, response_tokens = tokens.split([num_prompts * prompt, int(lengths.sum())])
    prompts = Prompts(
        prompt_tokens, torch.arange(num_prompts + 1) * prompt, torch.arange(num_prompts)
    )
    rollouts = made_up(response_tokens, cumulative(lengths))
    return Case(model, prompts, rollouts, min(token_budget, 2048) if small else token_budget)


def on_device(config: DecoderConfig, device: torch.device) -> Decoder:
    """Return a policy with random weights drawn on the device: a CPU takes half a minute for a
    billion.
    """
    model = Decoder.empty(config, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def step17(
    num_prompts: int, num_rollouts: int, warm_up: int, device: torch.device, dtype: torch.dtype
) -> Config:
    """Return the configuration of the MaxRL paper's policy and batch, with GRPO; on a GPU one pass
    holds the whole batch.
    """
    options = {
        **{"objective": "grpo", "maze_size": 17, "prompts": num_prompts, "rollouts": num_rollouts},
        **{"hidden_size": 256, "intermediate_size": 1024, "heads": 4, "kv_heads": 2},
        **{"sft_steps": warm_up, "token_budget": 4096 if device.type == "cpu" else 131072},
        **{"dtype": str(dtype).removeprefix("torch."), "device": device.type},
    }
    return parse_options(options)


def made_up(tokens: Tensor, cu_seqlens: Tensor) -> Rollouts:
    return Rollouts(
        tokens,
        cu_seqlens,
        torch.zeros(len(tokens)),
        torch.zeros(len(cu_seqlens) - 1, dtype=torch.bool),
    )


def report(name: str, case: dict[str, Any]) -> None:
    print(
        f"\n{name}: {case['parameters']:,} parameters, {case['prompts']} prompts x "
        f"{case['rollouts']} rollouts, "
        f"{case['prompt_tokens']:,} prompt and {case['response_tokens']:,} response tokens; "
        f"GEMM throughput {case['matrix_gflops']:,.0f} GFLOP/s"
    )
    for stage, value in case.get("milliseconds_by_stage", {}).items():
        print(f"  {stage:<20}{value:9.1f} ms")
    if "milliseconds_by_stage" in case:
        print(
            f"  response tokens/s: {case['rollout_tokens_per_second']:,.0f} in rollout, "
            f"{case['step_tokens_per_second']:,.0f} "
            f"in the whole step; {case['rollouts_that_teach']} rollouts have a gradient"
        )
    print(
        f"  {'update':<12}{'ms':>10}{'x shared':>10}{'tokens':>12}"
        f"{'tokens/s':>12}{'floor ms':>10}{'MFU':>7}{'peak MiB':>10}"
    )
    for layout, x in case["layouts"].items():
        peak = "" if x["peak_mib"] is None else f"{x['peak_mib']:,.0f}"
        print(
            f"  {layout:<12}{x['milliseconds']:10,.1f}{x['times_shared']:10.2f}{x['tokens']:12,}"
            f"{x['tokens_per_second']:12,.0f}"
            f"{x['floor_milliseconds']:10,.1f}{x['model_flops_utilisation']:7.1%}{peak:>10}"
        )


def report_step(case: dict[str, Any]) -> None:
    stages = ", ".join(f"{k} {v:,.1f} ms" for k, v in case["milliseconds_by_stage"].items())
    print(
        f"\nwhole step of {case['maze_size']}x{case['maze_size']} mazes, {case['prompts']} x "
        f"{case['rollouts']} rollouts, {case['response_tokens']:,.0f} response tokens: "
        f"{case['step_milliseconds']:,.1f} ms, floor {case['floor_milliseconds']:,.1f} ms\n"
        f"  by stage: {stages}"
    )


SIZES = {
    "job": (32, 16),
    "step17": (32, 128),
    "qwen-0.5b": (4, 16),
    "qwen-1.5b": (4, 16),
}


def measure(
    name: str,
    options: argparse.Namespace,
    flags: list[str],
    device: torch.device,
    dtype: torch.dtype,
    result: dict[str, Any],
) -> None:
    prompts, rollouts = options.prompts or SIZES[name][0], options.rollouts or SIZES[name][1]
    figures: dict[str, Any] = {}
    if name == "step17":
        config = step17(prompts, rollouts, options.warm_start, device, dtype)
        result["cases"][name] = whole_step(config, options.rounds)
        report_step(result["cases"][name])
        return
    if name == "job":
        given = ["--prompts", str(prompts), "--rollouts", str(rollouts), "--sft-steps", "40"]
        given += ["--dtype", str(dtype).removeprefix("torch."), "--device", device.type]
        case, figures = job(parse([*given, *flags]))
    else:
        case = qwen(name, prompts, rollouts, options.tokens, device)
    layouts = [layout for layout in LAYOUTS if layout in {"shared", *options.layouts}]
    figures["tokens_a_pass"] = case.token_budget
    for updates in update_in_layouts(case, options.rounds, device, dtype, layouts):
        result["cases"][name] = figures | updates
        keep(result)
    report(name, result["cases"][name])


def main() -> int:
    parser = argument_parser("train_step", __doc__, rounds=3, has_dtype=True)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(SIZES),
        default=["job"],
        help="default: job",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help="of the update (default: all)",
    )
    parser.add_argument(
        "--warm-start",
        type=int,
        default=100,
        help="warm-start steps of step17 (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=int, help="prompts per step (default: the case's)")
    parser.add_argument("--rollouts", type=int, help="rollouts per prompt (default: the case's)")
    parser.add_argument("--tokens", type=int, default=49152, help="of a pass of the qwen cases")
    options, flags = parser.parse_known_args()
    device = prepare(options)
    dtype = resolve_dtype(options.dtype, device)
    result: dict[str, Any] = {
        "benchmark": "train_step",
        "machine": machine(device, dtype),
        "cases": {},
    }
    print(describe(result["machine"]))
    for name in options.cases:
        measure(name, options, flags, device, dtype, result)
    print(json.dumps(result), flush=True)
    disagreeing = [
        name for name, case in result["cases"].items() if not case.get("gradients_agree", True)
    ]
    if disagreeing:
        print(
            f"error: the layouts' gradients disagree in {' and '.join(disagreeing)}",
            file=sys.stderr,
        )
    return 1 if disagreeing else 0


if __name__ == "__main__":
    sys.exit(run_command(main))

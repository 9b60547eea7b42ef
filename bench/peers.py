"""`python -m bench.peers`: a training step beside TRL's GRPOTrainer doing the same.

Both start from the same warm-started policy and train it by GRPO on 7x7 mazes, 8 prompts x 16 rollouts in float32; on a GPU
on 17x17 mazes, 32 x 128 in bfloat16. They sample N responses to each of G prompts with transformers or with the native engine,
score them by the same function, and make one AdamW step on all. One process, in turn: three steps of TRL, three of ours, and
so on; the first step of each three, which meets the other side's memory and caches, is not counted for either. The last line is
one JSON document. TRL wants an environment of its own: `make peers`.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.measure import synchronize
from bench.whole_step import OurStep
from maxrl_fast.config.checks import check
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse, resolve
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import resolve_device, versions
from maxrl_fast.model.checkpoint import save_checkpoint
from maxrl_fast.model.policy import build_policy
from maxrl_fast.records import Rollouts
from maxrl_fast.run.screen import Screen
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.maze import WORDS
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.training.warm_start import warm_start

SIZES = {
    "paper": ["--hidden-size", "256", "--intermediate-size", "1024", "--heads", "4", "--kv-heads", "2"],  # 3.9M parameters
    "default": [],  # 0.6M
}
JOBS = {
    "cpu": "--maze-size 7 --prompts 8 --rollouts 16 --dtype float32",
    "cuda": "--maze-size 17 --prompts 32 --rollouts 128 --dtype bfloat16 --token-budget 131072",
}
MOST_ROWS = 512  # of TRL's micro-batch: 4096 rows of 490 tokens would keep more activations than a GPU has memory

TURN = 3  # steps of a side before the other's turn


def trl_trainer(config: Config, task: Task, checkpoint: Path, steps: int, after_step: Any) -> tuple[Any, list[float]]:
    """A GRPOTrainer of the same job, and the list that its steps' mean rewards go to."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokenizer.eos_token = "DONE"  # where a response ends
    options = config.rollout
    prompts = task.prompts("train", 10**6, steps * options.prompts)
    lists = [prompts.tokens[a:b].tolist() for a, b in zip(prompts.cu_seqlens, prompts.cu_seqlens[1:], strict=False)]
    dataset = Dataset.from_dict(
        {"prompt": [" ".join(WORDS[t] for t in tokens) for tokens in lists], "index": list(range(len(lists)))}
    )
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        scores: list[float] = task.score(prompts.select(torch.tensor(index)), Rollouts.given(completion_ids)).tolist()
        rewards.append(statistics.mean(scores))
        return scores

    total = options.prompts * options.rollouts
    on_cpu = config.run.device == "cpu"
    micro_batch = total if on_cpu else math.gcd(total, MOST_ROWS)
    arguments = trl.GRPOConfig(
        output_dir=str(checkpoint / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=total // micro_batch,  # and that many are sampled at once
        num_generations=options.rollouts,
        max_completion_length=options.max_new_tokens,
        temperature=options.temperature,
        max_steps=steps,
        learning_rate=config.optimizer.lr,
        lr_scheduler_type="constant",
        max_grad_norm=config.optimizer.clip_grad,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=on_cpu,
        bf16=config.run.dtype == "bfloat16",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model, reward, arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=[after_step]
    )
    return trainer, rewards


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Both sides, `steps` steps each."""
    from transformers import TrainerCallback

    task = build_task(config.task, config.run.seed)
    config = resolve(config, task)
    torch.set_num_threads(config.run.threads or 1)
    device = torch.device(config.run.device)
    model = build_policy(config, task).to(device)
    warm_start(config, task, model, Screen())
    ours = OurStep(config, task, model)
    times: dict[str, list[float]] = {"ours": [], "trl": []}

    class InTurn(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize(device)
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(device)
            times["trl"].append(time.perf_counter() - self.start)
            for _ in range(TURN if len(times["trl"]) % TURN == 0 else 0):
                synchronize(device)
                start = time.perf_counter()
                ours()
                synchronize(device)
                times["ours"].append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "policy"
        save_checkpoint(checkpoint, model.config, model.weights(), task.tokenizer_files(), task.stop_ids)
        trainer, rewards = trl_trainer(config, task, checkpoint, steps, InTurn())
        trainer.train()
    counted = {name: [x for i, x in enumerate(values) if i % TURN] for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in counted.items()}
    return {
        "benchmark": "peers",
        "machine": versions()
        | {"threads": torch.get_num_threads(), "device": str(device), "dtype": config.run.dtype}
        | {name: importlib.metadata.version(name) for name in ("trl", "transformers", "accelerate")},
        "prompts": config.rollout.prompts,
        "rollouts": config.rollout.rollouts,
        "maze_size": config.task.maze_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "response_tokens": statistics.mean(ours.tokens),
        "reward_mean": {"ours": statistics.mean(ours.rewards), "trl": statistics.mean(rewards)},
        "seconds": medians,
        "seconds_of_each_step": times,
        "ratio": medians["trl"] / medians["ours"],
        "ratio_of_each_step": [t / o for t, o in zip(counted["trl"], counted["ours"], strict=True)],
    }


def main() -> int:
    """The command line: the sizes, and every option of the trainer."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=list(SIZES), default="paper", help="the policy (default: the paper's, 3.9M parameters)"
    )
    parser.add_argument("--turns", type=int, default=5, help=f"turns of each side, {TURN} steps each (default: 5)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    options, flags = parser.parse_known_args()
    try:
        if options.turns < 1:
            raise InputError(f"--turns must be at least 1, got {options.turns}")
        if importlib.util.find_spec("trl") is None:
            raise InputError("bench.peers needs TRL, in an environment of its own: `make peers` makes one")
        device = resolve_device(options.device).type
        fixed = ["--objective", "grpo", "--lr", "1e-4", "--sft-steps", "60", "--device", device, "--out", "unused"]
        config = parse([*fixed, *JOBS[device].split(), *SIZES[options.size], *flags])
        check(config)
        result = measure(config, options.turns * TURN)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = result["machine"]
    print(f"{machine['platform']}, {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}")
    both = f"both in {machine['dtype']}, {result['parameters']:,} parameters"
    print(f"TRL {machine['trl']}, transformers {machine['transformers']}; {both}")
    print(
        f"{result['prompts']} prompts x {result['rollouts']} rollouts of {result['maze_size']}x{result['maze_size']} mazes, "
        f"{result['response_tokens']:,.0f} response tokens; mean reward {result['reward_mean']['ours']:.3f}, "
        f"TRL {result['reward_mean']['trl']:.3f}"
    )
    print(f"{'':<12}{'s a step':>10}{'x ours':>10}")
    for name, seconds in result["seconds"].items():
        print(f"{name:<12}{seconds:10.3f}{seconds / result['seconds']['ours']:10.1f}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.peers`: a training step against the same step of TRL's GRPOTrainer.

Both train the same warm-started policy with GRPO: on a CPU 8 prompts x 16 rollouts of 7x7 mazes in
float32, on a GPU 32 x 128 of 17x17 mazes in bfloat16. They sample with transformers or the native
engine, score with the same function, and take one AdamW step on all rollouts. They run in one
process, three steps of TRL, then three of ours, and so on. The first step of each three is not
counted, for either, as memory and caches are then the other trainer's. The last line is one JSON
document. TRL needs its own environment: `make peers`.

It takes some minutes on two cores, and `make gpu-profile` gives it 40 seconds.
"""

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

from bench.measure import (
    PeakMemory,
    argument_parser,
    describe,
    machine,
    prepare,
    run_command,
    synchronize,
)
from bench.whole_step import FIRST_PROMPT, timed_trainer, warm_started
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import parse
from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.scorer import Scorer

SIZES = {
    "paper": "--hidden-size 256 --intermediate-size 1024 --heads 4 --kv-heads 2",  # 3.9M parameters
    "default": "",  # 0.6M
}
JOBS = {
    "cpu": "--maze-size 7 --prompts 8 --rollouts 16 --dtype float32",
    "cuda": "--maze-size 17 --prompts 32 --rollouts 128 --dtype bfloat16 --token-budget 131072",
}
# of TRL's micro-batch: activations of 4096 rows of 490 tokens do not fit into a GPU's memory
MAX_ROWS = {"cpu": 4096, "cuda": 512}
TURN = 3  # steps of one trainer before the other's turn


def trl_trainer(
    config: Config,
    task: Task,
    scorer: Scorer,
    checkpoint: Path,
    steps: int,
    max_rows: int,
    after_step: Any,
) -> tuple[Any, list[float]]:
    """Return a GRPOTrainer of the same job, and the list to which its steps' mean rewards are
    appended.
    """
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokenizer.eos_token = task.decode([task.stop_ids[0]], with_special=True)
    options = config.sampling
    prompts = task.prompts("train", FIRST_PROMPT, steps * options.prompts)
    lists = [
        prompts.tokens[a:b].tolist()
        for a, b in zip(prompts.cu_seqlens, prompts.cu_seqlens[1:], strict=False)
    ]
    texts = [task.decode(tokens, with_special=True) for tokens in lists]
    if tokenizer(texts)["input_ids"] != lists:
        raise RuntimeError("the tokenizer makes other tokens of the prompts' texts")
    dataset = Dataset.from_dict({"prompt": texts, "index": list(range(len(lists)))})
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        chosen, rollouts = prompts.select(torch.tensor(index)), Rollouts.given(completion_ids)
        scores: list[float] = scorer.score(chosen, rollouts).tolist()
        rewards.append(statistics.mean(scores))
        return scores

    total = options.prompts * options.rollouts
    micro_batch = math.gcd(total, max_rows)
    arguments = trl.GRPOConfig(
        output_dir=str(checkpoint / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=total // micro_batch,  # TRL samples all of them at once
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
        use_cpu=config.run.device == "cpu",
        bf16=config.run.dtype == "bfloat16",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model,
        reward,
        arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[after_step],
    )
    return trainer, rewards


def measure(config: Config, steps: int, max_rows: int) -> dict[str, Any]:
    """Time `steps` steps of both; TRL's micro-batches have at most `max_rows` rows."""
    from transformers import TrainerCallback

    resolved, task, model = warm_started(config)
    device = resolved.run.where[0]
    ours = timed_trainer(resolved, task, model)
    scorer = ours.trainer.collector.scorer
    times: dict[str, list[float]] = {"ours": [], "trl": []}
    peaks: dict[str, int | None] = {}  # of the last step

    class InTurn(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.peak = PeakMemory(device)
            synchronize(device)
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(device)
            times["trl"].append(time.perf_counter() - self.start)
            peaks["trl"] = self.peak.bytes()
            for _ in range(TURN if len(times["trl"]) % TURN == 0 else 0):
                peak = PeakMemory(device)
                synchronize(device)
                start = time.perf_counter()
                ours.step()
                synchronize(device)
                times["ours"].append(time.perf_counter() - start)
                peaks["ours"] = peak.bytes()

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "policy"
        checkpoint.mkdir()
        files = new_files(model.config, task.stop_ids) | task.tokenizer_files()
        write_policy(checkpoint, model.config.dtype, model.weights(), files)
        trainer, rewards = trl_trainer(
            resolved, task, scorer, checkpoint, steps, max_rows, InTurn()
        )
        trainer.train()
    counted = {
        name: [x for i, x in enumerate(values) if i % TURN] for name, values in times.items()
    }
    medians = {name: statistics.median(values) for name, values in counted.items()}
    return {
        "benchmark": "peers",
        "machine": machine(device)
        | {"dtype": resolved.run.dtype}
        | {
            name: importlib.metadata.version(name) for name in ("trl", "transformers", "accelerate")
        },
        "prompts": config.sampling.prompts,
        "rollouts": config.sampling.rollouts,
        "task": task.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "response_tokens": ours.tokens(),
        "reward_mean": {"ours": ours.metric("reward_mean"), "trl": statistics.mean(rewards)},
        "seconds": medians,
        "peak_bytes": peaks,
        "seconds_of_each_step": times,
        "ratio": medians["trl"] / medians["ours"],
        "ratio_of_each_step": [t / o for t, o in zip(counted["trl"], counted["ours"], strict=True)],
    }


def report(result: dict[str, Any]) -> None:
    about = result["machine"]
    print(
        f"TRL {about['trl']}, transformers {about['transformers']}; {result['parameters']:,} "
        "parameters"
    )
    print(
        f"{result['prompts']} prompts x {result['rollouts']} rollouts, {result['task']}: "
        f"{result['response_tokens']:,.0f} response tokens; mean reward "
        f"{result['reward_mean']['ours']:.3f}, "
        f"TRL {result['reward_mean']['trl']:.3f}"
    )
    print(f"{'':<12}{'s a step':>10}{'x ours':>10}{'peak MiB':>10}")
    for name, seconds in result["seconds"].items():
        peak = result["peak_bytes"][name]
        print(
            f"{name:<12}{seconds:10.3f}{seconds / result['seconds']['ours']:10.1f}"
            + ("" if peak is None else f"{peak / 2**20:10,.0f}")
        )


def main() -> int:
    parser = argument_parser("peers", __doc__)
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="paper",
        help="the policy (default: the paper's, 3.9M parameters)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=5,
        help=f"turns of each trainer, {TURN} steps each (default: 5)",
    )
    options, flags = parser.parse_known_args()
    if options.turns < 1:
        raise InputError(f"--turns must be at least 1, got {options.turns}")
    if importlib.util.find_spec("trl") is None:
        raise InputError("bench.peers needs TRL in its own environment: `make peers` makes one")
    device = prepare(options).type
    fixed = "--objective grpo --lr 1e-4 --lr-schedule constant --warmup-steps 0 --sft-steps 60"
    words = f"{fixed} --device {device} {JOBS[device]} {SIZES[options.size]}".split()
    config = parse([*words, *flags])
    result = measure(config, options.turns * TURN, MAX_ROWS[device])
    print(describe(result["machine"]))
    report(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

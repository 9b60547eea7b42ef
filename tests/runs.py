"""Five small runs that the tests of files, logs, reports, evaluations and resuming read, and what
these tests share. The fixture `shared_run` of conftest.py makes each at its first use.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from maxrl_fast import train
from maxrl_fast.training.learner import Learner

ROOT = Path(__file__).parents[1]
CHAIN_TASK = f"{ROOT}/examples/chain.py:ChainTask"
GUESS_TASK = f"{ROOT}/examples/guess.py:GuessTask"
SMALL = [
    *"--maze-size 7 --prompts 4 --rollouts 4 --k 2 --steps 3".split(),
    *"--sft-steps 40 --sft-batch 8 --sft-lr 5e-3 --eval-prompts 6 --eval-samples 4".split(),
    *"--hidden-size 32 --intermediate-size 48 --layers 2 --heads 4 --kv-heads 2".split(),
    *"--threads 1 --dtype float32".split(),
]
TIMINGS = {"rollout_seconds", "train_seconds", "tokens_per_second"}
WAITS = {"wait_seconds", "sampler_wait_seconds"}  # with --ahead


def base():
    at = SMALL.index("--k")
    return [*SMALL[:at], *SMALL[at + 2 :]]


JOB = [
    *base(),
    *"--sft-steps 40 --steps 6 --eval-every 2 --save-every 2 --keep-checkpoints 4".split(),
]
# The run "maze" solves some of its mazes, and not all.
MAZE = [*JOB, *"--objective maxpo --k 2 --seed 4 --sft-steps 150 --sft-batch 16 --lr 8e-4".split()]
MAZE += "--max-new-tokens 17 --sft-lr 1e-2 --warmup-steps 0".split()
MAZE += "--eval-prompts 12".split()
MAZE += ["--log-to", "tensorboard"]
ADAPTERS = "--lora-rank 2 --lora-alpha 6 --lora-targets q_proj,down_proj".split()
LORA = "--task maze --maze-size 7 --prompts 4 --rollouts 4 --k 2 --steps 4 --sft-steps 8".split()
LORA += "--sft-batch 8 --sft-lr 5e-3 --lr 1e-3 --eval-prompts 4 --eval-samples 2".split()
LORA += "--threads 1 --save-every 2 --dtype float32 --kl-coef 0.1 --keep-checkpoints 0".split()
# In the chain every group has some reward, so that no gradient is mere rounding.
RANKS = f"--task {CHAIN_TASK} --length 8 --prompts 4 --rollouts 8 --k 2 --steps 3".split()
RANKS += "--warmup-steps 1 --eval-prompts 4 --eval-samples 2 --threads 1 --dtype float32".split()
RANKS += "--lr 1e-2 --kl-coef 0.1".split()
# Some rewards are above 1, some below 0, and some fail.
REWARD = """
def score(prompt, response):
    print("seen", len(prompt))
    return 8 / (len(response) % 8 - 2) - 1
"""


def options_of(words):
    """Return the options of a command as keywords; of a flag given twice, the last one counts."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return {flag[2:].replace("-", "_"): value for flag, value in pairs}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_timings(path):
    return [
        {key: value for key, value in record.items() if key not in TIMINGS | WAITS}
        for record in read(path)
    ]


def assert_same_run(one, two):
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert without_timings(one / name) == without_timings(two / name)
    weights = [path / "latest" / "model.safetensors" for path in (one, two)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def assert_same(one, two):
    for log in "metrics eval eval_prompts pass_rates warnings".split():
        logs = [path / f"{log}.jsonl" for path in (one, two)]
        first, second = (without_timings(x) if x.exists() else None for x in logs)
        assert first == second, log
    assert read(one / "rollouts.jsonl") == read(two / "rollouts.jsonl") != []
    for name in ("model.safetensors", "state/state-00000-00000.safetensors"):
        expected, tensors = load_file(one / "latest" / name), load_file(two / "latest" / name)
        assert expected.keys() == tensors.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensor, tensors[key]), key
    assert os.readlink(one / "latest") == os.readlink(two / "latest")
    assert os.readlink(one / "best") == os.readlink(two / "best")


def stop_at(monkeypatch, when, number=signal.SIGTERM):
    update = Learner.optim_step

    def stopped(self, *arguments, **options):
        if options["when"] == when:
            signal.raise_signal(number)
        return update(self, *arguments, **options)

    monkeypatch.setattr(Learner, "optim_step", stopped)


def stop_and_resume(monkeypatch, out, job, *stops):
    arguments = [*job, "--out", str(out)]
    for when in stops:
        stop_at(monkeypatch, when)
        assert train.main(arguments) == 128 + signal.SIGTERM
        monkeypatch.undo()
        kind, _, number = when.rpartition(" step ")
        name = f"{kind.replace(' ', '-')}-" if kind else "step-"
        assert (out / "latest").resolve().name == f"{name}{int(number.split()[-1]):06d}"
        torch.rand(3), random.random()  # other draws of the process must not matter
        arguments = ["--resume", str(out)]
    assert train.main(arguments) == 0


def resumes_bitwise(monkeypatch, folder, job, *stops):
    assert train.main([*job, "--out", str(folder / "whole")]) == 0
    stop_and_resume(monkeypatch, folder / "stopped", job, *stops)
    assert_same(folder / "whole", folder / "stopped")
    return read(folder / "whole" / "metrics.jsonl")


def copied(run, folder):
    return Path(shutil.copytree(run, folder / "run", symlinks=True))


def forked(function):
    child = os.fork()
    if not child:
        code = 99
        try:
            code = function() or 0
        finally:
            os._exit(code)  # no clean-up of pytest's
    return child


def exit_code(child, limit=300):
    """Return the exit code; -9 if it is killed."""
    end = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert time.monotonic() <= end, "the process did not end"
    return os.waitstatus_to_exitcode(ended[1])


def killed_where(module, name, condition, arguments):
    """Run a command in a process that kills itself when this function is called with arguments that
    meet the condition.
    """
    function = getattr(module, name)

    def killed(*given, **options):
        if condition(*given, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **options)

    def main():
        setattr(module, name, killed)
        return train.main(arguments)

    assert exit_code(forked(main)) == -signal.SIGKILL


def tiny_policy(family, directory, vocab_size):
    from tests.families import tiny_config, tiny_model

    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    tiny_model(tiny_config(family, vocab_size=vocab_size, **tokens)).save_pretrained(directory)
    return str(directory)


def _maze(out):
    assert train.main([*MAZE, "--out", str(out)]) == 0


def _text(out):
    from tests.tasks.test_dataset import save_byte_level_policy, written

    folder = out.with_name("text-files")
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    data = written(folder / "data.jsonl", [{"prompt": f"{i}: say"} for i in range(140)])
    flags = f"--task dataset --data {data} --model {save_byte_level_policy(folder)}"
    flags += f" --objective rloo --reward {folder}/reward.py:score --max-reward-error-rate .9"
    flags += " --max-new-tokens 12 --prompts 4 --rollouts 4 --steps 2 --lr 0.01"
    flags += " --warmup-steps 0 --eval-prompts 7 --eval-samples 6 --reward-workers 1 --threads 1"
    flags += " --dtype float32"
    assert train.main([*flags.split(), "--out", str(out)]) == 0


def _lora(out):
    from maxrl_fast.tasks.maze import MazeTask

    start = tiny_policy("gemma2", out.with_name("gemma2"), MazeTask(5).vocab_size)
    assert train.main([*LORA, *ADAPTERS, "--model", start, "--out", str(out)]) == 0


def _ranks(out):
    from tests.distributed.test_torchrun import finished, torchrun

    start = tiny_policy("qwen3_moe", out.with_name("qwen3_moe"), 8)
    options = options_of(RANKS) | {"sharding": "full", "model": start, "out": str(out)}
    script = out.with_name("script.py")
    script.write_text(
        f"import maxrl_fast, os\nrun = maxrl_fast.run({options!r})\n"
        # One write for each line: torchrun starts Python unbuffered, and both processes write into
        # one pipe.
        "os.write(1, f'rank:{os.environ[\"RANK\"]}:{run.exit}:{len(run.metrics)}\\n'.encode())\n"
    )
    process = torchrun(2, str(script))
    output = finished(process, 300)
    assert process.returncode == 0, output
    out.with_name("ranks.txt").write_text(output)


def _killed(out):
    """The job of "maze": killed while a checkpoint is written, when one is written and no link
    shows it, and in an update.
    """
    from maxrl_fast.job import checkpoints

    def is_second(folder, *_, **__):
        return "step-000002" in str(folder)

    job, again = [*MAZE, "--out", str(out)], ["--resume", str(out)]
    killed_where(checkpoints, "write_policy", is_second, job)
    (partial,) = out.glob("checkpoints/.*")
    assert (partial / "state").exists()

    def is_fourth(path):
        return path.name == "latest" and (out / "checkpoints" / "step-000004").exists()

    killed_where(checkpoints, "atomic_file", is_fourth, again)
    assert (out / "latest").resolve().name == "step-000002"
    killed_where(Learner, "optim_step", lambda *_, when, **__: when == "step 6", again)
    time.sleep(1)  # TensorBoard orders files by the second of their start, then by process
    assert train.main(again) == 0


RUNS = {"maze": _maze, "text": _text, "lora": _lora, "ranks": _ranks, "killed": _killed}


def made(name, folder):
    """Return the folder of a run, which the first process that asks for it makes."""
    folder.mkdir(exist_ok=True)
    out, done = folder / name, folder / f"{name}.done"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process that has it
        assert done.exists() or not out.exists(), f"the run {name} has failed"
        if not done.exists():
            RUNS[name](out)
            done.touch()
    return out

import contextlib
import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maxrl_fast import train
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.passes import gradients_fit, is_sharded
from tests.job.test_resume import assert_same
from tests.models import tiny_decoder
from tests.ranks import RUNS, one_update
from tests.runs import CHAIN_TASK, ROOT, SMALL, TIMINGS, WAITS, exit_code, forked
from tests.tasks.test_dataset import save_byte_level_policy, written
from tests.tool_episodes import calculator_job
from tests.training.test_drawn import FEW

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def meeting(num_ranks):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return place | {"WORLD_SIZE": str(num_ranks)}


def torchrun(num_ranks, *arguments, cwd=ROOT):
    launch = "-m torch.distributed.run --standalone --nproc-per-node".split()
    return subprocess.Popen(
        [sys.executable, *launch, str(num_ranks), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(process, limit):
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        process.kill()
    return output


@pytest.fixture(scope="module")
def one_process():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = {
        name: one_update(Ranks(), sharding, settings, **options)
        for name, (sharding, settings, options) in RUNS.items()
    }
    torch.set_num_threads(threads)
    return results


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))


def test_several_ranks_compute_the_same_as_one_process(one_process, tmp_path):
    num_ranks = 3  # of which no size of a matrix is a multiple
    process = torchrun(num_ranks, "-m", "tests.ranks", str(tmp_path))
    output = finished(process, 300)
    assert process.returncode == 0, output
    for rank in range(num_ranks):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, expected in one_process.items():
            limit = 0.05 if "bfloat16" in name else 1e-5
            result = results[name]
            # it counts a prompt in every micro-batch
            for key in expected["metrics"].keys() - {"num_tokens"}:
                wanted = pytest.approx(expected["metrics"][key], rel=limit, abs=1e-6)
                assert result["metrics"][key] == wanted, (name, key)
            if (every_pass := RUNS[name][2].get("every_pass")) is not None:
                assert (result["exchanges"] == 1) == (not every_pass), name
            assert result["nothing"] == pytest.approx(expected["nothing"], rel=limit), name
            assert result["gradients"].keys() == expected["gradients"].keys()
            for key, gradient in expected["gradients"].items():
                assert gradient.abs().max() > 1e-4, (name, key)
                assert relative(result["gradients"][key], gradient) < limit, (name, key)
            for key, weight in expected["weights"].items():
                # Adam's first step is lr times a sign, which rounding may turn
                bound = 3e-3 if "bfloat16" in name else 2e-3
                assert relative(result["weights"][key], weight) < bound, (name, key)
            assert relative(result["logprobs"], expected["logprobs"]) < max(limit, 1e-3), name
            assert result["gathered"].keys() == expected["gathered"].keys(), name
            assert ("inserted.tokens" in expected["gathered"]) == ("turns" in name)
            for key, tensor in expected["gathered"].items():
                assert torch.equal(result["gathered"][key], tensor), (name, key)
            assert expected["off_policy"].abs().max() > 1e-2, name
            assert relative(result["off_policy"], expected["off_policy"]) < max(limit, 1e-3), name
            if "bfloat16" not in name:  # rounding may carry a token across a bound
                weights = expected["weights of tokens"]
                assert 0 < int((weights == 0).sum()) < len(weights), name
                assert relative(result["weights of tokens"], weights) < 1e-3, name
                assert torch.equal(result["kept"], expected["kept"]), name


def read(out, stream):
    return [json.loads(line) for line in (out / f"{stream}.jsonl").open()]


JOB = "--steps 6 --sft-steps 3 --eval-prompts 16 --eval-samples 2 --threads 1".split()
JOB += ["--dtype", "float32"]  # the tolerances below are for float32


def run(num_ranks, *flags):
    """Run the command here, or ranks of it in forks."""
    if num_ranks == 1:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = train.main([*flags])
        assert code == 0, printed.getvalue()
        return printed.getvalue()
    for module in ("fsdp", "checkpoint.hf_storage"):
        importlib.import_module(f"torch.distributed.{module}")
    shared = meeting(num_ranks)
    with tempfile.TemporaryFile("a+", buffering=1) as printed:

        def rank(number):
            os.environ.update(shared, RANK=str(number))
            sys.stdout = sys.stderr = printed
            return train.main([*flags])

        ranks = [forked(partial(rank, number)) for number in range(num_ranks)]
        codes = [*map(exit_code, ranks)]
        printed.seek(0)
        output = printed.read()
    assert not any(codes), (codes, output)
    return output


def run_job(out, num_ranks, *flags):
    return run(num_ranks, *JOB, "--out", str(out), *flags)


def assert_same_metrics(alone, together, rel=1e-3, abs=1e-5):
    for expected, result in zip(read(alone, "metrics"), read(together, "metrics"), strict=True):
        assert expected.keys() == result.keys()
        for key in expected.keys() - OF_RANKS:
            step = expected["step"]
            assert result[key] == pytest.approx(expected[key], rel=rel, abs=abs), (step, key)


# prompts that begin alike share where they are on one rank
OF_RANKS = TIMINGS | WAITS | {"tokens_shared"}


def test_rewards_from_the_policy_are_the_same_on_several_ranks_and_with_sharded_weights(tmp_path):
    lines = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(6)]
    data, policy = written(tmp_path / "sums.jsonl", lines), save_byte_level_policy(tmp_path)
    flags = f"--task math --data {data} --model {policy} --max-new-tokens 16".split()
    flags += "--plain-prompts --prompts 5 --rollouts 3 --eval-prompts 2 --keep-rollouts 15".split()
    flags += "--objective rloo --reward-source rlpr --sft-steps 0 --steps 1".split()
    flags, records, kept = [*flags, "--prompt-suffix", ""], [], []
    for num_ranks, more in ((1, []), (2, ["--sharding", "full"])):
        run_job(tmp_path / str(num_ranks), num_ranks, *flags, *more, "--token-budget", "200")
        records.append(read(tmp_path / str(num_ranks), "metrics")[0])
        kept.append(read(tmp_path / str(num_ranks), "rollouts"))
    assert records[0]["reward_mean"] > 0
    assert {"reward/answer_logprob", "reward/answer_leads"} <= records[0].keys()
    for name in ("reward_mean", "grad_norm", *(x for x in records[0] if x.startswith("reward/"))):
        assert records[1][name] == pytest.approx(records[0][name], rel=1e-3, abs=1e-6), name
    assert len(kept[0]) == 15
    for one, other in zip(*kept, strict=True):
        assert other["response"] == one["response"]
        assert other["components"] == pytest.approx(one["components"], rel=1e-3, abs=1e-6)


def test_episodes_are_the_same_on_four_ranks(tmp_path):
    job = [*calculator_job(tmp_path), *"--reward-workers 1 --steps 2".split()]
    run_job(tmp_path / "warm", 1, *job, "--steps", "0")
    more = ["--sft-steps", "0", "--model", str(tmp_path / "warm" / "latest")]
    for num_ranks in (1, 4):
        run_job(tmp_path / str(num_ranks), num_ranks, *job, *more, "--sharding", "full")
    assert_same_metrics(tmp_path / "1", tmp_path / "4", abs=1e-6)
    assert read(tmp_path / "1", "eval") == read(tmp_path / "4", "eval")
    kept = [read(tmp_path / out, "rollouts") for out in ("1", "4")]
    assert sum("turns" in record for record in kept[0]) > 10
    for alone, together in zip(*kept, strict=True):
        assert together.pop("advantage") == pytest.approx(alone.pop("advantage"), rel=1e-5)
        assert together == alone


@pytest.mark.parametrize(
    ("flags", "metric"),
    [
        ("--rollouts 32 --first-rollouts 4 --stop-at 2 --ahead 1", "draws_mean"),
        ("--rollouts 4 --carry 3", "carried"),
        ("--rollouts 4 --draw-prompts learnability", "prompts_seen"),
    ],
)
def test_rounds_are_the_same_on_several_ranks(flags, metric, tmp_path):
    """In the last ones of a step fewer prompts are left than ranks, which train meanwhile."""
    (tmp_path / "few.py").write_text(FEW)
    job = f"--task {tmp_path}/few.py:Few --length 8 --reward-threshold .1 --sft-steps 0".split()
    job += f"--steps 3 --objective maxrl --prompts 3 {flags}".split()
    for num_ranks in (1, 3):
        run_job(tmp_path / str(num_ranks), num_ranks, *job)
    assert_same_metrics(tmp_path / "1", tmp_path / "3")
    assert len({record[metric] for record in read(tmp_path / "1", "metrics")}) > 1


def test_a_run_resumes_with_other_numbers_of_ranks_and_other_sharding(tmp_path):
    """Two ranks save the state in shards. Each of the others resumes from the one before; of a
    rank-3 adapter, the fourth process has no part.
    """
    out = tmp_path / "run"
    flags = "--lr-schedule constant --kl-coef 0.1 --entropy-coef 0.01 --lora-rank 3".split()
    flags += "--prompts 8 --rollouts 4".split()
    alone = tmp_path / "alone"
    run_job(alone, 1, *flags)
    output = run_job(out, 2, *flags, *"--sharding full --steps 2".split())
    assert "one of 2 processes" in output
    assert output.count("maxrl_fast 0") == 1  # only rank 0 logs
    # rank 0 keeps the samples of its share
    kept = [line for line in read(out, "samples") if line["step"] == 0]
    assert kept == read(alone, "samples")[:16]
    assert len(list((out / "latest" / "state").iterdir())) == 2
    for more in ("--steps 4 --sharding full", "--steps 6 --sharding none"):
        output = run(4 if "full" in more else 1, "--resume", str(out), *more.split())
        assert "will not be bitwise identical" in output
    assert_same_metrics(alone, out)
    ours, theirs = (load_file(run / "latest" / "model.safetensors") for run in (out, alone))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert relative(ours[key], tensor) < 1e-3, key


def test_a_critic_is_the_same_on_several_ranks_and_resumes_with_other_sharding(tmp_path):
    out = tmp_path / "run"
    flags = "--lr-schedule constant --objective ppo --gae-lambda 0.9 --prompts 8".split()
    flags += f"--task {CHAIN_TASK} --length 8 --sft-steps 0 --updates-per-step 2 --steps 6".split()
    run_job(tmp_path / "alone", 1, *flags)
    run_job(out, 2, *flags, *"--steps 2 --sharding none".split())
    run(2, "--resume", str(out), *"--steps 4 --sharding full".split())
    run(1, "--resume", str(out), *"--steps 6 --sharding none".split())
    assert_same_metrics(tmp_path / "alone", out, rel=2e-3, abs=1e-4)
    for record in read(tmp_path / "alone", "metrics"):
        assert min(record["critic_grad_norm"], record["value_loss"]) > 1e-3


def test_an_interrupt_stops_all_ranks_at_the_same_step(tmp_path):
    out = tmp_path / "run"
    arguments = ["-m", "maxrl_fast.train", *SMALL, "--steps", "10000", "--out", str(out)]
    process = torchrun(2, *arguments)
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    output = finished(process, 60)
    assert "stopped by Ctrl-C after step" in output, output
    assert (out / "latest" / "model.safetensors").exists()


KILLED = """
import os, signal, sys, time
from pathlib import Path
from maxrl_fast import train
from maxrl_fast.training.learner import Learner

step, marker = Learner.optim_step, Path(sys.argv.pop(1))
checkpoint = Path(sys.argv[-1]) / "checkpoints" / "step-000003"  # which a thread writes
KILLS = {"warm start step 2": "1", "step 4": "0"}  # the rank that is killed in each

def killed(self, *, when, lr):
    if KILLS.get(when) == os.environ["RANK"] and not (marker / when).exists():
        (marker / when).touch()
        while when == "step 4" and not checkpoint.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, when=when, lr=lr)

Learner.optim_step = killed
sys.exit(train.main(sys.argv[1:]))
"""


def test_ranks_that_torchrun_restarts_reach_the_end_bitwise(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    job = "--entropy-coef 0.1 --steps 5 --sft-steps 4 --save-every 3 --sharding full"
    job = [*SMALL, *job.split(), *"--resume auto --out".split()]
    script = [str(tmp_path / "killed.py"), str(tmp_path), *job]
    launch = [*"--nproc-per-node 4 --max-restarts 2 --master-port".split(), str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("restarted", "whole"):  # the second run finds the marks of the kills
        full = [*command, str(tmp_path / name)]
        done = subprocess.run(full, env=environment, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        # Of the ranks that have ended when it looks, torchrun names the first: the killed one, or
        # one that has noticed (1).
        failures = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank", done.stderr)
        assert set(failures) <= {"-9", "1"}
        assert len(failures) == (2 if name == "restarted" else 0)
        assert "Traceback" not in done.stderr
        assert done.stdout.count("new\n4 prompts") == (2 if name == "restarted" else 1)
        assert done.stdout.count(
            f"from {tmp_path / name / 'checkpoints' / 'step-000003'}\n4 prompts"
        ) == (name == "restarted")
    assert_same(tmp_path / "whole", tmp_path / "restarted")


def wait_for(path, process, limit=120):
    start = time.monotonic()
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() - start < limit
        time.sleep(0.2)


APART = """
import os, signal, sys, time
import torch
from maxrl_fast.job.control import StallWatchdog, Stopwatch
from maxrl_fast.runtime.ranks import Ranks
ranks = Ranks.of_environment()
with ranks.connected(torch.device("cpu")), StallWatchdog(Stopwatch(), 3.0):
    ranks.sum(torch.ones(1))
    {action}
    ranks.sum(torch.ones(1))
"""


@contextlib.contextmanager
def ranks_apart(tmp_path, action):
    """Two ranks without torchrun, which would end one when the other fails."""
    script = tmp_path / "apart.py"
    script.write_text(APART.format(action=action))
    shared = os.environ | meeting(2) | {"PYTHONPATH": str(ROOT)}
    command, options = [sys.executable, str(script)], {"text": True, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, env=shared | {"RANK": x}, **options) for x in "01"]
    try:
        yield both
    finally:
        for process in both:
            process.kill()


@pytest.mark.parametrize("failure", ["raise RuntimeError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_failing_rank_ends_the_others_within_a_minute(tmp_path, failure):
    with ranks_apart(tmp_path, f"if ranks.rank: {failure}") as (first, second):
        _, error = first.communicate(timeout=60 + 30)  # 30 s for the start
        second.wait(timeout=10)
    assert (first.returncode, second.returncode != 0) == (1, True)
    ended = r"error: rank 0 stops: another process of the run has ended \(.*\)"
    assert re.search(ended, error), error


def is_stopped(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_ranks_that_are_stopped_together_for_longer_than_the_limit_go_on(tmp_path):
    stop = "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(0.5)"
    with ranks_apart(tmp_path, stop) as both:
        end = time.monotonic() + 90
        while not all(map(is_stopped, both)):
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(5)
        for process in both:
            process.send_signal(signal.SIGCONT)
        for process in both:
            _, error = process.communicate(timeout=60)
            assert (process.returncode, error) == (0, "")


WITHOUT_OUT = """
import os, sys, time
strftime = time.strftime
# as when the clock turns between two processes
time.strftime = lambda *a: "second-" + os.environ["RANK"]
from maxrl_fast import train
sys.exit(train.main(sys.argv[1:]))
"""


def test_all_ranks_write_into_one_folder_at_different_times(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(WITHOUT_OUT)
    flags = [*SMALL, *"--steps 1 --sharding full".split()]
    process = torchrun(2, "late.py", *flags, cwd=tmp_path)
    output = finished(process, 200)
    assert process.returncode == 0, output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["maxpo-second-0"]
    assert len(list((tmp_path / "runs" / "maxpo-second-0" / "latest" / "state").iterdir())) == 2
    monkeypatch.chdir(tmp_path)
    assert train.main(["--resume", "runs/maxpo-second-0"]) == 0


def test_shares_and_sharding():
    assert [Ranks(r, 3).part(8) for r in range(3)] == [(0, 2), (2, 3), (5, 3)]
    assert Ranks().part(5) == (0, 5)
    model = tiny_decoder()
    assert not is_sharded("auto", model, Machine("cpu", 2, 1))
    assert is_sharded("full", model, Machine("cpu", 2, 1))
    assert not is_sharded("full", model, Machine("cpu", 1, 1))
    size = sum(p.numel() for p in model.parameters())
    assert gradients_fit(model, Machine("cuda", 2, 32 * size))
    assert not gradients_fit(model, Machine("cuda", 2, 31 * size))

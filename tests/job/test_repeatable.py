import os
import subprocess
import sys

import pytest

from tests.runs import ROOT, SMALL, assert_same_run

# Runs a job under a clock at a third of the speed, in uneven steps, and with all directories listed
# backwards.
OTHER_SURROUNDINGS = """
import itertools, os, sys, time

def uneven(clock):
    start, calls = clock(), itertools.count()
    return lambda: start + (clock() - start) / 3 + 1e-4 * next(calls)

for name in ("monotonic", "perf_counter", "time"):
    setattr(time, name, uneven(getattr(time, name)))

class Backwards:
    def __init__(self, entries):
        self.entries = reversed(list(entries))
    __iter__ = __enter__ = lambda self: self
    __next__ = lambda self: next(self.entries)
    __exit__ = close = lambda *_: None

listdir, scandir = os.listdir, os.scandir
os.listdir = lambda path=".": listdir(path)[::-1]
os.scandir = lambda path=".": Backwards(scandir(path))

from maxrl_fast import train
sys.exit(train.main(sys.argv[1:]))
"""
REWARD = """
def score(prompt, response):
    return float(len(response) % 3 == 0)
"""


@pytest.mark.slow
def test_neither_the_clock_nor_the_hash_seed_nor_the_order_of_directories_changes_a_bit(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    job = [*SMALL, *"--sft-steps 5 --updates-per-step 2 --kl-coef 0.1 --dynamic-sampling 2".split()]
    job += "--threads 2 --rollouts 16 --maze-size 9 --reward-seconds 60 --eval-every 1".split()
    job += ["--reward", f"{tmp_path / 'reward.py'}:score"]
    for name, hash_seed, code in (
        ("one", "1", ["-m", "maxrl_fast.train"]),
        ("two", "2", ["-c", OTHER_SURROUNDINGS]),
    ):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, *code, *job, "--out", str(tmp_path / name)]
        subprocess.run(command, env=environment, check=True, timeout=200, stdout=subprocess.DEVNULL)
    assert_same_run(tmp_path / "one", tmp_path / "two")

"""Prompts that are made one batch ahead, in a thread."""

import subprocess
import sys
import threading

import pytest
import torch

from maxrl_fast.config.checks import objective_of
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import InputError
from maxrl_fast.job.build import RunContext, build_collector
from maxrl_fast.job.build_task import build_scorer, build_task
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.prompt_prefetcher import PromptPrefetcher
from tests.tables import refused

LIMIT = 30  # seconds for another thread


class RecordedTask(MazeTask):
    """Notes every call: its thread, and its range. `began` is set by the first call from another
    thread, which waits for `may_go_on`."""

    fails_at = -1

    def __init__(self):
        super().__init__(5)
        self.calls, self.began, self.may_go_on = [], threading.Event(), threading.Event()
        self.may_go_on.set()

    def prompts(self, split, start, count):
        is_ahead = threading.current_thread() is not threading.main_thread()
        self.calls.append((start, count, is_ahead))
        if is_ahead:
            self.began.set()
            assert self.may_go_on.wait(LIMIT)
        if start == self.fails_at:
            raise InputError(f"there is no prompt {start}")
        return super().prompts(split, start, count)


def assert_prompts(prompts, start, count):
    expected = MazeTask(5).prompts("train", start, count)
    for name in ("tokens", "cu_seqlens", "ids"):
        assert torch.equal(getattr(prompts, name), getattr(expected, name))


def test_the_same_prompts_come_in_the_same_order_and_one_batch_ahead():
    task = RecordedTask()
    ahead = PromptPrefetcher(task)
    for step in range(4):
        assert_prompts(ahead.take(2 * step, 2), 2 * step, 2)
        ahead._background.wait()
    assert task.calls == [(0, 2, False), (2, 2, True), (4, 2, True), (6, 2, True), (8, 2, True)]


def test_taking_does_not_wait_for_the_batch_after_it():
    task = RecordedTask()
    task.may_go_on.clear()
    ahead = PromptPrefetcher(task)
    assert_prompts(ahead.take(0, 3), 0, 3)
    assert task.began.wait(LIMIT)
    assert len(task.calls) == 2  # and no batch beyond the one that is being made
    task.may_go_on.set()
    assert_prompts(ahead.take(3, 3), 3, 3)


@pytest.mark.parametrize(("start", "count"), [(50, 2), (2, 3)])
def test_a_batch_that_does_not_follow_is_made_when_it_is_asked_for(start, count):
    task = RecordedTask()
    ahead = PromptPrefetcher(task)
    ahead.take(0, 2)
    assert_prompts(ahead.take(start, count), start, count)
    assert_prompts(ahead.take(start + count, count), start + count, count)
    assert (start, count, False) in task.calls


def test_an_error_is_raised_for_the_batch_that_has_it_and_no_other():
    task = RecordedTask()
    task.fails_at = 2
    ahead = PromptPrefetcher(task)
    assert_prompts(ahead.take(0, 2), 0, 2)
    for _ in range(2):
        with refused("there is no prompt 2"):
            ahead.take(2, 2)
    ahead = PromptPrefetcher(task)
    ahead.take(0, 2)
    assert_prompts(ahead.take(4, 2), 4, 2)  # nobody asks for the one that fails
    assert_prompts(ahead.take(6, 2), 6, 2)


AT_EXIT = """
import time, torch
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.prompt_prefetcher import PromptPrefetcher

class Slow(MazeTask):
    def prompts(self, split, start, count):
        end = time.monotonic() + 0.5 * (start > 0)
        while time.monotonic() < end:
            torch.arange(10_000).cumsum(0)
        return super().prompts(split, start, count)

PromptPrefetcher(Slow(5)).take(0, 2)
"""


@pytest.mark.slow
def test_a_process_that_ends_while_prompts_are_made_has_its_own_exit_code():
    """Python ends threads wherever they are, and in an operation of PyTorch this aborts the
    process.
    """
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


TINY = Config().replace(
    objective="grpo",
    maze_size=5,
    prompts=2,
    rollouts=2,
    sft_steps=0,
    device="cpu",
    dynamic_sampling=3,
)


CASES = [("maze", "cuda", True), ("chain", "cuda", False), ("maze", "cpu", False)]


@pytest.mark.parametrize(("task_name", "device", "is_ahead"), CASES)
def test_prompts_that_take_time_are_made_ahead_on_a_gpu(task_name, device, is_ahead):
    config = TINY.replace(task=task_name)
    task = build_task(config.task, 0)
    resolved = resolve(config, task)
    resolved = resolved.replace(device=device)
    scorer = build_scorer(resolved.reward, task)
    collector = build_collector(
        RunContext(resolved, task, objective_of(resolved), None, None, scorer)
    )
    assert (collector.make_prompts is not None) == is_ahead

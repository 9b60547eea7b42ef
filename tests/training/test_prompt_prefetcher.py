"""Prompts that are made one batch ahead, in a thread."""

import threading

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.prompt_prefetcher import PromptPrefetcher
from tests.tables import refused

LIMIT = 30  # seconds for another thread


class RecordedTask(MazeTask):
    """Notes every call: its range, and whether another thread makes it. Such a call sets `began`,
    and waits for `may_go_on`.
    """

    def __init__(self, fails_at=-1):
        super().__init__(5)
        self.calls, self.fails_at = [], fails_at
        self.began, self.may_go_on = threading.Event(), threading.Event()
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
        ahead._coming[1].result()
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


def test_an_error_is_raised_for_the_batch_that_has_it_and_no_other():
    ahead = PromptPrefetcher(RecordedTask(fails_at=2))
    assert_prompts(ahead.take(0, 2), 0, 2)
    for _ in range(2):
        with refused("there is no prompt 2"):
            ahead.take(2, 2)
    ahead = PromptPrefetcher(RecordedTask(fails_at=2))
    ahead.take(0, 2)
    assert_prompts(ahead.take(4, 2), 4, 2)  # nobody asks for the one that fails
    assert_prompts(ahead.take(6, 2), 6, 2)

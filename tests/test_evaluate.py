"""pass@k against exact rationals, and evaluation against a policy whose success is known."""

import pytest
import torch

from maxrl_fast.evaluate import evaluate, pass_at_k, powers_of_two
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Sampling
from maxrl_fast.tasks.maze import MazeTask
from tests import brute_force


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_pass_at_k_is_exact(n):
    for k in range(1, n + 1):
        actual = pass_at_k(n, torch.arange(n + 1), k)
        expected = [float(brute_force.pass_at_k(n, c, k)) for c in range(n + 1)]
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_pass_at_k_of_many_samples_keeps_its_digits():
    for c, k in ((1, 1), (1, 512), (100, 256), (1000, 3)):
        actual = pass_at_k(1024, torch.tensor(c), k).item()
        assert actual == pytest.approx(float(brute_force.pass_at_k(1024, c, k)), rel=1e-10)


def test_pass_at_k_states_its_range():
    with pytest.raises(ValueError, match="needs 1 <= k <= 8, got 9"):
        pass_at_k(8, torch.tensor([1]), 9)


def test_powers_of_two():
    assert [powers_of_two(n) for n in (1, 2, 5, 16)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8, 16]]


class Oracle:
    """An engine that solves every maze with its first `solved` samples and walks into a wall with the others."""

    def __init__(self, task, solved):
        self.task, self.solved = task, solved

    def generate(self, prompts, num_samples, sampling, *, seed, step):
        from maxrl_fast.records import Rollouts
        from maxrl_fast.tasks.maze import DONE, UP, shortest_path

        answers = []
        for index in prompts.ids.tolist():
            path = [*shortest_path(self.task.maze("test", index)), DONE]
            answers += [path if sample < self.solved else [UP, DONE] for sample in range(num_samples)]
        return Rollouts.given(answers)


def test_evaluation_counts_what_is_solved():
    task, done = MazeTask(7), []
    result = evaluate(
        Oracle(task, 3),
        task,
        Scorer(task, None),
        40,
        8,
        Sampling(1.0, 20, task.stop_ids),
        seed=0,
        device=torch.device("cpu"),
        progress=done.append,
    )
    for k in (1, 2, 4, 8):
        assert result.pass_at_k[k] == pytest.approx(float(brute_force.pass_at_k(8, 3, k)))
    assert done == [32, 40]
    assert result.truncated == 0
    assert result.num_tokens == pytest.approx(result.response_length_mean * 320)

import math

import pytest
import torch

from maxrl_fast.evaluation import evaluator
from maxrl_fast.evaluation.evaluator import Evaluation, Evaluator
from maxrl_fast.evaluation.kept_samples import SampleTally, sample_records
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.rollout import CheckedEngine, Sampling
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import DONE, UP, MazeTask, shortest_path
from maxrl_fast.tasks.scorer import Scorer
from tests import brute_force


class Oracle:
    def __init__(self, task, solved, split="test"):
        self.task, self.solved, self.split = task, solved, split

    def generate(self, request):
        answers = []
        for index in request.prompts.ids.tolist():
            path = [*shortest_path(self.task.maze(self.split, index)), DONE]
            answers += [path if n < self.solved else [UP, DONE] for n in range(request.num_samples)]
        return Rollouts.given(answers)


def evaluated(engine, task, progress=lambda done: None, keep=None, **options):
    sampling = Sampling(1.0, 20, task.stop_ids)
    sizes = {"num_prompts": 40, "num_samples": 8}
    evaluation = Evaluator(engine, task, Scorer(task, None), sampling, **sizes, **options)
    return evaluation.evaluate(progress, keep)


def test_evaluation_counts_what_is_solved():
    task, done, kept = MazeTask(7), [], []

    def keep(*chunk):
        kept.append(chunk)

    result = evaluated(Oracle(task, 3), task, progress=done.append, keep=keep, chunk=16)
    for k in (1, 2, 4, 8):
        assert result.pass_at_k[k] == pytest.approx(float(brute_force.pass_at_k(8, 3, k)))
    assert done == [16, 32, 40]
    record = result.record()
    assert record["truncated"] == 0
    assert result.num_tokens == pytest.approx(record["response_length_mean"] * 320)
    assert torch.cat([samples.prompts.ids for samples, _, _ in kept]).tolist() == list(range(40))
    assert torch.cat([rewards for _, rewards, _ in kept]).tolist() == ([1.0] * 3 + [0.0] * 5) * 40
    assert sum(len(samples.rollouts.tokens) for samples, _, _ in kept) == result.num_tokens
    again = evaluated(Oracle(task, 3), task)
    assert torch.equal(again.rewards, result.rewards)
    assert again.record() == record
    trained = Oracle(task, 8, "train")  # the training split has other prompts
    assert evaluated(trained, task, split="train").pass_at_k[1] == 1
    assert evaluated(trained, task).pass_at_k[1] < 0.5


def test_pass_counts_are_by_id_and_bounded(monkeypatch):
    rewards = torch.tensor([[1, 0], [math.nan, 0], [1, 1]])
    evaluation = Evaluation(torch.tensor([7, 2, 3]), rewards, num_tokens=9, num_truncated=1)
    counts = {"num_samples": 2, "num_prompts": 3, "ids": [2, 3, 7], "num_correct": [0, 2, 1]}
    assert evaluation.pass_counts() == counts
    monkeypatch.setattr(evaluator, "MOST_PROMPTS", 2)
    assert evaluation.pass_counts() == counts | {"ids": [2, 3], "num_correct": [0, 2]}
    other = Evaluation(torch.tensor([2, 3]), torch.tensor([[0.5, math.nan], [-1, 3]]), 9, 1)
    rewards = {"reward_mean": [-0.25, 1], "reward_max": [0.5, 3]}
    assert other.pass_counts().items() >= rewards.items()


def test_a_rank_without_prompts_samples_for_the_others_where_they_share_an_engine(monkeypatch):
    """Of 40 prompts in chunks of 13 on three ranks, the last is alone in its chunk: only the last
    rank has it."""
    task, oracle, counts = MazeTask(7), Oracle(MazeTask(7), 3), []
    generate = oracle.generate
    oracle.generate = lambda request: counts.append(len(request.prompts)) or generate(request)
    monkeypatch.setattr(Ranks, "concatenate", lambda self, x: x)
    for is_shared in (False, True):
        engine = CheckedEngine(oracle, "oracle", task.vocab_size, is_shared)
        evaluated(engine, task, ranks=Ranks(0, 3), chunk=13)
    assert counts == [13, 13, 0]


def test_sample_records():
    task = MazeTask(5)
    prompts = task.prompts("test", 3, 2)
    path = [*shortest_path(task.maze("test", 3)), DONE]
    rollouts = Rollouts.given([path, [UP], [UP, UP, DONE], path])
    rollouts.truncated[1] = True
    rewards = torch.tensor([1.0, math.nan, -0.5, 0.0])
    parts = [{"form": 0.5}, {}, {"form": math.nan}, {}]
    records = list(sample_records(task, Samples(prompts, rollouts), rewards, parts))
    asked = [task.decode(x.tolist()) for x in prompts.tokens.view(2, -1)]
    said = [task.decode(x) for x in (path, [UP], [UP, UP, DONE], path)]
    columns = {
        "id": [3, 3, 4, 4],
        "prompt": [asked[0]] * 2 + [asked[1]] * 2,
        "response": said,
        "reward": [1.0, None, -0.5, 0.0],
        "truncated": [False, True, False, False],
        "tokens": [len(path), 1, 3, len(path)],
        "components": [{"form": 0.5}, {}, {"form": None}, {}],
        "answer": [None] * 4,  # mazes have none
        "columns": [{}] * 4,
    }
    for name, values in columns.items():
        assert [record[name] for record in records] == values, name


def test_the_tally_numbers_the_answers_to_each_prompt():
    class Letters(MazeTask):
        def answer(self, response):
            return "" if "UP" in response else response.split()[-2]

    task = Letters(5)
    lines = []
    tally = SampleTally(task, lines.append)
    down, left, right = 14, 15, 16
    moves = (down, left, right, UP, left, left, UP, down)
    responses = [[move, DONE] for move in moves]
    rewards = torch.tensor([1.0, 1.0, 0.0, math.nan, 0.0, 1.0, 0.0, 0.0])
    tally.take(Samples(task.prompts("test", 0, 2), Rollouts.given(responses)), rewards, [{}] * 8)
    assert tally.answers == [[0, 1, 2, -1], [0, 0, -1, 1]]
    assert len(lines) == 8


def test_log_probs_that_are_not_finite_are_refused():
    task, rollouts = MazeTask(5), Rollouts.given([[UP], [UP, DONE]])
    rollouts.logprobs[1] = math.inf
    samples = Samples(task.prompts("test", 4, 2), rollouts)
    with pytest.raises(RuntimeError, match="log-probs sampled for prompt 5 are not finite"):
        SampleTally(task, lambda line: None).take(samples, torch.zeros(2), [{}] * 2)

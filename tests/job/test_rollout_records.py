"""Which rollouts of a step are kept, and that each has its own reward, advantage and components."""

import random
import struct
import zlib

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.job.rollout_records import first_groups, rollout_records
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import DONE, MazeTask
from maxrl_fast.training.learner import Learner
from tests.batches import collected, make_prompts
from tests.runs import JOB, read


def checksum(tokens):
    return zlib.crc32(struct.pack(f"<{len(tokens)}q", *tokens))


def test_the_same_prompts_come_again_in_the_next_epochs():
    """They are chosen by a checksum, whatever the others of the step are."""
    generator = random.Random(3)
    data = [[generator.randrange(11) for _ in range(1 + i % 5)] + [i] for i in range(200)]
    for _ in range(3):
        generator.shuffle(data)
        for step in (data[i : i + 10] for i in range(0, 200, 10)):
            ranked = sorted(range(10), key=lambda i, step=step: checksum(step[i]))
            assert first_groups(make_prompts(step), 2).tolist() == ranked[:2]


def test_a_record_has_the_numbers_of_its_own_rollout():
    """Three groups of four, of which one is kept whole and two of the next."""
    task, num = MazeTask(5), 4
    prompts = task.prompts("train", 10, 3)
    responses = [[8 + s, DONE] for s in range(12)]
    rewards = torch.arange(12.0).view(3, num)
    valid = torch.ones(3, num, dtype=torch.bool)
    order = first_groups(prompts, 3).tolist()
    failed = num * order[0] + 1
    valid.view(-1)[failed] = False
    step = collected(Samples(prompts, Rollouts.given(responses)), rewards * valid, valid, step=7)
    parts = tuple({"form": float(s)} if s % 2 else {} for s in range(12))
    object.__setattr__(step, "components", parts)
    records = rollout_records(task, step, -torch.arange(12.0), 6, Ranks())
    sequences = [num * order[0] + i for i in range(4)] + [num * order[1] + i for i in range(2)]
    assert [record["id"] for record in records] == [10 + s // num for s in sequences]
    assert [record["response"] for record in records] == [
        task.decode(responses[s]) for s in sequences
    ]
    assert [record["reward"] for record in records] == [
        None if s == failed else float(s) for s in sequences
    ]
    assert [record["advantage"] for record in records] == [
        None if s == failed else -float(s) for s in sequences
    ]
    assert [record["components"] for record in records] == [parts[s] for s in sequences]
    assert {record["step"] for record in records} == {7}
    assert set(records[0]) == {
        *("step", "id", "prompt", "response", "reward", "truncated", "tokens"),
        *("advantage", "components", "answer", "columns"),
    }


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (5, 5), (100, 12)])
def test_no_more_rollouts_are_kept_than_asked_for_and_there_are(count, kept):
    task = MazeTask(5)
    step = collected(
        Samples(task.prompts("train", 0, 3), Rollouts.given([[DONE]] * 12)), torch.zeros(3, 4)
    )
    assert len(rollout_records(task, step, torch.zeros(12), count, Ranks())) == kept


@pytest.mark.slow
def test_the_advantage_of_the_update_that_used_a_rollout_is_kept(tmp_path, monkeypatch):
    update, used = Learner.update, []

    def spy(self, samples, advantages, sequences, *, when, **options):
        if when == "step 2":
            ids = samples.prompts.ids.tolist()
            used.extend((ids[s // 4], float(advantages[s])) for s in sequences.tolist())
        return update(self, samples, advantages, sequences, when=when, **options)

    monkeypatch.setattr(Learner, "update", spy)
    monkeypatch.setattr(
        MazeTask, "score", lambda self, prompts, rollouts: (rollouts.lengths % 2).float()
    )
    flags = "--objective pacs_paper --updates-per-step 2 --keep-rollouts 16 --sft-steps 5 --steps 2"
    assert train.main([*JOB, *flags.split(), "--out", str(tmp_path / "run")]) == 0
    kept = [
        (record["id"], record["advantage"])
        for record in read(tmp_path / "run" / "rollouts.jsonl")
        if record["step"] == 2
    ]
    assert sorted(kept) == sorted(used)
    assert any(advantage for _, advantage in kept[:4] + kept[-4:])

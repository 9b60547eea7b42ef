import random
import struct
import zlib

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.job.loop import first_groups, rollout_records
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks.maze import DONE, MazeTask
from maxrl_fast.training.learner import Learner
from tests.batches import collected, make_prompts
from tests.runs import JOB, read


def test_the_same_prompts_come_again_in_the_next_epochs():
    generator = random.Random(3)
    step = [[generator.randrange(11) for _ in range(1 + i % 5)] + [i] for i in range(30)]
    ranked = sorted(step, key=lambda tokens: zlib.crc32(struct.pack(f"<{len(tokens)}q", *tokens)))
    for _ in range(3):
        generator.shuffle(step)
        assert [step[i] for i in first_groups(make_prompts(step))] == ranked


def test_a_record_has_the_numbers_of_its_own_rollout():
    task, num = MazeTask(5), 4
    prompts = task.prompts("train", 10, 3)
    responses = [[8 + s, DONE] for s in range(12)]
    rewards = torch.arange(12.0).view(3, num)
    valid = torch.ones(3, num, dtype=torch.bool)
    order = first_groups(prompts)
    failed = num * order[0] + 1
    valid.view(-1)[failed] = False
    step = collected(Samples(prompts, Rollouts.given(responses)), rewards * valid, valid, step=7)
    parts = tuple({"form": float(s)} if s % 2 else {} for s in range(12))
    object.__setattr__(step, "components", parts)
    records = rollout_records(task, step, -torch.arange(12.0), 6)
    sequences = [num * order[0] + i for i in range(4)] + [num * order[1] + i for i in range(2)]
    for s, record in zip(sequences, records, strict=True):
        own = {"step": 7, "id": 10 + s // num, "response": task.decode(responses[s])}
        own |= {"reward": None if s == failed else float(s), "components": parts[s]}
        assert (own | {"advantage": None if s == failed else -float(s)}).items() <= record.items()
    assert set(records[0]) == {
        *("step", "id", "prompt", "response", "reward", "truncated", "tokens"),
        *("advantage", "components", "answer", "columns"),
    }


@pytest.mark.slow
def test_the_advantage_of_the_update_that_used_a_rollout_is_kept(tmp_path, monkeypatch):
    pass_, used = Learner.forward_backward, []

    def spy(self, samples, advantages, sequences, draw=(0, 0)):
        if draw[0] == 2:
            ids = samples.prompts.ids.tolist()
            used.extend((ids[s // 4], float(advantages[s])) for s in sequences.tolist())
        pass_(self, samples, advantages, sequences, draw)

    monkeypatch.setattr(Learner, "forward_backward", spy)
    monkeypatch.setattr(MazeTask, "score", lambda self, _, x: (x.lengths % 2).float())
    flags = "--objective pacs_paper --updates-per-step 2 --keep-rollouts 16 --sft-steps 5 --steps 2"
    assert train.main([*JOB, *flags.split(), "--out", str(tmp_path / "run")]) == 0
    records = read(tmp_path / "run" / "rollouts.jsonl")
    kept = [(record["id"], record["advantage"]) for record in records if record["step"] == 2]
    assert sorted(kept) == sorted(used)
    assert any(advantage for _, advantage in kept[:4] + kept[-4:])

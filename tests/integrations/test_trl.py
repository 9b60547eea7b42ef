import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maxrl_fast import ops

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def job():
    """The module with the trainers. It needs TRL, which the environment of the other tests does not
    have."""
    from tests.integrations import trl_job

    return trl_job


def ours(rows, estimator, weights=(1.0,), **options):
    """Return the advantages of a generated batch; its groups are found by their prompts, not by
    position."""
    each = torch.tensor(rows["rewards"])
    rewards = (each * torch.tensor(weights)).nansum(1).masked_fill(each.isnan().all(1), math.nan)
    valid, prompts = ~rewards.isnan(), sorted(set(rows["prompts"]))
    groups = torch.tensor([prompts.index(prompt) for prompt in rows["prompts"]])
    if "lengths" in ops.ESTIMATORS[estimator].inputs:
        options["lengths"] = torch.tensor([len(ids) for ids in rows["responses"]])
    return ops.group_advantage(
        rewards.nan_to_num(), estimator, group_ids=groups, valid=valid, **options
    )


def check(generated, seen, estimator, **options):
    wanted = {}
    for rows in generated:
        advantages = ours(rows, estimator, **options)
        torch.testing.assert_close(torch.tensor(rows["logged"]), advantages, rtol=0, atol=1e-6)
        for ids, advantage in zip(rows["responses"], advantages.tolist(), strict=True):
            wanted.setdefault(tuple(ids), []).append(advantage)
    for _, ids, advantage in seen:
        assert min(abs(advantage - one) for one in wanted[tuple(ids)]) <= 1e-6
    return sum(abs(advantage) > 1e-3 for *_, advantage in seen)


CASES = [
    ("maxrl", {}, "maxrl", {}),
    ("maxpo", {"estimator_options": {"k": 3}}, "maxpo", {"k": 3}),
    ("own", {"estimator": "opo"}, "opo", {}),  # its baseline is weighted by lengths
]
NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum"}
OF_PARTS = {"num_iterations": 2, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
TWO_BATCHES = {"gradient_accumulation_steps": 2, "scale_rewards": "batch"}


@pytest.mark.parametrize(("name", "arguments", "estimator", "options"), CASES)
def test_the_loss_sees_our_advantages(job, tmp_path, name, arguments, estimator, options):
    """With gradient accumulation, and two rewards of which either or both may be unknown."""
    trainer = job.run(
        name, tmp_path, arguments=arguments, config=TWO_BATCHES, unknown=True, weights=(1.0, -0.5)
    )
    rewards = torch.tensor([row for rows in trainer.generated for row in rows["rewards"]])
    assert {*(~rewards.isnan()).sum(1).tolist()} == {0, 1, 2}
    assert len(trainer.seen) == 3 * 16
    assert check(trainer.generated, trainer.seen, estimator, weights=(1.0, -0.5), **options) > 10


def test_a_mixin_behind_the_trainer_is_refused(job):
    with pytest.raises(
        TypeError, match="the bases of Behind must have the mixin before GRPOTrainer"
    ):
        type("Behind", (job.GRPOTrainer, job.AdvantageMixin), {})


def run_in_two_processes(folder, name, **options):
    launch = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    command = [*launch, "-m", "tests.integrations.trl_job", name, json.dumps(options), str(folder)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert [record["processes"] for record in records] == [2, 2]
    assert records[0]["generated"] == records[1]["generated"]
    assert records[0]["seen"] != records[1]["seen"]
    return records


def test_each_of_two_processes_computes_pacs_anew_from_its_own_groups(tmp_path):
    """The policy stays the one that sampled, so the advantages of the second update are those that
    were logged."""
    config = {"num_iterations": 2, "learning_rate": 0.0, "max_steps": 2}
    for record in run_in_two_processes(tmp_path, "pacs", config=config, unknown=True):
        (rows,) = record["generated"]
        logged = dict(zip(map(tuple, rows["responses"]), rows["logged"], strict=True))
        assert len(record["seen"]) == 2 * 8
        for _, ids, advantage in record["seen"]:
            assert advantage == pytest.approx(logged[tuple(ids)], abs=1e-5)
        assert max(abs(advantage) for *_, advantage in record["seen"]) > 0.1


def test_the_correction_for_vllm_stays_in_the_batch(job, tmp_path, monkeypatch):
    class Engine:
        def sync_weights(self):
            pass

        def generate(self, prompts, images, num_generations, profiler):
            generator = torch.Generator().manual_seed(len(corrections))
            responses = torch.randint(2, 16, (len(prompts), 6), generator=generator).tolist()
            return prompts, responses, [[[-2.5]] * 6 for _ in prompts], None

    class WithEngine(job.MaxRLTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.use_vllm, self.vllm_generation, self._last_loaded_step = True, Engine(), -1

        def _compute_loss(self, model, inputs):
            corrections.append(inputs["importance_sampling_ratio"])
            return super()._compute_loss(model, inputs)

    corrections = []
    monkeypatch.setitem(job.TRAINERS, "vllm", WithEngine)
    trainer = job.run("vllm", tmp_path)
    assert check(trainer.generated, trainer.seen, "maxrl") > 5
    assert len(corrections) == 3
    assert all((ratios - 1).abs().max() > 0.01 for ratios in corrections)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("own", {"arguments": {"estimator": "maxgrpo"}}, "estimator must be one of"),
        ("maxrl", {"config": NORMALIZED}, "must be sum_then_normalize"),
        ("pacs", {"config": OF_PARTS}, "whole groups"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(job, tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        job.build(name, tmp_path, **options)

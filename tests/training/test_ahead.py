import gc
import weakref
from copy import deepcopy
from dataclasses import is_dataclass, replace

import pytest
import torch

from examples.chain import ChainTask
from maxrl_fast.config.read import parse
from maxrl_fast.errors import RewardError, warn
from maxrl_fast.job.build import RunContext, prepare
from maxrl_fast.job.checkpoints import load_batches, save_batches
from maxrl_fast.records import Inserted, Rollouts, cumulative
from maxrl_fast.runtime.ranks import Ranks
from tests.job.test_resume import resumes_bitwise
from tests.models import save_checkpoint, tiny_decoder
from tests.runs import GUESS_TASK, base
from tests.tables import refused
from tests.tool_episodes import calculator_job
from tests.training.test_collect import ALL_WRONG, CHAIN, MIXED, CountingSource, collected

STEPS = 5
SIBLING = "--kl full --kl-coef .1 --teacher-prompt sibling"


def build(*flags):
    """Return the trainer after a warm start, if the flags have one, and the evaluator."""
    task_flags = [] if "--task" in flags else CHAIN
    config = parse([*base()[2:], *task_flags, "--lr", "1e-2", "--steps", str(STEPS), *flags])
    run = RunContext.begin(*prepare(config, Ranks(), warn), Ranks())
    for _ in run.warm_start.steps():
        pass
    run.learner.copy_policy()
    run.engine.load_weights(run.policy)
    return run.trainer, run.evaluators["test"]


@pytest.mark.parametrize(
    ("ahead", "flags"),
    [
        *((a, "--objective maxrl --dynamic-sampling 3") for a in (1, 3)),
        *((a, "--objective rloo --loss reinforce") for a in (1, 3)),
        *((a, "--objective maxpo_off_policy --k 2") for a in (1, 3)),
        (1, "--objective maxrl --reward-source vote"),
        (2, "--objective ppo --updates-per-step 2 --kl-coef .1"),
        (2, "--objective distill --reference {teacher}"),
        (2, f"--task {GUESS_TASK} --sft-steps 60 --objective rloo --rollouts 16 {SIBLING}"),
    ],
)
def test_steps_are_those_of_a_loop_with_old_weights(ahead, flags, tmp_path):
    """An evaluation between them, which uses the engine, changes nothing."""
    if "{teacher}" in flags:
        task, model = ChainTask(8), tiny_decoder(vocab_size=8)
        save_checkpoint(tmp_path, model.config, model.weights(), task.tokenizer_files(), (2,))
    words = flags.format(teacher=tmp_path).split()
    trainer, evaluator = build(*words, "--ahead", str(ahead))
    by_hand, _ = build(*words)
    by_hand.correction = trainer.correction
    assert (trainer.correction is not None) == ("reinforce" in flags or "distill" in flags)
    versions = [deepcopy(by_hand.learner.model)]
    first = sampled = turns = 0
    for n in range(1, STEPS + 1):
        record = trainer.step(n, first)
        if n == 3:
            trainer.load_engine()
            evaluator.evaluate()
        by_hand.engine.load_weights(versions[max(0, n - 1 - ahead)])
        by_hand.waiting.append(by_hand.collector.collect(n, sampled))
        expected = by_hand.step(n, sampled)
        sampled += expected.batch.num_sampled
        first += record.batch.num_sampled
        inserted = record.batch.rollouts.inserted
        turns += 0 if inserted is None else len(inserted.tokens)
        versions.append(deepcopy(by_hand.learner.model))
        assert record.metrics["lag"] == min(ahead, n - 1) * trainer.options.updates_per_step
        assert record.metrics["loss"] == expected.metrics["loss"]
        both = trainer.learner.model, versions[-1]
        for own, other in zip(*(model.parameters() for model in both), strict=True):
            assert torch.equal(own, other)
    assert trainer.settle() == []  # nothing is sampled for later steps
    trainer.learning_rate = replace(trainer.learning_rate, steps=STEPS + 2)
    trainer.load_engine()  # as an extended run, whose first batch is the policy's own
    assert trainer.step(STEPS + 1, first).metrics["lag"] == 0
    assert [x.sampled_after for x in trainer.settle()] == [STEPS]
    changed = versions[0].lm_head.weight != versions[-1].lm_head.weight
    assert changed.any()
    assert (turns > 0) == ("guess" in flags)


def test_the_error_of_sampling_is_raised_by_the_next_step(monkeypatch):
    trainer, _ = build("--objective", "maxrl", "--ahead", "1")

    def fails(n, first_prompt):
        if n == 3:
            raise RewardError("failed")
        return collect(n, first_prompt)

    collect, collector = trainer.collector.collect, trainer.collector
    monkeypatch.setattr(type(collector), "collect", lambda self, *given: fails(*given))
    trainer.step(1, 0)
    trainer.step(2, 4)
    with pytest.raises(RewardError, match="failed"):
        trainer.step(3, 8)
    assert trainer.settle() == []


def test_on_a_gpu_the_thread_has_its_device_and_a_stream_of_its_own(monkeypatch):
    """The stream begins after the weights have been copied and ends before the batch is read."""
    trainer, _ = build("--objective", "maxrl", "--ahead", "1")
    calls, device = [], torch.device("cuda", 3)

    class Stream:
        def __init__(self, device, priority=0):
            self.device = device

        def wait_stream(self, other):
            calls.append(f"after {other}")

        def synchronize(self):
            calls.append("wait")

        def __enter__(self):
            calls.append(f"on {self.device}")

        def __exit__(self, *error):
            calls.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"main of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set {device}"))
    monkeypatch.setattr(type(trainer.learner), "device", device)
    engine, sample = trainer.engine, trainer.collector.collect
    monkeypatch.setattr(type(engine), "load_weights", lambda *_: calls.append("weights"))
    monkeypatch.setattr(
        type(trainer.collector), "collect", lambda _, *n: calls.append("sample") or sample(*n)
    )
    trainer._next_batch(1, 0)
    trainer.settle()
    expected = ["sample", "weights", "after main of cuda:3", "set cuda:3", "on cuda:3"]
    assert calls == [*expected, "sample", "off", "wait"]


def test_a_process_with_several_trainers_frees_each():
    trainer, evaluator = build("--objective", "maxrl", "--ahead", "1")
    model = weakref.ref(trainer.learner.model)
    del trainer, evaluator
    gc.collect()
    assert model() is None


def test_a_waiting_batch_is_read_as_it_was_written(tmp_path):
    table = [ALL_WRONG, MIXED, MIXED, MIXED]
    batch = collected(table, 2, CountingSource(table))
    columns = tuple({"answer": f"é{i}", "numbers": [1, 2.5, None]} for i in range(2))
    tokens = batch.rollouts.tokens
    counts = torch.arange(len(tokens)) % 2
    inserted = Inserted(torch.arange(int(counts.sum())), cumulative(counts))
    prompts = replace(batch.prompts, columns=columns)
    rollouts = replace(batch.rollouts, inserted=inserted)
    batch = replace(batch, prompts=prompts, rollouts=rollouts, raw_rollouts=batch.rollouts)
    save_batches(tmp_path, [batch, replace(batch, step=4, sampled_after=2)])
    found, second = load_batches(tmp_path, torch.device("cpu"))
    assert (found.step, second.step, second.sampled_after) == (3, 4, 2)

    def plain(x):
        if isinstance(x, torch.Tensor):
            return x.dtype, x.tolist()
        return {n: plain(own) for n, own in vars(x).items()} if is_dataclass(x) else (type(x), x)

    assert plain(found) == plain(batch)
    assert isinstance(found.rollouts, Rollouts)


def test_what_needs_the_policy_while_it_trains_is_refused():
    for flags, message in (
        ("--rollout vllm", "needs --rollout native or --vllm-url, to sample while it trains"),
        ("--objective verifree", "cannot be used for verifree"),
        ("--ahead 5", "ahead must be an integer from 0 to 4, got 5"),
    ):
        with refused(message):
            parse(["--ahead", "1", *flags.split()])
    names = {
        loss: parse(["--ahead", "1", "--objective", "maxrl", "--loss", loss]).chosen.correction
        for loss in ("reinforce", "ppo")
    }
    assert names == {"reinforce": "tis", "ppo": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "flags"),
    [
        *((a, [*CHAIN, *"--objective maxrl --dynamic-sampling 4".split()]) for a in (1, 2)),
        (2, [*CHAIN, *"--objective ppo --reward-source vote --kl-coef .1".split()]),
        (1, f"--task {GUESS_TASK} --sft-steps 60 --objective rloo --rollouts 16 {SIBLING}".split()),
        (2, None),
    ],
)
def test_a_run_that_samples_ahead_resumes_bitwise(ahead, flags, tmp_path, monkeypatch):
    job = calculator_job(tmp_path) if flags is None else [*base()[2:], *flags]
    job += ["--steps", "6", "--ahead", str(ahead), "--eval-every", "2", "--lr", "1e-2"]
    steps = resumes_bitwise(monkeypatch, tmp_path, job, "step 2", "step 4")
    assert [step["lag"] for step in steps] == [min(ahead, n) for n in range(6)]
    is_dynamic = "--dynamic-sampling" in job
    assert not is_dynamic or len({step["num_prompts_sampled"] for step in steps}) > 1
    assert any(step["grad_norm"] for step in steps)

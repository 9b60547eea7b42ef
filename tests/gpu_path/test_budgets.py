"""What the host launches on a GPU, and where it waits for it: budgets, without a GPU (pretend.py).

A small policy is bound by launches: one costs the host about 4 us, and 0.7 us of the GPU's time in
a CUDA graph. Every wait empties the GPU's queue."""

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts, Rollouts, Samples, cumulative
from maxrl_fast.rollout import RolloutRequest, Sampling, decode_slots, sample_keys
from maxrl_fast.rollout.decode_slots import DecodeSlots, Shape
from maxrl_fast.rollout.device_decoder import DeviceEngine
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.runtime import tuning
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.learner import Learner, LossSettings, make_optimizer
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.registry import make_objective
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.trainer import OptimizerOptions, Trainer
from tests.batches import collected
from tests.gpu_path.pretend import GPU
from tests.models import updated
from tests.ops.definitions import OPTIONS
from tests.ops.test_group_advantage import inputs_of

DECODING_STEP = 45  # kernels of a decoding step of the maze's policy, which has 4 layers
DECODING_LAYER = 10  # of a layer in decoding, in every family
# of a layer in the update, forward and backward, with its share of the optimizer
TRAINING_LAYER = 98
PACKING = 20  # of a micro-batch
PACS_LOSS = 110  # plain PyTorch, its gradient and its metrics
UPDATE = 510  # of the maze's policy, in one micro-batch
STEP = 290  # of a whole step of it with two layers, without rollouts
GROUP_ADVANTAGE = 8
FUNCTION = 180  # of an estimator without a kernel, once in a step
# The waits of an update: for the lengths and the advantages; for loss and gradient norm, before the
# weights change; and for Adam's moments after that. A micro-batch has none.
WAITS = 3
WAITS_OF_STEP = 2  # for the metrics of the step, and for those of the objective if it has any


MAZE = DecoderConfig(32, 256, 1024, 4, 4, 2, 64, 512)
ONE_LAYER, TWO_LAYERS = (dataclasses.replace(MAZE, num_hidden_layers=n) for n in (1, 2))
FAMILIES = {
    "qwen2": DecoderConfig(151936, 896, 4864, 2, 14, 2, 64, 4096),
    "qwen3": DecoderConfig(151936, 1024, 3072, 2, 16, 8, 128, 4096, model_type="qwen3"),
    "llama": DecoderConfig(128256, 2048, 8192, 2, 32, 8, 64, 4096, model_type="llama"),
}


def policy(gpu, config=MAZE, dtype=torch.float32):
    with gpu:
        return Decoder.empty(config, GPU, dtype)


PLAIN = Sampling(1.0, 180, (7, 2))


def decoding_step(gpu, config, sampling=PLAIN):
    """Count one step of 4 groups of 8 samples."""
    with torch.no_grad(), gpu:
        model = DeviceEngine(policy(gpu, config), torch.bfloat16).model
        batch = DecodeSlots(model, Shape(4, 32, 8, 384, 180), torch.bfloat16, in_kernel=True)
        batch.step(sampling, 180)  # makes the cache
    with torch.no_grad(), gpu.watch():
        batch.step(sampling, 180)
    assert not gpu.waits, f"a decoding step is captured into a CUDA graph, and must not wait: {gpu}"
    return gpu.num_launches


def samples(gpu, num_prompts=4, num_rollouts=8):
    g, size = torch.Generator().manual_seed(0), num_prompts * num_rollouts
    cu_seqlens = cumulative(torch.randint(10, 41, (size,), generator=g))
    tokens, responses = (
        torch.randint(0, 32, (n,), generator=g) for n in (num_prompts * 310, int(cu_seqlens[-1]))
    )
    prompts = Prompts(tokens, torch.arange(num_prompts + 1) * 310, torch.arange(num_prompts))
    zeros = torch.zeros(len(responses)), torch.zeros(size, dtype=torch.bool)
    return Samples(gpu.put(prompts), gpu.put(Rollouts(responses, cu_seqlens, *zeros)))


def learner(gpu, config=MAZE, budget=131072, **options):
    model = policy(gpu, config)
    optimizer, settings = make_optimizer(model, 0.99, 0.01), LossSettings("ppo", "token_mean")
    return Learner(model, optimizer, settings, 1.0, budget, torch.bfloat16, **options)


def rewards(gpu, num_prompts=4, num_rollouts=8, shape=None):
    """0 and 1 in turn, so that every group learns."""
    values = (torch.arange(num_prompts * num_rollouts) % 2).float()
    return gpu.put(values.view(shape or (num_prompts, num_rollouts)))


def update(gpu, config=MAZE, num_prompts=4, num_rollouts=8, budget=131072):
    learning, batch = learner(gpu, config, budget), samples(gpu, num_prompts, num_rollouts)
    advantages = rewards(gpu, num_prompts, num_rollouts, (-1,))
    for _ in range(2):
        with gpu.watch():
            updated(learning, batch, advantages, batch.sequences, when="step 1", lr=1e-3)
    return gpu.num_launches


def test_a_decoding_step_of_the_mazes(gpu):
    assert decoding_step(gpu, MAZE) <= DECODING_STEP, str(gpu)
    decoding_step(gpu, MAZE, Sampling(1.0, 180, (7, 2), top_k=5, top_p=0.9))  # waits for nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_decoding(gpu, family):
    deeper = dataclasses.replace(FAMILIES[family], num_hidden_layers=3)
    of_layer = decoding_step(gpu, deeper) - decoding_step(gpu, FAMILIES[family])
    assert of_layer <= DECODING_LAYER, f"{of_layer} a layer; two layers: {gpu}"


def test_a_layer_in_training(gpu):
    deeper = dataclasses.replace(MAZE, num_hidden_layers=2)
    of_layer = update(gpu, deeper) - update(gpu, ONE_LAYER)
    assert of_layer <= TRAINING_LAYER, f"{of_layer} a layer; one layer: {gpu}"


def specs(forest):
    return [spec for *_, spec in forest.parts]


def test_packing_launches_the_same_for_any_number_of_sequences(gpu):
    counts = []
    for shape in ((2, 4), (32, 8)):
        batch = samples(gpu, *shape)
        packer = Packer(batch.prompts, batch.rollouts, rewards(gpu, *shape, (-1,)), False)
        with gpu.watch():
            packed = packer.pack(packer.split(packer.share(batch.sequences, 1)[0], 10**6)[0])
            for spec in specs(packed.forest):
                assert spec.varlen[0].device == GPU
        assert len(gpu.waits) == 1, f"only the lengths are read: {gpu}"
        counts.append(gpu.num_launches)
    assert counts[0] == counts[1] <= PACKING, str(gpu)


@pytest.mark.parametrize("estimator", [x for x, row in ops.ESTIMATORS.items() if not row.of_run])
def test_group_advantages_do_not_wait(gpu, estimator):
    row = ops.ESTIMATORS[estimator]
    known = inputs_of(estimator, (4, 8)) | OPTIONS.get(estimator, {})
    chosen = {name: gpu.put(x) if torch.is_tensor(x) else x for name, x in known.items()}
    if row.size is not None and row.size.required:
        chosen[row.size.name] = row.size.smallest
    given = rewards(gpu)
    for _ in range(2):  # the first call makes tables, which are kept
        with gpu.watch():
            advantages = ops.group_advantage(given, estimator, **chosen)
    assert advantages.device == GPU
    assert not gpu.waits, str(gpu)
    assert gpu.num_launches <= (FUNCTION if row.kernel is None else GROUP_ADVANTAGE), str(gpu)


def test_an_update(gpu):
    assert update(gpu) <= UPDATE, str(gpu)
    assert len(gpu.waits) <= WAITS, str(gpu)
    assert gpu.launches["_fused_adamw_"] == 2, "one kernel for the matrices, one for the vectors"
    assert gpu.launches["_foreach_zero_"] == 0  # gradients are None before the first pass
    update(gpu, ONE_LAYER, budget=700)  # each prompt alone, with its 8 responses
    assert len(gpu.waits) <= WAITS, str(gpu)


def test_an_update_launches_the_same_for_any_number_of_sequences(gpu):
    assert update(gpu, ONE_LAYER, 2, 4) == update(gpu, ONE_LAYER, 16, 16), str(gpu)


OBJECTIVES = {"grpo": GroupObjective("grpo", {}), "pacs": make_objective("pacs", {}, 8)}


def step(gpu, objective, learning, **options):
    """Run two steps, and count the second one: sampling itself waits for the device."""
    with gpu:
        engine = native_engine(learning.model, torch.bfloat16, cache_bytes=10**9)
        batch = collected(samples(gpu), rewards(gpu))
    collector = SimpleNamespace(task=MazeTask(17), ranks=Ranks(), collect=lambda step, first: batch)
    adam = OptimizerOptions(lr=1e-3, steps=10, warmup_steps=0)
    trainer = Trainer(collector, objective, learning, engine, adam, **options)
    for n in (1, 2):
        with gpu.watch():
            metrics = trainer.step(n, 0).metrics
    assert metrics["num_sequences_trained"] == 32
    assert metrics["reward_mean"] == 0.5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_whole_step(gpu, objective):
    with gpu:
        learning = learner(gpu, TWO_LAYERS)
    step(gpu, OBJECTIVES[objective], learning)
    has_own_metrics = objective == "pacs"
    assert len(gpu.waits) <= WAITS + WAITS_OF_STEP - (not has_own_metrics), str(gpu)
    assert gpu.num_launches <= STEP + PACS_LOSS * has_own_metrics, str(gpu)


def test_a_step_with_a_reference_policy_and_importance_weights(gpu):
    with gpu:
        reference = policy(gpu, TWO_LAYERS).requires_grad_(False)
        learning = learner(gpu, TWO_LAYERS, reference=reference)
        learning.settings = dataclasses.replace(learning.settings, kl_coef=0.1)
    correction = make_correction("tis", {"importance_cap": 2.0})
    step(gpu, OBJECTIVES["grpo"], learning, correction=correction)
    more = "one more for the reference policy, two for the correction and its metrics"
    assert len(gpu.waits) <= WAITS + 1 + 3, f"{more}: {gpu}"


LIMIT = 40  # tokens of a response
SAMPLING = Sampling(1.0, LIMIT, (7, 2))
NUM_PROMPTS = 4
# Before and after the steps: checks of the request, the prompts' lengths, the prefill's indices,
# the packing of the responses.
WAITS_OF_CALL = 25
# Which samples have ended; and the indices of the rows to keep, six times in a call at most.
WAITS_OF_BURST = 1


def length_of(keys):
    return 1 + keys % LIMIT


def append(length, done, keys, rows):
    length, done, keys = (x.known for x in (length, done, keys))
    rows = torch.arange(len(length)) if rows is None else rows.known
    length[rows] += (~done[rows]).long()
    done[rows] |= length[rows] == length_of(keys[rows])


@pytest.fixture
def engine(gpu, monkeypatch):
    """With graphs that replay a step with the tensors and the number of rows of their capture."""
    sample_and_append, steps = decode_slots.sample_and_append, []

    def sampled(logits, sampling, keys, stops, last, length, done, tokens, logprobs, rows=None):
        sample_and_append(logits, sampling, keys, stops, last, length, done, tokens, logprobs, rows)
        steps.append((length, done, keys, rows))
        append(*steps[-1])

    def captured(step, stream, pool):
        assert stream is engine.stream is not None
        waits = len(gpu.waits)
        step()
        assert len(gpu.waits) == waits, f"a captured step must not wait: {gpu.waits[waits:]}"
        return SimpleNamespace(replay=partial(append, *steps[-1]))

    monkeypatch.setattr(decode_slots, "sample_and_append", sampled)
    monkeypatch.setattr(decode_slots, "captured", captured)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    with gpu:
        engine = native_engine(policy(gpu, ONE_LAYER), torch.bfloat16, cache_bytes=10**9)
    return engine


def sample(gpu, engine, num_samples):
    """Sample, check the responses' lengths, and return how often the host waited."""
    lengths, ids = torch.tensor([30, 7, 41, 12]), torch.arange(NUM_PROMPTS)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    prompts = gpu.put(Prompts(torch.arange(90) % 32, bounds, ids))
    with gpu:
        gpu.waits.clear()
        rollouts = engine.generate(RolloutRequest(prompts, num_samples, SAMPLING, 3, 1))
        num_waits, lengths = len(gpu.waits), rollouts.lengths.cpu()
    samples = torch.arange(NUM_PROMPTS * num_samples)
    keys = sample_keys(3, 1, samples // num_samples, samples % num_samples)
    assert rollouts.tokens.device == GPU
    assert torch.equal(lengths, length_of(keys))
    return num_waits


def test_prompts_that_wait_for_a_slot_are_admitted_later(gpu, engine):
    engine.max_batch = 7
    for num_samples in (3, 10):
        sample(gpu, engine, num_samples)


def test_a_call_waits_a_few_times_for_each_burst(gpu, engine):
    for _ in range(2):  # the first call captures
        num_waits = sample(gpu, engine, 16)
        bursts = -(-engine.statistics.decode_steps // tuning.BURST)
        assert num_waits <= WAITS_OF_CALL + WAITS_OF_BURST * bursts, str(gpu)

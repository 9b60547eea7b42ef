"""What the host launches on a GPU, and where it waits for it: budgets, without a GPU (pretend.py).

A small policy is bound by launches: one costs the host about 4 us, and 0.7 us of the GPU's time in
a CUDA graph. Every wait empties the GPU's queue.
"""

import dataclasses

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.model.attention import tree_attention
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts, Rollouts, Samples, cumulative
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.decode_slots import DecodeSlots, Shape
from maxrl_fast.rollout.device_decoder import DeviceDecoder
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.correction import ImportanceWeights
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.pacs import PacsObjective
from maxrl_fast.training.optimizer import LearningRate, make_optimizer
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.trainer import Trainer
from tests.batches import collected
from tests.gpu_path.pretend import GPU

DECODING_STEP = 45  # kernels of a decoding step of the maze's policy, which has 4 layers
DECODING_LAYER = 10  # of a layer in decoding, in every family
# of a layer in the update, forward and backward, with its share of the optimizer
TRAINING_LAYER = 98
PACKING = 20  # of a micro-batch
LINEAR_LOSS = 26  # of the loss from hidden states in one chunk, forward and backward
PACS_LOSS = 70  # plain PyTorch, and its gradient
PACS_ADVANTAGES = 24 + PACS_LOSS
UPDATE = 510  # of the maze's policy, in one micro-batch
STEP = 615  # of a whole step of it without rollouts
GROUP_ADVANTAGE = 8
FUNCTION = 180  # of an estimator without a kernel, once in a step
# The waits of an update: for the lengths and the advantages; for loss and gradient norm, before the
# weights change; and for Adam's moments after that. A micro-batch has none.
WAITS = 3
WAITS_OF_STEP = 2  # for the metrics of the step, and for those of the objective if it has any

CORRECTION = ImportanceWeights(0.0, 2.0, of_sequence=False, masks=False)
MAZE = DecoderConfig(32, 256, 1024, 4, 4, 2, 64, 512)
ONE_LAYER = dataclasses.replace(MAZE, num_hidden_layers=1)
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
        model = DeviceDecoder(policy(gpu, config), torch.bfloat16).model
        batch = DecodeSlots(model, Shape(4, 32, 8, 384, 180), torch.bfloat16, in_kernel=True)
    with torch.no_grad(), gpu.watch():
        batch.step(sampling, 180)
    assert not gpu.waits, f"a decoding step is captured into a CUDA graph, and must not wait: {gpu}"
    return gpu.num_launches


def samples(gpu, num_prompts=4, num_rollouts=8):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 41, (num_prompts * num_rollouts,), generator=g)
    tokens, num_tokens = torch.randint(0, 32, (num_prompts * 310,), generator=g), int(lengths.sum())
    prompts = Prompts(tokens, torch.arange(num_prompts + 1) * 310, torch.arange(num_prompts))
    responses, is_truncated = (
        torch.randint(0, 32, (num_tokens,), generator=g),
        torch.zeros(len(lengths), dtype=torch.bool),
    )
    rollouts = Rollouts(responses, cumulative(lengths), torch.zeros(num_tokens), is_truncated)
    return Samples(gpu.put(prompts), gpu.put(rollouts))


def learner(gpu, config=MAZE, budget=131072, **options):
    model = policy(gpu, config)
    optimizer, settings = make_optimizer(model, 0.99, 0.01), LossSettings("ppo", "token_mean")
    return Learner(model, optimizer, settings, 1.0, budget, torch.bfloat16, **options)


def rewards(gpu, num_prompts=4, num_rollouts=8, shape=None):
    """0 and 1 in turn, so that every group learns."""
    values = (torch.arange(num_prompts * num_rollouts) % 2).float()
    return gpu.put(values.view(shape or (num_prompts, num_rollouts)))


def update(gpu, config=MAZE, num_prompts=4, num_rollouts=8, budget=131072):
    """Count an update after the first, which allocates gradients and moments."""
    learning, batch = learner(gpu, config, budget), samples(gpu, num_prompts, num_rollouts)
    advantages = rewards(gpu, num_prompts, num_rollouts, (-1,))
    for _ in range(2):
        with gpu.watch():
            learning.update(batch, advantages, batch.sequences, when="step 1", lr=1e-3)
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
    return [forest.segments, *(spec for *_, spec in forest.levels)]


def test_packing_launches_the_same_for_any_number_of_sequences(gpu):
    counts = []
    for shape in ((2, 4), (32, 8)):
        batch = samples(gpu, *shape)
        packer = Packer(batch.prompts, batch.rollouts, rewards(gpu, *shape, (-1,)), 1.0)
        with gpu.watch():
            packed = packer.pack(packer.split(packer.share(batch.sequences, 1)[0], 10**6)[0])
            for spec in specs(packed.forest):
                assert spec.varlen[0].device == GPU
        assert len(gpu.waits) == 1, f"only the lengths are read: {gpu}"
        counts.append(gpu.num_launches)
    assert counts[0] == counts[1] <= PACKING, str(gpu)


def test_attention_is_one_call_for_the_segments_and_one_for_each_level(gpu):
    batch = samples(gpu)
    with gpu:
        packer = Packer(batch.prompts, batch.rollouts, rewards(gpu, shape=(-1,)))
        forest = packer.pack(batch.sequences).forest
        calls = 1 + len(forest.levels)
        size = int(forest.lengths.sum())
        q, k, v = (
            torch.empty(size, heads, 64, dtype=torch.bfloat16, device=GPU, requires_grad=True)
            for heads in (4, 2, 2)
        )
        for spec in specs(forest):
            assert spec.varlen
    with gpu.watch():
        tree_attention(q, k, v, forest).sum().backward()
    for name in ("forward", "backward"):
        assert gpu.launches[f"_flash_attention_{name}"] == calls
    assert not gpu.waits, str(gpu)
    assert gpu.num_launches <= 10 + 22 * len(forest.levels), str(gpu)


def test_the_loss_from_hidden_states(gpu):
    counts = []
    for num_sequences in (4, 64):
        with gpu:
            hidden = torch.empty(
                num_sequences * 8, 64, dtype=torch.bfloat16, device=GPU, requires_grad=True
            )
            weight = torch.empty(1000, 64, device=GPU, requires_grad=True)
        targets, cu_seqlens = (
            gpu.put(torch.arange(num_sequences * 8)),
            gpu.put(torch.arange(num_sequences + 1) * 8),
        )
        advantages = gpu.put(torch.arange(1.0, num_sequences + 1))
        with gpu.watch():
            loss, _ = ops.linear_policy_gradient_loss(
                hidden, weight, targets, advantages, cu_seqlens
            )
            loss.backward()
        assert not gpu.waits, str(gpu)
        assert gpu.launches["token_loss_in_bfloat16"] == 1
        counts.append(gpu.num_launches)
    assert counts[0] == counts[1] <= LINEAR_LOSS, str(gpu)


@pytest.mark.parametrize("estimator", ops.ESTIMATORS)
def test_group_advantages_do_not_wait(gpu, estimator):
    row, chosen = ops.ESTIMATORS[estimator], {}
    known = {
        "lengths": gpu.put(torch.arange(1, 33).view(4, 8)),
        "logprobs": gpu.put(-torch.arange(1.0, 33.0).view(4, 8)),
        "greedy_correct": gpu.put(torch.tensor([False, True, False, True])),
        "reward_parts": gpu.put(torch.arange(64).view(2, 4, 8) % 2),
        "greedy_rewards": gpu.put(torch.tensor([0.0, 1.0, 0.0, 0.5])),
        "prompts": [0, 1, 2, 3],
        "log_ratios": gpu.put(torch.arange(-16.0, 16.0).view(4, 8) / 32),
    }
    chosen |= {name: known[name] for name in row.inputs}
    chosen |= {name: 0.1 for name, option in row.options.items() if option.default is None}
    if row.size is not None and row.size.required:
        chosen[row.size.name] = row.size.smallest
    given = rewards(gpu)
    for _ in range(2):  # the first call makes tables, which are kept
        with gpu.watch():
            advantages = ops.group_advantage(given, estimator, **chosen)
    assert advantages.device == GPU
    assert not gpu.waits, str(gpu)
    assert gpu.num_launches <= (FUNCTION if row.kernel is None else GROUP_ADVANTAGE), str(gpu)


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_pacs_waits_for_the_lengths_and_its_metrics_only(gpu, updates_per_step):
    with gpu:
        learning = learner(gpu)
        batch = collected(samples(gpu), rewards(gpu))
    objective = PacsObjective()
    objective.updates_per_step = updates_per_step
    with gpu:
        step = objective.begin(batch, learning)
    for sequences in batch.minibatches(updates_per_step):
        with gpu.watch():
            assert step.advantages(sequences).device == GPU
        if updates_per_step == 1:
            assert not gpu.waits, str(gpu)
            assert gpu.num_launches <= PACS_ADVANTAGES, str(gpu)
        assert len(gpu.waits) <= 1, f"micro-batches are cut by the lengths: {gpu}"
    with gpu.watch():
        step.finish()
    assert len(gpu.waits) == 1, str(gpu)


def test_an_update(gpu):
    assert update(gpu) <= UPDATE, str(gpu)
    assert len(gpu.waits) <= WAITS, str(gpu)
    assert gpu.launches["_fused_adamw_"] == 2, "one kernel for the matrices, one for the vectors"
    assert gpu.launches["_foreach_zero_"] == 1
    update(gpu, ONE_LAYER, budget=700)  # each prompt alone, with its 8 responses
    assert len(gpu.waits) <= WAITS, str(gpu)


def test_an_update_launches_the_same_for_any_number_of_sequences(gpu):
    assert update(gpu, ONE_LAYER, 2, 4) == update(gpu, ONE_LAYER, 16, 16), str(gpu)


OBJECTIVES = {
    "grpo": GroupObjective("grpo", {}),
    "pacs": PacsObjective(),
}


class Collector:
    """What a step has sampled; sampling itself waits for the device."""

    task, ranks = MazeTask(17), Ranks()

    def __init__(self, batch):
        self.batch = batch

    def collect(self, step, first_prompt):
        return self.batch


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_whole_step(gpu, objective):
    with gpu:
        learning = learner(gpu)
        engine = NativeEngine(learning.model, torch.bfloat16, cache_bytes=10**9)
        batch = collected(samples(gpu), rewards(gpu))
    trainer = Trainer(
        Collector(batch), OBJECTIVES[objective], learning, engine, LearningRate(1e-3, 10, 0)
    )
    for n in (1, 2):
        with gpu.watch():
            metrics = trainer.step(n, 0).metrics
    assert metrics["num_sequences_trained"] == 32
    assert metrics["reward_mean"] == 0.5
    has_own_metrics = objective == "pacs"
    assert len(gpu.waits) <= WAITS + WAITS_OF_STEP - (not has_own_metrics), str(gpu)
    assert gpu.num_launches <= STEP + PACS_LOSS * has_own_metrics, str(gpu)


def test_a_step_with_a_reference_policy_and_importance_weights(gpu):
    with gpu:
        learning = learner(gpu, reference=policy(gpu).requires_grad_(False))
        learning.settings = dataclasses.replace(learning.settings, kl_coef=0.1)
        engine = NativeEngine(learning.model, torch.bfloat16, cache_bytes=10**9)
        batch = collected(samples(gpu), rewards(gpu))
    trainer = Trainer(
        Collector(batch),
        OBJECTIVES["grpo"],
        learning,
        engine,
        LearningRate(1e-3, 10, 0),
        correction=CORRECTION,
    )
    with gpu.watch():
        trainer.step(1, 0)
    more = "one more for the reference policy, two for the correction and its metrics"
    assert len(gpu.waits) <= WAITS + 1 + 3, f"{more}: {gpu}"

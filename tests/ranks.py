"""One of the processes that tests/distributed/test_torchrun.py starts with torchrun: `python -m
tests.ranks OUT`.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor

from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.model.linear import full_tensor
from maxrl_fast.records import Inserted, Rollouts, Samples, cumulative
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.learner import Learner, LossSettings, UpdateMetrics, make_optimizer
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.passes import distribute, shard
from tests.batches import collected, make_prompts
from tests.models import adapted, tiny_decoder, updated

# 4 responses to each of 5 prompts
LENGTHS = [3, 9, 1, 12, 5, 5, 0, 7, 2, 20, 4, 4, 6, 1, 8, 3, 11, 2, 9, 9]


def step_inputs(has_turns: bool = False):
    """Return five prompts of different lengths with four responses each. One response is empty, one
    group has no advantages. With `has_turns`, up to two tokens are inserted before some tokens of
    the first six and the last six responses.
    """
    generator = torch.Generator().manual_seed(3)

    def tokens(length):
        return torch.randint(0, 32, (length,), generator=generator).tolist()

    prompts = make_prompts([tokens(n) for n in (6, 30, 3, 11, 8)])
    rollouts = Rollouts.given([tokens(n) for n in LENGTHS])
    logprobs = torch.full((len(rollouts.tokens),), -3.0)
    rollouts = dataclasses.replace(rollouts, logprobs=logprobs)
    advantages = torch.randn(20, generator=generator)
    advantages[8:12] = 0
    if has_turns:
        counts = torch.randint(0, 3, (len(rollouts.tokens),), generator=generator)
        counts[rollouts.cu_seqlens[:-1].clamp_max(len(counts) - 1)] = 0
        counts[rollouts.cu_seqlens[6] : rollouts.cu_seqlens[14]] = 0
        inserted = Inserted(torch.tensor(tokens(int(counts.sum()))), cumulative(counts))
        rollouts = dataclasses.replace(rollouts, inserted=inserted)
    return Samples(prompts, rollouts), advantages


def one_update(
    ranks: Ranks, sharding: str, settings: LossSettings, **options: float
) -> dict[str, object]:
    """Return metrics, gradients and weights after an update with token budget 24, and log-probs
    under the new weights.
    """
    model = tiny_decoder()
    if options.get("lora"):
        adapted(model, "q_proj,down_proj")
    model.checkpoint_activations = options.get("checkpoint_activations", False)
    reference = tiny_decoder(seed=1).requires_grad_(False)
    dtype = torch.bfloat16 if options.get("bfloat16") else torch.float32
    if sharding == "full" and ranks.size > 1:
        for policy in (model, reference):
            shard(policy, dtype, torch.device("cpu"))
    module = distribute(model, ranks, dtype)
    if options.get("every_pass"):  # as where its memory is short
        model.keeps_gradients = False
    samples, advantages = step_inputs(options.get("turns", False))
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.01)
    state = {"siren_anchor": torch.tensor([0.2]).double()}
    learner = Learner(model, optimizer, settings, 1e9, 24, dtype, reference, ranks, module, state)
    samples = Samples(samples.prompts, learner.with_reference(samples))
    objective = GroupObjective("maxpo_off_policy", {"k": 2})
    # advantages as rewards, one group alike
    step = objective.begin(collected(samples, advantages.view(5, 4)), learner)
    off_policy = step.advantages(torch.arange(20))
    rewards = advantages.view(5, 4)
    correction = make_correction("icepop", {"low": 0.05, "high": 20.0})
    weighted = correction(collected(samples, rewards), learner)
    learner.settings = dataclasses.replace(settings, sequence_mask=1.0)
    kept = learner.plan(samples, advantages, torch.arange(20), (0, 0)).sequences
    learner.settings = settings
    noise = torch.randn(len(samples.rollouts.tokens), generator=torch.Generator().manual_seed(5))
    logprobs = samples.rollouts.logprobs + options.get("noise", 0.0) * noise
    rollouts = dataclasses.replace(samples.rollouts, logprobs=logprobs)
    samples = Samples(samples.prompts, rollouts)
    counts = "every_pass" in options
    with torch.autograd.profiler.profile(counts) as calls:
        metrics = updated(learner, samples, advantages, torch.arange(20), when="step 1", lr=1e-3)
    names = [call.name for call in calls.function_events] if counts else []
    exchanges = sum("c10d::_reduce_scatter" in name for name in names)
    known = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    gradients = {name: full_tensor(grad).clone() for name, grad in known}
    weights = {name: weight.clone() for name, weight in model.weights()}
    first, count = ranks.part(20)
    own = samples.rollouts.select(torch.arange(first, first + count))
    own = dataclasses.replace(own, ref_logprobs=None)  # computed after they were gathered
    if own.inserted is not None and not len(own.inserted.tokens):  # those of the second of three
        own = dataclasses.replace(own, inserted=None)
    chosen = torch.tensor([1, 4, 5, 6, 16])
    logprobs = learner.passes.logprobs(model, samples, chosen)
    nothing = updated(
        learner, samples, torch.zeros(20), torch.arange(8, 12), when="step 2", lr=1e-3
    )
    return {
        "metrics": flat(metrics),
        "exchanges": exchanges / (1 + len(model.blocks)),
        "gradients": gradients,
        "weights": weights,
        "logprobs": logprobs,
        "gathered": gathered(ranks.gather(own)),
        "off_policy": off_policy,
        "weights of tokens": weighted.rollouts.importance_weights,
        "kept": kept,
        "nothing": flat(nothing),
    }


def gathered(rollouts: Rollouts) -> dict[str, Tensor]:
    tensors = dict(vars(rollouts)) | {"inserted": None}
    if rollouts.inserted is not None:
        tensors |= {f"inserted.{name}": x for name, x in vars(rollouts.inserted).items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def flat(metrics: UpdateMetrics) -> dict[str, float]:
    return {name: value for name, value in vars(metrics).items() if name != "own"} | metrics.own


PPO = LossSettings(loss="ppo", aggregation="token_mean", clip_low=0.5, clip_high=0.5)


def own_loss(t: Tokens, *, power: float = 2.0) -> Tensor:
    penalty = (t.sequence_mean(t.log_ratio).detach() * t.logprobs).abs() ** power
    return 0.1 * penalty - t.advantages * t.ratio


COV = {"share": 0.2, "low": 0.1, "high": 2.0}
SIMKO = {"alpha": 0.3, "k": 2, "tau": 0.5}
LOSSES = {
    "kl_cov": LossSettings("kl_cov", "token_mean", loss_options={"share": 0.2, "coef": 0.5}),
    "clip_cov": LossSettings("clip_cov", "token_mean", 0.9, 9.0, loss_options=COV, seed=3),
    "simko": LossSettings("simko", "token_mean", 0.9, 9.0, loss_options=SIMKO),
    "high entropies": LossSettings("ppo", "token_mean", 0.9, 9.0, top_entropy=0.6),
    "siren": LossSettings("ppo", "token_mean", 0.5, 0.5, siren=0.3),
    "own": LossSettings(own_loss, "token_mean", kl_coef=0.1),
}
KL = LossSettings("gspo", "seq_mean_token_mean", kl_coef=0.1)
FULL = LossSettings("ppo", "token_mean", divergence_coef=0.5)
RUNS = {
    "ddp": ("none", PPO, {}),
    "fsdp": ("full", PPO, {"every_pass": False}),
    "ddp with kl": ("none", KL, {}),
    "fsdp with kl": ("full", KL, {"every_pass": True}),
    "ddp with the exact divergence": ("none", FULL, {}),
    "fsdp with the exact divergence": ("full", FULL, {}),
    "ddp lora": ("none", PPO, {"lora": True}),
    "fsdp lora, checkpointed": ("full", PPO, {"lora": True, "checkpoint_activations": True}),
    "fsdp bfloat16": ("full", PPO, {"bfloat16": True}),
    "ddp turns": ("none", PPO, {"turns": True}),
    "fsdp turns": ("full", LOSSES["high entropies"], {"turns": True, "noise": 1.0}),
    # the tokens that they compare are gathered in the same way with either
    **{
        name: (("none", "full")[i % 2], settings, {"noise": 1.0})
        for i, (name, settings) in enumerate(LOSSES.items())
    },
}

if __name__ == "__main__":
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = Ranks.of_environment()
    with ranks.connected(torch.device("cpu")):
        results = {}
        for name, (sharding, settings, options) in RUNS.items():
            results[name] = one_update(ranks, sharding, settings, **options)
        torch.save(results, out / f"{ranks.rank}.pt")

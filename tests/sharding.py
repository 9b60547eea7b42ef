"""A world of one rank: `python -m tests.sharding cuda:0 FOLDER` compares a policy that is sharded
by FSDP2 with one that is not, in a process of its own, which collectives that hang do not outlive.
"""

import datetime
import subprocess
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from maxrl_fast.job.checkpoints import Snapshot, load_learner, save_state
from maxrl_fast.model.linear import full_tensor
from maxrl_fast.records import Samples
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.runtime.ranks import Ranks, exit_process
from maxrl_fast.training.learner import Learner, LossSettings, make_optimizer
from maxrl_fast.training.passes import shard
from tests.batches import THREE_PROMPTS as PROMPTS
from tests.models import tiny_decoder, updated

# sizes that every kernel has in half precision too
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
COSINE = {torch.float32: 1 - 1e-4, torch.bfloat16: 0.98}  # Adam turns roundings into signs
LIMIT = datetime.timedelta(seconds=60)


def run_alone(device: str, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.sharding", device, str(folder)]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def trained(dtype, device, sharded):
    """Return the learner after two updates in several micro-batches, their samples and metrics, and
    the change of all weights."""
    model = tiny_decoder(model_type="qwen3", **SIZES)
    before = [weight.detach().to(device, copy=True) for weight in model.parameters()]
    if sharded:
        shard(model, dtype, device)
    else:
        model.to(device)
    # CUDA graphs are captured while NCCL's watchdog runs
    engine = native_engine(model, dtype, cache_bytes=2**25)
    request = RolloutRequest(PROMPTS.to(device), 4, Sampling(1.0, 9, (3,)), 1, 1)
    rollouts = engine.generate(request)
    settings = LossSettings("reinforce", "token_mean")  # no clip, which roundings could cross
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.01)
    learner = Learner(model, optimizer, settings, 0.01, 24, dtype)
    assert learner.passes.shares_weights == sharded
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(0)).to(device)
    samples = Samples(request.prompts, rollouts)
    updates = [
        updated(learner, samples, advantages, samples.sequences, when=f"step {n}", lr=2e-4)
        for n in (1, 2)
    ]
    engine.load_weights(model)
    assert engine.generate(request).logprobs.isfinite().all()
    after = [full_tensor(weight.detach()) for weight in model.parameters()]
    change = [(x - y).flatten() for x, y in zip(after, before, strict=True)]
    return learner, rollouts, updates, torch.cat(change)


def compare(dtype, device, folder):
    plain, expected_rollouts, expected, expected_change = trained(dtype, device, sharded=False)
    learner, rollouts, updates, change = trained(dtype, device, sharded=True)
    assert torch.equal(rollouts.tokens, expected_rollouts.tokens)  # of the same weights
    for a, e in zip(updates, expected, strict=True):
        assert e.grad_norm > 0.01  # clipped
        for name in ("loss", "grad_norm"):
            x, y = getattr(a, name), getattr(e, name)
            print(f"{dtype} {name}: {x:.6g}, unsharded {y:.6g}")
            assert abs(x - y) <= TOLERANCE[dtype] * abs(y) + 1e-8, name
        assert a.num_targets == e.num_targets == len(rollouts.tokens)
    cosine = float(torch.cosine_similarity(change, expected_change, dim=0))
    assert cosine > COSINE[dtype], cosine
    snapshot = Snapshot.of(learner)
    assert snapshot.is_sharded
    save_state(folder, snapshot.tensors)
    load_learner(folder, plain, Ranks())  # without shards
    saved = dict(snapshot.weights)
    for (name, a), b in zip(
        plain.model.named_parameters(), learner.model.parameters(), strict=True
    ):
        assert torch.equal(a, full_tensor(b.detach())), name
        assert name not in saved or torch.equal(saved[name], a.cpu()), name
    assert len(saved) == sum(1 for _ in learner.model.parameters())


def main(device, folder):
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=LIMIT,
    )
    for dtype in TOLERANCE:
        compare(dtype, device, folder / str(dtype))
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(torch.device(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:  # which the end of a process with NCCL could wait for
        traceback.print_exc()
        exit_process(1)
    exit_process(0)

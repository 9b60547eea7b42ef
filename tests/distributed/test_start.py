import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils._python_dispatch import _disable_current_modes

from maxrl_fast import train
from maxrl_fast.job import build, launch
from tests.config.test_memory import LiveBytes
from tests.distributed.test_torchrun import finished, torchrun
from tests.runs import CHAIN_TASK

SIZES = "--hidden-size 64 --intermediate-size 192 --layers 8 --kv-heads 2".split()
RUN = f"--task {CHAIN_TASK} --length 8 --sft-steps 0 --steps 1 --eval-prompts 4 --objective ppo"


@pytest.mark.slow
def test_a_rank_never_holds_half_of_the_weights(tmp_path):
    flags = [*RUN.split(), *SIZES, *"--kl-coef 0.1 --sharding full --out".split()]
    arguments = ["-m", "tests.distributed.test_start", *flags, str(tmp_path / "run")]
    process = torchrun(4, *arguments)
    output = finished(process, 200)
    assert process.returncode == 0, output
    lines = [line.split()[1:] for line in output.splitlines() if line.startswith("BYTES")]
    for whole, layer, peak, kept in ([int(x) for x in line] for line in lines):
        assert kept <= 1.01 * whole / 4
        assert peak <= kept + layer
        assert peak < whole / 2
    assert len(lines) == 4


def main():
    """Train, where weights go from the host to a device as if it were another than the CPU."""
    counted, place, run_loop = LiveBytes(), build.RunContext.place, launch.RunLoop
    build_engine, host = build.build_engine, []

    def placed(run):
        policy = run.policy
        host.extend(p.detach() for p in policy.parameters())  # so that no address is used again
        host.append(max(sum(p.nbytes for p in x.parameters()) for x in policy.blocks))
        with counted:
            found = place(run)
            _ = run.trainer
        return found

    def engine(*arguments):
        with _disable_current_modes():
            return build_engine(*arguments)

    def loop(run, *arguments):
        with counted:
            loop = run_loop(run, *arguments)
        learner = loop.trainer.learner
        models = learner.model, learner.reference, learner.critic.model
        whole = sum(4 * p.numel() for model in models for p in model.parameters())
        print("BYTES", whole, host[-1], counted.peak, counted.now, flush=True)
        return loop

    def moved(params, *_):
        for p in params:
            p.data = p.data.clone()

    nn.Module.to = lambda self, _: self._apply(torch.clone)
    _fsdp_init._move_states_to_device = moved
    build.build_engine = engine
    build.RunContext.place, launch.RunLoop = placed, loop
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

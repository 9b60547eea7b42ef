"""One of the processes that test_vllm_ranks.py starts with torchrun: `python -m
tests.rollout.vllm_ranks TENSOR_PARALLEL`.
"""

import sys

import torch

from maxrl_fast.model.linear import add_adapters
from maxrl_fast.records import Prompts
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.vllm import VllmEngine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.sharding import distribute, shard
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder

# The first and the last prompt have the same tokens: their samples differ, whichever ranks sample
# them.
PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7] * 9, [9, 9], [5, 6, 7, 8]])
SAMPLING = Sampling(1.0, 24, (3, 17))
CPU, NUM_SAMPLES = torch.device("cpu"), 6


def policy(seed, with_adapters=True):
    """Return a policy, the same on all ranks."""
    model = tiny_decoder(seed)
    if with_adapters:
        add_adapters(model, 3, 8.0, "q_proj,down_proj", seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(
                    parameter, std=0.3, generator=torch.Generator().manual_seed(seed)
                )
    return model


def own_logprobs(seed, with_adapters, prompts, rollouts):
    """Return the rollouts' log-probs under `policy(seed)`, computed in one process."""
    logits = response_logits(
        policy(seed, with_adapters), one_batch(prompts, rollouts), torch.float32
    ).detach()
    return torch.log_softmax(logits, -1).gather(-1, rollouts.tokens[:, None])[:, 0]


def main(tensor_parallel):
    ranks = Ranks.of_environment()
    with ranks.connected(CPU):
        engine = VllmEngine(
            policy(9),
            torch.float32,
            cache_bytes=2**25,
            ranks=ranks,
            tensor_parallel=tensor_parallel,
        )
        own = PROMPTS.take(*ranks.part(len(PROMPTS)))
        for seed, with_adapters, is_sharded in (
            (1, False, False),
            (2, True, False),
            (3, False, True),
            (4, True, True),
        ):
            model = policy(seed, with_adapters)
            if is_sharded:
                shard(model, torch.float32, torch.device("cpu"))
            else:
                distribute(model, ranks, torch.float32)
            engine.load_weights(model)
            rollouts = engine.generate(RolloutRequest(own, NUM_SAMPLES, SAMPLING, 0, seed))
            assert len(rollouts) == NUM_SAMPLES * len(own)
            difference = (
                (rollouts.logprobs - own_logprobs(seed, with_adapters, own, rollouts)).abs().max()
            )
            assert difference < 1e-4, (seed, difference)
            assert (rollouts.logprobs - own_logprobs(seed + 1, True, own, rollouts)).abs().max() > 1
            everything = ranks.gather(rollouts)
            assert len(everything) == NUM_SAMPLES * len(PROMPTS)
            first, last = (
                everything.select(torch.arange(s, s + NUM_SAMPLES)) for s in (0, 4 * NUM_SAMPLES)
            )
            assert first.tokens.tolist() != last.tokens.tolist()
            again = engine.generate(RolloutRequest(own, NUM_SAMPLES, SAMPLING, 0, seed))
            assert again.tokens.tolist() == rollouts.tokens.tolist()
        # as in the last chunk of an evaluation
        for prompts, count in ((PROMPTS.take(0, 1), 1), (Prompts.none(CPU), 0)):
            prompts = (
                prompts
                if (ranks.rank == 0) == (count == 1)
                else (PROMPTS.take(1, 1) if count == 0 else Prompts.none(CPU))
            )
            if tensor_parallel > 1 or len(prompts):
                assert len(
                    engine.generate(RolloutRequest(prompts, 2, SAMPLING.greedy, 0, 0))
                ) == 2 * len(prompts)
        print(f"rank {ranks.rank}: done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))

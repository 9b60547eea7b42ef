"""One side of bench.against: a process that imports either commit and answers requests, one JSON
line each.

It imports nothing of `bench`, which differs at the other commit, and only names of `maxrl_fast`
that both have. Weights, prompts and responses come from seeds, so that both sides compute the same.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import maxrl_fast
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts, Rollouts, Samples, cumulative
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.training.learner import Learner

BUILD: Any = importlib.import_module("maxrl_fast.job.build")  # what it imports has moved


def make_prompts(vocabulary: int, count: int, length: int) -> Prompts:
    tokens = torch.randint(
        vocabulary, (count * length,), generator=torch.Generator().manual_seed(0)
    )
    return Prompts(tokens, torch.arange(count + 1) * length, torch.arange(count))


class Update:
    """An update in which every rollout has a gradient. Its learning rate is 0: every call starts
    from the same weights.

    Responses have random tokens, and lengths uniform between `shortest` and `longest`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        count: int,
        prompt_length: int,
        num_rollouts: int,
        shortest: int,
        longest: int,
        dtype: str,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (count * num_rollouts,), generator=generator)
        tokens = torch.randint(config["vocab_size"], (int(lengths.sum()),), generator=generator)
        ended = torch.zeros(len(lengths), dtype=torch.bool)
        self.prompts = make_prompts(config["vocab_size"], count, prompt_length)
        self.rollouts = Rollouts(tokens, cumulative(lengths), torch.zeros(len(tokens)), ended)
        self.advantages = torch.randn(len(lengths), generator=generator)
        self.model = Decoder(DecoderConfig(**config))
        self.model.initialise(0)
        optimizer = BUILD.make_optimizer(self.model, beta2=0.99, weight_decay=0.01)
        settings = BUILD.LossSettings(loss="reinforce", aggregation="token_mean")
        self.learner = Learner(self.model, optimizer, settings, 1.0, 4096, getattr(torch, dtype))
        self.metrics: Any = None

    def __call__(self) -> None:
        samples = Samples(self.prompts, self.rollouts)
        self.learner.forward_backward(samples, self.advantages, samples.sequences)
        self.metrics = self.learner.optim_step(when="update", lr=0.0)

    def results(self) -> dict[str, float]:
        return {"loss": self.metrics.loss, "gradient norm": self.metrics.grad_norm}


class Rollout:
    """Responses of the native engine, all up to the length limit."""

    def __init__(
        self,
        config: dict[str, Any],
        count: int,
        prompt_length: int,
        num_rollouts: int,
        limit: int,
        dtype: str,
    ) -> None:
        model = Decoder(DecoderConfig(**config)).requires_grad_(False)
        model.initialise(0)
        self.prompts, self.num_rollouts = (
            make_prompts(config["vocab_size"], count, prompt_length),
            num_rollouts,
        )
        self.sampling = Sampling(1.0, limit, ())
        self.engine = native_engine(model, getattr(torch, dtype))
        self.rollouts: Rollouts | None = None

    def __call__(self) -> None:
        request = RolloutRequest(self.prompts, self.num_rollouts, self.sampling, seed=0, step=1)
        self.rollouts = self.engine.generate(request)

    def results(self) -> dict[str, float]:
        assert self.rollouts is not None
        # after a token that rounding has changed, later ones differ
        first = self.rollouts.cu_seqlens[:-1]
        means = {
            "first tokens' log-prob": self.rollouts.logprobs[first],
            "log-prob": self.rollouts.logprobs,
        }
        return {name: float(x.double().mean()) for name, x in means.items()} | {
            "tokens": len(self.rollouts.tokens)
        }


KINDS: dict[str, type[Update | Rollout]] = {"update": Update, "rollout": Rollout}


def clock() -> float:
    """Return seconds of CPU time with one thread, which other programs do not affect; else of wall
    time.
    """
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    works: dict[str, Update | Rollout] = {}
    print(json.dumps({"package": str(Path(maxrl_fast.__file__).parent)}), flush=True)
    for line in sys.stdin:
        answer: Any
        request = json.loads(line)
        if request["do"] == "prepare":
            work = works[request["name"]] = KINDS[request["kind"]](**request["case"])
            work()
            answer = work.results()
        else:
            start = clock()
            works[request["name"]]()
            answer = (clock() - start) * 1e3
        print(json.dumps(answer), flush=True)

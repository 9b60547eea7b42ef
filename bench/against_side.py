"""One side of bench.against: a process that imports either commit and answers requests, one JSON
line each.

It imports nothing of `bench`, which differs at the other commit. What differs between the commits
in `maxrl_fast` is at the top; below are only names that both have. Weights, prompts and responses
come from seeds, so that both sides compute the same.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import maxrl_fast
from maxrl_fast import records
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts, Rollouts, cumulative
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine

PACKAGE = Path(maxrl_fast.__file__).parent
# bc21ff5: no packages for stages, and no record Samples
IS_FLAT = not (PACKAGE / "training").is_dir()


def module(name: str, flat_name: str) -> Any:
    return importlib.import_module(f"maxrl_fast.{flat_name if IS_FLAT else name}")


learning, packing = module("training.learner", "learner"), module("training.packing", "batching")


def rolled_out(engine: Any, prompts: Prompts, num_samples: int, sampling: Sampling) -> Any:
    """Before 26 November 2026 engines took the fields of a request as arguments."""
    request = getattr(importlib.import_module("maxrl_fast.rollout"), "RolloutRequest", None)
    if request is None:
        return engine.generate(prompts, num_samples, sampling, seed=0, step=1)
    return engine.generate(request(prompts, num_samples, sampling, seed=0, step=1))


def make_optimizer(model: Decoder) -> torch.optim.Optimizer:
    if IS_FLAT:
        optimizer = learning.make_optimizer(model, module("", "options").OptimizerOptions())
    else:
        optimizer = module("training.optimizer", "").make_optimizer(
            model, beta2=0.99, weight_decay=0.01
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def samples(prompts: Prompts, rollouts: Rollouts) -> tuple[Any, ...]:
    """The first arguments of Learner.update."""
    return (prompts, rollouts) if IS_FLAT else (records.Samples(prompts, rollouts),)


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
        settings = learning.LossSettings(loss="reinforce", aggregation="token_mean")
        self.learner = learning.Learner(
            self.model, make_optimizer(self.model), settings, 1.0, 4096, getattr(torch, dtype)
        )
        self.metrics: Any = None

    def __call__(self) -> None:
        everything = torch.arange(len(self.advantages))
        self.metrics = self.learner.update(
            *samples(self.prompts, self.rollouts),
            self.advantages,
            everything,
            when="update",
            lr=0.0,
        )

    def results(self) -> dict[str, float]:
        return {"loss": self.metrics.loss, "gradient norm": self.metrics.grad_norm}

    def operators(self) -> int:
        """Return the number of operators that forward and backward of four prompts call, without
        autograd's.
        """
        # older commits have the cost in the learner
        owner: Any = getattr(self.learner, "passes", self.learner)
        how: Any = getattr(owner, "shares_all", 0.0)  # older commits: the cost of merging, 0
        packer = packing.Packer(self.prompts, self.rollouts, self.advantages, how)
        sequences = torch.arange(4 * packer.num_rollouts)
        batch = packer.pack(sequences)
        plan = (
            learning.UpdatePlan(sequences, 1.0) if hasattr(learning, "UpdatePlan") else 1.0
        )  # an older commit takes the number
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.learner.loss(batch, plan)[0].backward()
        return sum(
            "::" in e.name and not e.name.startswith("autograd::") for e in profiler.events() or ()
        )


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
        self.engine = NativeEngine(model, getattr(torch, dtype))
        self.rollouts: Rollouts | None = None

    def __call__(self) -> None:
        self.rollouts = rolled_out(self.engine, self.prompts, self.num_rollouts, self.sampling)

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


def operators_of_a_layer(**case: Any) -> int:
    """Return the number of operators of a layer: what a third layer adds. The last differs: it
    computes only predicting rows."""
    counts = []
    for layers in (2, 3):
        case["config"]["num_hidden_layers"] = layers
        update = Update(**case)
        update()
        counts.append(update.operators())
    return counts[1] - counts[0]


def clock() -> float:
    """Return seconds of CPU time with one thread, which other programs do not affect; else of wall
    time.
    """
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    works: dict[str, Update | Rollout] = {}
    print(json.dumps({"package": str(PACKAGE)}), flush=True)
    for line in sys.stdin:
        answer: Any
        request = json.loads(line)
        if request["do"] == "operators":
            answer = operators_of_a_layer(**request["case"])
        elif request["do"] == "prepare":
            work = works[request["name"]] = KINDS[request["kind"]](**request["case"])
            work()
            answer = work.results()
        else:
            start = clock()
            works[request["name"]]()
            answer = (clock() - start) * 1e3
        print(json.dumps(answer), flush=True)

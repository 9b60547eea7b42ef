"""`python -m bench.attention`: attention over prompts with responses on a CPU, our kernel against
FlashAttention calls and a merge.

Both compute the same packed stream in turn, in one process, after their results were compared. The
floor is 4 D floating-point operations for each pair of a query and a key that it sees, 10 D
backward, at the measured throughput of a matrix multiplication of 1024 x 1024. With one thread,
times are that thread's CPU time, which does not count waiting for other processes. A ratio is the
median over rounds. The last line is one JSON document. It takes about a minute.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.layouts import num_pairs
from bench.measure import argument_parser, describe, machine, prepare, run_command
from maxrl_fast.model.attention import Forest, merged_attention, tree_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A stream: prompts of one length, each with the same number of responses; response lengths are
    uniform between two bounds."""

    prompts: int
    prompt_length: int
    responses: int
    shortest: int
    longest: int
    heads: int
    key_heads: int
    head_dim: int

    def forest(self) -> Forest:
        count = self.prompts * self.responses
        lengths = torch.randint(
            self.shortest, self.longest + 1, (count,), generator=torch.Generator().manual_seed(0)
        )
        responses = lengths.view(self.prompts, -1)
        lengths = torch.nn.functional.pad(responses, (1, 0), value=self.prompt_length)
        roots = torch.arange(self.prompts)[:, None] * (self.responses + 1)
        parents = torch.nn.functional.pad(roots.expand_as(responses), (1, 0), value=-1)
        return Forest(lengths.flatten(), parents.flatten(), torch.device("cpu"))

    def pairs(self) -> int:
        """Return the number of pairs of a query, per head, and a key that it attends to."""
        return self.heads * num_pairs(self.forest())


CASES = {
    "default job": Case(32, 94, 16, 9, 17, 8, 4, 16),
    "17x17 maze": Case(2, 310, 64, 1, 180, 4, 2, 64),
    "a layer of Qwen2.5-0.5B": Case(1, 512, 8, 256, 256, 14, 2, 64),
}


class Side:
    def __init__(self, function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor):
        self.function, self.grad = function, grad
        self.leaves = [x.clone().requires_grad_() for x in inputs]
        self.out = self.forward()

    def forward(self) -> Tensor:
        return self.function(*self.leaves)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.leaves, self.grad, retain_graph=True)


def clock() -> float:
    """Return milliseconds of CPU time with one thread, else of wall time."""
    return (time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()) * 1e3


def timed(work: Callable[[], object], least: float = 30.0) -> float:
    """Return the median milliseconds of a call, over calls that take about `least` together, at
    least one.
    """
    times: list[float] = []
    while sum(times) < least:
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


def throughput(dtype: torch.dtype = torch.float32) -> float:
    """Return FLOPs per millisecond of a matrix multiplication, the best of five."""
    a, b = torch.randn(2, 1024, 1024).to(dtype)
    return 2 * 1024**3 / min(timed(lambda: a @ b, 0.1) for _ in range(5))


def measure(case: Case, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    forest, generator = case.forest(), torch.Generator().manual_seed(1)
    shapes = [
        (int(forest.lengths.sum()), heads, case.head_dim)
        for heads in (case.heads, case.key_heads, case.key_heads, case.heads)
    ]
    *inputs, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    ours = Side(lambda q, k, v: tree_attention(q, k, v, forest), inputs, grad)
    calls = Side(lambda q, k, v: merged_attention(q, k, v, forest), inputs, grad)
    for x, y in zip((ours.out, *ours.backward()), (calls.out, *calls.backward()), strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.05 * float(y.detach().abs().max()))
    figures: dict[str, Any] = {"tokens": len(grad), "pairs": case.pairs()}
    for name, of_pair in (("forward", 4), ("backward", 10)):
        times = [
            (timed(getattr(ours, name)), timed(getattr(calls, name)), throughput())
            for _ in range(rounds)
        ]
        floor = (
            of_pair
            * case.head_dim
            * figures["pairs"]
            / statistics.median(rate for *_, rate in times)
        )
        milliseconds = statistics.median(x for x, *_ in times)
        figures[name] = {
            "milliseconds": milliseconds,
            "flash_calls_milliseconds": statistics.median(x for _, x, _ in times),
            "ratio": statistics.median(theirs / own for own, theirs, _ in times),
            "floor_milliseconds": floor,
            "share_of_floor": floor / milliseconds,
        }
    return figures


def measure_cases(dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    cases = {}
    for name, case in CASES.items():
        figures = cases[name] = measure(case, dtype, rounds)
        for way in ("forward", "backward"):
            x = figures[way]
            print(
                f"{name}, {way}: {x['milliseconds']:.2f} ms, FlashAttention calls "
                f"{x['flash_calls_milliseconds']:.2f} ms "
                f"({x['ratio']:.2f} x), floor {x['floor_milliseconds']:.2f} ms "
                f"({x['share_of_floor']:.0%})"
            )
    return cases


def main() -> int:
    parser = argument_parser("attention", __doc__, rounds=9)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    options = parser.parse_args()
    options.device, options.threads = "cpu", options.threads or 1
    device = prepare(options)
    result: dict[str, Any] = {"machine": machine(device, DTYPES[options.dtype])}
    print(describe(result["machine"]))
    result["cases"] = measure_cases(DTYPES[options.dtype], options.rounds)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))

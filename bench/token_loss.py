"""`python -m bench.token_loss`: the token losses, forward and backward, against other
implementations and a copy.

All run in one process, after their gradients were compared; on a CPU each is timed in turn with
ours. The floor is one read and one write of the logits at the measured bandwidth of a copy of as
many bytes. Peers are eager PyTorch, torch.compile, and, where installed, TRL's
selective_log_softmax and liger-kernel's GRPO loss; these come last, because one may spoil the
process. What fails is reported and the rest goes on; the exit code is then 1 if it was ours. The
last line is one JSON document; off a terminal one with all figures so far follows each
implementation.

It takes some minutes on two cores, and less than one on a GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.linear_losses import Linear
from bench.loss_case import SEQUENCES, Batch, Case, eager_ppo
from bench.measure import (
    Sides,
    argument_parser,
    describe,
    host_microseconds,
    keep,
    kernel_milliseconds,
    machine,
    prepare,
    print_host_time,
    run_command,
)
from maxrl_fast.errors import InputError
from maxrl_fast.ops import policy_gradient_loss, token_logprobs
from maxrl_fast.runtime.device import memory_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECTIONS = (
    *("logits", "other_vocabularies", "linear", "linear_logprobs"),
    "divergence",
)
SIZES = ("tokens", "hidden_size", "vocabulary")
RATES = ("copy_gb_per_second", "matrix_product_tflops", "host_microseconds", "tflops")
COLUMNS = (
    *("milliseconds", "of_copy_bandwidth", "useful_tflops", "times_ours"),
    *("peak_bytes_per_element", "peak_mib"),
)
Figures = dict[str, Any]


class Logits:
    """The figures of the loss on logits [T, V] of one dtype."""

    def __init__(self, case: Case, rounds: int, compiled: Callable[..., Tensor] | None):
        self.case, self.compiled = case, compiled
        self.host: float | None = None
        self.differences = dict[str, float]()

        def timed(functions: Any) -> dict[str, float]:
            return kernel_milliseconds(functions, rounds, case.device, case.refill)

        in_turn = case.device.type == "cpu"
        self.sides = Sides("ours", case.ours, timed, case.device, case.refill, in_turn)

    def figures(self) -> Figures:
        case, sides = self.case, self.sides
        times, size = sides.milliseconds, case.num_tokens * case.vocab_size
        copy = times.get("copy")
        moved = 2 * size * case.dtype.itemsize
        return {
            "tokens": case.num_tokens,
            "vocabulary": case.vocab_size,
            "milliseconds": times,
            "host_microseconds": self.host,
            "copy_gb_per_second": copy and moved / copy / 1e6,
            "of_copy_bandwidth": {n: copy / t for n, t in times.items() if copy and n != "copy"},
            "times_ours": sides.ratio,
            "peak_bytes_per_element": {n: x and x / size for n, x in sides.peak_bytes.items()},
            "gradient_relative_difference": self.differences,
            "failed": sides.failed,
        }

    def checked(self, name: str, side: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return the implementation, to be timed. One of ours whose gradient is wrong has failed,
        but is timed too.
        """
        try:
            self.differences[name] = self.case.difference(name, side)
        except RuntimeError as error:
            if not name.startswith("ours"):
                raise
            self.sides.failed[name] = f"{type(error).__name__}: {error}"
        return side

    def ours(self) -> Iterator[Figures]:
        """Yield the figures after each of ours, and after eager PyTorch's."""
        case = self.case
        compared: dict[str, Callable[[], Tensor]] = {
            "ours": case.ours,
            "ours, token_logprobs": case.of_logprobs,
        }
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            **{name: partial(self.checked, name, side) for name, side in compared.items()},
            "copy": lambda: partial(case.working.copy_, case.source),
            "ours, no gradient": lambda: partial(token_logprobs, case.source, case.targets),
            "ours, sapo (a function)": lambda: partial(case.ours, loss="sapo"),
            "ours, with entropy and KL": lambda: partial(
                case.ours, entropy_coef=0.01, kl_coef=0.1, ref_logprobs=case.old
            ),
            "eager": lambda: self.checked("eager", partial(case.by, eager_ppo)),
        }
        with case.filled():
            for _ in self.sides.try_each(makers):
                if self.host is None and case.device.type == "cuda":
                    self.host = host_microseconds({"ours": case.ours}, case.device)["ours"]
                yield self.figures()

    def peers(self) -> Iterator[Figures]:
        """Yield the figures after each other implementation."""
        case = self.case
        makers: dict[str, Callable[[], Callable[[], object]]] = {}
        if self.compiled is not None:
            compiled = partial(case.by, self.compiled)
            makers["torch.compile"] = partial(self.checked, "torch.compile", compiled)
        makers["liger-kernel GRPO"] = case.by_liger
        name = "TRL selective_log_softmax"
        makers[name] = lambda: self.checked(name, case.by_trl())
        with case.filled():
            for _ in self.sides.try_each(makers):
                yield self.figures()


def default_tokens(device: torch.device, memory: int) -> int:
    """Return a T at which every part fits into the device's memory, in bytes."""
    if device.type == "cpu":
        return 2048
    return 16384 if memory >= 100 * 10**9 else 8192 if memory >= 70 * 10**9 else 2048


def parts(
    options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str, str, Iterator[Figures]]]:
    """Yield section and name of each part, and the iterator that measures it, in this order: ours
    and eager PyTorch's by their importance, then what other implementations may spoil.

    Raises:
        InputError: if a size is too small.
    """
    on_gpu, rounds = device.type == "cuda", options.rounds
    tokens = options.tokens or default_tokens(device, memory_bytes(device))
    vocab = options.vocab or (151936 if on_gpu else 32768)
    hidden = options.hidden or (4096 if on_gpu else 512)
    others = options.other_vocabs
    if others is None:
        others = [32000, 262144] if on_gpu else []
    if min(tokens // SEQUENCES, vocab, hidden, *others) < 1:
        raise InputError(f"--tokens must be at least {SEQUENCES}, the other numbers at least 1")
    names = options.dtypes or (["bfloat16"] if on_gpu else ["float32", "bfloat16"])
    # Without bfloat16 instructions a CPU takes minutes for one matrix multiplication: there only
    # --dtypes asks for it.
    fast = names if on_gpu or options.dtypes else ["float32"]
    compiled = None if options.no_compile else torch.compile(eager_ppo)

    def on_logits(name: str, v: int, compiled: Callable[..., Tensor] | None) -> Logits:
        return Logits(Case(DTYPES[name], tokens, v, device), rounds, compiled)

    def linear(name: str, num_tokens: int, v: int) -> Linear:
        return Linear(DTYPES[name], num_tokens, v, hidden, rounds, device)

    logits = {("logits", name): on_logits(name, vocab, compiled) for name in names}
    logits |= {
        ("other_vocabularies", f"{names[0]} {v}"): on_logits(names[0], v, None) for v in others
    }
    losses = {name: linear(name, tokens, vocab) for name in fast}
    few, few_vocab = (min(tokens, 4096), 131072) if on_gpu else (tokens // 4, vocab)
    for name in names:
        yield "logits", name, logits["logits", name].ours()
    for name in fast:
        yield "linear", name, losses[name].loss()
    for name in fast:
        yield "linear_logprobs", name, linear(name, few, few_vocab).logprobs()
    for name in fast:
        yield "divergence", name, linear(name, few if on_gpu else tokens, few_vocab).divergence()
    for v in others:
        name = f"{names[0]} {v}"
        yield "other_vocabularies", name, logits["other_vocabularies", name].ours()
    for (section, name), measured in logits.items():
        yield section, name, measured.peers()


def measure(result: Figures, options: argparse.Namespace, device: torch.device) -> None:
    """Put the figures of all parts into `result`, and the errors of those that fail."""
    for section, name, figures in parts(options, device):
        try:
            torch.cuda.empty_cache()
            for measured in figures:
                result[section][name] = measured
                keep(result)
        except Exception as error:  # out of memory, or a kernel's
            result["failed"][f"{section} {name}"] = f"{type(error).__name__}: {error}"[:300]
            keep(result)


def report(result: Figures) -> None:
    print(describe(result["machine"]))
    for section in SECTIONS:
        for name, case in result[section].items():
            sizes = " x ".join(str(case[x]) for x in SIZES if x in case)
            rates = (f"{x} {case[x]:.4g}" for x in RATES if case.get(x) is not None)
            print(f"\n{', '.join([section, name, sizes, *rates])}")
            columns = [x for x in COLUMNS if x in case]
            print(" ".join([f"  {'':<26}", *(f"{x:>22}" for x in columns)]))
            for side in case["milliseconds"]:
                cells = (case[x].get(side) for x in columns)
                texts = (f"{'' if x is None else f'{x:.4g}':>22}" for x in cells)
                print(" ".join([f"  {side:<26}", *texts]))
            for side, error in case.get("failed", {}).items():
                print(f"  failed: {side}: {error}")
    for part, error in result["failed"].items():
        print(f"failed: {part}: {error}")


class Empty(torch.autograd.Function):
    """What any autograd.Function costs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        saved: Tensor = ctx.x
        return saved


def on_host(rounds: int) -> int:
    """Print the host's time of ppo at T = 40 and V = 32, beside an empty autograd.Function."""
    batch, vocab = Batch(40, 32, torch.device("cpu")), 32
    logits = torch.randn(40, vocab, requires_grad=True)
    given = batch.targets, batch.advantages, batch.cu_seqlens

    def with_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            logits.grad = None
            loss().backward()

        return call

    def empty() -> Tensor:
        return Empty.apply(logits)

    def ours() -> Tensor:
        return policy_gradient_loss(logits, *given, old_logprobs=batch.old)[0]

    eager = partial(eager_ppo, logits, batch.targets, batch.per_token, batch.old)
    floors = {"loss": "empty Function", "loss and backward": "empty Function and backward"}
    functions: dict[str, Callable[[], object]] = {
        "addition": lambda: logits + logits,
        "empty Function": empty,
        "empty Function and backward": with_backward(empty),
        "eager loss and backward": with_backward(eager),
        "loss": ours,
        "loss and backward": with_backward(ours),
    }
    return print_host_time("token_loss --host", functions, floors, rounds)


def main() -> int:
    parser = argument_parser("token_loss", __doc__, rounds=5)
    parser.add_argument(
        "--tokens", type=int, help="T (default: 2048; up to 16384 on a GPU, by its memory)"
    )
    parser.add_argument("--vocab", type=int, help="V (default: 32768, 151936 on a GPU)")
    parser.add_argument(
        "--other-vocabs",
        type=int,
        nargs="*",
        help="more V, in the first dtype, without torch.compile (default: none; 32000 262144 on a "
        "GPU)",
    )
    parser.add_argument(
        "--hidden", type=int, help="H of the linear loss (default: 512, 4096 on a GPU)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, help="default: float32 bfloat16; bfloat16 on a GPU"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--host", action="store_true", help="only the host's time of a small loss")
    options = parser.parse_args()
    device = prepare(options)
    if options.host:
        return on_host(options.rounds)
    result: Figures = {"benchmark": "token_loss", "machine": machine(device), "failed": {}}
    result |= {section: {} for section in SECTIONS}
    measure(result, options, device)
    report(result)
    print(json.dumps(result))
    cases = [case for section in SECTIONS for case in result[section].values()]
    wrong = [name for case in cases for name in case.get("failed", ()) if name.startswith("ours")]
    return 1 if wrong or result["failed"] else 0


if __name__ == "__main__":
    sys.exit(run_command(main))

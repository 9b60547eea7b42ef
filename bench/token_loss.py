"""`python -m bench.token_loss`: the token losses, forward and backward, against other
implementations and a copy.

All run in one process, each timed in turn with ours, after their gradients were compared. The floor
is one read and one write of the logits at the measured bandwidth of a copy of as many bytes. Peers
are eager PyTorch, torch.compile, and, where installed, TRL's selective_log_softmax, liger-kernel's
GRPO loss and cut-cross-entropy. Ours come first, and another one that fails is reported. The last
line is one JSON document; off a terminal one with all figures so far follows each implementation.

It takes some minutes on two cores, and `make gpu` gives it 85 seconds.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.measure import (
    Sides,
    argument_parser,
    describe,
    host_microseconds,
    keep,
    kernel_milliseconds,
    machine,
    prepare,
    run_command,
)
from maxrl_fast.errors import InputError
from maxrl_fast.ops import (
    linear_divergence,
    linear_policy_gradient_loss,
    linear_token_logprobs,
    log_ratio_reward,
    pacs_loss,
    policy_gradient_loss,
    token_logprobs,
)
from maxrl_fast.ops.logit_chunks import default_chunk, row_stride

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEQUENCES = 16


def eager_ppo(logits: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> Tensor:
    """Return PPO's clipped loss by log_softmax and gather; advantages [T]."""
    return clipped(
        torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0], advantages, old
    )


def clipped(logp: Tensor, advantages: Tensor, old: Tensor) -> Tensor:
    ratio = (logp - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()


class Computed(torch.autograd.Function):
    """Stands for a model: forward returns logits made before the clock starts, backward stores
    their gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, case: "Case", logits: Tensor) -> Tensor:
        ctx.case = case
        same = logits.new_empty(0)  # not a view, which in_place could not overwrite
        same.set_(logits.untyped_storage(), 0, logits.shape, logits.stride())  # type: ignore[arg-type, unused-ignore]
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.case.gradient = gradient
        return gradient.new_zeros(()), None, None


class Case:
    """Logits [T, V] of one dtype and the losses' other inputs; every implementation leaves its
    gradient in `gradient`.
    """

    def __init__(self, dtype: torch.dtype, num_tokens: int, vocab_size: int, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        bounds = torch.linspace(0, num_tokens, SEQUENCES + 1).long()
        self.cu_seqlens = bounds.to(device)
        self.source = torch.randn(num_tokens, vocab_size, device=device).to(dtype)
        self.working = self.source.clone()  # what in_place overwrites
        self.anchor = torch.zeros((), device=device, dtype=dtype, requires_grad=True)
        self.gradient = torch.empty(0)
        self.targets = torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)
        self.advantages = torch.randn(SEQUENCES, generator=generator).to(device)
        self.per_token = self.advantages.repeat_interleave(bounds.diff().to(device))
        noise = 0.1 * torch.randn(num_tokens, generator=generator).to(device)
        self.old = token_logprobs(self.source, self.targets)[0] + noise

    def computed(self) -> Tensor:
        return Computed.apply(self.anchor, self, self.working)

    def backward(self, loss: Tensor) -> Tensor:
        loss.backward()
        return self.gradient

    def ours(self, **options: Any) -> Tensor:
        arguments = (self.computed(), self.targets, self.advantages, self.cu_seqlens)
        return self.backward(policy_gradient_loss(*arguments, old_logprobs=self.old, **options)[0])

    def of_logprobs(self) -> Tensor:
        return self.backward(
            clipped(token_logprobs(self.computed(), self.targets)[0], self.per_token, self.old)
        )

    def by(self, loss: Callable[..., Tensor]) -> Tensor:
        return self.backward(loss(self.computed(), self.targets, self.per_token, self.old))

    def refill(self) -> None:
        self.gradient = torch.empty(0)
        self.working.copy_(self.source)


def installed_peers(case: Case) -> tuple[dict[str, Callable[[], Tensor]], list[str]]:
    peers: dict[str, Callable[[], Tensor]] = {}
    absent = []
    try:
        from trl.trainer.utils import selective_log_softmax

        def by_trl() -> Tensor:
            logp = selective_log_softmax(case.computed()[None], case.targets[None])[0]
            return case.backward(clipped(logp.float(), case.per_token, case.old))

        peers["TRL selective_log_softmax"] = by_trl
    except ImportError as error:
        absent.append(f"TRL ({error})")
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        if case.source.device.type != "cuda":
            raise ImportError("it needs a GPU")

        # Its logits are [B, L + 1, V], with an unused last row per sequence: here one sequence with
        # one more row.
        longer = torch.cat([case.source, case.source[:1]])[None].requires_grad_()

        def by_liger() -> Tensor:
            longer.grad = None
            loss, _ = triton_grpo_loss(
                longer,
                case.old[None],
                None,
                case.targets[None],
                case.advantages[:1],
                temperature=1.0,
                beta=0.0,
                eps_low=0.2,
                eps_high=0.2,
                inplace=False,
                reduce=True,
            )[:2]
            loss.backward()
            assert longer.grad is not None
            return longer.grad[0, :-1]

        peers["liger-kernel GRPO"] = by_liger
    except ImportError as error:
        absent.append(f"liger-kernel ({error})")
    return peers, absent


def check_agreement(
    expected: Tensor,
    sides: Mapping[str, Callable[[], Tensor]],
    dtype: torch.dtype,
    before: Callable[[], object],
) -> dict[str, float]:
    """Return the relative differences of the gradients.

    Raises:
        RuntimeError: if one is too large, or the expected gradient is zero.
    """
    differences = {}
    for name, side in sides.items():
        before()
        actual = side()
        error = size = 0.0
        for a, e in zip(actual.split(256), expected.split(256), strict=True):
            error += float((a.float() - e.float()).square().sum())
            size += float(e.float().square().sum())
        differences[name] = (error / size) ** 0.5
        # In bfloat16 TRL rounds log-probs, so that other tokens are clipped.
        limit = 1e-5 if dtype == torch.float32 else 0.2 if name.startswith("TRL") else 1e-2
        if not size > 0 or not differences[name] < limit:
            raise RuntimeError(
                f"{name}: the relative difference of its gradient is {differences[name]}"
            )
    return differences


def measure_logits(
    dtype: torch.dtype,
    num_tokens: int,
    vocab_size: int,
    rounds: int,
    compiled: Callable[..., Tensor] | None,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yield the figures on logits of one dtype: for ours and eager PyTorch, then again after each
    other implementation.
    """
    case = Case(dtype, num_tokens, vocab_size, device)
    source, target = case.source, torch.zeros_like(case.source)
    peers, absent = installed_peers(case)
    native: dict[str, Callable[[], Tensor]] = {
        "ours": case.ours,
        "ours, in place": lambda: case.ours(in_place=True),
        "ours, token_logprobs": case.of_logprobs,
        "eager": lambda: case.by(eager_ppo),
    }
    others = ({} if compiled is None else {"torch.compile": lambda: case.by(compiled)}) | peers
    expected = case.by(eager_ppo).clone()
    differences = check_agreement(expected, native, dtype, case.refill)
    sides = Sides(
        "ours",
        case.ours,
        lambda x: kernel_milliseconds(x, rounds, device, case.refill),
        device,
        case.refill,
    )
    sides.add(
        {
            "copy": lambda: target.copy_(source),
            "ours, no gradient": lambda: token_logprobs(source, case.targets),
            "ours, gspo": lambda: case.ours(loss="gspo"),
            "ours, sapo (a function)": lambda: case.ours(loss="sapo"),
            "ours, with entropy and KL": lambda: case.ours(
                entropy_coef=0.01, kl_coef=0.1, ref_logprobs=case.old
            ),
            **native,
        }
    )
    case.refill()
    host = host_microseconds({"ours": case.ours}, device)["ours"] if device.type == "cuda" else None

    def figures() -> dict[str, Any]:
        times, moved = sides.milliseconds, 2 * source.numel() * source.element_size()
        return {
            "tokens": num_tokens,
            "vocabulary": vocab_size,
            "milliseconds": times,
            "host_microseconds": host,
            "copy_gb_per_second": moved / times["copy"] / 1e6,
            "of_copy_bandwidth": {
                name: times["copy"] / t for name, t in times.items() if name != "copy"
            },
            "times_ours": sides.ratio,
            "peak_bytes_per_element": {
                n: None if peak is None else peak / source.numel()
                for n, peak in sides.peak_bytes.items()
            },
            "gradient_relative_difference": differences,
            "not_installed": absent,
            "failed": sides.failed,
        }

    def checked(name: str) -> Callable[[], Tensor]:
        if not name.startswith("liger"):  # liger takes one advantage for all tokens
            differences.update(check_agreement(expected, {name: others[name]}, dtype, case.refill))
        return others[name]

    yield figures()
    for _ in sides.try_each({name: partial(checked, name) for name in others}):
        yield figures()


def measure_linear(
    dtype: torch.dtype,
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    rounds: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of the loss from hidden states and the output matrix: for ours, then again
    after each other one.
    """
    case = Case(dtype, num_tokens, vocab_size, device)
    hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
    weight = (
        (torch.randn(vocab_size, hidden_size, device=device) / hidden_size**0.5)
        .to(dtype)
        .requires_grad_()
    )
    case.source = case.working = torch.empty(0)  # frees the logits, which are not needed here
    batch = (case.targets, case.advantages, case.cu_seqlens)

    def ours(loss: str = "ppo") -> object:
        total, _ = linear_policy_gradient_loss(
            hidden, weight, *batch, old_logprobs=case.old, loss=loss
        )
        return torch.autograd.grad(total, (hidden, weight))

    def eager() -> object:
        loss = eager_ppo(hidden @ weight.T, case.targets, case.per_token, case.old)
        return torch.autograd.grad(loss, (hidden, weight))

    makers: dict[str, Callable[[], Callable[[], object]]] = {"eager": lambda: eager}
    absent = []
    try:
        from cut_cross_entropy import linear_cross_entropy

        if device.type != "cuda":
            raise ImportError("it needs a GPU")

        def by_cut_cross_entropy() -> object:
            return torch.autograd.grad(
                linear_cross_entropy(hidden, weight, case.targets), (hidden, weight)
            )

        makers["cut-cross-entropy, no policy gradient"] = lambda: by_cut_cross_entropy
    except ImportError as error:
        absent.append(f"cut-cross-entropy ({error})")
    sides = Sides("ours", ours, lambda x: kernel_milliseconds(x, rounds, device), device)
    sides.add({"ours": ours, "ours, sapo (a function)": partial(ours, "sapo")})
    left = torch.randn(1024, hidden_size, device=device).to(dtype)
    gemm = kernel_milliseconds({"gemm": lambda: left @ weight.detach().T}, rounds, device)["gemm"]
    rounded = 0 if weight.element_size() >= 4 else weight.element_size()  # bytes
    chunk = (
        min(default_chunk(hidden, vocab_size), num_tokens)
        * row_stride(vocab_size, device)
        * hidden.element_size()
    )

    def figures() -> dict[str, Any]:
        work = 6 * num_tokens * hidden_size * vocab_size
        return {
            "tokens": num_tokens,
            "vocabulary": vocab_size,
            "hidden_size": hidden_size,
            "milliseconds": sides.milliseconds,
            "useful_tflops": {name: work / t / 1e9 for name, t in sides.milliseconds.items()},
            "matrix_product_tflops": 2 * 1024 * hidden_size * vocab_size / gemm / 1e9,
            "peak_mib": {
                name: None if peak is None else peak / 2**20
                for name, peak in sides.peak_bytes.items()
            },
            # The least memory: the gradients, the output matrix's in float32 and rounded, and one
            # chunk of logits.
            "gradients_mib": (
                hidden.numel() * hidden.element_size() + (4 + rounded) * weight.numel()
            )
            / 2**20,
            "chunk_mib": chunk / 2**20,
            "times_ours": sides.ratio,
            "not_installed": absent,
            "failed": sides.failed,
        }

    yield figures()
    for _ in sides.try_each(makers):
        yield figures()


def measure_linear_logprobs(
    dtype: torch.dtype,
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the figures of log-probs from hidden states, forward and backward; the backward pass
    recomputes the logits.
    """
    hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
    weight = (
        (torch.randn(vocab_size, hidden_size, device=device) / hidden_size**0.5)
        .to(dtype)
        .requires_grad_()
    )
    targets = torch.randint(vocab_size, (num_tokens,), device=device)
    ones = torch.ones(num_tokens, device=device)

    def ours() -> object:
        return torch.autograd.grad(
            linear_token_logprobs(hidden, weight, targets)[0], (hidden, weight), ones
        )

    milliseconds = kernel_milliseconds({"ours": ours}, rounds, device)["ours"]
    products = 8 * num_tokens * hidden_size * vocab_size  # logits twice, and both gradients
    sizes = {"tokens": num_tokens, "vocabulary": vocab_size, "hidden_size": hidden_size}
    return sizes | {"milliseconds": milliseconds, "tflops": products / milliseconds / 1e9}


def measure_divergence(
    dtype: torch.dtype,
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the figures of the reverse divergence from a teacher, forward and backward."""
    sides = [
        (torch.randn(n, hidden_size, device=device) / hidden_size**power).to(dtype)
        for n, power in 2 * ((num_tokens, 0), (vocab_size, 0.5))
    ]
    hidden, weight, *teacher = *(x.requires_grad_() for x in sides[:2]), *sides[2:]

    def ours() -> object:
        return torch.autograd.grad(linear_divergence(hidden, weight, *teacher)[0], (hidden, weight))

    def eager() -> object:
        log_p, log_q = (
            torch.log_softmax((x @ w.T).float(), -1) for x, w in ((hidden, weight), teacher)
        )
        loss = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        return torch.autograd.grad(loss, (hidden, weight))

    timed = Sides("ours", ours, lambda x: kernel_milliseconds(x, rounds, device), device)
    timed.add({"ours": ours, "eager": eager})
    sizes = {"tokens": num_tokens, "vocabulary": vocab_size, "hidden_size": hidden_size}
    return sizes | {
        "milliseconds": timed.milliseconds,
        "times_ours": timed.ratio,
        "peak_mib": {name: x and x / 2**20 for name, x in timed.peak_bytes.items()},
    }


def measure_pacs(rounds: int, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of PACS at 1024 prompts x 16 rollouts x 64 tokens, forward and
    backward.
    """
    logp = torch.randn(1024 * 16 * 64, device=device, requires_grad=True)
    cu_seqlens = torch.arange(0, logp.numel() + 1, 64, device=device)
    labels = (torch.rand(1024 * 16, device=device) < 0.3).float()
    proxies = torch.randn(1024 * 16, device=device, requires_grad=True)
    ref = torch.randn_like(logp)
    grad_rewards = torch.randn_like(proxies)
    return kernel_milliseconds(
        {
            "log_ratio_reward": lambda: torch.autograd.grad(
                log_ratio_reward(logp, ref, cu_seqlens), logp, grad_rewards
            ),
            "pacs_loss": lambda: torch.autograd.grad(pacs_loss(proxies, labels, 16)[0], proxies),
        },
        rounds,
        device,
    )


def report(result: dict[str, Any]) -> None:
    print(describe(result["machine"]))
    for name, case in (result["logits"] | result["other_vocabularies"]).items():
        size = f"{case['tokens']} x {case['vocabulary']}"
        print(
            f"\nlogits {size} {name.split()[0]}: a copy moves {case['copy_gb_per_second']:.1f} GB/s"
        )
        print(
            f"  {'':<44}{'ms':>9}{'of copy bandwidth':>20}{'x ours':>9}{'peak bytes/element':>20}"
        )
        for name, ms in case["milliseconds"].items():
            of_copy, peak = (
                case["of_copy_bandwidth"].get(name),
                case["peak_bytes_per_element"].get(name),
            )
            print(
                f"  {name:<44}{ms:9.1f}{'' if of_copy is None else f'{of_copy:.0%}':>20}"
                f"{case['times_ours'][name]:9.2f}{'' if peak is None else f'{peak:.1f}':>20}"
            )
        print(f"  not installed: {'; '.join(case['not_installed']) or 'nothing'}")
        for name, error in case["failed"].items():
            print(f"  failed: {name}: {error}")
    for dtype, case in result["linear"].items():
        size = (
            f"{case['tokens']} tokens, hidden {case['hidden_size']}, vocabulary "
            f"{case['vocabulary']}"
        )
        print(
            f"\nfrom hidden states, {size}, {dtype}: GEMM throughput "
            f"{case['matrix_product_tflops']:.3f} TFLOP/s"
        )
        for name, ms in case["milliseconds"].items():
            peak = case["peak_mib"][name]
            print(
                f"  {name:<44}{ms:9.1f} ms, {case['useful_tflops'][name]:.3f} useful TFLOP/s, "
                f"{case['times_ours'][name]:.2f} x "
                f"ours, peak {'unknown' if peak is None else f'{peak:.0f} MiB'}"
            )
    for dtype, case in result["linear_logprobs"].items():
        size = (
            f"{case['tokens']} tokens, hidden {case['hidden_size']}, vocabulary "
            f"{case['vocabulary']}"
        )
        print(
            f"\nlog-probs from hidden states, {size}, {dtype}: {case['milliseconds']:.1f} ms, "
            f"{case['tflops']:.3f} TFLOP/s"
        )
    for dtype, case in result["divergence"].items():
        sizes = f"{case['tokens']} x {case['hidden_size']} x {case['vocabulary']}"
        print(f"\ndivergence from a teacher, {sizes}, {dtype}:")
        for name, ms in case["milliseconds"].items():
            print(f"  {name:<44}{ms:9.1f} ms, peak {case['peak_mib'][name] or math.nan:.0f} MiB")
    print(
        "\n1024 prompts x 16 rollouts x 64 tokens: "
        + ", ".join(f"{k} {v:.2f} ms" for k, v in result["pacs"].items())
    )


def main() -> int:
    parser = argument_parser("token_loss", __doc__, rounds=5)
    parser.add_argument("--tokens", type=int, help="T (default: 2048, 16384 on a GPU)")
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
    options = parser.parse_args()
    device, rounds = prepare(options), options.rounds
    on_gpu = device.type == "cuda"
    tokens, vocab = (
        options.tokens or (16384 if on_gpu else 2048),
        options.vocab or (151936 if on_gpu else 32768),
    )
    hidden = options.hidden or (4096 if on_gpu else 512)
    others = (
        options.other_vocabs
        if options.other_vocabs is not None
        else [32000, 262144]
        if on_gpu
        else []
    )
    if min(tokens // SEQUENCES, vocab, hidden, *others) < 1:
        raise InputError(f"--tokens must be at least {SEQUENCES}, the other numbers at least 1")
    compiled = None if options.no_compile else torch.compile(eager_ppo)
    names = options.dtypes or (["bfloat16"] if on_gpu else ["float32", "bfloat16"])
    # Without bfloat16 instructions a CPU takes minutes for one matrix multiplication: there only
    # --dtypes asks for it.
    fast = names if on_gpu or options.dtypes else ["float32"]
    result: dict[str, Any] = {"benchmark": "token_loss", "machine": machine(device)}
    result |= {"logits": {}, "linear": {}, "linear_logprobs": {}, "other_vocabularies": {}}
    result["divergence"] = {}
    result["pacs"] = measure_pacs(rounds, device)
    few, other_vocab = (4096, 131072) if on_gpu else (tokens // 4 or 1, vocab)
    growing = [
        *(
            ("logits", name, measure_logits(DTYPES[name], tokens, vocab, rounds, compiled, device))
            for name in names
        ),
        *(
            ("linear", name, measure_linear(DTYPES[name], tokens, vocab, hidden, rounds, device))
            for name in fast
        ),
        *(
            (
                "other_vocabularies",
                f"{names[0]} {v}",
                measure_logits(DTYPES[names[0]], tokens, v, rounds, None, device),
            )
            for v in others
        ),
    ]
    for section, name, cases in growing:
        for case in cases:
            result[section][name] = case
            keep(result)
    for name in fast:
        result["linear_logprobs"][name] = measure_linear_logprobs(
            DTYPES[name], few, other_vocab, hidden, rounds, device
        )
        result["divergence"][name] = measure_divergence(
            DTYPES[name], few if on_gpu else tokens, other_vocab, hidden, rounds, device
        )
    report(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

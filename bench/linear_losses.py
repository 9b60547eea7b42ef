"""The losses from hidden states and the output matrix, part of `python -m bench.token_loss`."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.loss_case import Batch, eager_ppo
from bench.measure import Sides, kernel_milliseconds
from maxrl_fast.ops import linear_divergence, linear_policy_gradient_loss, linear_token_logprobs
from maxrl_fast.ops.logit_chunks import default_chunk, logits_dtype, row_stride

CALLS = 2  # of each function in a round: one takes up to 0.2 s


class Linear:
    """Sizes, dtype and figures of a loss from hidden states [T, H] and the output matrix [V, H]."""

    def __init__(
        self,
        dtype: torch.dtype,
        num_tokens: int,
        vocab_size: int,
        hidden_size: int,
        rounds: int,
        device: torch.device,
    ):
        self.dtype, self.device = dtype, device
        self.num_tokens, self.vocab_size, self.hidden_size = num_tokens, vocab_size, hidden_size
        self.sizes = {"tokens": num_tokens, "vocabulary": vocab_size, "hidden_size": hidden_size}
        self.rounds = rounds

    def timed(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        return kernel_milliseconds(functions, self.rounds, self.device, calls=CALLS)

    def sides(self, ours: Callable[[], object], name: str = "ours") -> Sides:
        return Sides(name, ours, self.timed, self.device, in_turn=self.device.type == "cpu")

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the output matrix, random."""
        shapes = (self.num_tokens, 1.0), (self.vocab_size, self.hidden_size**-0.5)
        hidden, weight = (
            torch.randn(n, self.hidden_size, device=self.device).mul_(scale).to(self.dtype)
            for n, scale in shapes
        )
        return hidden.requires_grad_(), weight.requires_grad_()

    def chunk(self, hidden: Tensor) -> int:
        """Return how many tokens the loss multiplies at a time."""
        return min(default_chunk(hidden, self.vocab_size), self.num_tokens)

    def loss(self) -> Iterator[dict[str, Any]]:
        """Yield the figures of the loss: ours, then again after each other implementation."""
        hidden, weight = self.matrices()
        batch = Batch(self.num_tokens, self.vocab_size, self.device)
        with torch.no_grad():
            batch.old += linear_token_logprobs(hidden, weight, batch.targets)[0]
        arguments = (batch.targets, batch.advantages, batch.cu_seqlens)

        def ours(loss: str = "ppo") -> object:
            total, _ = linear_policy_gradient_loss(
                hidden, weight, *arguments, old_logprobs=batch.old, loss=loss
            )
            return torch.autograd.grad(total, (hidden, weight))

        def eager() -> object:
            loss = eager_ppo(hidden @ weight.T, batch.targets, batch.per_token, batch.old)
            return torch.autograd.grad(loss, (hidden, weight))

        sides = self.sides(ours)
        chunk = self.chunk(hidden)
        left = hidden.detach()[:1024]
        gemm = self.timed({"gemm": lambda: left @ weight.detach().T})["gemm"]
        row_bytes = row_stride(self.vocab_size, self.device) * logits_dtype(hidden).itemsize
        rounded = 0 if weight.element_size() >= 4 else weight.element_size()  # bytes
        # The least memory: the gradients, the output matrix's in float32 and rounded, and one
        # chunk of logits.
        gradients = hidden.numel() * hidden.element_size() + (4 + rounded) * weight.numel()
        work = self.num_tokens * self.hidden_size * self.vocab_size

        def figures() -> dict[str, Any]:
            return self.sizes | {
                "milliseconds": sides.milliseconds,
                "useful_tflops": {n: 6 * work / t / 1e9 for n, t in sides.milliseconds.items()},
                "matrix_product_tflops": 2 * len(left) * weight.numel() / gemm / 1e9,
                "peak_mib": {n: x and x / 2**20 for n, x in sides.peak_bytes.items()},
                "gradients_mib": gradients / 2**20,
                "chunk_mib": chunk * row_bytes / 2**20,
                "times_ours": sides.ratio,
                "failed": sides.failed,
            }

        makers: dict[str, Callable[[], Callable[[], object]]] = {
            "ours": lambda: ours,
            "ours, sapo (a function)": lambda: partial(ours, "sapo"),
            "eager": lambda: eager,
        }
        for _ in sides.try_each(makers):
            yield figures()

    def logprobs(self) -> Iterator[dict[str, Any]]:
        """Yield the figures of log-probs, forward and backward; the backward pass recomputes the
        logits.
        """
        hidden, weight = self.matrices()
        targets = torch.randint(self.vocab_size, (self.num_tokens,), device=self.device)
        ones = torch.ones(self.num_tokens, device=self.device)

        def ours() -> object:
            return torch.autograd.grad(
                linear_token_logprobs(hidden, weight, targets)[0], (hidden, weight), ones
            )

        times = self.timed({"ours": ours})
        # logits twice, and both gradients
        products = 8 * self.num_tokens * self.hidden_size * self.vocab_size
        tflops = products / times["ours"] / 1e9
        yield self.sizes | {"milliseconds": times, "tflops": tflops}

    def divergence(self) -> Iterator[dict[str, Any]]:
        """Yield the figures of the reverse divergence from a teacher, forward and backward: ours,
        then with eager PyTorch's.
        """
        hidden, weight = self.matrices()
        teacher_hidden, teacher_weight = (x.detach() for x in self.matrices())

        def ours() -> object:
            loss = linear_divergence(hidden, weight, teacher_hidden, teacher_weight)[0]
            return torch.autograd.grad(loss, (hidden, weight))

        def eager() -> object:
            log_p, log_q = (
                torch.log_softmax((x @ w.T).float(), -1)
                for x, w in ((hidden, weight), (teacher_hidden, teacher_weight))
            )
            loss = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
            return torch.autograd.grad(loss, (hidden, weight))

        sides = self.sides(ours)
        for _ in sides.try_each({"ours": lambda: ours, "eager": lambda: eager}):
            yield self.sizes | {
                "milliseconds": sides.milliseconds,
                "times_ours": sides.ratio,
                "peak_mib": {name: x and x / 2**20 for name, x in sides.peak_bytes.items()},
                "failed": sides.failed,
            }

"""Logits and the other inputs of a token loss, which ours and other implementations compute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import policy_gradient_loss, token_logprobs

SEQUENCES = 16
BLOCK = 256  # rows whose gradient is compared at a time


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
        same = logits.new_empty(0)
        same.set_(logits.untyped_storage(), 0, logits.shape, logits.stride())  # type: ignore[arg-type, unused-ignore]
        return same

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.case.gradient = gradient
        return gradient.new_zeros(()), None, None


class Batch:
    """A loss's inputs besides logits: T tokens in 16 sequences, on a device."""

    def __init__(self, num_tokens: int, vocab_size: int, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        bounds = torch.linspace(0, num_tokens, SEQUENCES + 1).long()
        self.num_tokens, self.vocab_size, self.device = num_tokens, vocab_size, device
        self.cu_seqlens = bounds.to(device)
        self.targets = torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)
        self.advantages = torch.randn(SEQUENCES, generator=generator).to(device)
        self.per_token = self.advantages.repeat_interleave(bounds.diff().to(device))
        self.noise = 0.1 * torch.randn(num_tokens, generator=generator).to(device)
        self.old = self.noise  # of log-probs, which are known later


class Case(Batch):
    """Logits [T, V] of one dtype too; every implementation leaves its gradient in `gradient`.

    The logits exist inside `with case.filled()`, always the same.
    """

    def __init__(self, dtype: torch.dtype, num_tokens: int, vocab_size: int, device: torch.device):
        super().__init__(num_tokens, vocab_size, device)
        self.dtype = dtype
        self.anchor = torch.zeros((), device=device, dtype=dtype, requires_grad=True)
        self.empty()

    def empty(self) -> None:
        self.longer = self.source = self.working = self.gradient = torch.empty(0)

    @contextmanager
    def filled(self) -> Iterator[None]:
        torch.manual_seed(0)
        try:
            shape = self.num_tokens + 1, self.vocab_size  # liger-kernel wants a last, unused row
            self.longer = torch.randn(*shape, device=self.device).to(self.dtype)
            self.source = self.longer[:-1]
            self.working = self.source.clone()  # what each implementation reads
            self.old = token_logprobs(self.source, self.targets)[0] + self.noise
            yield
        finally:
            self.empty()

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

    def expected(self, rows: slice) -> Tensor:
        """Return eager PyTorch's gradient of some rows of the logits."""
        logits = self.source[rows].detach().requires_grad_()
        loss = eager_ppo(logits, self.targets[rows], self.per_token[rows], self.old[rows])
        return torch.autograd.grad(loss * (len(logits) / self.num_tokens), logits)[0]

    def refill(self) -> None:
        self.gradient = torch.empty(0)
        self.working.copy_(self.source)

    def difference(self, name: str, side: Callable[[], Tensor]) -> float:
        """Return the relative difference of an implementation's gradient from eager PyTorch's.

        Raises:
            RuntimeError: if it is too large, or eager PyTorch's gradient is zero.
        """
        self.refill()
        actual = side()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, self.num_tokens, BLOCK):
            rows = slice(start, start + BLOCK)
            expected = self.expected(rows).float()
            sums[0] += (actual[rows].float() - expected).square().sum()
            sums[1] += expected.square().sum()
        error, size = sums.tolist()
        # In bfloat16 TRL rounds log-probs, so that other tokens are clipped.
        limit = 1e-5 if self.dtype == torch.float32 else 0.2 if name.startswith("TRL") else 1e-2
        if not size > 0 or not (error / size) ** 0.5 < limit:
            raise RuntimeError(f"squared, its gradient differs by {error} from eager's {size}")
        return float((error / size) ** 0.5)

    def by_trl(self) -> Callable[[], Tensor]:
        """Return TRL's log-probs with a clipped loss."""
        from trl.trainer.utils import selective_log_softmax

        def side() -> Tensor:
            logp = selective_log_softmax(self.computed()[None], self.targets[None])[0]
            return self.backward(clipped(logp.float(), self.per_token, self.old))

        return side

    def by_liger(self) -> Callable[[], Tensor]:
        """Return liger-kernel's loss; it takes one advantage for all tokens."""
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        if self.device.type != "cuda":
            raise ImportError("it needs a GPU")
        logits = self.longer[None].detach().requires_grad_()
        arguments = (logits, self.old[None], None, self.targets[None], self.advantages[:1])
        options = {"temperature": 1.0, "beta": 0.0, "eps_low": 0.2, "eps_high": 0.2}

        def side() -> Tensor:
            logits.grad = None
            triton_grpo_loss(*arguments, **options, inplace=False, reduce=True)[0].backward()
            assert logits.grad is not None
            return logits.grad[0, :-1]

        return side

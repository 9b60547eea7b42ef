"""The token losses by name, and what a function must be to serve as one."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.method import AnyFunction, Method, Registry, name_of
from maxrl_fast.algorithms.options import (
    BelowOne,
    NotNegative,
    check_options,
    options_of,
    parameters_of,
)
from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import describe_error

# numbers of several losses: arguments of ops.policy_gradient_loss
CLIPS = ("clip_low", "clip_high", "dual_clip")


@dataclass(frozen=True)
class Clips:
    """The options of a run with a loss that clips."""

    clip_low: BelowOne = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """The ratio is clipped above 1 + clip_high."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLoss(Method):
    """A token loss: a function of Tokens that returns the loss of each token [T].

    In the formula A is the advantage, rho = pi / pi_old, and sg a constant factor.

    Args:
        weight: the factor of A grad logp in the descent direction; 1 at rho = 1, except for
            entropy_adv and the tokens that clip_cov, lp_reg and simko choose.
        clips: whether it takes clip_low and clip_high.
        aggregation: the only one that the loss is defined for.
        by_sequence: whether it has a ratio of whole responses.
        over_batch: whether the loss of a token depends on other responses of the update.
        rows: a function of log_p [C, V], targets [C] and the options that it names, that returns
            what the loss needs of rows of logits: [C, R].
        fused: whether a kernel computes it.
    """

    clips: bool = False
    aggregation: str | None = None
    by_sequence: bool = False
    over_batch: bool = False
    rows: Callable[..., Tensor] | None = None
    fused: bool = False

    noun: ClassVar[str] = "loss"
    first: ClassVar[str] = "Tokens"
    of_users: ClassVar[Mapping[str, Any]] = {"weight": ""}

    @classmethod
    def of(cls, function: Callable[..., Any], **fields: Any) -> "TokenLoss":
        asked = [parameter.name for parameter in parameters_of(function)]
        options = options_of(function) if asked else {}
        known = {*options, *CLIPS}
        others = [
            parameter.name
            for parameter in parameters_of(function)[1:]
            if parameter.name not in known and parameter.default is parameter.empty
        ]
        if others:
            raise ValueError(
                f"the parameters of loss {name_of(function)} after Tokens must be keyword-only "
                f"numbers, got {', '.join(others)}"
            )
        own = {name: option for name, option in options.items() if name not in CLIPS}
        return super().of(function, options=own, clips="clip_low" in asked, **fields)

    @property
    def shown_options(self) -> str:
        return " ".join([super().shown_options, "--clip-low, --clip-high" * self.clips]).strip()

    def resolve(self, given: Mapping[str, Any] | None) -> dict[str, float]:
        """Return all options; raise ValueError or TypeError where one does not fit."""
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"loss_options must be a mapping of names to numbers, got {type(given).__name__}"
            )
        return check_options(f"loss {self.name}", self.options, given or {})

    def bind(self, options: Mapping[str, float], **clips: float) -> Callable[[Tokens], Tensor]:
        """Return the function with its options, and those of the given clips that it takes."""
        parameters = inspect.signature(self.function).parameters
        taken = {name: value for name, value in clips.items() if name in parameters}
        return partial(self.function, **options, **taken)


_REGISTRY = Registry(TokenLoss)
LOSSES, ALIASES, find_loss = _REGISTRY.methods, _REGISTRY.aliases, _REGISTRY.find


def token_loss(
    source: str, *, weight: str = "", **fields: Any
) -> Callable[[AnyFunction], AnyFunction]:
    """Register the decorated function in LOSSES; `fields`: further ones of its TokenLoss."""
    return _REGISTRY.register(source, weight=weight, **fields)


def learns_without_advantage(loss: TokenLoss, options: tuple[tuple[str, float], ...]) -> bool:
    """Return whether the loss has a gradient for tokens with advantage 0, tried on seven tokens.

    Raises ValueError if it fails, or does not return finite losses [T] float64 with a gradient.
    """
    if loss.fused:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        return _learns_without_advantage(loss, options)


@lru_cache(maxsize=1024)
def _learns_without_advantage(loss: TokenLoss, options: tuple[tuple[str, float], ...]) -> bool:
    function = loss.bind(dict(options), clip_low=0.2, clip_high=0.2, dual_clip=math.inf)
    has_gradient = False
    for scale in (1.0, 0.0):
        tokens = _example(loss, dict(options), scale)
        try:
            values = checked(loss, function(tokens), tokens)
        except ValueError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a user's function raises becomes one sentence
            raise ValueError(
                f"loss {loss.name} fails on seven tokens: {describe_error(error)}"
            ) from error
        if not values.requires_grad:
            raise ValueError(
                f"loss {loss.name} must have a gradient in the logprobs or the entropy of its "
                "tokens, got none"
            )
        given = tokens.logprobs, tokens.entropy, tokens.rows
        inputs = [x for x in given if x is not None and x.requires_grad]
        gradients = torch.autograd.grad(values.sum(), inputs, allow_unused=True)
        has_gradient = any(x is not None and bool(x.any()) for x in gradients)
    return has_gradient


def checked(loss: TokenLoss, values: Any, tokens: Tokens) -> Tensor:
    """Return what a loss function has returned; raise ValueError where it is not a loss of each
    token.

    On a CPU a user's loss must be finite for tokens that are not masked.
    """
    wanted = f"loss {loss.name} must return {tokens.logprobs.dtype} [T] = [{len(tokens.logprobs)}]"
    if not isinstance(values, Tensor):
        raise InputError(f"{wanted}, got {type(values).__name__}")
    if values.shape != tokens.logprobs.shape or values.dtype != tokens.logprobs.dtype:
        raise InputError(f"{wanted}, got {values.dtype} of shape {tuple(values.shape)}")
    is_users = not str(getattr(loss.function, "__module__", "")).startswith("maxrl_fast.")
    if is_users and is_host_readable(values):
        # Where the policy is NaN, so are the log-probs, and the loss of any function.
        is_wrong = tokens.mask & ~values.isfinite() & ~tokens.logprobs.isnan()
        if bool(is_wrong.any()):
            first = int(is_wrong.nonzero()[0])
            got = f"{values[first].item()} at token {first}"
            raise InputError(f"loss {loss.name} must be finite, got {got}")
    return values


def _example(loss: TokenLoss, options: Mapping[str, float], scale: float) -> Tokens:
    place = torch.arange(7, dtype=torch.float64)
    logprobs = -0.3 - (place * 1.7).sin().square()
    rows = None
    if loss.rows is not None:
        log_p = torch.log_softmax((torch.arange(112.0).double() * 0.7).cos().view(7, 16), -1)
        rows = call_rows(loss, options, log_p.requires_grad_(), torch.arange(7))
    return Tokens(
        logprobs=logprobs.requires_grad_(),
        entropy=(0.5 + (place * 0.9).cos().square()).requires_grad_(),
        old_logprobs=logprobs.detach() + 0.2 * (place * 2.3 + 1).sin(),
        ref_logprobs=logprobs.detach() - 0.1,
        advantages=scale * torch.tensor([1.0, -1.0, 0.5, 0.5, -2.0, -2.0, -2.0]).double(),
        mask=torch.ones(7, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 1, 4, 7]),
        rows=rows,
        generator=torch.Generator().manual_seed(0),
    )


def call_rows(
    loss: TokenLoss, options: Mapping[str, float], log_p: Tensor, targets: Tensor
) -> Tensor:
    assert loss.rows is not None
    return loss.rows(log_p, targets, **{name: options[name] for name in options_of(loss.rows)})

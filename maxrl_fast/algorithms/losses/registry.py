"""The token losses by name, and what a function must be to serve as one."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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

    In the formula A is the advantage, rho = pi / pi_old, and sg a constant factor. The weight is
    the factor of A grad logp in the descent direction; 1 at rho = 1, except for entropy_adv and the
    tokens that clip_cov, lp_reg and simko choose. A function whose second parameter is `logits` is
    called with some of the tokens at a time, cut anywhere, and their logits divided by the
    temperature, [T, V], with a gradient."""

    clips: bool = False  # whether it takes clip_low and clip_high
    aggregation: str | None = None  # the only one that the loss is defined for
    by_sequence: bool = False  # whether it has a ratio of whole responses
    # of all Tokens of an update, without gradients, and of the options that it names; the loss gets
    # the result [T, ...] as `statistics` of its tokens
    statistics: Callable[..., Tensor] | None = None
    # a fused loss. The function then is one like `statistics`, and returns which tokens [T] bool
    # keep their advantage in that loss.
    masks: str = ""
    all_tokens: bool | None = None  # tokens with the advantage 0 have a gradient; None: if a user's
    fused: bool = False  # whether a kernel computes it
    bounds: tuple[tuple[str, str], ...] = ()  # pairs of options: the first is at most the second

    noun: ClassVar[str] = "loss"
    first: ClassVar[str] = "Tokens"
    of_users: ClassVar[Mapping[str, Any]] = {"weight": ""}

    @classmethod
    def of(cls, function: Callable[..., Any], **fields: Any) -> "TokenLoss":
        parameters = parameters_of(function)
        options = options_of(function) if parameters else {}
        known = {*options, *CLIPS, "logits"}
        if others := [
            x.name for x in parameters[1:] if x.name not in known and x.default is x.empty
        ]:
            raise ValueError(
                f"the parameters of loss {name_of(function)} after Tokens must be keyword-only "
                f"numbers, got {', '.join(others)}"
            )
        own = {name: option for name, option in options.items() if name not in CLIPS}
        clips = "masks" in fields or any(x.name == "clip_low" for x in parameters)
        return super().of(function, options=own, clips=clips, **fields)

    @property
    def is_users(self) -> bool:
        return not str(getattr(self.function, "__module__", "")).startswith("maxrl_fast.")

    @property
    def over_batch(self) -> bool:
        """Whether the loss of a token depends on other responses of the update."""
        return bool(self.statistics or self.masks)

    @property
    def reads_logits(self) -> bool:
        return "logits" in inspect.signature(self.function).parameters

    @property
    def shown_options(self) -> str:
        return " ".join([super().shown_options, "--clip-low, --clip-high" * self.clips]).strip()

    def resolve(self, given: Mapping[str, Any] | None) -> dict[str, float]:
        """Return all options; raise ValueError or TypeError where one does not fit."""
        if given is not None and not isinstance(given, Mapping):
            got = type(given).__name__
            raise TypeError(f"loss_options must be a mapping of names to numbers, got {got}")
        values = check_options(f"loss {self.name}", self.options, given or {})
        for low, high in self.bounds:
            if values[low] > values[high]:
                wanted = f"at most its {high}, {values[high]:g}"
                raise ValueError(f"{low} of {self.name} must be {wanted}, got {values[low]:g}")
        return values

    def bind(self, options: Mapping[str, float], **clips: float) -> Callable[..., Tensor]:
        """Return the function with its options, and those of the given clips that it takes."""
        return _bound(self.function, {**options, **clips})

    def compare(self, tokens: Tokens, options: Mapping[str, float]) -> Tensor:
        """Return what the loss reads of all tokens of an update: statistics, or a mask."""
        return _bound(self.statistics or self.function, options)(tokens)


def _bound(function: Callable[..., Tensor], options: Mapping[str, float]) -> Callable[..., Tensor]:
    parameters = inspect.signature(function).parameters
    return partial(function, **{name: x for name, x in options.items() if name in parameters})


_REGISTRY = Registry(TokenLoss)
LOSSES, ALIASES, find_loss = _REGISTRY.methods, _REGISTRY.aliases, _REGISTRY.find


def token_loss(
    source: str, *, weight: str = "", **fields: Any
) -> Callable[[AnyFunction], AnyFunction]:
    """Register the decorated function in LOSSES; `fields`: further ones of its TokenLoss."""
    return _REGISTRY.register(source, weight=weight, **fields)


def checked(loss: TokenLoss, values: Any, tokens: Tokens) -> Any:
    """Return what a loss function has returned; raise InputError where it is not a loss of each
    token. On a CPU a user's loss must be finite for tokens that are not masked."""
    like = tokens.logprobs
    got = type(values).__name__
    if isinstance(values, Tensor):
        got = f"{values.dtype} of shape {tuple(values.shape)}"
    if got != f"{like.dtype} of shape {tuple(like.shape)}":
        wanted = f"{like.dtype} [T] = [{len(like)}]"
        raise InputError(f"loss {loss.name} must return {wanted}, got {got}")
    if like.requires_grad and torch.is_grad_enabled() and not values.requires_grad:
        wanted = "a gradient in the logprobs or the entropy of its tokens"
        raise InputError(f"loss {loss.name} must have {wanted}, got none")
    if loss.is_users and is_host_readable(values):
        # Where the policy is NaN, so are the log-probs, and the loss of any function.
        is_wrong = tokens.mask & ~values.isfinite() & ~like.isnan()
        if bool(is_wrong.any()):
            first = int(is_wrong.nonzero()[0])
            got = f"{values[first].item()} at token {first}"
            raise InputError(f"loss {loss.name} must be finite, got {got}")
    return values

"""A policy whose layers are transformers': any decoder that calls the attention function once a
layer, which calls the policy's, alone or within a model that reads images or sound too.

Scale, sliding window, soft cap and sinks are passed on; what else eager attention would honour is
refused by name. Each layer casts the float32 master weights to the compute dtype; routers of
experts compute in float32. Dropout is off."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from maxrl_fast.errors import InputError
from maxrl_fast.model.attention import AttentionVariant
from maxrl_fast.model.layer_kernels import choose_rows
from maxrl_fast.model.linear import merged_weights
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.model.recurrence import Recurrence, States

NAME = "maxrl_fast"  # under which the functions are registered
# Arguments that say nothing about the attention between tokens.
_NAMES = """position_ids cache_position position_embeddings past_key_values use_cache
output_attentions output_hidden_states output_router_logits return_dict hidden_states layer_idx
logits_to_keep"""
_OTHER = {*_NAMES.split()}


@dataclass(frozen=True)
class HuggingFaceSizes(PolicySizes):
    # of config.json, without keys that make transformers run code
    fields: dict[str, Any] = field(default_factory=dict)
    # tokens in whose place a model that reads images or sound too has these
    images: tuple[int, ...] = ()


class HuggingFacePolicy(PolicyModel):
    """A model of transformers, of which only the decoder of text is left, changed in place."""

    def __init__(self, model: Any, sizes: HuggingFaceSizes):
        super().__init__()
        import transformers  # not at the top: runs of the native decoder do without it

        if has_parts(model.config):
            _keep_decoder(model)
        self.backend = f"transformers {transformers.__version__}"
        self.config, self.hf = sizes, model.eval()
        self._block_names = _block_names(model)
        routers, blocks = _router_classes(self.body), list[Any](self.blocks)
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        for module in [x for block in blocks for x in block.modules() if _has_state(x)]:
            _mix(module, _Recurrent)
        for module in list[nn.Module](self.body.modules()):
            if isinstance(module, routers):
                _mix(module, _Router)
            elif isinstance(module, nn.Embedding) and id(module) not in in_blocks:
                _mix(module, _Embedding)
            elif id(module) not in in_blocks and module is not self.body and module._parameters:
                _mix(module, _Cast)
        _mix(self.lm_head, _Cast)
        for i, block in enumerate(blocks):
            _mix(block, _Block)
            block.block_index = i
        _register()
        self.set_eager(False)
        text = model.config.get_text_config()
        self.softcap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
        if self.device.type != "meta":
            self.logit_scale = self._measured_scale(text)

    @property
    def lm_head(self) -> Any:
        return self.hf.get_output_embeddings()

    def set_output(self, layer: nn.Module) -> None:
        self.hf.set_output_embeddings(layer)

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.hf.get_submodule(name) for name in self._block_names]

    @property
    def body(self) -> nn.Module:
        return self.hf.get_submodule(self._block_names[0].rsplit(".", 2)[0])

    def set_eager(self, is_eager: bool) -> None:
        owner = self.hf.get_decoder() if has_parts(self.hf.config) else self.hf
        try:
            owner.set_attn_implementation("eager" if is_eager else NAME)
        except Exception as error:  # transformers raises anything
            raise InputError(
                f"{self.config.model_type} does not support our attention function: {error}"
            ) from error

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Callable[..., Tensor],
        rows: Tensor | None,
        dtype: torch.dtype = torch.float32,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        for block in self.blocks:
            if self.checkpoint_activations:
                _set_checkpointing(block)
        with within(Pass(attention, recurrence, dtype)):
            inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
            hidden = self.body(**inputs, use_cache=False)[0][0]
        return self.padded(hidden if rows is None else choose_rows(hidden, rows))

    def padded(self, hidden: Tensor) -> Tensor:
        """Add a column of 1 [R, H + 1] where the output layer has a bias."""
        has_bias = getattr(self.lm_head, "bias", None) is not None
        return F.pad(hidden, (0, 1), value=1.0) if has_bias else hidden

    @property
    def output_matrix(self) -> Tensor:
        """[V, H], or [V, H + 1] with the bias as the last column."""
        weight, bias = self.lm_head.weight, getattr(self.lm_head, "bias", None)
        return weight if bias is None else torch.cat([weight, bias[:, None]], 1)

    @torch.no_grad()
    def own_logits(
        self, tokens: Tensor, change: Callable[[Tensor], Tensor] = lambda hidden: hidden
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [L, V] of one sequence [L] by the model's eager forward pass, and its
        hidden states [L, H] after `change`."""
        found: list[Tensor] = []
        self.unshard()

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            found.append(change(output[0][0]))
            output["last_hidden_state"] = found[0][None]
            return output

        handle = self.body.register_forward_hook(hook)
        self.set_eager(True)
        try:
            with within(None):
                logits = self.hf(input_ids=tokens[None], use_cache=False).logits[0].float()
        finally:
            self.set_eager(False)
            handle.remove()
        return logits, found[0]

    @torch.no_grad()
    def _measured_scale(self, config: Any) -> float:
        """Return the factor of hidden @ weight.T (Granite, Cohere), or 1. Families use one name for
        a factor and a divisor, so it is measured, where soft caps do not matter."""
        candidates = [1.0]
        for name in ("logit_scale", "logits_scaling", "logits_scale", "lm_head_multiplier"):
            value = getattr(config, name, None)
            if isinstance(value, (int, float)) and value > 0:
                candidates += [float(value), 1 / value]
        if len(candidates) == 1:
            return 1.0
        logits, hidden = self.own_logits(torch.arange(2, device=self.device), lambda x: 1e-3 * x)
        plain = self.logits(hidden)
        ratio = float((logits * plain).sum() / plain.square().sum())
        return min(candidates, key=lambda x: abs(ratio / x - 1))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Convert one layer at a time."""
        from transformers.core_model_loading import revert_weight_conversion

        def block_of(item: tuple[str, Tensor]) -> str | None:
            return next((x for x in self._block_names if item[0].startswith(f"{x}.")), None)

        for _, group in itertools.groupby(merged_weights(self.hf), key=block_of):
            yield from revert_weight_conversion(self.hf, dict(group)).items()


def has_parts(config: Any) -> bool:
    return "text_config" in config.sub_configs


def _keep_decoder(model: Any) -> None:
    """Remove the modules beside the decoder of text, such as encoders of images."""
    kept = {*model.get_decoder().modules(), model.get_output_embeddings()}

    def prune(module: Any) -> None:
        for name, child in [*module.named_children()]:
            if kept.isdisjoint(child.modules()):
                delattr(module, name)
            elif child not in kept:
                prune(child)

    prune(model)


def _block_names(model: Any) -> list[str]:
    """Layers are modules in lists, of a class in _no_split_modules."""
    classes = set(model._no_split_modules or ())
    names = [
        f"{name}.{i}"
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList)
        for i, block in enumerate(blocks)
        if type(block).__name__ in classes
    ]
    if not names:
        raise InputError(f"{type(model).__name__} does not say what its decoder layers are")
    return names


def _router_classes(model: Any) -> tuple[type, ...]:
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", ())
    recorded = recorded if isinstance(recorded, (list, tuple)) else [recorded]
    classes = (getattr(x, "target_class", x) for x in recorded)
    return tuple(cls for cls in classes if isinstance(cls, type))


@cache
def _mixed(mixin: type, cls: Any) -> type:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def _mix(module: nn.Module, mixin: type) -> None:
    """A class survives copy.deepcopy, unlike a closure."""
    if not isinstance(module, mixin):
        own: Any = type(module)
        module.__class__ = _mixed(mixin, own)


class _Bound(nn.Module):
    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.module, self.own_forward = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


def _in_dtype(
    module: nn.Module, dtype: torch.dtype, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Gradients reach the parameters, which are cast."""
    if all(p.dtype == dtype or not p.is_floating_point() for p in module.parameters()):
        return forward(*args, **kwargs)
    cast = {
        f"module.{name}": p.to(dtype)
        for name, p in module.named_parameters()
        if p.is_floating_point()
    }
    return functional_call(_Bound(module, forward), cast, args, kwargs)


class _Embedding(nn.Module):
    """Only the rows that are read are cast."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        return output if (layer_pass := current.get()) is None else output.to(layer_pass.dtype)


class _Cast(nn.Module):
    """A module that computes in the dtype of its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next(
            x.dtype
            for x in (*args, *kwargs.values())
            if isinstance(x, Tensor) and x.is_floating_point()
        )
        return _in_dtype(self, dtype, super().forward, args, kwargs)


class _Router(nn.Module):
    """A router computes in float32: small differences decide where a token goes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(
            x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args
        )
        return _in_dtype(self, torch.float32, super().forward, args, kwargs)


def _has_state(module: nn.Module) -> bool:
    """Such a layer takes a cache after its input, and convolves."""
    names = [*inspect.signature(module.forward).parameters][1:2]
    is_conv = hasattr(module, "conv") or hasattr(module, "conv1d")
    return is_conv and names in (["cache_params"], ["past_key_values"])


class _Recurrent(nn.Module):
    """A layer with a state, whose states the pass keeps."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        layer_pass, own_forward = current.get(), super().forward
        if layer_pass is None:
            return own_forward(hidden_states, **kwargs)
        if layer_pass.recurrence is None:
            raise InputError(f"{type(self).__name__} has a state, which this caller cannot keep")
        name = next(x for x in kwargs if x in ("cache_params", "past_key_values"))

        def run(hidden: Tensor, states: States, mask: Tensor | None) -> Tensor:
            own = kwargs | {name: states, "attention_mask": mask}
            return own_forward(hidden, **own)

        layer_pass.num_states += 1
        key = layer_pass.layer, layer_pass.num_states
        return layer_pass.recurrence(key, run, hidden_states[0])[None]


class _Block(_Cast):
    """A layer keeps its attention function for activation checkpointing."""

    block_index = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, layer_pass=current.get(), **kwargs)

    def forward(self, *args: Any, layer_pass: "Pass | None" = None, **kwargs: Any) -> Any:
        if layer_pass is not None:
            layer_pass = replace(layer_pass, layer=self.block_index)
        with within(layer_pass):
            return super().forward(*args, **kwargs)


def _set_checkpointing(block: Any) -> None:
    """transformers checkpoints layers in training mode; only the layer itself gets this flag."""
    if not hasattr(block, "gradient_checkpointing"):
        raise InputError(f"{type(block).__name__} of transformers has no activation checkpointing")
    block.gradient_checkpointing = block.training = True
    block._gradient_checkpointing_func = partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False
    )


# The attention function.


@dataclass
class Pass:
    attention: Callable[..., Tensor]  # of PolicyModel.forward, as is `recurrence`
    recurrence: Recurrence | None
    dtype: torch.dtype
    layer: int = -1
    num_calls: int = 0
    num_states: int = 0


current: ContextVar[Pass | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def within(layer_pass: Pass | None) -> Iterator[None]:
    token = current.set(layer_pass)
    try:
        yield
    finally:
        current.reset(token)


def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _window)


def _window(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> int | None:
    """In place of transformers' mask tensor; None: all earlier tokens."""
    if use_vmap:
        raise InputError(
            "the model changes the causal mask by its own function, which is not supported"
        )
    return local_size


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, U, Hq, D] of query [1, Hq, U, D], key and value [1, Hkv, U, D]."""
    layer_pass = current.get()
    if layer_pass is None:
        raise InputError("the model calls attention outside its layers")
    layer_pass.num_calls += 1
    window = attention_mask if isinstance(attention_mask, int) else 0
    told = [
        x for x in others if x not in _OTHER and others[x] is not None and others[x] is not False
    ]
    if attention_mask is not None and not isinstance(attention_mask, int):
        told.append("its own mask")
    elif sliding_window is not None and sliding_window != window:
        told.append(f"sliding_window {sliding_window}, where its mask has {window or 'none'},")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        told.append("is_causal False")
    if dropout:
        told.append(f"dropout {dropout}")
    if layer_pass.num_calls > 1:
        told.append("a second attention in one layer")
    if told:
        raise InputError(
            f"{type(module).__name__} asks for {', '.join(told)}, which shared-prompt attention "
            "does not do"
        )
    # they differ in multi-head latent attention
    size, largest = value.shape[-1], max(query.shape[-1], value.shape[-1])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, heads, D]
    if size != query.shape[-1]:
        q, k, v = (F.pad(x, (0, largest - x.shape[-1])) for x in (q, k, v))
    if scaling != largest**-0.5:
        q = q * (scaling * largest**0.5)
    variant = AttentionVariant(window, float(softcap or 0.0), s_aux)
    out = layer_pass.attention(layer_pass.layer, q, k, v, *([] if variant.is_plain else [variant]))
    return out[None, ..., :size], None

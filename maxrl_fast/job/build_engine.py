import torch

from maxrl_fast.config.options import ResolvedConfig
from maxrl_fast.job.build_policy import dtype_of
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.rollout.checked import CheckedEngine
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.rollout.native import MAX_BATCH, NativeEngine
from maxrl_fast.rollout.transformers import TransformersEngine
from maxrl_fast.runtime.loading import build_from_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.training.logprob_parity import check_engine


def build_engine(
    name: str,
    model: PolicyModel,
    task: Task,
    dtype: torch.dtype,
    *,
    max_new_tokens: int,
    max_batch: int,
    kv_cache_gb: float | None = None,
    compiled: bool = False,
    ranks: Ranks | None = None,
    vllm_tensor_parallel: int = 1,
    vllm_url: str | None = None,
    filters_tokens: bool = False,
) -> CheckedEngine:
    """Build a rollout engine with the model's weights: "native", "vllm", or a custom class.

    vLLM samples `max_batch` responses at once, and must know at its start whether sampling
    `filters_tokens` (top-k, top-p or min-p), for the log-probs. kv_cache_gb is in 1e9 bytes.

    Raises:
        InputError: if the engine is not installed, its class is not an engine, or the model does
        not fit the KV-cache limit.
    """
    device = model.lm_head.weight.device
    cache_bytes = None if kv_cache_gb is None else int(kv_cache_gb * 1e9)
    engine: Engine
    if vllm_url is not None:
        from maxrl_fast.rollout.vllm_server import VllmServerEngine

        engine = VllmServerEngine(
            model, dtype, vllm_url, ranks=ranks, filters_tokens=filters_tokens
        )
    elif name == "vllm":
        from maxrl_fast.rollout.vllm import VllmEngine  # not installed everywhere

        engine = VllmEngine(
            model,
            dtype,
            cache_bytes=cache_bytes,
            max_batch=min(max(max_batch, 256), MAX_BATCH[device.type]),
            ranks=ranks,
            tensor_parallel=vllm_tensor_parallel,
            filters_tokens=filters_tokens,
        )
    elif name not in ENGINES:
        offered = {"model": model, "dtype": dtype, "max_batch": max_batch}
        offered["ranks"] = ranks or Ranks()
        # an engine without this parameter refuses it
        limit = {} if cache_bytes is None else {"cache_bytes": cache_bytes}
        hint = "; it may have model, dtype, max_batch, ranks and cache_bytes"
        engine = build_from_code("rollout", name, Engine, offered, limit, hint)
    else:
        own: NativeEngine | TransformersEngine
        if isinstance(model, HuggingFacePolicy):
            own = TransformersEngine(model, dtype, cache_bytes=cache_bytes)
        else:
            assert isinstance(model, Decoder)
            own = NativeEngine(model, dtype, cache_bytes=cache_bytes, compiled=compiled)
        # refuses a cache that is too small
        own.sequence_bytes(task.prompt_length, max_new_tokens)
        engine = own
    return CheckedEngine(engine, name, model.config.vocab_size)


def compare_engine(model: PolicyModel, engine: Engine, name: str) -> str:
    """Return a sentence on how far a third-party engine's log-probs are from the policy's; "" for
    engines that tests cover.

    vLLM is compared only for transformers policies, a custom engine always. Raises InputError if
    the engine samples from another model.
    """
    if name not in ENGINES:
        engine.load_weights(model)
    elif name == "native" or not isinstance(model, HuggingFacePolicy):
        return ""
    return check_engine(model, engine, name)


def build_run_engine(
    config: ResolvedConfig, model: PolicyModel, task: Task, ranks: Ranks | None = None
) -> CheckedEngine:
    options = config.rollout
    return build_engine(
        options.rollout,
        model,
        task,
        dtype_of(config),
        max_new_tokens=options.max_new_tokens,
        max_batch=options.samples_of_engine(1 if ranks is None else ranks.size),
        kv_cache_gb=options.kv_cache_gb,
        compiled=config.run.compile,
        ranks=ranks,
        vllm_tensor_parallel=options.vllm_tensor_parallel,
        vllm_url=options.vllm_url,
        filters_tokens=options.top_p < 1,
    )


def build_sampling(config: ResolvedConfig, task: Task) -> Sampling:
    options = config.rollout
    return Sampling(options.temperature, options.max_new_tokens, task.stop_ids, top_p=options.top_p)

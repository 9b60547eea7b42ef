"""Which rollout engine a configuration asks for."""

import torch

from maxrl_fast.config.options import Config
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.rollout import Engine
from maxrl_fast.rollout.native import MOST_ROWS, NativeEngine
from maxrl_fast.tasks import Task


def build_engine(config: Config, model: Decoder, task: Task) -> Engine:
    """The engine of a resolved configuration, with the model's weights.

    Raises:
        InputError: where it is not installed, cannot run this model, or not within the memory that the configuration gives.
    """
    device = model.lm_head.weight.device
    dtype, gigabytes = getattr(torch, config.run.dtype), config.rollout.kv_cache_gb
    cache_bytes = None if gigabytes is None else int(gigabytes * 1e9)
    if config.rollout.rollout == "vllm":
        from maxrl_fast.rollout.vllm import VllmEngine  # which not every environment has

        rows = max(config.rollout.prompts * config.rollout.rollouts, 256)
        return VllmEngine(model, dtype, cache_bytes=cache_bytes, max_rows=min(rows, MOST_ROWS[device.type]))
    in_cpp = None if config.rollout.decoder == "auto" else config.rollout.decoder == "cpp"
    engine = NativeEngine(model, dtype, cache_bytes=cache_bytes, in_cpp=in_cpp, compiled=config.run.compile)
    assert config.rollout.max_new_tokens is not None
    engine.sequence_bytes(task.prompt_length, config.rollout.max_new_tokens)
    return engine

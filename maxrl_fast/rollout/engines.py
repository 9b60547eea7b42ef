"""Which rollout engine a configuration asks for."""

import torch

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.options import Config
from maxrl_fast.rollout import Engine
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.tasks import Task


def build_engine(config: Config, model: Decoder, task: Task) -> Engine:
    """The engine of a resolved configuration, with the model's weights.

    Raises:
        InputError: where it is not installed, or cannot run this model.
    """
    dtype, gigabytes = getattr(torch, config.run.dtype), config.rollout.kv_cache_gb
    cache_bytes = None if gigabytes is None else int(gigabytes * 1e9)
    return NativeEngine(model, dtype, cache_bytes=cache_bytes)

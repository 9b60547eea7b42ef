"""Which of our own engines samples. All samples of a prompt share its keys and values."""

from typing import Any

import torch

from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout import NativeEngine
from maxrl_fast.rollout.cpu_decoder import CpuEngine
from maxrl_fast.rollout.device_decoder import DeviceEngine
from maxrl_fast.rollout.transformers import TransformersEngine


def native_engine(
    model: PolicyModel, dtype: torch.dtype, in_cpp: bool | None = None, **limits: Any
) -> NativeEngine:
    """Return the engine that samples from a policy, with its weights.

    in_cpp: use the C++ decoder; None: on every CPU. It computes in bfloat16 only if the CPU has
    instructions for it. limits: cache_bytes and max_batch of NativeEngine.
    """
    if isinstance(model, HuggingFacePolicy):
        return TransformersEngine(model, dtype, **limits)
    is_cpu = model.lm_head.weight.device.type == "cpu"
    kind = CpuEngine if in_cpp or (in_cpp is None and is_cpu) else DeviceEngine
    return kind(model, dtype, **limits)

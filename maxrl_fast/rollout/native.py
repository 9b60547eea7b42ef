"""Which of our own engines samples. All samples of a prompt share its keys and values."""

from typing import Any

import torch

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout import NativeEngine
from maxrl_fast.rollout.cpu_decoder import CpuEngine
from maxrl_fast.rollout.device_decoder import DeviceEngine


def native_engine(
    model: PolicyModel, dtype: torch.dtype, in_cpp: bool | None = None, **limits: Any
) -> NativeEngine:
    """Return the engine that samples from a policy, with its weights. in_cpp: use the C++ decoder,
    which policies of ours have; None: on every CPU. It computes in bfloat16 only if the CPU has
    instructions for it. limits: NativeEngine's others."""
    is_cpu = model.lm_head.weight.device.type == "cpu"
    in_cpp = isinstance(model, Decoder) and (is_cpu if in_cpp is None else in_cpp)
    return (CpuEngine if in_cpp else DeviceEngine)(model, dtype, **limits)

"""The native rollout engine. All samples of a prompt share its keys and values."""

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import RolloutRequest, RolloutStatistics
from maxrl_fast.rollout.cpu_decoder import CpuDecoder, arithmetic_of
from maxrl_fast.rollout.device_decoder import DeviceDecoder
from maxrl_fast.rollout.transformers import TransformersDecoder
from maxrl_fast.runtime.device import memory_bytes

MAX_BATCH = {"cpu": 1024, "cuda": 16384}  # samples decoded at a time; larger batches are no faster


def default_cache_bytes(device: torch.device) -> int:
    return memory_bytes(device) // (4 if device.type == "cuda" else 8)


class NativeEngine:
    """Samples responses with a copy of the policy in the compute dtype.

    cache_bytes: KV-cache limit, in the PyTorch decoder including a step's tensors; samples beyond
    it wait. max_batch: samples decoded at a time. in_cpp: use the C++ decoder; None: on every CPU.
    It computes in bfloat16 only if the CPU has instructions for it. Policies of transformers have a
    decoder of their own.
    """

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        *,
        cache_bytes: int | None = None,
        max_batch: int | None = None,
        in_cpp: bool | None = None,
    ):
        device = model.lm_head.weight.device
        self.config = model.config
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.max_batch = MAX_BATCH[device.type] if max_batch is None else max_batch
        self.statistics = RolloutStatistics()
        self.decoder: CpuDecoder | DeviceDecoder | TransformersDecoder
        if isinstance(model, HuggingFacePolicy):
            self.decoder = TransformersDecoder(model, dtype)
        else:
            assert isinstance(model, Decoder)
            if in_cpp or (in_cpp is None and device.type == "cpu"):
                self.decoder = CpuDecoder(model.config, arithmetic_of(dtype))
            else:
                self.decoder = DeviceDecoder(model, dtype)
            self.load_weights(model)

    def describe(self) -> str:
        return f"{self.decoder.describe()} of at most {self.cache_bytes / 1e9:.3g} GB)"

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """Return the KV-cache bytes of a prompt and of a response; raise InputError if they
        exceed it."""
        prompt, own = self.decoder.sequence_bytes(prompt_length, max_new_tokens)
        if prompt + own > self.cache_bytes:
            raise InputError(
                "kv_cache_gb must hold the longest prompt and a response, "
                f"{(prompt + own) / 1e9:.3g} GB at {prompt_length} and {max_new_tokens} tokens, "
                f"got {self.cache_bytes / 1e9:.3g}"
            )
        return prompt, own

    def load_weights(self, model: PolicyModel) -> None:
        self.decoder.load_weights(model)

    def sleep(self) -> None:
        """See `DeviceDecoder.sleep`."""
        self.decoder.sleep()

    def generate(self, request: RolloutRequest) -> Rollouts:
        request.check(self.config)
        longest = int(request.prompts.lengths.max())
        self.sequence_bytes(longest, request.sampling.max_new_tokens)  # or an error
        rollouts, self.statistics = self.decoder.generate(request, self.cache_bytes, self.max_batch)
        return rollouts

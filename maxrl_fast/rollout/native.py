"""The native rollout engine. All samples of a prompt share its keys and values."""

import torch

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import RolloutRequest, RolloutStatistics, check_cache
from maxrl_fast.rollout.cpu_decoder import CpuDecoder, arithmetic_of
from maxrl_fast.rollout.device_decoder import DeviceDecoder
from maxrl_fast.runtime.device import memory_bytes

MAX_BATCH = {"cpu": 1024, "cuda": 16384}  # samples decoded at a time; larger batches are no faster


def default_cache_bytes(device: torch.device) -> int:
    """Return a quarter of a GPU's memory, or an eighth of the machine's."""
    return memory_bytes(device) // (4 if device.type == "cuda" else 8)


class NativeEngine:
    """Samples responses with a copy of the policy in the compute dtype.

    The random numbers of a sample depend only on (seed, step, prompt id, sample, position).
    cache_bytes: KV-cache limit, in the PyTorch decoder including a step's tensors; samples beyond
    it wait. max_batch: samples decoded at a time. in_cpp: use the C++ decoder; None: on every CPU.
    It computes in bfloat16 only if the CPU has instructions for it. compiled: torch.compile the
    PyTorch decoder.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        *,
        cache_bytes: int | None = None,
        max_batch: int | None = None,
        in_cpp: bool | None = None,
        compiled: bool = False,
    ):
        device = model.lm_head.weight.device
        self.config = model.config
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.max_batch = MAX_BATCH[device.type] if max_batch is None else max_batch
        self.statistics = RolloutStatistics()
        in_cpp = device.type == "cpu" if in_cpp is None else in_cpp
        self.decoder: CpuDecoder | DeviceDecoder
        if in_cpp:
            self.decoder = CpuDecoder(model.config, arithmetic_of(dtype))
        else:
            self.decoder = DeviceDecoder(model, dtype, compiled)
        self.load_weights(model)

    def describe(self) -> str:
        return f"native ({self.decoder.describe()} of at most {self.cache_bytes / 1e9:.3g} GB)"

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """Return the KV-cache bytes of a prompt and of a response; raise InputError if they
        exceed it."""
        prompt, own = self.decoder.sequence_bytes(prompt_length, max_new_tokens)
        check_cache(self.cache_bytes, prompt, own, prompt_length, max_new_tokens)
        return prompt, own

    def load_weights(self, model: PolicyModel) -> None:
        assert isinstance(model, Decoder)
        self.decoder.load_weights(model)

    def sleep(self) -> None:
        """Free the PyTorch decoder's cache; see `DeviceDecoder.sleep`."""
        self.decoder.sleep()

    def generate(self, request: RolloutRequest) -> Rollouts:
        """See `Engine.generate`."""
        request.check(self.config)
        longest = int(request.prompts.lengths.max())
        self.sequence_bytes(longest, request.sampling.max_new_tokens)  # or an error
        rollouts, self.statistics = self.decoder.generate(request, self.cache_bytes, self.max_batch)
        return rollouts

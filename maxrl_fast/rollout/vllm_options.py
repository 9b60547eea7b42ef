"""The options of --rollout vllm, which must not import vLLM."""

from dataclasses import dataclass

from maxrl_fast.algorithms.options import Count


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM runs."""

    vllm_tensor_parallel: Count = 1
    """vLLM's tensor-parallel size; must divide the world size."""
    vllm_url: str | None = None
    """Address of a vLLM server that samples, such as http://127.0.0.1:8000; it must see this
    machine's TMPDIR. By default vLLM runs in the trainer's processes."""

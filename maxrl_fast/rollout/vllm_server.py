"""The vLLM rollout engine on a server, over HTTP; it reads weights from a shared folder.

For vLLM 0.32: `/inference/v1/generate` takes and returns token ids (--enable-scale-out);
`/server_info`, `/collective_rpc` and `/reset_prefix_cache` need VLLM_SERVER_DEV_MODE=1. vLLM's own
transfer of weights needs NCCL.
"""

import http.client
import itertools
import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from maxrl_fast.errors import InputError, ServerError, StorageError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import RolloutStatistics, Sampling, check_request
from maxrl_fast.rollout.vllm_shared import (
    Sample,
    check_version,
    logprobs_mode,
    named_weights,
    rollouts_of,
    sampling_parameters,
)
from maxrl_fast.runtime.ranks import Ranks

_START = "start it as VLLM_SERVER_DEV_MODE=1 vllm serve DIR --enable-scale-out --logprobs-mode"
QUESTION_LIMIT = 30.0  # seconds that the server may take for a short answer
WORK_LIMIT = 1800.0  # seconds that it may take to sample a prompt's responses or to load weights
MAX_REQUESTS = 256  # prompts sent at a time

T = TypeVar("T")


class VllmServerEngine:
    """Samples responses with a vLLM server. Random numbers depend on (seed, step, prompt id,
    sample).

    model: the policy that the server was started with. url: such as http://127.0.0.1:8000. ranks:
    the processes of the run, which all ask this server. filters_tokens: see
    `vllm_shared.logprobs_mode`.

    Raises InputError if no server answers, or it has another version or other options.
    """

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        url: str,
        *,
        ranks: Ranks | None = None,
        filters_tokens: bool = False,
    ):
        self.config, self.dtype = model.config, dtype
        self.url, self._ranks = url.rstrip("/"), ranks or Ranks()
        self.statistics, self._logprobs_mode = RolloutStatistics(), logprobs_mode(filters_tokens)
        start = f"{_START} {self._logprobs_mode}"
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"vllm_url must begin with http:// or https://, got {url}")
        try:
            self.version: str = self._ask("/version", lambda answer: answer["version"])
            options: dict[str, Any] = self._ask(
                "/server_info?config_format=json",
                lambda answer: dict(answer["vllm_config"]["model_config"]),
            )
        except ServerError as error:
            raise InputError(f"{error}; {start}") from error
        check_version(self.version)
        if (mode := options.get("logprobs_mode")) != self._logprobs_mode:
            whose = "--vllm-url with --top-p" if filters_tokens else "--vllm-url"
            wanted = f"a server with --logprobs-mode {self._logprobs_mode}"
            raise InputError(f"{whose} needs {wanted}, got {mode}; {start}")
        self._folder = Path(tempfile.gettempdir())
        if self._ranks.is_first:  # it alone writes
            self._folder = Path(tempfile.mkdtemp(prefix="maxrl_fast-weights-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.load_weights(model)

    def describe(self) -> str:
        return f"vllm ({self.version}, at {self.url}; it reads weights from {self._folder})"

    def load_weights(self, model: PolicyModel) -> None:
        """Write the weights into the folder and let the server load them; all ranks call this
        together."""
        # gathered by all ranks together
        for i, (name, weight) in enumerate(named_weights(model, self.dtype)):
            if self._ranks.is_first:
                # a file for each, so that there is no second copy of all
                file = self._folder / f"model-{i:05d}.safetensors"
                try:
                    save_file({name: weight.cpu().contiguous()}, file)
                except (OSError, SafetensorError) as error:
                    what = "cannot write weights for the vLLM server"
                    raise StorageError(f"{what}, {file}: {error}") from error
        if self._ranks.is_first:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            self._ask("/collective_rpc", lambda answer: answer["results"], call, WORK_LIMIT)
            if not self._ask("/reset_prefix_cache", lambda answer: answer["success"], {}):
                what = "could not clear its prefix cache: it has other requests"
                raise ServerError(f"the vLLM server at {self.url} {what}")
        self._ranks.wait_for_all()  # before the others sample

    def generate(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, *, seed: int, step: int
    ) -> Rollouts:
        """See `Engine.generate`. Raises ServerError if the server fails, or takes longer than
        WORK_LIMIT."""
        check_request(prompts, num_samples, sampling, self.config)
        start, parameters = time.perf_counter(), sampling_parameters(sampling, num_samples)
        bounds, tokens = prompts.cu_seqlens.tolist(), prompts.tokens.tolist()
        requests = [
            # Sample i of a request has the seed + i.
            {
                "token_ids": tokens[a:b],
                "sampling_params": parameters | {"seed": hash((seed, step, index)) % 2**62},
            }
            for (a, b), index in zip(itertools.pairwise(bounds), prompts.ids.tolist(), strict=True)
        ]

        def sampled(request: dict[str, Any]) -> list[Sample]:
            return self._ask(
                "/inference/v1/generate",
                lambda answer: _samples(answer, parameters["n"]),
                request,
                WORK_LIMIT,
            )

        pool = ThreadPoolExecutor(min(len(requests), MAX_REQUESTS))
        try:
            answers = list(pool.map(sampled, requests))
        finally:
            pool.shutdown(cancel_futures=True)
        rollouts = rollouts_of(answers, num_samples, sampling, self._logprobs_mode)
        numbers = int(rollouts.lengths.max()), len(prompts.tokens), len(rollouts.tokens), 0
        self.statistics = RolloutStatistics(0.0, time.perf_counter() - start, *numbers)
        return rollouts.to(prompts.tokens.device)

    def sleep(self) -> None:
        """Do nothing: the server's memory is not the trainer's."""

    def _ask(
        self, path: str, read: Callable[[Any], T], body: Any = None, limit: float = QUESTION_LIMIT
    ) -> T:
        """Return `read` of the JSON answer to a GET request, or to a POST with a body.

        Raises ServerError if `read` fails, or there is no answer within `limit` seconds.
        """
        who = f"the vLLM server at {self.url}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=limit) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(500).decode(errors="replace").split())
            raise ServerError(f"{who} answered {path} with status {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise ServerError(f"{who} has not answered {path} for {limit:g} s") from error
            cause = reason or type(error).__name__
            raise ServerError(
                f"{who} cannot be reached, or closed the connection: {cause}"
            ) from error
        try:
            return read(json.loads(text))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            what = "with something else than expected"
            raise ServerError(f"{who} answered {path} {what}: {text[:200]!r}") from error


# a proxy of the environment is for the internet
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _samples(answer: Any, num_samples: int) -> list[Sample]:
    """Return the samples in an answer; raise ValueError where they are not complete."""
    samples = list[Sample]()
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        is_complete = 0 < len(tokens) == len(logprobs)
        if not is_complete or choice["finish_reason"] not in ("stop", "length"):
            raise ValueError("a sample is not complete")
        samples.append((tokens, logprobs, choice["finish_reason"] == "length"))
    if len(samples) != num_samples:
        raise ValueError("samples are missing")
    return samples

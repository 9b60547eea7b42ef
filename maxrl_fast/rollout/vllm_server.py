"""The vLLM rollout engine on a server, over HTTP; it reads weights from a shared folder, as vLLM's
own transfer needs NCCL. `/inference/v1/generate` takes and returns token ids (--enable-scale-out);
`/server_info`, `/collective_rpc` and `/reset_prefix_cache` need VLLM_SERVER_DEV_MODE=1."""

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

from maxrl_fast.errors import EngineError, InputError, printable
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts, unpack
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.rollout.episodes import Turns
from maxrl_fast.rollout.vllm import (
    Sample,
    check_version,
    logprobs_mode,
    named_weights,
    play,
    rollouts_of,
    sampling_parameters,
)
from maxrl_fast.runtime.files import is_locked, locked, storing
from maxrl_fast.runtime.ranks import Ranks

_START = "start it as VLLM_SERVER_DEV_MODE=1 vllm serve DIR --enable-scale-out --logprobs-mode"
QUESTION_LIMIT = 30.0  # seconds in which a byte of a short answer must come
WORK_LIMIT = 1800.0  # the same while it samples a prompt's responses or loads weights
TOKEN_BYTES = 1000  # of the answer for each sampled token, several times what vLLM writes
ANSWER_BYTES = 1 << 24  # of any other answer
SHOWN = 200  # bytes of an answer in a message
WEIGHTS = "maxrl_fast-weights-"  # folders in the temporary directory
MAX_REQUESTS = 256  # prompts, or turns of episodes, sent at a time
REPLY_SECONDS = 0.01  # how long it waits for the server before it looks for replies that are due

T = TypeVar("T")


class VllmServerEngine:
    """Samples with a vLLM server that was started with this policy; all ranks ask it. Random
    numbers depend on (seed, step, prompt id, sample)."""

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
        self._logprobs_mode = logprobs_mode(filters_tokens)
        start = f"{_START} {self._logprobs_mode}"
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"vllm_url must begin with http:// or https://, got {url}")
        try:
            self.version = request_json(self.url, "/version", lambda x: printable(x["version"]))
            options: dict[str, Any] = request_json(
                self.url,
                "/server_info?config_format=json",
                lambda answer: dict(answer["vllm_config"]["model_config"]),
            )
        except EngineError as error:
            raise InputError(f"{error}; {start}") from error
        check_version(self.version)
        if (mode := options.get("logprobs_mode")) != self._logprobs_mode:
            whose = "--vllm-url with --top-p" if filters_tokens else "--vllm-url"
            wanted = f"a server with --logprobs-mode {self._logprobs_mode}"
            raise InputError(f"{whose} needs {wanted}, got {printable(mode)}; {start}")
        self._folder = Path(tempfile.gettempdir())
        if self._ranks.is_first:  # it alone writes
            _remove_abandoned(self._folder)
            self._folder = Path(tempfile.mkdtemp(prefix=WEIGHTS))
            held = contextlib.ExitStack()  # the kernel frees the lock of a killed run
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)
            held.enter_context(locked(self._folder))
            weakref.finalize(self, held.close)
        self.load_weights(model)

    def describe(self) -> str:
        return f"vllm ({self.version}, at {self.url}; it reads weights from {self._folder})"

    def load_weights(self, model: PolicyModel) -> None:
        """All ranks gather them together, and the first writes them for the server."""
        for i, (name, weight) in enumerate(named_weights(model, self.dtype)):
            if self._ranks.is_first:
                # a file for each, so that there is no second copy of all
                file = self._folder / f"model-{i:05d}.safetensors"
                with storing(f"weights for the vLLM server, {file}"):
                    save_file({name: weight.cpu().contiguous()}, file)
        if self._ranks.is_first:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            request_json(self.url, "/collective_rpc", lambda x: x["results"], call, WORK_LIMIT)
            if not request_json(self.url, "/reset_prefix_cache", lambda x: x["success"], {}):
                what = "could not clear its prefix cache: it has other requests"
                raise EngineError(f"the vLLM server at {self.url} {what}")
        self._ranks.wait_for_all()  # before the others sample

    def generate(self, request: RolloutRequest) -> Rollouts:
        """Raises EngineError if the server fails, or takes longer than WORK_LIMIT."""
        request.check(self.config)
        is_single = request.environments is None
        most = len(request.prompts) if is_single else request.num_sequences
        pool = ThreadPoolExecutor(min(most, MAX_REQUESTS))
        try:
            rollouts = (self._sample if is_single else self._play)(request, pool)
        finally:
            pool.shutdown(cancel_futures=True)
        return rollouts.to(request.prompts.tokens.device)

    def _sample(self, request: RolloutRequest, pool: ThreadPoolExecutor) -> Rollouts:
        prompts, num_samples = request.prompts, request.num_samples
        parameters, bodies = sampling_parameters(request.sampling, num_samples), []
        tokens = unpack(prompts.tokens, prompts.lengths)
        for of_prompt, index in zip(tokens, prompts.ids.tolist(), strict=True):
            seed = hash((request.seed, request.step, index)) % 2**62 + request.first_sample
            # Sample i of a request has the seed + i.
            own = parameters | {"seed": seed}
            bodies.append({"token_ids": of_prompt, "sampling_params": own})
        answers = []
        for answer in pool.map(self._answer, bodies):
            request.beat()
            answers.append(answer)
        return rollouts_of(answers, num_samples, request.sampling, self._logprobs_mode)

    def _play(self, request: RolloutRequest, pool: ThreadPoolExecutor) -> Rollouts:
        turns = Turns(request, self.config.vocab_size)
        running: dict[Future[list[Sample]], int] = {}  # requests and their samples

        def ask(sample: int, tokens: list[int], parameters: dict[str, Any]) -> None:
            body = {"token_ids": tokens, "sampling_params": parameters}
            running[pool.submit(self._answer, body)] = sample

        def answers() -> tuple[list[tuple[int, list[int], Sequence[float]]], bool]:
            found, timeout = [], REPLY_SECONDS if turns.waiting else None
            for future in wait(running, timeout, FIRST_COMPLETED).done:
                tokens, logprobs, _ = future.result()[0]
                found.append((running.pop(future), tokens, logprobs))
            return found, bool(running)

        return play(request, turns, ask, answers, self._logprobs_mode)

    def _answer(self, request: dict[str, Any]) -> list[Sample]:
        parameters = request["sampling_params"]
        return request_json(
            self.url,
            "/inference/v1/generate",
            lambda answer: _samples(answer, parameters["n"]),
            request,
            WORK_LIMIT,
            ANSWER_BYTES + parameters["n"] * parameters["max_tokens"] * TOKEN_BYTES,
        )

    def sleep(self) -> None:
        """Do nothing: the server's memory is not the trainer's."""


def request_json(
    server: str,
    path: str,
    read: Callable[[Any], T],
    body: Any = None,
    seconds: float = QUESTION_LIMIT,
    most_bytes: int = ANSWER_BYTES,
) -> T:
    """Return `read` of the JSON reply to a GET request, or to a POST with a body; proxies are not
    used, and redirections not followed. Raises EngineError if nothing comes for `seconds`, the
    reply has more than `most_bytes`, or `read` fails."""
    who, parts = f"the vLLM server at {server}", urlsplit(server + path)
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    headers = {"Content-Type": "application/json", "Connection": "close"}
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=seconds)) as connection:
            target = parts._replace(scheme="", netloc="").geturl()
            connection.request(method, target, data, headers)
            reply = connection.getresponse()
            content = reply.read(most_bytes + 1)
    except TimeoutError as error:
        raise EngineError(f"{who} has not answered {path} for {seconds:g} s") from error
    except (OSError, HTTPException, ValueError) as error:
        cause = f"cannot be reached, or closed the connection: {type(error).__name__}: {error}"
        raise EngineError(f"{who} {cause}") from error
    if len(content) > most_bytes:
        raise EngineError(f"{who} answered {path} with more than {most_bytes / 1e6:.0f} MB")
    text = printable(content[:SHOWN].decode(errors="replace"))
    if reply.status != 200:
        raise EngineError(f"{who} answered {path} with status {reply.status}: {text}")
    try:
        return read(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"answered {path} with something else than expected: {text}"
        raise EngineError(f"{who} {what}") from error


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{WEIGHTS}*"):
        with contextlib.suppress(OSError, InputError):  # another start removes it, or it is a link
            is_own = folder.lstat().st_uid == os.getuid() and (folder / "lock").exists()
            if is_own and not is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _samples(answer: Any, num_samples: int) -> list[Sample]:
    """Raise ValueError where they are not what was asked for."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    samples = list[Sample]()
    if [choice["index"] for choice in choices] != [*range(num_samples)]:
        raise ValueError("samples are missing")
    for choice in choices:
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        is_whole = len(tokens) == len(logprobs) and all(type(token) is int for token in tokens)
        if not is_whole or reason not in ("stop", "length"):
            raise ValueError("a sample is not complete")
        samples.append((tokens, logprobs, reason == "length"))
    return samples

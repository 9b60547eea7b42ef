"""The vLLM rollout engine on a server, over HTTP; it reads weights from a shared folder.

For vLLM 0.32: `/inference/v1/generate` takes and returns token ids (--enable-scale-out);
`/server_info`, `/collective_rpc` and `/reset_prefix_cache` need VLLM_SERVER_DEV_MODE=1. vLLM's own
transfer of weights needs NCCL.
"""

import contextlib
import io
import json
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
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
QUESTION_LIMIT = 30.0  # seconds that the server may take for a short answer
WORK_LIMIT = 1800.0  # seconds that it may take to sample a prompt's responses or to load weights
TOKEN_BYTES = 1000  # of the answer for each sampled token, several times what vLLM writes
ANSWER_BYTES = 1 << 24  # of any other answer
SHOWN = 200  # bytes of an answer in a message
WEIGHTS = "maxrl_fast-weights-"  # folders in the temporary directory
MAX_REQUESTS = 256  # prompts, or turns of episodes, sent at a time
REPLY_SECONDS = 0.01  # how long it waits for the server before it looks for replies that are due

T = TypeVar("T")


class VllmServerEngine:
    """Samples responses with a vLLM server. Random numbers depend on (seed, step, prompt id,
    sample).

    model: the policy that the server was started with. url: such as http://127.0.0.1:8000. ranks:
    the processes of the run, which all ask this server. filters_tokens: see
    `vllm.logprobs_mode`.
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
        """Write the weights into the folder and let the server load them; all ranks call this
        together."""
        # gathered by all ranks together
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
        """See `Engine.generate`. Raises EngineError if the server fails, or takes longer than
        WORK_LIMIT."""
        request.check(self.config)
        most = len(request.prompts) if request.environments is None else request.num_sequences
        pool = ThreadPoolExecutor(min(most, MAX_REQUESTS))
        try:
            rollouts = (self._sample if request.environments is None else self._play)(request, pool)
        finally:
            pool.shutdown(cancel_futures=True)
        return rollouts.to(request.prompts.tokens.device)

    def _sample(self, request: RolloutRequest, pool: ThreadPoolExecutor) -> Rollouts:
        prompts, num_samples = request.prompts, request.num_samples
        parameters = sampling_parameters(request.sampling, num_samples)
        bodies = [
            # Sample i of a request has the seed + i.
            {
                "token_ids": tokens,
                "sampling_params": parameters
                | {
                    "seed": hash((request.seed, request.step, index)) % 2**62 + request.first_sample
                },
            }
            for tokens, index in zip(
                unpack(prompts.tokens, prompts.lengths), prompts.ids.tolist(), strict=True
            )
        ]
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
    """Return `read` of the JSON reply to a GET request, or to a POST with a body.

    Proxies are not used, and redirections not followed.

    Raises:
        EngineError: if the whole reply has not come within `seconds`, it has more than
            `most_bytes`, or `read` fails.
    """
    who, deadline = f"the vLLM server at {server}", time.monotonic() + seconds
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        parts = urlsplit(server + path)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with contextlib.closing(kind(parts.netloc, timeout=seconds)) as connection:
            connection.connect()
            connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
            target = parts._replace(scheme="", netloc="").geturl()
            connection.request(method, target, data, headers)
            reply = HTTPResponse(connection.sock, method=method)
            reply.fp = io.BufferedReader(_Incoming(connection.sock, deadline))
            reply.begin()
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


class _Incoming(io.RawIOBase):
    """What a socket receives until a deadline. The time-out of a socket is that of each read, which
    a reply that drips keeps, in its header too.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{WEIGHTS}*"):
        with contextlib.suppress(OSError, InputError):  # another start removes it, or it is a link
            is_own = folder.lstat().st_uid == os.getuid() and (folder / "lock").exists()
            if is_own and not is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _samples(answer: Any, num_samples: int) -> list[Sample]:
    """Return the samples in an answer; raise ValueError where they are not what was asked for."""
    samples = list[Sample]()
    for index, choice in enumerate(sorted(answer["choices"], key=lambda choice: choice["index"])):
        tokens = choice["token_ids"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        is_complete = type(choice["index"]) is int and choice["index"] == index
        is_complete &= 0 < len(tokens) == len(logprobs)
        is_complete &= all(type(token) is int and 0 <= token < 1 << 31 for token in tokens)
        # JSON's integers have any size, and its true and false are numbers of Python
        is_complete &= all(type(x) in (int, float) and abs(x) < 1e30 for x in logprobs)
        if not is_complete or choice["finish_reason"] not in ("stop", "length"):
            raise ValueError("a sample is not complete")
        samples.append((tokens, [*map(float, logprobs)], choice["finish_reason"] == "length"))
    if len(samples) != num_samples:
        raise ValueError("samples are missing")
    return samples

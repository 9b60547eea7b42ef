"""Encodes prompts in another process, within limits of time and memory.

A chat template is a program of whoever made the checkpoint, and a tokenizer is almost one. In the trainer, nested loops would
stop the run without a message, and {{ 'a' * 10**10 }} would take its memory.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import import_tokenizers, template_file

SECONDS = 60  # limit for one prompt, and for loading the tokenizer
MEMORY = 4 * 10**9  # bytes
START_SECONDS = 600  # limit for the start of the process, which imports transformers, perhaps from a slow disk
GRACE = 30  # seconds to wait for a process that has reached its limit
CHUNK = 256  # prompts in one request

# Not `python -m`: with this process's sys.path the worker imports the same modules.
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[3:]; from maxrl_fast.model.prompt_worker import main; main()"
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Message = dict[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message]


class PromptEncoder:
    """Encodes prompts with the tokenizer and the chat template of a checkpoint directory.

    Args:
        limit: the longest prompt, in tokens.
        allow_special: encode control tokens in a prompt's own text as such, instead of refusing them.

    Raises:
        InputError: if transformers is not installed, or the tokenizer cannot be loaded within SECONDS and MEMORY.
    """

    _loadings = itertools.count()
    _turn = threading.Lock()  # all share one process, which answers one request at a time; prompts may be made in a thread

    def __init__(self, directory: Path, limit: int = 0, allow_special: bool = False):
        self._directory = directory
        loading = next(self._loadings)
        self._settings = {"directory": str(directory), "loading": loading, "limit": limit, "allow_special": allow_special}
        self._settings["are_responses"] = False
        Worker.running()
        import_tokenizers()  # while the worker does the same
        self._request([], [], {})

    def encode(self, prompts: Sequence[Prompt], places: Sequence[str]) -> list[list[int] | None]:
        """Return the token ids of each prompt; None for those that have none, or more than `limit`.

        Args:
            places: where each prompt comes from, for error messages, such as "prompts.jsonl, line 3".

        Raises:
            InputError: if a prompt has a control token, the chat template rejects it, or it exceeds SECONDS or MEMORY.
        """
        return self._chunks(prompts, places, {})

    def encode_responses(self, responses: Sequence[str], places: Sequence[str], limit: int) -> list[list[int] | None]:
        """Return the token ids of each response, as text behind a prompt; None for those that have none, or more than `limit`.

        Raises:
            InputError: as `encode`.
        """
        return self._chunks(responses, places, {"limit": limit, "are_responses": True})

    def _chunks(self, texts: Sequence[Prompt], places: Sequence[str], settings: dict[str, Any]) -> list[list[int] | None]:
        starts = range(0, len(texts), CHUNK)
        return [ids for i in starts for ids in self._request(texts[i : i + CHUNK], places[i : i + CHUNK], settings)]

    def _request(self, prompts: Sequence[Prompt], places: Sequence[str], settings: dict[str, Any]) -> list[list[int] | None]:
        """Return the answers of the worker, after one that says that it has the tokenizer."""
        with self._turn:
            return self._answers(prompts, places, settings)

    def _answers(self, prompts: Sequence[Prompt], places: Sequence[str], settings: dict[str, Any]) -> list[list[int] | None]:
        worker, num_answers, found = Worker.running(), 1 + len(prompts), list[list[int] | None]()
        try:
            worker.send(self._settings | settings | {"prompts": list(prompts), "seconds": SECONDS})
            for i in range(num_answers):
                answer = worker.receive()
                if "error" in answer:
                    raise InputError(f"{places[i - 1]}: {answer['error']}" if i else answer["error"])
                found.append(answer.get("ids"))
        except OSError:  # it has ended, or does not answer
            i = len(found)
            what, where = f"loading the tokenizer of {self._directory}", ""
            if i:
                file = self._directory / "tokenizer.json" if isinstance(prompts[i - 1], str) else template_file(self._directory)
                what, where = f"encoding a prompt with {file}", f"{places[i - 1]}: "
            limits = f"{SECONDS} s and {MEMORY / 1e9:g} GB"
            raise InputError(f"{where}{what} must take at most {limits}, but the process {worker.end()}") from None
        return found[1:]


class Worker:
    """The process. All encoders share one, because its start takes a second. It ends when this process does."""

    _running: ClassVar["Worker | None"] = None

    @classmethod
    def running(cls) -> "Worker":
        """Return the process, a new one if there is none or it has ended."""
        if cls._running is None or cls._running._process.poll() is not None:
            cls._running = cls()
        return cls._running

    def __init__(self) -> None:
        connection, child_end = socket.socketpair()
        with child_end:
            arguments = [child_end.fileno(), MEMORY, *sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it
            )
        connection.settimeout(START_SECONDS)
        self._connection, self._lines, self._is_ready = connection, connection.makefile("rb"), False

    def send(self, request: dict[str, Any]) -> None:
        """Send a request, first waiting for the process to be ready.

        Raises:
            OSError: if it has ended or is not ready in time.
        """
        if not self._is_ready:
            self.receive()
            self._connection.settimeout(SECONDS + GRACE)
            self._is_ready = True
        self._connection.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message; raises as `send` does."""
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> str:
        """End the process, and return how it ended."""
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "does not answer"
        finally:
            self._lines.close()
            self._connection.close()
        if code == -signal.SIGALRM:
            return "took longer"
        return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

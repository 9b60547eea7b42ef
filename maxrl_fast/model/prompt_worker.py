"""The process that encodes prompts for a run. `Worker` in prompt_process.py starts it.

Messages are JSON, one per line. The worker sends {} once it can take requests. A request has the keys directory, loading,
prompts, limit, allow_special, are_responses and seconds. The answers to it are {} once the tokenizer is loaded, and then, for
each prompt, {"ids": [...]}, or {"ids": null} if it is empty or too long. {"error": sentence} in place of one of them is the
last.
"""

import contextlib
import functools
import json
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import ControlTokens, encode_prompt, encode_response, import_tokenizers, load_tokenizer


def main() -> None:
    """Answer requests until the trainer closes the connection."""
    connection, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job, whose step must still end
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # out of memory, the kernel kills this process, not the trainer
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it, and it takes a second and 200 MB
    import_tokenizers()  # before the limits of time and memory, which are for the checkpoint's files
    for limit, value in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"{}\n")
        stream.flush()
        for line in stream:
            for answer in answers(json.loads(line)):
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()


def answers(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers to a request. SIGALRM ends the process if one of them takes longer than the request's limit."""
    try:
        signal.alarm(request["seconds"])
        tokenizer, control_tokens = load(request["directory"], request["loading"])
        yield {}
        for prompt in request["prompts"]:
            signal.alarm(request["seconds"])
            are_responses = request["are_responses"]
            if not request["allow_special"]:
                control_tokens.refuse(prompt, "a response" if are_responses else "a prompt")
            ids = (encode_response if are_responses else encode_prompt)(tokenizer, prompt)
            yield {"ids": ids if 0 < len(ids) <= request["limit"] else None}
    except InputError as error:
        yield {"error": str(error)}
    finally:
        signal.alarm(0)


@functools.lru_cache(4)
def load(directory: str, loading: int) -> tuple[Any, ControlTokens]:
    """Return the tokenizer of a directory. `loading` is a number that changes when the directory is to be read again."""
    tokenizer = load_tokenizer(Path(directory))
    return tokenizer, ControlTokens(tokenizer)

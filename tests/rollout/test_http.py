import contextlib
import socket
import threading
import time

import pytest

from maxrl_fast.errors import EngineError
from maxrl_fast.rollout.vllm_server import request_json

OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def serving(*parts):
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):  # the client has closed the connection
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    for part in parts:
                        while callable(part):
                            connection.sendall(part())
                        connection.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    with listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def ask(url, read=lambda answer: answer, seconds=20.0):
    return request_json(url, "/x?y=1", read, None, seconds=seconds, most_bytes=10**6)


def test_a_server_that_stops_is_a_sentence():
    with serving(OK, lambda: time.sleep(9) or b"") as url, pytest.raises(EngineError) as error:
        ask(url, seconds=0.4)
    assert str(error.value) == f"the vLLM server at {url} has not answered /x?y=1 for 0.4 s"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([OK + b"\r\n", lambda: b"1" * 65536], "answered /x?y=1 with more than 1"),
        ([b""], "cannot be reached, or closed the connection: RemoteDisconnect"),
        ([OK + b"\r\n\x1b[2J<html>"], "than expected: '\\x1b[2J<html>'"),
    ],
)
def test_other_replies_are_errors(parts, message):
    with serving(*parts) as url, pytest.raises(EngineError) as error:
        ask(url, lambda answer: answer["a"])
    assert message in str(error.value)

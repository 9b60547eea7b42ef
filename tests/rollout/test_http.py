"""Requests over HTTP, against servers that drip, flood, or answer something else."""

import contextlib
import itertools
import json
import socket
import threading
import time

import pytest

from maxrl_fast.errors import EngineError
from maxrl_fast.rollout.vllm_server import request_json

OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def serving(*parts, received=None):
    """Yield the URL of a server that sends `parts`, the last one again and again if it is a
    function, then closes the connection.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):  # the client has closed the connection
            while True:
                connection, _ = listening.accept()
                with connection:
                    asked = connection.recv(1 << 16)
                    while b"Content-Length" in asked and not asked.endswith(b"}"):
                        asked += connection.recv(1 << 16)  # the body may come later
                    if received is not None:
                        received.append(asked)
                    for part in parts:
                        while callable(part):
                            connection.sendall(part())
                        connection.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    with listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def ask(url, read=lambda answer: answer, body=None, seconds=20.0, most_bytes=10**6):
    return request_json(url, "/x?y=1", read, body, seconds=seconds, most_bytes=most_bytes)


def test_a_reply_is_read_and_the_request_has_its_body_and_headers():
    received = []
    body = json.dumps({"a": [1, 2]}).encode()
    chunks = b"7\r\n%b\r\n6\r\n%b\r\n0\r\n\r\n" % (body[:7], body[7:])
    replies = [
        OK + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        OK + b"\r\n" + body,  # until the connection is closed
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks,
        # after a reply that says that the real one comes later
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n" + body,
    ]
    for reply, given in itertools.product(replies, (None, {"b": "\udc80"})):
        with serving(reply, received=received) as url:
            assert ask(url, lambda x: x["a"][1], given) == 2
    assert received[0].startswith(b"GET /x?y=1 HTTP/1.1\r\n")
    assert received[1].startswith(b"POST /x?y=1 HTTP/1.1\r\n")
    assert received[1].endswith(b'\r\n\r\n{"b": "\\udc80"}')


def drip():
    time.sleep(0.02)
    return b"1"


@pytest.mark.parametrize(
    "head",
    [
        b"",
        OK + b"A: ",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1111\r\n",
    ],
)
def test_one_deadline_is_for_the_whole_reply(head):
    """Each byte arrives within the time-out of a read."""
    with serving(head, drip) as url, pytest.raises(EngineError) as error:
        ask(url, seconds=0.4)
    assert str(error.value) == f"the vLLM server at {url} has not answered /x?y=1 for 0.4 s"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([OK + b"\r\n", lambda: b"1" * 65536], "answered /x?y=1 with more than 1"),
        ([OK + b"A: ", lambda: b"1" * 65536], "cannot be reached, or closed"),
        ([b""], "cannot be reached, or closed the connection: RemoteDisconnect"),
        ([b"HTTP/1.1 307 No\r\nLocation: /z\r\n\r\n"], "with status 307: "),
        ([OK + b"\r\n\x1b[2J<html>"], "than expected: '\\x1b[2J<html>'"),
    ],
)
def test_other_replies_are_errors(parts, message):
    with serving(*parts) as url, pytest.raises(EngineError) as error:
        ask(url, lambda answer: answer["a"])
    assert message in str(error.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:x"])
def test_a_server_that_cannot_be_reached(url):
    with pytest.raises(EngineError, match=r"cannot be reached"):
        ask(url)

"""Requests to a server over HTTP: one deadline for a whole reply, and a limit on its size."""

import contextlib
import io
import json
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from maxrl_fast.runtime.files import printable

SHOWN = 200  # bytes of a reply in a message

T = TypeVar("T")


class RequestError(Exception):
    """A request has no answer. The message is a predicate whose subject is the server."""


def request_json(
    url: str, read: Callable[[Any], T], body: Any = None, *, seconds: float, most_bytes: int
) -> T:
    """Return `read` of the JSON reply to a GET request, or to a POST with a body.

    Proxies are not used, and redirections not followed.

    Raises:
        RequestError: if the whole reply has not come within `seconds`, it has more than
            `most_bytes`, or `read` fails.
    """
    deadline = time.monotonic() + seconds
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        parts = urlsplit(url)
        path = parts._replace(scheme="", netloc="").geturl()
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with contextlib.closing(kind(parts.netloc, timeout=seconds)) as connection:
            connection.connect()
            connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
            connection.request(method, path, data, headers)
            reply = HTTPResponse(connection.sock, method=method)
            reply.fp = io.BufferedReader(_Incoming(connection.sock, deadline))
            reply.begin()
            content = reply.read(most_bytes + 1)
    except TimeoutError as error:
        raise RequestError(f"has not answered {path} for {seconds:g} s") from error
    except (OSError, HTTPException, ValueError) as error:
        cause = f"cannot be reached, or closed the connection: {type(error).__name__}: {error}"
        raise RequestError(cause) from error
    if len(content) > most_bytes:
        raise RequestError(f"answered {path} with more than {most_bytes / 1e6:.0f} MB")
    text = printable(content[:SHOWN].decode(errors="replace"))
    if reply.status != 200:
        raise RequestError(f"answered {path} with status {reply.status}: {text}")
    try:
        return read(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RequestError(f"answered {path} with something else than expected: {text}") from error


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

"""A small Hugging Face hub on this machine, with the few routes that `snapshot_download` needs."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from maxrl_fast.model.hub import directory_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "f" * 40
_RESOLVE = re.compile(r"/([\w-]+/[\w-]+)/resolve/(\w+)/(.+)")
_API = re.compile(r"/api/models/([\w-]+/[\w-]+)(/revision/(\w+))?(/tree/(\w+))?")


class Hub:
    """Models by ORG/NAME, each a folder; `main` is its commit. What was asked for is in `asked`.

    An error in `errors`, of ORG/NAME, is an HTTP status and the X-Error-Code that the hub sends
    with it.
    """

    def __init__(self, models: dict[str, Path]):
        self.models, self.main = models, COMMIT
        self.errors, self.asked = dict[str, tuple[int, str]](), list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append(f"{self.command} {path}")
                self._answer(*hub.answer(path))

            do_HEAD = do_GET

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    with contextlib.suppress(BrokenPipeError):  # a client that waits no longer
                        self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Hub"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path in ("/", ""):
            return 200, {}, b""
        file, listing = _RESOLVE.fullmatch(path), _API.fullmatch(path)
        name = (file or listing)[1] if file or listing else ""
        if name in self.errors:
            status, code = self.errors[name]
            return status, {"X-Error-Code": code}, b"{}"
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = file[2] if file else (listing[3] or listing[5] or "main")
        if revision not in ("main", COMMIT, LATER):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if file:
            content = (self.models[name] / file[3]).read_bytes()
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            return 200, {"ETag": tag, "X-Repo-Commit": revision}, content
        info = {"_id": "1", "id": name, "sha": self.main, "siblings": [], "tags": []}
        told = self._tree(name) if listing[4] else info | {"private": False}
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()

    def _tree(self, name: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size}
            | {"oid": hashlib.sha1(path.read_bytes()).hexdigest()}
            for path in self.models[name].iterdir()
        ]


def use_hub(url: str, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    directory_of.cache_clear()

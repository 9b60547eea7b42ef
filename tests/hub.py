"""A small Hugging Face hub on this machine, with the few routes that `snapshot_download` needs."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from maxrl_fast.model.checkpoint import directory_of
from tests.server import Answer, serving

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
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator["Hub"]:
        def answer(request: BaseHTTPRequestHandler, _: bytes) -> Answer:
            path = request.path.partition("?")[0]
            self.asked.append(f"{request.command} {path}")
            return self.answer(path)

        with serving(answer) as self.url:
            yield self

    def answer(self, path: str) -> Answer:
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

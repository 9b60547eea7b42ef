"""Where --model is: a directory, or a model of the Hugging Face hub, downloaded into its cache.

Only configurations, safetensors and tokenizer files are downloaded: no pickles and no code.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import FILES as TOKENIZER_FILES

HUB = "hf://"
FOLDER = "--model must be the folder of a checkpoint"
SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
STALL_SECONDS = 120  # without a byte from the hub
REACH_SECONDS = 2.0  # to look up the hub's name, connect and get an answer
# Not `python -m`: with this process's sys.path the other imports the same modules.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])[0]; "
    "from maxrl_fast.model.hub import download_process; download_process()"
)
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_model(model: str, wanted: str = FOLDER) -> str | None:
    """Return hf://ORG/NAME[@REVISION] for a model of the hub, None for a directory, offline.

    ORG/NAME alone is a model of the hub, unless the directory ORG exists. `wanted`: what the option
    must be, for the error message. Raises InputError if the directory does not exist or the name is
    not valid.
    """
    path, of_the_hub = Path(model), f"a model of the hub is {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION"
    if model.startswith(HUB):
        if not _NAME.fullmatch(model.removeprefix(HUB)):
            raise InputError(f"{wanted}, got {model}; {of_the_hub}")
        return model
    if path.is_dir():
        return None
    if os.path.lexists(path):
        raise InputError(f"{wanted}, got {model}, which is not a directory")
    if "/" in model and _NAME.fullmatch(model) and not os.path.lexists(path.parent):
        return HUB + model
    raise InputError(f"{wanted}, got {model}, which is not there; {of_the_hub}")


def find_model(model: str, warn: Callable[[str], None], wanted: str = FOLDER) -> str:
    """Return what a run records as its model: the absolute path, or hf://ORG/NAME@COMMIT.

    `warn` is called with a sentence if the hub cannot be reached and the cached copy is used.
    Raises InputError as `check_model`, and if the hub does not have the model or revision, refuses
    it, or cannot be reached.
    """
    name = check_model(model, wanted)
    if name is None:
        return str(Path(model).absolute())
    repository, revision = _parts(name)
    if revision is not None and _COMMIT.fullmatch(revision):
        return name
    _import()
    offline = why_unreachable()
    try:
        commit = _snapshot(repository, revision, SMALL_FILES, offline).name
    except InputError as error:
        raise InputError(
            str(error) if model.startswith(HUB) else f"there is no folder {model}, and {error}"
        ) from error
    if offline:
        warn(
            f"the hub cannot be reached ({offline}); the model is the copy of {name} in the cache, "
            f"of commit {commit}"
        )
    return f"{HUB}{repository}@{commit}"


@lru_cache(8)
def directory_of(model: str, with_weights: bool = False) -> Path:
    """Return the directory of a model, after downloading what is not in the cache.

    Raises InputError if a file cannot be downloaded, or the model has no config.json or no
    safetensors.
    """
    if not model.startswith(HUB):
        return Path(model)
    repository, revision = _parts(model)
    _import()
    directory = _snapshot(
        repository, revision, SMALL_FILES + WEIGHT_FILES * with_weights, why_unreachable()
    )
    if not (directory / "config.json").exists():
        raise InputError(
            f"{model} has no config.json: it must be a model in the format of transformers"
        )
    if with_weights and not any(directory.glob("model*.safetensors")):
        raise InputError(
            f"{model} has no weights in safetensors ({', '.join(WEIGHT_FILES[:2])}), and no others "
            "are read"
        )
    return directory


def why_unreachable() -> str:
    """Return why the hub does not answer within REACH_SECONDS; "" if it does.

    Its libraries would retry for half a minute. HF_ENDPOINT, HF_HUB_OFFLINE and proxies count.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    causes = [f"{constants.ENDPOINT} does not answer within {REACH_SECONDS:g} s"]

    def ask() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=REACH_SECONDS).status_code
            is_down = status >= 500
            causes.append(f"{constants.ENDPOINT} answers with status {status}" if is_down else "")
        # of requests (an OSError) or httpx, from the network, TLS or a proxy; or HF_HUB_OFFLINE
        except _failures() as error:
            causes.append(f"{constants.ENDPOINT}: {_first_line(error)}")

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    # a name look-up has no time limit by itself
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)
    return causes[-1]


def _parts(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.removeprefix(HUB).partition("@")
    return repository, revision or None


def _import() -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"a model of the hub needs huggingface_hub: pip install 'maxrl_fast[hf]' ({error})"
        ) from error


def _snapshot(repository: str, revision: str | None, files: tuple[str, ...], offline: str) -> Path:
    """Return the cached directory of a revision, after downloading `files` unless offline."""
    from huggingface_hub import constants

    place = {"endpoint": constants.ENDPOINT, "cache_dir": str(constants.HF_HUB_CACHE)}
    request = {"repo_id": repository, "revision": revision, "allow_patterns": files, **place}
    if not offline:
        folder = f"models--{repository.replace('/', '--')}"
        return _download(request, Path(place["cache_dir"], folder))
    if isinstance(answer := _answer(request | {"local_files_only": True}, offline), InputError):
        raise answer
    return answer


def _download(request: dict[str, Any], folder: Path) -> Path:
    """Download in a child process, which is killed if the folder does not grow for STALL_SECONDS.

    Some requests of the library have no time limit, and its threads would keep this process alive.
    """
    command = [sys.executable, "-c", _CHILD, json.dumps([sys.path, request])]
    grown, size = time.monotonic(), -1
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            while child.poll() is None:
                time.sleep(0.05)
                if (now := _size(folder)) != size:
                    grown, size = time.monotonic(), now
                if time.monotonic() - grown > STALL_SECONDS:
                    raise InputError(
                        f"nothing of {HUB}{request['repo_id']} has arrived in {STALL_SECONDS} s "
                        "from the hub"
                    )
            said = child.stdout.read().splitlines()
        finally:
            child.kill()
    failed = {"error": f"the process that downloads exited with code {child.returncode}"}
    answer = json.loads(said[-1]) if said else failed
    if "error" in answer:
        raise InputError(answer["error"])
    return Path(answer["directory"])


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def download_process() -> None:
    answer = _answer(json.loads(sys.argv[1])[1], "")
    key = "error" if isinstance(answer, InputError) else "directory"
    print(json.dumps({key: str(answer)}))


def _answer(request: dict[str, Any], offline: str) -> Path | InputError:
    """Return the directory of a snapshot, or the error as a sentence."""
    from huggingface_hub import errors, get_token, snapshot_download

    repository, revision = request["repo_id"], request["revision"]
    name = f"{HUB}{repository}"
    state = "is not set" if get_token() is None else "has none"
    token = (
        "an access token of an account that may read it must be in the environment variable "
        f"HF_TOKEN, which {state}"
    )
    try:
        return Path(snapshot_download(**request))
    except errors.LocalEntryNotFoundError as error:
        cause = offline or _first_line(error.__cause__ or error)
        return InputError(
            f"the hub cannot be reached ({cause}), and its cache does not have {name}"
        )
    except errors.GatedRepoError:
        return InputError(
            f"{name} is gated: accept its terms at {request['endpoint']}/{repository}; {token}"
        )
    except errors.RevisionNotFoundError:
        return InputError(f"{name} has no revision {revision}")
    except errors.RepositoryNotFoundError:
        return InputError(f"the hub has no model {repository}, or it is private; then {token}")
    # from the network, HTTP, the disk, or a name or an answer that is not valid
    except _failures() as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = f"; {token}" if status in (401, 403) else ""
        return InputError(f"cannot download {name}: {_first_line(error)}{advice}")


def _failures() -> tuple[type[BaseException], ...]:
    """Return what a request may raise: also the errors of huggingface_hub's HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]

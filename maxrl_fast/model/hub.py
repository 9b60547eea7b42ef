"""Where --model is: a directory, or a model of the Hugging Face hub, downloaded into its cache.

Only configurations, safetensors and tokenizer files are downloaded: no pickles and no code.
"""

import os
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import PROCESSORS
from maxrl_fast.model.tokenizer import FILES as TOKENIZER_FILES

HUB = "hf://"
FOLDER = "--model must be the folder of a checkpoint"
SMALL_FILES = ("config.json", "generation_config.json", *PROCESSORS, *TOKENIZER_FILES)
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
STALL_SECONDS = 120  # without a byte from the hub
REACH_SECONDS = 2.0  # to look up the hub's name, connect and get an answer
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_model(model: str, wanted: str = FOLDER) -> str | None:
    """Return hf://ORG/NAME[@REVISION] for a model of the hub, None for a directory, offline.
    ORG/NAME alone is a model of the hub, unless the directory ORG exists. `wanted`: for messages.
    """
    path, of_the_hub = Path(model), f"a model of the hub is {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION"
    if model.startswith(HUB):
        if not _NAME.fullmatch(model.removeprefix(HUB)):
            raise InputError(f"{wanted}, got {model}; {of_the_hub}")
        return model
    if path.is_dir():
        if (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors")):
            raise InputError(
                f"{wanted}, got the adapters in {model}: merge them into their model first; the "
                "folder around a run's adapters has them merged"
            )
        if not (path / "config.json").exists():
            raise InputError(f"{wanted}, got {model}, which has no config.json")
        return None
    if os.path.lexists(path):
        raise InputError(f"{wanted}, got {model}, which is not a directory")
    if "/" in model and _NAME.fullmatch(model) and not os.path.lexists(path.parent):
        return HUB + model
    raise InputError(f"{wanted}, got {model}, which is not there; {of_the_hub}")


def find_model(model: str, warn: Callable[[str], None], wanted: str = FOLDER) -> str:
    """Return what a run records as its model: the path without links, since a run moves its
    `latest`, or hf://ORG/NAME@COMMIT. `warn` is called if the cached copy is used because the hub
    cannot be reached."""
    name = check_model(model, wanted)
    if name is None:
        return str(Path(model).resolve())
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
    """Return the directory of a model, downloading what is not in the cache."""
    if not model.startswith(HUB):
        return Path(model)
    repository, revision = _parts(model)
    _import()
    directory = _snapshot(
        repository, revision, SMALL_FILES + WEIGHT_FILES * with_weights, why_unreachable()
    )
    if not (directory / "config.json").exists():
        raise InputError(
            f"{model} has no config.json: it must be a model in the format of transformers, with "
            "adapters merged"
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
            f"a model of the hub needs huggingface_hub: pip install huggingface_hub ({error})"
        ) from error


def _limit_waiting(request: Any) -> None:
    """Give a request of huggingface_hub a time limit; those that list files have none."""
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {name: x or STALL_SECONDS for name, x in limits.items()}


def _snapshot(repository: str, revision: str | None, files: tuple[str, ...], offline: str) -> Path:
    from huggingface_hub import constants, errors, get_token, snapshot_download
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if _limit_waiting not in (hooks := get_session().event_hooks["request"]):
        hooks.append(_limit_waiting)
    name = f"{HUB}{repository}"
    token = (
        "an access token of an account that may read it must be in the environment variable "
        f"HF_TOKEN, which {'is not set' if get_token() is None else 'has none'}"
    )
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*files],
                cache_dir=constants.HF_HUB_CACHE,
                local_files_only=bool(offline),
            )
        )
    except errors.LocalEntryNotFoundError as error:
        cause = offline or _first_line(error.__cause__ or error)
        message = f"the hub cannot be reached ({cause}), and its cache does not have {name}"
        raise InputError(message) from error
    except errors.GatedRepoError as error:
        message = f"{name} is gated: accept its terms at {constants.ENDPOINT}/{repository}; {token}"
        raise InputError(message) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{name} has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        message = f"the hub has no model {repository}, or it is private; then {token}"
        raise InputError(message) from error
    # from the network, HTTP, the disk, or a name or an answer that is not valid
    except _failures() as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = f"; {token}" if status in (401, 403) else ""
        raise InputError(f"cannot download {name}: {_first_line(error)}{advice}") from error


def _failures() -> tuple[type[BaseException], ...]:
    """Return what a request may raise: also the errors of huggingface_hub's HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]

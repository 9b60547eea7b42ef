"""Where --model is: a directory, or a model of the Hugging Face hub, downloaded into its cache.

Only configurations, safetensors and tokenizer files are downloaded: no pickles and no code.
"""

import os
import re
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
REACH_SECONDS, STALL_SECONDS = 10, 120  # until the hub answers, and without a byte later
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_model(model: str, wanted: str = FOLDER) -> str | None:
    """Return hf://ORG/NAME[@REVISION] for a model of the hub, None for a directory. ORG/NAME alone
    is of the hub, unless the directory ORG exists. `wanted`: for messages."""
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
    `latest`, or hf://ORG/NAME@COMMIT. `warn` is told where only the cache can be asked."""
    name = check_model(model, wanted)
    if name is None:
        return str(Path(model).resolve())
    repository, revision = _parts(name)
    if revision is not None and _COMMIT.fullmatch(revision):
        return name
    hub, cause = _hub(), ""
    try:
        hub.HfApi().model_info(repository, revision=revision, timeout=REACH_SECONDS)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        missing = "" if model.startswith(HUB) else f"there is no folder {model}, and "
        raise InputError(missing + _sentence(name, error)) from error
    except Exception as error:  # of the network, TLS, a proxy, HTTP, or HF_HUB_OFFLINE
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    commit = _snapshot(name, SMALL_FILES, cause).name  # which notes the branch's for offline runs
    if cause:
        warn(
            f"the hub cannot be reached ({cause}); the model is the copy of {name} in the cache, "
            f"of commit {commit}"
        )
    return f"{HUB}{repository}@{commit}"


@lru_cache(8)
def directory_of(model: str, with_weights: bool = False) -> Path:
    """Download what is not in the cache."""
    if not model.startswith(HUB):
        return Path(model)
    directory = _snapshot(model, SMALL_FILES + WEIGHT_FILES * with_weights)
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


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise InputError(
            f"a model of the hub needs huggingface_hub: pip install huggingface_hub ({error})"
        ) from error
    return huggingface_hub


def _parts(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.removeprefix(HUB).partition("@")
    return repository, revision or None


def _snapshot(name: str, files: tuple[str, ...], offline: str = "") -> Path:
    """Return the folder with these files; `offline`: why only the cache is asked."""
    hub, (repository, revision) = _hub(), _parts(name)
    hub.get_session().timeout = STALL_SECONDS  # requests that list files have no limit otherwise
    chosen = {"allow_patterns": [*files], "local_files_only": bool(offline)}
    try:
        return Path(hub.snapshot_download(repository, revision=revision, **chosen))
    except Exception as error:  # of the network, HTTP, the disk, or an answer that is not valid
        said = f"the hub cannot be reached ({offline}), and its cache does not have {name}"
        raise InputError(said if offline else _sentence(name, error)) from error


def _sentence(name: str, error: Exception) -> str:
    hub, said = _hub(), f"cannot get {name} from the hub: {' '.join(str(error).split()):.300}"
    if isinstance(error, hub.errors.RepositoryNotFoundError):  # also for a gated one
        said += (
            "; for a private or gated model HF_TOKEN must have the access token of an account that "
            f"has accepted the terms at {hub.constants.ENDPOINT}/{_parts(name)[0]}"
        )
    return said

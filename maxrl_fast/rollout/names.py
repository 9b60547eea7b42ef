"""The names that --rollout takes."""

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.plugins import is_file, is_installed

ENGINES = ("native", "vllm")


def is_plugin(name: str) -> bool:
    return name not in ENGINES and (is_file(name) or is_installed("rollout", name))


def check_engine_name(name: str) -> None:
    if name not in ENGINES and not is_plugin(name):
        wanted = f"{', '.join(ENGINES)}, FILE.py:CLASS or the name of an installed engine"
        raise InputError(f"--rollout must be {wanted}, got {name!r}")

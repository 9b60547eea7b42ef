"""The names that --rollout takes."""

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import is_code

ENGINES = ("native", "vllm")


def check_engine_name(name: str) -> None:
    if name not in ENGINES and not is_code(name):
        wanted = f"{', '.join(ENGINES)}, FILE.py:CLASS or package.module:CLASS"
        raise InputError(f"--rollout must be {wanted}, got {name!r}")

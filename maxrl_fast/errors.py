"""Errors that end a run with a sentence instead of a traceback. `advice`: what a user can do about it."""


class InputError(ValueError):
    """What the user gave cannot work. The message says what was wanted and what came; exit code 2."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or log-probability became NaN or infinite. The message says where; exit code 1."""

    advice = "A lower --lr or --clip-grad often helps; --dtype float32 rules out rounding."


class StorageError(RuntimeError):
    """What a run has to keep could not be written, as on a full disk. The message says what and why; exit code 1."""

    advice = "Make room there, then --resume goes on from it."


class RewardError(RuntimeError):
    """The reward function fails too often, or cannot be run any more. The message says how, with an example; exit code 1."""

    advice = "Mend it, or raise --reward-seconds, --reward-memory-gb or --max-reward-error-rate; then --resume goes on."

"""Errors that end a run with a sentence instead of a traceback."""


class InputError(ValueError):
    """What the user gave cannot work. The message says what was wanted and what came; exit code 2."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or log-probability became NaN or infinite. The message says where; exit code 1."""

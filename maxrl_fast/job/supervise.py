"""A run under the watchdog: how it ended, by a signal, or by an error that has a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from maxrl_fast.errors import NonFiniteError, RewardError, ServerError, StorageError
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.control import Interrupted
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.job.screen import Screen
from maxrl_fast.training.stopwatch import Stopwatch


@dataclass
class Ending:
    """How a run ended."""

    code: int = 0  # 1: by `error`; 128 + the number of the signal that stopped it
    error: RuntimeError | None = None  # non-finite values, failing rewards, a full disk or a failing server; nobody has said it


@contextmanager
def supervise(
    checkpoints: Checkpoints, progress: Progress, files: RunFiles, screen: Screen, is_alone: bool
) -> Iterator[Ending]:
    """Run the body to its end, and set how it ended.

    Args:
        is_alone: whether this is the only rank. Otherwise an error of this rank's disk or server is raised, for the others to
            hear of it.
    """
    ending = Ending()
    try:
        yield ending
    except Interrupted as error:
        screen.say(f"stopped by {error} after {progress}, saved in {checkpoints.newest}; --resume {files.out} resumes it")
        ending.code = 128 + error.signal
    except (NonFiniteError, RewardError, StorageError, ServerError) as error:
        _finish_saving(checkpoints, screen)
        kept = f"the last good checkpoint is {checkpoints.newest}" if checkpoints.newest else "no checkpoint was written"
        sentence = f"{error}; {kept}. {error.advice}"
        if isinstance(error, StorageError | ServerError) and not is_alone:
            raise type(error)(sentence) from error
        ending.code, ending.error = 1, type(error)(sentence)
    except (KeyboardInterrupt, SystemExit):  # the second signal
        screen.complain(f"stopped at once; the last checkpoint is {checkpoints.newest or 'not written yet'}")
        raise
    except BaseException:
        _finish_saving(checkpoints, screen)
        raise


def _finish_saving(checkpoints: Checkpoints, screen: Screen) -> None:
    """Wait for a save that was begun before an error; its own error is printed."""
    try:
        checkpoints.wait()
    except StorageError as error:
        screen.complain(str(error))


def close(files: RunFiles, progress: Progress, clock: Stopwatch, screen: Screen, ending: Ending) -> Ending:
    """Finish the files of a run that has ended, and show its closing tables; return how it ended, their errors included."""
    try:
        files.close(clock.seconds, is_done=ending.code == 0)
    except StorageError as error:
        if ending.error:  # which comes first; the caller says it
            screen.complain(f"{error}. {error.advice}")
        else:
            ending = Ending(1, StorageError(f"{error}. {error.advice}"))
    screen.closing_tables(list(progress.evaluations.values()), clock.seconds, progress.tokens, files.listing())
    return ending

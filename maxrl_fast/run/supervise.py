"""A run under the watchdog: signals, and errors that have a sentence, become an exit code."""

from collections.abc import Callable

from maxrl_fast.errors import NonFiniteError, RewardError, ServerError, StorageError
from maxrl_fast.run.checkpoints import Checkpoints
from maxrl_fast.run.control import Interrupted
from maxrl_fast.run.progress import Progress
from maxrl_fast.run.run_files import RunFiles
from maxrl_fast.run.screen import Screen
from maxrl_fast.training.stopwatch import Stopwatch


def supervise(
    run: Callable[[], None], checkpoints: Checkpoints, progress: Progress, files: RunFiles, screen: Screen, is_alone: bool
) -> int:
    """Run to the end and return the exit code: 0; 1 on non-finite values, failing rewards, a full disk or a failing server;
    128 + the signal's number when stopped.

    Args:
        is_alone: whether this is the only rank. Otherwise an error of this rank's disk or server is raised, for the others to
            hear of it.
    """
    try:
        run()
    except Interrupted as error:
        screen.say(f"stopped by {error} after {progress}, saved in {checkpoints.newest}; --resume {files.out} resumes it")
        return 128 + error.signal
    except (NonFiniteError, RewardError, StorageError, ServerError) as error:
        _finish_saving(checkpoints, screen)
        kept = f"the last good checkpoint is {checkpoints.newest}" if checkpoints.newest else "no checkpoint was written"
        sentence = f"{error}; {kept}. {error.advice}"
        if isinstance(error, StorageError | ServerError) and not is_alone:
            raise type(error)(sentence) from error
        screen.complain(sentence)
        return 1
    except (KeyboardInterrupt, SystemExit):  # the second signal
        screen.complain(f"stopped at once; the last checkpoint is {checkpoints.newest or 'not written yet'}")
        raise
    except BaseException:
        _finish_saving(checkpoints, screen)
        raise
    return 0


def _finish_saving(checkpoints: Checkpoints, screen: Screen) -> None:
    """Wait for a save that was begun before an error; its own error is printed."""
    try:
        checkpoints.wait()
    except StorageError as error:
        screen.complain(str(error))


def close(files: RunFiles, progress: Progress, clock: Stopwatch, screen: Screen, code: int) -> int:
    """Finish the files of a run that has ended with this exit code, and show its closing tables; return the exit code."""
    try:
        files.close(clock.seconds)
    except StorageError as error:
        screen.complain(f"{error}. {error.advice}")
        code = 1
    screen.closing_tables(list(progress.evaluations.values()), clock.seconds, progress.tokens, files.listing())
    return code

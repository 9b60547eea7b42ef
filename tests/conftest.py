"""Thread settings for tests that run in parallel (pytest -n), the instruction sets of the CPU's
kernels, and the runs that tests share.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # to be set before PyTorch is imported
    # one busy thread per worker; subprocesses inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # threads that wait leave their core to the other workers
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # until the tests are known: a fifth of their time

# Under nohup, tests of SIGHUP and the processes that they start would ignore it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses the fixture `instructions` with each instruction set of this machine."""
    if "instructions" in metafunc.fixturenames:
        from maxrl_fast import _C

        metafunc.parametrize("instructions", _C.instruction_sets(), indirect=True)


@pytest.fixture
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the CPU's kernels use no wider instructions than these."""
    from maxrl_fast import _C

    _C.limit_instructions(request.param)
    yield request.param
    _C.limit_instructions(_C.instruction_sets()[0])


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: the folder of a run of tests/runs.py, which no test may change."""
    from tests.runs import made

    folder = tmp_path_factory.getbasetemp()
    # the workers of pytest-xdist have folders of their own in that of the session
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return lambda name: made(name, folder / "runs")


@pytest.fixture(scope="session")
def maze_run(shared_run: Callable[[str], Path]) -> Path:
    return shared_run("maze")

"""Thread settings for tests that run in parallel (pytest -n), and the instruction sets of the CPU's
kernels.
"""

import os
import signal
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # to be set before PyTorch is imported
    # one busy thread per worker; subprocesses inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # threads that wait leave their core to the other workers
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Under nohup, tests of SIGHUP and the processes that they start would ignore it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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

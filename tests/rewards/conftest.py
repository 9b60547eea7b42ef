"""Pools that the tests of a file share."""

import pytest

from tests.rewards.pools import GB, pool


@pytest.fixture(scope="module")
def patient():
    """A pool of one worker with a long time limit."""
    with pool("act", workers=1, time_limit=30.0, memory_limit=GB // 4) as one:
        yield one


@pytest.fixture(scope="module")
def hasty():
    """A pool of two workers with a short time limit."""
    with pool("act", time_limit=1.0) as one:
        yield one

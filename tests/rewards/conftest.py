import pytest

from tests.rewards.pools import GB, pool


@pytest.fixture(scope="module")
def patient():
    with pool("act", workers=1, time_limit=30.0, memory_limit=GB // 4) as one:
        yield one


@pytest.fixture(scope="module")
def hasty():
    with pool("act", time_limit=1.0) as one:
        yield one

from collections.abc import Iterator

import pytest

from maxrl_fast.ops import ESTIMATORS


@pytest.fixture
def estimators_as_before() -> Iterator[None]:
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)

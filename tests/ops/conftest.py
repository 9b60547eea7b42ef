from collections.abc import Iterator

import pytest

from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.ops.group_advantage import forget_plans
from maxrl_fast.ops.group_advantage_kernel import forget_tables


@pytest.fixture
def estimators_as_before() -> Iterator[None]:
    """Undo what register_estimator did in a test."""
    before = dict(ESTIMATORS)
    yield
    ESTIMATORS.clear()
    ESTIMATORS.update(before)
    forget_plans()
    forget_tables()

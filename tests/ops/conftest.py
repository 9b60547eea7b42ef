from collections.abc import Iterator

import pytest

from maxrl_fast.ops.estimators import ESTIMATORS, KERNEL_ROWS
from maxrl_fast.ops.group_advantage import forget_plans
from maxrl_fast.ops.group_advantage_kernel import forget_tables


@pytest.fixture
def estimators_as_before() -> Iterator[None]:
    """Undo what register_estimator did in a test."""
    before = dict(ESTIMATORS), dict(KERNEL_ROWS)
    yield
    for table, rows in zip((ESTIMATORS, KERNEL_ROWS), before, strict=True):
        table.clear()
        table.update(rows)
    forget_plans()
    forget_tables()

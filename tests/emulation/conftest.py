import zlib

import pytest


@pytest.fixture
def is_reverse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the threads of a block run in descending order, and asynchronous copies happen early:
    for half of the cases, by their names, so that a case keeps its order when others are added.
    """
    reverse = zlib.crc32(request.node.name.encode()) % 2 == 1
    monkeypatch.setenv("MAXRL_EMULATED_ORDER", "reverse" if reverse else "in order")
    monkeypatch.setenv("MAXRL_EMULATED_COPIES", "early" if reverse else "late")
    return reverse

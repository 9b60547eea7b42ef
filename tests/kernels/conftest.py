"""The fixtures `device` and `gpu`: a test runs on a CPU with each of its instruction sets in `make
test`, on an emulated GPU in `make test-emulated`, and on a GPU with `pytest -m gpu`.

An emulated case runs the threads of a block in ascending order, with late asynchronous copies, or
in descending order, with early ones: which of the two, its name says, so that it stays the same
when others are added. With EMULATE=all it runs in both.
"""

import os
import zlib
from collections.abc import Iterator

import pytest

from tests.kernels.devices import Device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in {"device", "gpu"}.intersection(metafunc.fixturenames):
        from maxrl_fast import _C

        orders = (
            ["ascending", "descending"] if os.environ.get("EMULATE") == "all" else ["one order"]
        )
        cpus = [f"cpu {name}" for name in _C.instruction_sets()] if fixture == "device" else []
        emulated = [
            pytest.param(f"emulated {order}", marks=pytest.mark.emulated) for order in orders
        ]
        params = [*cpus, *emulated, pytest.param("cuda", marks=pytest.mark.gpu)]
        metafunc.parametrize(fixture, params, indirect=True)


def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    name, _, variant = request.param.partition(" ")
    is_reverse = variant == "descending"
    if variant == "one order":
        is_reverse = zlib.crc32(request.node.name.encode()) % 2 == 1
    if name == "emulated":
        monkeypatch.setenv("MAXRL_EMULATED_ORDER", "reverse" if is_reverse else "in order")
        monkeypatch.setenv("MAXRL_EMULATED_COPIES", "early" if is_reverse else "late")
    if name == "cpu":
        from maxrl_fast import _C

        _C.limit_instructions(variant)
        yield Device(name)
        _C.limit_instructions(_C.instruction_sets()[0])
        return
    yield Device(name, is_reverse)


device = pytest.fixture(chosen, name="device")
gpu = pytest.fixture(chosen, name="gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A case that is marked gpu itself is not one of the emulated GPU."""
    of_gpu = {x for x in items if {"gpu", "emulated"} <= {mark.name for mark in x.iter_markers()}}
    items[:] = [x for x in items if x not in of_gpu]
    config.hook.pytest_deselected(items=list(of_gpu))

"""Every fault of this folder can still be planted."""

from pathlib import Path

import pytest

from tests.faults.run import HERE, read_faults

ROOT = HERE.parents[1]


@pytest.mark.parametrize("file", sorted(HERE.glob("*.toml")), ids=lambda file: file.stem)
def test_each_fault_fits_its_file(file: Path) -> None:
    faults = read_faults([file], None)
    assert faults
    for fault in faults:
        assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1, fault["name"]
        assert fault["new"] != fault["old"], fault["name"]

"""What a wheel rests on. `make dist` builds one and looks into it."""

import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import maxrl_fast

ROOT = Path(__file__).parent.parent


def test_the_version_is_in_one_place():
    """Only CITATION.cff, which is read by others, repeats it."""
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]', text, re.MULTILINE)
    assert 'version = { attr = "maxrl_fast.__version__" }' in text
    assert maxrl_fast.__version__ not in re.findall(r'^version = "(.*)"', text, re.MULTILINE)
    assert f"\nversion: {maxrl_fast.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(("code", "built"), [(0, "AUTO"), (1, "AUTO"), (3, "OFF")])
def test_the_build_asks_torch_whether_it_has_cuda(code, built, monkeypatch):
    monkeypatch.delenv("MAXRL_FAST_CUDA", raising=False)
    cuda = runpy.run_path(str(ROOT / "setup.py"))["cuda"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code))
    assert cuda() == built
    monkeypatch.setenv("MAXRL_FAST_CUDA", "ON")
    assert cuda() == "ON"


def test_the_build_takes_no_instructions_that_only_some_machines_have():
    for file in (ROOT / "CMakeLists.txt", ROOT / "setup.py"):
        assert not re.search(r"[\s\"';:]-m(arch|tune|cpu|avx|fma|sse)", file.read_text()), file

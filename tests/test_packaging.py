"""What a wheel rests on. `make dist` builds one and looks into it."""

import re
from pathlib import Path

import maxrl_fast

ROOT = Path(__file__).parent.parent


def test_the_version_is_in_one_place():
    """Only CITATION.cff, which is read by others, repeats it."""
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^dynamic = \["version"\]', text, re.MULTILINE)
    assert 'version = { attr = "maxrl_fast.__version__" }' in text
    assert maxrl_fast.__version__ not in re.findall(r'^version = "(.*)"', text, re.MULTILINE)
    assert f"\nversion: {maxrl_fast.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_build_takes_no_instructions_that_only_some_machines_have():
    """AVX2 and AVX-512 are chosen when the extension runs (csrc/cpu/dispatch.h), so that a wheel
    runs on any x86-64.
    """
    for file in (ROOT / "CMakeLists.txt", ROOT / "setup.py"):
        assert not re.search(r"[\s\"';:]-m(arch|tune|cpu|avx|fma|sse)", file.read_text()), file

"""Plants faults in a copy of this checkout, one at a time, and runs the tests that should fail:
`python tests/faults/run.py`.

Every *.toml in this folder, or the one given by --file, is a list of

    [[fault]]
    name = "sapo: tau of the wrong sign of A"  # says enough to plant it again in other code
    file = "csrc/token_loss.h"
    old = "x.advantage > 0.0 ? 0 : 1"     # must occur exactly once in the file
    new = "x.advantage < 0.0 ? 0 : 1"
    tests = ["tests/ops/test_losses.py"]   # arguments of pytest: a list, or a string that a shell
                                           would split
    compile = ["csrc/cpu/token_loss.cpp"]  # for a header: the only sources that use what is
                                           changed; default: all

A fault is caught if a test fails. A test module that cannot be imported, no test at all, a crash
and a build that fails do not count. Before the first fault the tests must pass. Faults in csrc/
come last, and need a build (minutes). The checkout itself is never changed.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
LIMIT = 300  # seconds of one run of pytest


def read_faults(files: list[Path], names: list[str] | None) -> list[dict[str, Any]]:
    """Return the faults of these names, those in csrc/ last; exit if a name is unknown or given
    twice.
    """
    faults = [fault for file in files for fault in tomllib.loads(file.read_text())["fault"]]
    known = [fault["name"] for fault in faults]
    if wrong := [name for name in known if known.count(name) > 1] or [
        name for name in names or [] if name not in known
    ]:
        sys.exit(f"a name must be that of exactly one fault, got {wrong[0]!r}")
    for fault in faults:
        if isinstance(fault["tests"], str):
            fault["tests"] = shlex.split(fault["tests"])
    chosen = [fault for fault in faults if names is None or fault["name"] in names]
    return sorted(chosen, key=lambda fault: fault["file"].startswith("csrc/"))  # stable


def copy_checkout(folder: Path) -> Path:
    """Copy what git tracks, as it is now, and the built extension. A build folder cannot be moved:
    CMake keeps its path.
    """
    root = HERE.parents[1]
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True)
    tracked = listed.rstrip("\0").split("\0")
    built = [str(path.relative_to(root)) for path in (root / "maxrl_fast").glob("_C.*")]
    for name in {*tracked, *built}:
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def run(copy: Path, *arguments: str, limit: float | None = None) -> tuple[int, str]:
    """Return exit code and output of Python with these arguments. All its processes end with it, or
    with this one.
    """
    environment = {**os.environ, "MAXRL_FAST_CUDA": "OFF", "PYTHONPATH": str(copy)}
    # cmake, ninja
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # a module of the same size and second would not be compiled again
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def build(copy: Path) -> str:
    """Build the CPU kernels; return what went wrong, or nothing."""
    cache = copy / "build" / f"extension-{sys.implementation.cache_tag}" / "CMakeCache.txt"
    if not cache.exists():
        cache.parent.mkdir(parents=True)
        # else each link compiles all: 3 minutes on two cores
        cache.write_text("CMAKE_INTERPROCEDURAL_OPTIMIZATION:BOOL=OFF\n")
    code, output = run(copy, "setup.py", "build_ext", "--inplace")
    return "" if code == 0 else f"the build failed:\n{output[-2000:]}"


def failing_test(copy: Path, tests: list[str], limit: int = LIMIT) -> tuple[str, str]:
    """Return the first test that fails, or nothing and why there is none."""
    try:
        code, output = run(
            copy, "-m", "pytest", "-q", "-x", "-rf", "-p", "no:cacheprovider", *tests, limit=limit
        )
    except subprocess.TimeoutExpired:
        return "", f"no test failed within {limit} s"
    # By name, since with -x a module that cannot be imported may end pytest with 1 too.
    failed = re.search(r"^FAILED (.*?)(?: - |$)", output, re.MULTILINE)
    if code == 1 and failed:
        return failed[1], ""
    reasons = {0: "all tests passed", 4: "pytest got wrong arguments", 5: "there is no such test"}
    return "", reasons.get(code, f"pytest ended with {code}:\n{output[-2000:]}")


def plant(copy: Path, fault: dict[str, Any]) -> tuple[str, str]:
    """Run the tests of a fault with the fault; return the test that fails, or nothing and why there
    is none.
    """
    path, is_compiled = copy / fault["file"], fault["file"].startswith("csrc/")
    text, written = path.read_text(), path.stat()
    if (count := text.count(fault["old"])) != 1:
        return "", f"`old` must occur once in {fault['file']}, not {count} times"

    def write(content: str) -> None:
        path.write_text(content)
        if "compile" in fault:  # ninja compiles what is newer than its object
            os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
        for source in fault.get("compile", []):
            (copy / source).touch()

    try:
        write(text.replace(fault["old"], fault["new"]))
        if is_compiled and (problem := build(copy)):
            return "", problem
        return failing_test(copy, fault["tests"])
    finally:
        write(text)  # the next build compiles it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="read this file alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant only these")
    options = parser.parse_args()
    files = [options.file] if options.file else sorted(HERE.glob("*.toml"))
    faults = read_faults(files, options.only)
    # the copy is removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = copy_checkout(Path(folder))
        if any(fault["file"].startswith("csrc/") for fault in faults) and (problem := build(copy)):
            sys.exit(problem)
        lists = [fault["tests"] for fault in faults]
        with_options = [tests for tests in lists if any(test.startswith("-") for test in tests)]
        together = dict.fromkeys(x for tests in lists if tests not in with_options for x in tests)
        for tests in [[*together], *with_options] if together else with_options:
            failed, reason = failing_test(copy, tests, LIMIT * len(tests))
            if reason != "all tests passed":
                sys.exit(f"without a fault {' '.join(tests)} must pass: {failed or reason}")
        num_caught = 0
        for fault in faults:
            start = time.monotonic()
            failed, reason = plant(copy, fault)
            num_caught += bool(failed)
            result = f"caught      {failed}" if failed else f"NOT CAUGHT  {reason}"
            print(f"{fault['name']:60} {time.monotonic() - start:4.0f} s  {result}", flush=True)
    print(f"{num_caught} of {len(faults)} faults caught")
    return int(num_caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())

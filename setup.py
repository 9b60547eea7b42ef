"""Builds maxrl_fast._C by handing CMakeLists.txt to CMake; sources, flags and architectures live
there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


COMPILERS = ("c++", "g++", "clang++")  # that CMake looks for
NO_COMPILER = (
    "building maxrl_fast needs a C++ compiler, got none: install one (`apt install g++` on Debian "
    "and Ubuntu), or set CXX"
)


def cuda() -> str:
    """Return MAXRL_FAST_CUDA; AUTO is OFF where the torch of this Python has no CUDA."""
    wanted = os.environ.get("MAXRL_FAST_CUDA", "AUTO")
    # by which an isolated build hides the installed packages
    visible = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = "import sys, torch; sys.exit(0 if torch.version.cuda else 3)"
    if (
        wanted != "AUTO"
        or subprocess.run(
            [sys.executable, "-c", asked], env=visible, stderr=subprocess.DEVNULL, check=False
        ).returncode
        != 3
    ):
        return wanted
    return "OFF"


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # kept: the next build compiles what has changed
        build = ROOT / "build" / f"extension-{sys.implementation.cache_tag}"
        configure = [
            "cmake", "-S", ROOT, "-B", build, "-G", "Ninja",
            "-UCMAKE_MAKE_PROGRAM",  # the ninja of an isolated build is gone by the next
            # a kept folder remembers a compiler that was missing, and one architecture instead of
            # all
            "-UCMAKE_CUDA_*",
            # pip asks for another folder each time, and linking optimises: as long as compiling
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build / 'linked'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMAXRL_FAST_CUDA={cuda()}",
            f"-DMAXRL_FAST_STRICT={os.environ.get('MAXRL_FAST_STRICT', 'OFF')}",
        ]  # fmt: skip
        subprocess.check_call(configure)
        subprocess.check_call(["cmake", "--build", build])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process may have loaded it
        shutil.copy2(build / "linked" / target.name, target)


if __name__ == "__main__":
    # at the first call, before pip downloads torch
    if not any(map(shutil.which, os.environ.get("CXX", "").split()[:1] or COMPILERS)):
        sys.exit(NO_COMPILER)
    setup(ext_modules=[Extension("maxrl_fast._C", sources=[])], cmdclass={"build_ext": CMakeBuild})

"""Builds maxrl_fast._C by handing CMakeLists.txt to CMake; sources, flags and architectures live
there.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        out = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        # kept: the next build compiles what has changed
        build = ROOT / "build" / f"extension-{sys.implementation.cache_tag}"
        configure = [
            "cmake", "-S", ROOT, "-B", build, "-G", "Ninja",
            "-UCMAKE_MAKE_PROGRAM",  # the ninja of an isolated build is gone by the next
            # a kept folder remembers a compiler that was missing, and one architecture instead of
            # all
            "-UCMAKE_CUDA_*",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMAXRL_FAST_CUDA={os.environ.get('MAXRL_FAST_CUDA', 'AUTO')}",
            f"-DMAXRL_FAST_STRICT={os.environ.get('MAXRL_FAST_STRICT', 'OFF')}",
        ]  # fmt: skip
        subprocess.check_call(configure)
        subprocess.check_call(["cmake", "--build", build])


setup(ext_modules=[Extension("maxrl_fast._C", sources=[])], cmdclass={"build_ext": CMakeBuild})

#!/usr/bin/env bash
# tests/emulate.sh PYTHON: the extension with its CUDA kernels compiled for the CPU on tests/emulation, in a copy of the package
# of its own under build/emulation, and the tests marked emulated. Needs cmake, ninja and PYTHON's pybind11; no CUDA, no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
build=$PWD/build/emulation
tree=$build/tree

cmake -S . -B "$build/cmake" -G Ninja -DMAXRL_FAST_CUDA=EMULATE -DPython_EXECUTABLE="$python" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$tree/maxrl_fast"
cmake --build "$build/cmake"
find "$tree" -type f ! -path "$tree/maxrl_fast/_C*.so" -delete
tar --exclude='*.so' --exclude=__pycache__ -cf - maxrl_fast tests pyproject.toml | tar -xf - -C "$tree"
cd "$tree"  # comes before the installed package
"$python" -m pytest -q -p no:cacheprovider -m emulated tests/emulation

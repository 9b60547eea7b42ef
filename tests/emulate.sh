#!/usr/bin/env bash
# tests/emulate.sh PYTHON compiles the CUDA kernels for the CPU (tests/emulation) and runs the tests marked emulated. It needs
# neither CUDA nor a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/build_tree.sh
build_tree "$1" emulation -DMAXRL_FAST_CUDA=EMULATE
"$python" -m pytest -q -p no:cacheprovider -m emulated tests/emulation

#!/usr/bin/env bash
# tests/emulate.sh PYTHON compiles the CUDA kernels for the CPU (tests/emulation) and runs the tests marked emulated, each case in one
# order of a block's threads. With EMULATE=all each runs in both orders, and the kernels run under ThreadSanitizer too. It needs
# neither CUDA nor a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folders=tests/kernels
case "${EMULATE:-}" in
  "") ;;
  all) folders+=" tests/emulation" ;;
  *) echo "error: EMULATE must be all or empty, got $EMULATE: leave it out, or write EMULATE=all" >&2; exit 2 ;;
esac
source tests/build_tree.sh
build_tree "$1" emulation -DMAXRL_FAST_CUDA=EMULATE
"$python" -m pytest -q -p no:cacheprovider -m emulated $folders

#!/usr/bin/env bash
# tests/sanitize.sh PYTHON: the extension with AddressSanitizer and UBSan, in a copy of the package of its own under
# build/sanitize, and the tests that reach it. Needs cmake, ninja and PYTHON's pybind11. The first fault ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
build=$PWD/build/sanitize
tree=$build/tree

cmake -S . -B "$build/cmake" -G Ninja -DMAXRL_FAST_SANITIZE=ON -DPython_EXECUTABLE="$python" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$tree/maxrl_fast"
cmake --build "$build/cmake"
find "$tree" -type f ! -path "$tree/maxrl_fast/_C*.so" -delete
tar --exclude='*.so' --exclude=__pycache__ -cf - maxrl_fast tests pyproject.toml | tar -xf - -C "$tree"
cd "$tree"  # comes before the installed package

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/cmake/CMakeCache.txt")
for library in libasan.so libubsan.so libstdc++.so; do
  file=$("$compiler" -print-file-name=$library)
  test -e "$file" || { echo "$compiler has no $library" >&2; exit 1; }
  LD_PRELOAD="${LD_PRELOAD:-} $file"
done
# Python and PyTorch leak by design. Sizes that no machine has are PyTorch's to refuse.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

# It is this extension that is loaded, and a read behind a tensor's end does stop it.
status=0
LD_PRELOAD="$LD_PRELOAD" "$python" - >"$build/proof" 2>&1 <<'PY' || status=$?
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path.cwd()))
from maxrl_fast import _C

assert Path(_C.__file__).parent == Path.cwd() / "maxrl_fast", _C.__file__
logprobs, proxies, cu_seqlens = torch.zeros(3), torch.zeros(1), torch.tensor([0, 4])
sequences = _C.LogRatio(num_tokens=4, num_sequences=1, cu_seqlens=cu_seqlens.data_ptr(), mask=0, beta=1.0)
where = {"logprobs": logprobs.data_ptr(), "ref_logprobs": logprobs.data_ptr(), "proxies": proxies.data_ptr()}
print("loaded", _C.__file__, flush=True)
_C.log_ratio_reward_cpu(dtype="float32", sequences=sequences, **where, num_threads=1)
PY
if [ $status -eq 0 ] || ! grep -q "^loaded $tree" "$build/proof" || ! grep -q "heap-buffer-overflow" "$build/proof"; then
  cat "$build/proof"
  echo "a read behind the end of a tensor was not seen: the sanitizer is not at work" >&2
  exit 1
fi
echo "the sanitizer is at work in $tree"

# --capture=sys: a report goes to the terminal, and is not lost with the process. Half of the fuzz tests' examples.
MAXRL_FAST_FUZZ=0.5 LD_PRELOAD="$LD_PRELOAD" "$python" -m pytest -q --capture=sys -p no:cacheprovider tests/ops tests/rollout/test_native.py

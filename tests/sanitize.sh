#!/usr/bin/env bash
# tests/sanitize.sh PYTHON compiles the extension with AddressSanitizer and UBSan and runs the tests that reach it. The first error
# ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/build_tree.sh
build_tree "$1" sanitize -DMAXRL_FAST_SANITIZE=ON

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/cmake/CMakeCache.txt")
for library in libasan.so libubsan.so libstdc++.so; do
  file=$("$compiler" -print-file-name=$library)
  test -e "$file" || { echo "$compiler has no $library" >&2; exit 1; }
  LD_PRELOAD="${LD_PRELOAD:-} $file"
done
# Python and PyTorch leak by design. Allocations that are too large must return NULL, because PyTorch reports them itself.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

# Check that this extension is loaded, and that a read past the end of a tensor stops it.
status=0
LD_PRELOAD="$LD_PRELOAD" "$python" - >"$build/proof" 2>&1 <<'PY' || status=$?
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path.cwd()))
from maxrl_fast import _C
from maxrl_fast.ops.dispatch import KernelLaunch

assert Path(_C.__file__).parent == Path.cwd() / "maxrl_fast", _C.__file__
logprobs, proxies, cu_seqlens = torch.zeros(3), torch.zeros(1), torch.tensor([0, 4])
fields = {"num_sequences": 1, "cu_seqlens": cu_seqlens, "mask": 0, "beta": 1.0, "gradient": 0}
fields |= {"logprobs": logprobs, "ref_logprobs": logprobs, "proxies": proxies, "grad_proxies": 0}
print("loaded", _C.__file__, flush=True)
KernelLaunch(logprobs.device).launch("log_ratio_reward", dtype=torch.float32, **fields)
PY
if [ $status -eq 0 ] || ! grep -q "^loaded $tree" "$build/proof" || ! grep -q "heap-buffer-overflow" "$build/proof"; then
  cat "$build/proof"
  echo "a read past the end of a tensor was not detected: the sanitizer does not work" >&2
  exit 1
fi
echo "the sanitizer works in $tree"

# With --capture=sys, a report reaches the terminal instead of being lost with the process. The fuzz tests run a quarter of their
# examples, and of each kernel the tests that compare results bitwise: of rows at odd addresses, of any number of threads, of merged
# samples. Whether values are right is tested without the sanitizer.
MAXRL_FAST_FUZZ=0.25 LD_PRELOAD="$LD_PRELOAD" "$python" -m pytest -q --capture=sys -p no:cacheprovider \
  -k "(test_bindings or test_fuzz or attention_kernel or layer_kernels) and not rounding and not operators or bitwise or merged \
    or cpu and (any_address or width or log_ratio or chosen_rows or swiglu) or eight_threads or full_forward and C++" \
  tests/ops/test_{bindings,dispatch,fuzz,fuzz_losses}.py tests/kernels/test_{advantage,layer,token_loss}.py \
  tests/model/test_{attention_kernel,layer_kernels,linear}.py tests/rollout/test_{native,bfloat16,episodes}.py

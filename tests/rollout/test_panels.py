"""Matrix multiplication with packed panels (csrc/cpu/panels.h), on every instruction set of this
machine.
"""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_products_of_every_shape_equal_float64_on_every_instruction_set(tmp_path):
    program = tmp_path / "panels"
    options = f"-std=c++17 -O2 -fopenmp -Wno-psabi -ffp-contract=fast -I{ROOT}/csrc".split()
    source = ROOT / "tests" / "rollout" / "panels.cpp"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *options, str(source), "-o", str(program)], check=True, timeout=120)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith("4 lanes\n")

import ast
from pathlib import Path

import pytest
import torch

from maxrl_fast import _C

ARGUMENTS = {"dtype": "float32", "num_rows": 1, "size": 16, "eps": 1e-6, "num_threads": 1}
MEMORY = torch.zeros(16)  # real, so that a call that is not refused returns
ARGUMENTS |= dict.fromkeys(("x", "delta", "weight", "sum", "normed"), MEMORY.data_ptr())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"size": None}, TypeError, "add_rms_norm_cpu: missing argument size"),
        ({"width": 3}, TypeError, "add_rms_norm_cpu: unknown argument width"),
        ({"size": 1 << 40}, TypeError, "add_rms_norm_cpu: size must be a 32-bit integer"),
        ({"x": torch.ones(1)}, TypeError, "add_rms_norm_cpu: x must be an integer, got tensor"),
        (
            {"dtype": "int8"},
            ValueError,
            "add_rms_norm_cpu takes float32 float64 bfloat16, got int8",
        ),
    ],
)
def test_a_kernel_refuses_arguments_that_are_not_its_fields(change, error, message):
    given = {name: value for name, value in (ARGUMENTS | change).items() if value is not None}
    with pytest.raises(error, match=message):
        _C.add_rms_norm_cpu(**given)


def test_the_stub_names_what_the_module_has():
    """But not the kernels, which nothing names outside `KernelLaunch.launch`, nor what only CUDA
    builds have.
    """
    nodes = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text()).body
    stub = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stub |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)}
    module = {
        name
        for name in vars(_C)
        if not name.startswith("_") and not name.endswith(("_cpu", "_cuda"))
    }
    assert stub - {"LOSS_WORKSPACE"} == module - {"LOSS_WORKSPACE"}

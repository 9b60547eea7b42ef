import ast
import math
from pathlib import Path

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.ops.dispatch import KernelLaunch, pack
from maxrl_fast.ops.loss_kernel import LossTerms, plan_rows

MEMORY = torch.zeros(16)  # real, so that a call that is not refused returns
FIELDS = {"num_rows": 1, "size": 16, "eps": 1e-6}
FIELDS |= dict.fromkeys(("x", "delta", "weight", "sum", "normed"), MEMORY)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"size": ...}, TypeError, "add_rms_norm takes num_rows, size, .*, got num_rows, eps"),
        ({"width": 3}, TypeError, "add_rms_norm takes num_rows, .* got .* width"),
        ({"size": 1 << 40}, TypeError, "must have fields of .* got .* format requires -2147483648"),
        ({"num_rows": 1.5}, TypeError, "got {'num_rows': 1.5, .* argument is not an integer"),
        ({"eps": "0"}, TypeError, "got .* must be real number, not str|is not a float"),
        ({"x": (1, 2)}, TypeError, "expected 8 items for packing"),
        (
            {"dtype": torch.int8},
            ValueError,
            "add_rms_norm_cpu takes float32 float64 bfloat16, got int8",
        ),
    ],
)
def test_a_kernel_refuses_arguments_that_are_not_its_fields(change, error, message):
    given = {"dtype": torch.float32} | FIELDS | change
    given = {name: value for name, value in given.items() if value is not ...}
    with pytest.raises(error, match=message):
        KernelLaunch(MEMORY.device).launch("add_rms_norm", **given)


def test_a_field_of_an_enumeration_and_a_packed_record_are_checked():
    names = ("num_groups", "group_size", "ddof", "eps", "rewards", "valid", "tables")
    fields = dict.fromkeys((*names, "advantages"), 0) | {"centred": True, "scale": "mean"}
    record = pack("group_advantage", fields)
    with pytest.raises(ValueError, match=r"scale must be one of one, .*, mean, got 'median'"):
        pack("group_advantage", fields | {"scale": "median"})
    for wrong, how in ((record[:-1], "short"), (record + b"0", "long")):
        with pytest.raises(ValueError, match=f"the packed record is too {how}"):
            _C.group_advantage_cpu("float32", wrong, 1)


def test_a_planned_call_takes_only_arguments_as_its_kernel_reads_them():
    ones, bounds = torch.ones, torch.tensor([0, 2, 3])
    made = [torch.zeros(10, dtype=torch.float64), torch.zeros(()), None]
    given = [ones(3, 4), 0, None, torch.tensor([1, 0, 2]), 1.0, None, bounds, ones(2), None]
    given += [ones(3), None, None, None, *made]
    how = False, torch.float32, torch.float32, "T", *LossTerms().of_plan

    def run(change, *by_token):
        plan = plan_rows("token_loss", *how, *by_token)
        return plan.run(tuple(change.get(i, x) for i, x in enumerate(given)), 1)

    assert run({}) == run({4: ones(3), 11: ones(())}) == run({7: ones(3)}, True) == -1
    of_one_token = {6: torch.arange(4), 7: ones(3)}  # S = T
    assert (run(of_one_token), run(of_one_token, True), run({}, True)) == (-9, -1, -9)
    wrong = {
        0: (ones(4, 3).t(), ones(3, 4).half()),
        3: (torch.tensor([1, 0, 2], dtype=torch.int32), torch.tensor([[1], [0], [2]]), None),
        4: (0.0, math.inf, ones(2), None),
        6: (bounds[None],),
        7: (ones(1), torch._neg_view(ones(2)), None, [1.0, 1.0]),
        9: (ones(6)[::2], ones(3, device="meta"), ones(3).bfloat16()),
        11: (ones(1), -1.0),
    }
    for place, values in wrong.items():
        assert {run({place: x}) for x in values} == {-2 - place}
    assert run({11: -ones(())}) >= 0


def test_the_stub_names_what_the_module_has():
    """But not the kernels, which nothing names outside `KernelLaunch`, nor what only CUDA
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

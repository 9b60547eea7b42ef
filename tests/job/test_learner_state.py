import pytest
import torch

from maxrl_fast.job import checkpoints
from maxrl_fast.job.checkpoints import load_state, save_state
from tests.tables import refused

TENSORS = {
    "weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "step": torch.tensor(3.0),
    "quantiles": torch.arange(4, dtype=torch.float64),
    "none": torch.zeros(0, 2),
}


def loaded(folder):
    tensors = {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items()}
    load_state(folder, tensors)
    return tensors


def assert_equal(tensors):
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("file_bytes", [1, 10**9])
def test_tensors_are_read_as_they_were_written(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(checkpoints, "FILE_BYTES", file_bytes)
    save_state(tmp_path, TENSORS)
    assert len(list(tmp_path.iterdir())) == (1 if file_bytes > 1 else 4)
    assert_equal(loaded(tmp_path))


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_copy_from_a_gpu_goes_through_one_small_buffer(monkeypatch):
    pinned = torch.empty(25, dtype=torch.uint8)
    monkeypatch.setattr(checkpoints, "_pinned", lambda: pinned)
    for tensor in (*TENSORS.values(), torch.arange(90).view(9, 10).T):
        copy = checkpoints.host_copy(tensor.as_subclass(OnGpu))
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()


def test_rows_of_several_ranks_are_put_together_and_must_be_complete(tmp_path, monkeypatch):
    def save(rank, start, end):
        def own_rows(x):
            return (x[start:end], start) if x is TENSORS["weight"] else (x, 0)

        monkeypatch.setattr(checkpoints, "own_rows", own_rows)
        save_state(tmp_path, TENSORS, rank)

    save(1, 3, 5)
    with refused(r"weight must have 5 rows, got 2"):
        loaded(tmp_path)
    save(0, 0, 3)
    assert_equal(loaded(tmp_path))
    with refused(r"weight must have shape \[5, 4\], got \[5, 3\]"):
        load_state(tmp_path, {"weight": torch.zeros(5, 4)})

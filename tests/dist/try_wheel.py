"""Run operators of an installed wheel: `python try_wheel.py`, in a folder without the sources."""

from importlib.metadata import version
from pathlib import Path

import torch

import maxrl_fast
from maxrl_fast import _C, ops

assert "site-packages" in _C.__file__, f"the extension must be that of the wheel, got {_C.__file__}"
assert not list(Path(_C.__file__).parent.parent.glob("bench")), (
    "the wheel must not bring the benchmarks"
)
assert version("maxrl-fast") == maxrl_fast.__version__
advantages = ops.maxrl_advantage(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
assert advantages.tolist() == [[3.0, -1.0, -1.0, -1.0]], advantages
hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
logprobs, _ = ops.linear_token_logprobs(hidden, weight, targets)
torch.testing.assert_close(logprobs, (hidden @ weight.T).log_softmax(-1)[torch.arange(5), targets])
print(f"maxrl_fast {maxrl_fast.__version__} runs from {_C.__file__}")

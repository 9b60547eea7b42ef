"""--loss FILE.py:FUNCTION and package.module:FUNCTION: the trainer uses it, and checks it before
training starts.
"""

import re

import pytest

from maxrl_fast import train
from maxrl_fast.runtime.loading import load_code
from tests.tables import table
from tests.test_plugins import refused
from tests.test_train import base, read
from tests.training.test_collect import CHAIN

SOFT = '''"""A loss of the user's."""

import torch

from maxrl_fast.ops import Tokens


def soft(t: Tokens, *, tau: float = 1.0) -> torch.Tensor:
    """-A (4 / tau) sigmoid(tau (rho - 1))."""
    return -t.advantages * (4 / tau) * torch.sigmoid(tau * (t.ratio - 1))
'''
BAD = """
def constant(t): return t.advantages * t.logprobs.detach()
def right(t, *, tau: float = 1.0): return -t.advantages * tau * t.logprobs
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path with the loss as a module."""
    (tmp_path / "soft_plugin.py").write_text(SOFT)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    load_code.cache_clear()


@pytest.mark.slow
def test_a_loss_of_a_module_and_sapo_train_alike_and_a_changed_file_is_refused(
    site, tmp_path, capsys
):
    job = [*base()[2:], *CHAIN, "--objective", "grpo", "--steps", "2", "--updates-per-step", "2"]
    own, sapo = tmp_path / "own", tmp_path / "sapo"
    for out, flags in (
        (own, "soft_plugin:soft --loss-options tau=.8"),
        (sapo, "sapo --loss-options tau_positive=.8 tau_negative=.8"),
    ):
        assert train.main([*job, "--loss", *flags.split(), "--out", str(out)]) == 0
    weights = [(x / "latest" / "model.safetensors").read_bytes() for x in (own, sapo)]
    assert weights[0] == weights[1]
    assert all(record["grad_norm"] > 0 for record in read(own / "metrics.jsonl"))
    capsys.readouterr()
    (site / "soft_plugin.py").write_text(SOFT + "\n")
    assert train.main(["--resume", str(own), "--steps", "3"]) == 2
    assert "the file of --loss: changed" in capsys.readouterr().err


# what functions must return: tests/ops/test_users_loss.py
@pytest.mark.parametrize(
    ("flags", "message"),
    table(r"""
    nothing | must be FILE.py:FUNCTION: .*bad.py has no nothing
    constant | loss constant must have a gradient in the logprobs or the entropy
    right --loss-options tua=2 | loss right takes the options tau, got 'tua'; did you mean 'tau'?
    right --clip-low .1 | clip_low is not used by loss right, got 0.1
    """),
)
def test_a_bad_function_is_refused_before_any_work(tmp_path, capsys, flags, message):
    (tmp_path / "bad.py").write_text(BAD)
    said = refused(capsys, "--loss", *f"{tmp_path}/bad.py:{flags}".split())
    assert re.search(message, said), said

"""FSDP2 and NCCL in a world of one rank."""

import pytest

from tests.sharding import run_alone

pytestmark = pytest.mark.gpu


def test_a_policy_on_one_rank_learns_the_same_sharded(tmp_path):
    run_alone("cuda:0", tmp_path)

"""FSDP2 with gloo in a world of one rank, as tests/gpu/test_sharding.py with NCCL."""

from tests.sharding import run_alone


def test_a_policy_on_one_rank_learns_the_same_sharded(tmp_path):
    run_alone("cpu", tmp_path)

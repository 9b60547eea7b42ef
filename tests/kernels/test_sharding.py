import pytest

from tests.sharding import run_alone


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_policy_on_one_rank_learns_the_same_sharded(place, tmp_path):
    run_alone(place, tmp_path)

import pytest

from tests.tasks.test_dataset import save_byte_level_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_byte_level_policy(tmp_path_factory.mktemp("model"))

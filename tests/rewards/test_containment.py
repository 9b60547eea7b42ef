"""What reward functions cannot do to the machine, to other calls and to the trainer's secrets."""

import pytest

from tests.rewards.pools import FUNCTIONS, THREAD, pids, pool
from tests.tables import refused


@pytest.fixture(params=["forked", "loaded again"])
def file(request, tmp_path):
    """A file of functions whose process can be forked, and one that starts a thread and is loaded
    again.
    """
    path = tmp_path / "functions.py"
    path.write_text((THREAD if request.param == "loaded again" else "") + FUNCTIONS.read_text())
    return path


@pytest.mark.parametrize("isolation", ["process", "call"])
def test_a_deleted_working_directory_fails_no_other_call(tmp_path, monkeypatch, isolation):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pool("act", isolation=isolation) as two:
        scores = two.score(
            [{"action": "delete_folder"}, *({"action": "", "x": float(i)} for i in range(1, 20))]
        )
        assert two.score([{"action": "raise_error"}, {"action": "", "x": 2.0}]).rewards == [
            0.0,
            2.0,
        ]
    assert scores.failures == []
    assert scores.rewards == [1.0, *map(float, range(1, 20))]
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("failing", ["raise_error", "no_such_action", "segfault", "eat_bytes"])
def test_a_failed_call_is_followed_by_a_fresh_process(file, failing):
    with pool("act", workers=1, file=file) as one:
        assert one.score([{"action": "count"}] * 3).rewards == [1.0, 2.0, 3.0]
        before = pids(one)
        scores = one.score([{"action": failing}, {"action": "count"}])
        assert scores.rewards == [0.0, 1.0]
        assert pids(one) != before


def test_a_process_for_each_call_keeps_nothing_of_other_calls():
    with pool("act", isolation="call") as two:
        assert two.score([{"action": "count"}] * 20).rewards == [1.0] * 20
        assert len(set(two.score([{"action": "pid"}] * 10).rewards)) == 10


def test_a_function_that_starts_threads_is_refused_where_each_call_needs_a_process(tmp_path):
    (tmp_path / "threads.py").write_text(THREAD + "def f(): return 1.0")
    with refused("loading it starts threads, so it cannot be forked for each call"):
        pool(
            "f",
            1,
            file=tmp_path / "threads.py",
            isolation="call",
        )


def test_secrets_are_not_in_the_environment_unless_they_are_named(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "HTTPS_PROXY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    names = ["OPENAI_API_KEY", "HF_TOKEN", "HTTPS_PROXY", "JUDGE_KEY", "PATH", "HOME"]
    calls = [{"action": "variable", "name": name} for name in names]
    with pool("act", 1, environment=["JUDGE_KEY"]) as one:
        assert one.score(calls).rewards == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_strings_hash_alike_in_every_process(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "hashes.py").write_text("def f(): return hash('maze') % 2**20\n")
    rewards = set()
    for _ in range(3):
        with pool(
            "f",
            1,
            file=tmp_path / "hashes.py",
        ) as one:
            rewards.update(one.score([{}]).rewards)
    assert len(rewards) == 1


def test_a_variable_that_is_not_set_is_refused():
    with refused("needs the environment variable NO_SUCH_NAME, which is not set"):
        pool(
            "act",
            1,
            environment=["NO_SUCH_NAME"],
        )


def test_the_pool_says_what_contains_its_processes(file):
    with pool("act", file=file) as two:
        said, _ = two.lines()
    assert said.startswith("reward workers: 2, a fresh process after each failed call")
    assert ("loads the function again" in said) == file.read_text().startswith(THREAD)
    assert said.endswith(
        "this contains mistakes; run untrusted or model-written code in a container"
    )

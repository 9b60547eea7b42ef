"""What reward functions cannot do to the machine, to other calls and to the trainer's secrets."""

import pytest

from tests.rewards.pools import pids, pool


def test_a_deleted_working_directory_fails_no_other_call(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pool("act") as two:
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
        with pool("f", 1, file=tmp_path / "hashes.py") as one:
            rewards.update(one.score([{}]).rewards)
    assert len(rewards) == 1


@pytest.mark.parametrize("failing", ["segfault", "eat_bytes"])
def test_a_crash_and_exhausted_memory_are_followed_by_a_fresh_process(failing):
    with pool("act", workers=1) as one:
        assert one.score([{"action": "count"}] * 2).rewards == [1.0, 2.0]
        scores = one.score([{"action": "raise_error"}, {"action": "count"}])
        assert scores.rewards == [0.0, 3.0]
        before = pids(one)
        assert one.score([{"action": failing}, {"action": "count"}]).rewards == [0.0, 1.0]
        assert pids(one) != before

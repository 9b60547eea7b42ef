"""What the calls of a reward pool give, with real processes and misbehaving functions: rewards,
failures and their reasons.
"""

import ctypes
import os

import pytest

from maxrl_fast.rewards import pool as module
from tests.rewards.pools import eventually, fails, pids, pool, succeeds


def test_calls_run_in_parallel_in_separate_processes():
    with pool("pid", workers=3) as three:
        scores = three.score([{}] * 300)
        assert set(scores.rewards) <= set(pids(three))
        assert len(set(scores.rewards)) > 1
        assert os.getpid() not in scores.rewards
        assert three.score([]).rewards == []
    with pool("act", 1) as one:
        assert succeeds(one, "limits") == 1.0
        assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE, of this process


def test_a_file_can_import_its_neighbours_without_hiding_modules(tmp_path):
    (tmp_path / "neighbour.py").write_text("HALF = 0.5")
    (tmp_path / "json.py").write_text("from neighbour import HALF\ndef f(x): return x * HALF")
    with pool("f", file=tmp_path / "json.py") as two:
        assert two.score([{"x": 3}]).rewards == [1.5]


ENDLESS = ["spin", "catch_everything", "backtrack"]


@pytest.mark.slow
@pytest.mark.parametrize("action", ENDLESS)
def test_an_endless_call_times_out(hasty, action):
    failure = fails(hasty, action)
    assert failure.kind == "timeout"
    assert f"ran longer than 1 s, in {action} (functions.py, line " in failure.message


def test_a_process_that_ends_between_two_looks_is_heard(monkeypatch):
    """It was a crash if the time limit was reached at a look, as limits of whole seconds are."""
    original = module.has_ended
    with pool("act", 1, time_limit=0.5) as one:
        monkeypatch.setattr(module, "LOOK_INTERVAL", 0.1)
        monkeypatch.setattr(module, "has_ended", lambda pid: eventually(lambda: original(pid), 1.5))
        assert one.score([{"action": "sleep"}]).failures[0].kind == "timeout"


@pytest.mark.slow
def test_other_workers_continue_while_one_hangs():
    """The other worker makes all other calls before the time limit."""
    with pool("act", time_limit=3.0) as two:
        before = pids(two)
        scores = two.score([{"action": "sleep"}] + [{"action": "pid"}] * 50)
        assert [failure.kind for failure in scores.failures] == ["timeout"]
        assert len(set(scores.rewards[1:])) == 1
        assert scores.rewards[1] in before


@pytest.mark.slow
def test_time_is_counted_from_the_start_of_a_call():
    with pool("lasting", time_limit=2.0) as two:
        scores = two.score([{"seconds": 1.2}] * 4)  # the last call ends after 2.4 s
    assert scores.failures == []
    assert scores.rewards == [1.2] * 4


def test_memory_is_limited(patient):
    before = pids(patient)
    failure = fails(patient, "eat_list")
    assert failure.kind == "memory"
    assert pids(patient) != before


def test_the_memory_limit_excludes_memory_of_imports(tmp_path):
    (tmp_path / "large.py").write_text(
        "data = bytearray(200_000_000)\ndef f(size): return sum(map(len, [bytearray(size)]))"
    )
    with pool("f", file=tmp_path / "large.py", memory_limit=100_000_000) as two:
        scores = two.score([{"size": 50_000_000}, {"size": 150_000_000}])
    assert scores.rewards == [50_000_000.0, 0.0]
    assert scores.failures[0].kind == "memory"


CRASHES = {
    "exit_now": "exited with code 3",
    "kill_self": "was killed by SIGKILL",
    "close_all": "the worker process ",  # killed, or it has ended by itself: both are fast
    "answer_other": "wrote to the connection",
}


@pytest.mark.parametrize("action", CRASHES)
def test_a_crash_is_reported_for_its_call(patient, action):
    failure = fails(patient, action)
    assert failure.kind == "crash"
    assert CRASHES[action] in failure.message


@pytest.mark.parametrize("text", ["garbage", "{}\n", "[" * 100_000 + "\n"])
def test_writing_to_every_descriptor_is_a_crash(hasty, capfd, text):
    failure = fails(hasty, "write_to_all", text=text)
    assert failure.kind == "crash"
    assert failure.message.startswith("the reward code wrote to the connection between worker")
    assert len(failure.message) < 200
    assert capfd.readouterr() == ("", "")


def test_scoring_stops_when_too_many_calls_fail():
    beats = []
    with pool("act", workers=2, time_limit=0.3) as two:
        calls = [{"action": "number", "text": "2"}, *[{"action": "sleep"}] * 60]
        scores = two.score(calls, 3, lambda: beats.append(1))
        assert scores.rewards[0] == 2.0
        assert 4 <= len(scores.failures) <= 5
        assert scores.num_left == 61 - 1 - len(scores.failures)
        assert len(beats) >= 4
        assert two.score([{"action": "number", "text": "3"}] * 5).rewards == [3.0] * 5
    assert scores.num_left > 50


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise_error", "ValueError: no good (functions.py, line "),
        ("exit_python", "SystemExit: 3 "),
        ("raise_strange", "ValueError:  [31m red     "),
        ("raise_unprintable", "Unprintable: (its message"),
    ],
)
def test_an_exception_fails_only_its_call(patient, action, message):
    before = pids(patient)
    failure = fails(patient, action)
    assert failure.kind == "exception"
    assert failure.message.startswith(message)
    assert failure.message.isprintable()
    assert len(failure.message) < 1000
    assert pids(patient) == before

"""What reward functions cannot do to the machine, to other calls and to the trainer's secrets."""

import os
import re
import shutil
from pathlib import Path

import pytest

from maxrl_fast.errors import InputError
from maxrl_fast.rewards.contain import ControlGroup
from maxrl_fast.rewards.pool import RewardPool
from tests.rewards.test_pool import FUNCTIONS, pids, pool

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


@pytest.fixture(params=["forked", "loaded again"])
def file(request, tmp_path):
    """A file of functions whose process can be forked, and one that starts a thread and is loaded again."""
    path = tmp_path / "functions.py"
    path.write_text((THREAD if request.param == "loaded again" else "") + FUNCTIONS.read_text())
    return path


@pytest.mark.parametrize(
    ("action", "more"),
    [("share_memory", {}), ("share_file", {}), ("fill_children", {"number": 20})],
    ids=lambda value: str(value),
)
def test_shared_memory_and_memory_of_children_are_limited(file, tmp_path, action, more):
    """A tenth of what the call asks for is allowed. No process has more private memory than that."""
    path = tmp_path / "steps"
    with pool("act", workers=1, memory_limit=100_000_000, time_limit=60.0, file=file) as one:
        calls = [{"action": action, "path": str(path), "size": 1_000_000_000, **more}, {"action": "", "x": 2.0}]
        scores = one.score(calls)
    assert [(failure.index, failure.kind) for failure in scores.failures] == [(0, "memory")]
    assert scores.rewards[1] == 2.0
    assert 0 < len(path.read_text()) < 50  # of 100 steps


def test_memory_that_children_share_with_the_worker_counts_once(tmp_path):
    """The worker loads 60 MB, and three children map all of it: together they need no more than the worker alone."""
    (tmp_path / "large.py").write_text(
        "import os, time\n"
        "data = bytearray(b'x') * 60_000_000\n"
        "def f():\n"
        "    for _ in range(3):\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(1000)\n"
        "    time.sleep(1)\n"
        "    return 1.0\n"
    )
    with pool("f", workers=1, memory_limit=20_000_000, file=tmp_path / "large.py") as one:
        assert one.score([{}]).failures == []


@pytest.mark.parametrize("isolation", ["process", "call"])
def test_a_deleted_working_directory_fails_no_other_call(tmp_path, monkeypatch, isolation):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with RewardPool(f"{FUNCTIONS}:act", workers=2, time_limit=10, memory_limit=10**9, isolation=isolation) as two:
        scores = two.score([{"action": "delete_folder"}, *({"action": "", "x": float(i)} for i in range(1, 20))])
        assert two.score([{"action": "raise_error"}, {"action": "", "x": 2.0}]).rewards == [0.0, 2.0]
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


def test_a_failed_call_cannot_forge_the_results_of_later_ones():
    with pool("act", workers=1) as one:
        scores = one.score([{"action": "patch_worker", "fails": True}, *[{"action": "", "x": 1.0}] * 19])
    assert scores.rewards == [0.0] + [1.0] * 19


def test_a_process_for_each_call_keeps_nothing_of_other_calls():
    with RewardPool(f"{FUNCTIONS}:act", workers=2, time_limit=10, memory_limit=10**9, isolation="call") as two:
        patches = {"action": "patch_worker", "fails": False}
        scores = two.score([patches, {"action": "count"}, {"action": "answer_twice"}, *[{"action": "count"}] * 17])
        processes = two.score([{"action": "pid"}] * 10).rewards
    assert [failure.index for failure in scores.failures] in ([], [2])  # it answers its own call twice
    assert [*scores.rewards[:2], *scores.rewards[3:]] == [1.0] * 19
    assert len(set(processes)) == 10


def test_a_function_that_starts_threads_is_refused_where_each_call_needs_a_process(tmp_path):
    (tmp_path / "threads.py").write_text(THREAD + "def f(): return 1.0")
    with pytest.raises(InputError, match="loading it starts threads, so it cannot be forked for each call"):
        RewardPool(f"{tmp_path / 'threads.py'}:f", workers=1, time_limit=10, memory_limit=10**9, isolation="call")


def test_secrets_are_not_in_the_environment_unless_they_are_named(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "HTTPS_PROXY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    names = ["OPENAI_API_KEY", "HF_TOKEN", "HTTPS_PROXY", "JUDGE_KEY", "PATH", "HOME"]
    calls = [{"action": "variable", "name": name} for name in names]
    with RewardPool(f"{FUNCTIONS}:act", workers=1, time_limit=10, memory_limit=10**9, environment=["JUDGE_KEY"]) as one:
        assert one.score(calls).rewards == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_strings_hash_alike_in_every_process(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "hashes.py").write_text("def f(): return hash('maze') % 2**20\n")
    rewards = set()
    for _ in range(3):
        with RewardPool(f"{tmp_path / 'hashes.py'}:f", workers=1, time_limit=10, memory_limit=10**9) as one:
            rewards.update(one.score([{}]).rewards)
    assert len(rewards) == 1


def test_a_variable_that_is_not_set_is_refused():
    with pytest.raises(InputError, match="needs the environment variable NO_SUCH_NAME, which is not set"):
        RewardPool(f"{FUNCTIONS}:act", workers=1, time_limit=10, memory_limit=10**9, environment=["NO_SUCH_NAME"])


def test_the_pool_says_what_contains_its_processes(file):
    with pool("act", file=file) as two:
        said = two.describe()
    assert said.startswith("2, a fresh process after each failed call")
    assert ("loads the function again" in said) == file.read_text().startswith(THREAD)
    assert re.search(r"memory of a process and its descendants is (measured every 0.1 s|limited by the kernel)", said)


@pytest.fixture
def hierarchy(tmp_path, monkeypatch):
    """A folder that behaves as cgroup v2: a new group has its files, and can be removed although it has them."""

    def make(path, exist_ok):
        os.makedirs(path, exist_ok=exist_ok)
        for name in ("cgroup.procs", "cgroup.kill", "memory.swap.max", "memory.oom.group", "pids.max"):
            (path / name).write_text("")
        (path / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n")

    (tmp_path / "mount" / "user" / "scope").mkdir(parents=True)
    for place in ("user", "user/scope"):
        (tmp_path / "mount" / place / "cgroup.procs").write_text("")
    (tmp_path / "own").write_text("1:memory:/elsewhere\n0::/user/scope\n")
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    return tmp_path


@pytest.mark.parametrize(
    ("controllers", "expected"),
    [
        ({"user/scope": "cpu memory pids"}, "user/scope"),
        ({"user/scope": "cpu"}, "user/scope"),  # the controller can be enabled
        ({"user": "cpu memory"}, "user"),  # its own has processes
        ({}, None),
    ],
)
def test_cgroups_are_made_where_the_kernel_allows_a_memory_limit(hierarchy, controllers, expected):
    for place, names in controllers.items():
        (hierarchy / "mount" / place / "cgroup.subtree_control").write_text(names)
    found = ControlGroup.parent(hierarchy / "mount", hierarchy / "own")
    assert found == (hierarchy / "mount" / expected if expected else None)
    for place, names in controllers.items():
        written = (hierarchy / "mount" / place / "cgroup.subtree_control").read_text()
        assert written == (names if "memory" in names else "+memory +pids")
    assert list(hierarchy.glob("mount/**/maxrl-reward-*")) == []


def test_there_is_no_cgroup_on_a_machine_with_version_1(tmp_path):
    (tmp_path / "own").write_text("4:memory:/a\n1:name=systemd:/b\n")
    assert ControlGroup.parent(tmp_path, tmp_path / "own") is None


@pytest.mark.parametrize("num_killed", [0, 3])
def test_a_cgroup_limits_kills_and_tells_of_exhausted_memory(hierarchy, num_killed):
    path = hierarchy / "mount" / "group"
    group = ControlGroup(path)
    group.make(123_456)
    group.join()
    group.kill()
    values = {name: (path / name).read_text() for name in ("memory.max", "memory.swap.max", "memory.oom.group", "cgroup.procs")}
    assert values == {"memory.max": "123456", "memory.swap.max": "0", "memory.oom.group": "1", "cgroup.procs": "0"}
    assert (path / "cgroup.kill").read_text() == "1"
    assert int((path / "pids.max").read_text()) > 0
    events = (path / "memory.events").read_text()
    (path / "memory.events").write_text(events.replace("oom_kill 0", f"oom_kill {num_killed}"))
    assert group.remove() == (num_killed > 0)
    assert not path.exists()
    assert not group.remove()

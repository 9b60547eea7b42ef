"""The processes of a reward pool: how they start, what outlives a call, and that none outlives the
trainer.
"""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxrl_fast.errors import InputError, RewardError
from tests.rewards.pools import (
    FUNCTIONS,
    ROOT,
    descendants,
    eventually,
    fails,
    is_alive,
    own_descendants,
    pids,
    pool,
    succeeds,
)
from tests.tables import refused


@pytest.mark.parametrize("action", ["fork_and_return", "fork_and_raise"])
def test_a_forked_child_does_not_answer(patient, action):
    for _ in range(2):
        assert succeeds(patient, action) == 1.0


@pytest.mark.slow
def test_children_end_with_a_call_that_times_out(hasty, tmp_path):
    path = tmp_path / "child"
    assert fails(hasty, "leave_program_and_hang", path=str(path)).kind == "timeout"
    assert eventually(lambda: not is_alive(int(path.read_text())))


@pytest.mark.slow
def test_children_that_keep_the_connection_end_with_a_crash(tmp_path):
    """A child keeps the connection open after the worker has died."""
    path = tmp_path / "child"
    with pool("act", workers=1, time_limit=1.0) as one:
        failure = fails(one, "leave_child_and_exit", path=str(path))
    assert (failure.kind, failure.message) == ("crash", "the worker process exited with code 3")
    assert eventually(lambda: not is_alive(int(path.read_text())))


def test_children_end_with_their_call(patient, tmp_path):
    """A call that leaves processes costs its worker, in whose process group they are."""
    left = [tmp_path / str(number) for number in range(3)]
    for path in left:
        assert succeeds(patient, "leave_child", path=str(path)) == 1.0
        assert eventually(lambda path=path: not is_alive(int(path.read_text())))


def test_servers_that_the_module_starts_outlive_calls_but_not_the_pool(tmp_path):
    (tmp_path / "server.py").write_text(
        "import subprocess\n"
        "server = subprocess.Popen(['sleep', '1000'])\n"
        "def f(x):\n    return server.pid if x else 1 / 0\n"
    )
    with pool("f", workers=1, file=tmp_path / "server.py") as one:
        scores = one.score([{"x": 1}, {"x": 0}, {"x": 1}])
        assert [failure.index for failure in scores.failures] == [1]
        assert scores.rewards[0] == scores.rewards[2]
        server = int(scores.rewards[0])
        assert is_alive(server)
    assert eventually(lambda: not is_alive(server))


def test_a_call_does_not_affect_the_next(patient, tmp_path):
    here = os.getcwd()
    before = pids(patient)
    (tmp_path / "gone").mkdir()
    assert succeeds(patient, "change_surroundings", path=str(tmp_path / "gone")) == 1.0
    assert succeeds(patient, "folder", expected=here) == 1.0
    assert pids(patient) == before
    assert fails(patient, "segfault").kind == "crash"


def stop(pid):
    """Stop the process with SIGSTOP and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    assert eventually(
        lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    )


def test_a_call_that_was_not_read_is_made_again(tmp_path):
    """Stopped workers cannot read, so each dies with the call unread in its socket. The function is
    called exactly once.
    """
    path = tmp_path / "calls"
    with pool("append_line", workers=2) as two:
        stopped = pids(two)
        for pid in stopped:
            stop(pid)
        killer = threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGKILL) for pid in stopped])
        killer.start()
        scores = two.score([{"path": str(path)}])
        killer.join()
        assert scores.failures == []
        assert path.read_text() == "called\n"


BAD_FILES = {
    "def f(:\n": "bad.py failed: SyntaxError: ",
    "x = 1\nraise ValueError('not today')": "ValueError: not today (bad.py, line 2)",
    "import os; os._exit(4)": "the worker process exited with code 4",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_file_that_cannot_be_loaded_is_refused(tmp_path, text):
    (tmp_path / "bad.py").write_text(text)
    before = own_descendants()
    with pytest.raises(InputError) as error:
        pool("f", file=tmp_path / "bad.py")
    assert f"reward function {tmp_path / 'bad.py'}:f: " in str(error.value)
    assert BAD_FILES[text] in str(error.value)
    assert own_descendants() == before


def test_loading_time_is_limited(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(1000)")
    before = own_descendants()
    with refused(r"loading it took longer than 1 s"):
        pool("f", file=tmp_path / "slow.py", start_limit=1.0)
    assert own_descendants() == before


def test_workers_that_cannot_restart_are_an_error(tmp_path):
    path = tmp_path / "once.py"
    path.write_text("import os\ndef f(x): return x if x else os._exit(3)")
    with pool("f", file=path) as two:
        assert two.score([{"x": 1}, {"x": 0}]).rewards == [1.0, 0.0]
        path.write_text("raise OSError('the disk is gone')")
        with pytest.raises(RewardError, match="the disk is gone"):
            two.score([{"x": 0}] * 10)
        path.write_text("def f(x): return x + 1")
        assert two.score([{"x": 1}] * 3).rewards == [2.0] * 3  # the failed start is not permanent


@pytest.fixture
def interruptible():
    """Handle SIGINT as Python does by default. A background process may have been started with
    SIGINT ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_no_process():
    before = own_descendants()
    with pool("act", time_limit=60.0) as two:
        # Ctrl-C goes to the foreground process group, and workers are in groups of their own
        assert all(os.getpgid(pid) == pid != os.getpgrp() for pid in pids(two))
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.score([{"action": "ignore_signals"}] * 10)
        assert two.score([{"action": "", "x": 1.0}]).rewards == [1.0]
    assert own_descendants() == before


TRAINER = """
import os, signal, sys, time
from maxrl_fast.rewards.pool import RewardPool
# a shell without job control ignores it in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
pool = RewardPool(f"{sys.argv[1]}:act", workers=2, time_limit=60.0, memory_limit=1 << 30)
print([worker._process.pid for worker in pool._workers], flush=True)
"""
BUSY = "pool.score([{'action': 'leave_program_and_hang', 'path': sys.argv[2]}])"
ENDS = {
    "busy, killed": (BUSY, signal.SIGKILL),
    "busy, terminated": (BUSY, signal.SIGTERM),
    "holding the lock, killed": ("pool.score([{'action': 'backtrack'}] * 2)", signal.SIGKILL),
    "never closed": ("pass", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_workers_end_with_the_trainer(tmp_path, end):
    last, number = ENDS[end]
    path = tmp_path / "child"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER + last, FUNCTIONS, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with trainer:
        workers = ast.literal_eval(trainer.stdout.readline().decode())
        assert len(workers) == 2
        if number:
            if "busy" in end:
                assert eventually(lambda: path.exists() and path.read_text())
            time.sleep(0.5)
            assert all(map(is_alive, workers))
            trainer.send_signal(number)
        trainer.wait(20)
        if path.exists():
            workers.append(int(path.read_text()))
        assert eventually(lambda: not any(map(is_alive, workers)))


STOPPED = """
from maxrl_fast.rewards import pool as module
module.PATIENCE, module.LOOK_INTERVAL = 0.5, 0.2
pool = module.RewardPool(f"{sys.argv[1]}:lasting", workers=1, time_limit=2.0, memory_limit=1 << 30)
print([worker._process.pid for worker in pool._workers], flush=True)
scores = pool.score([{"seconds": 1.5}])
print([scores.rewards, scores.failures], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_all", [False, True])
def test_a_trainer_that_is_stopped_gets_its_reward(is_all):
    """For longer than a call may take, alone or with its worker."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys" + STOPPED, FUNCTIONS], cwd=ROOT, stdout=subprocess.PIPE
    ) as trainer:
        pids = [trainer.pid, *ast.literal_eval(trainer.stdout.readline().decode()) * is_all]
        time.sleep(0.5)
        for pid in pids:
            stop(pid)
        time.sleep(4)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert trainer.stdout.readline() == b"[[1.5], []]\n"


@pytest.mark.slow
def test_thousands_of_calls_leak_nothing():
    before = set(descendants(os.getpid()))
    actions = ["exit_now", "sleep", "eat_bytes", "raise_error", "segfault", "close_all"]
    with pool("act", time_limit=1.0) as two:
        calls = [{"action": "", "x": i} for i in range(3_000)]
        for i in range(200, 3_000, 200):
            calls[i] = {"action": actions[i // 200 % len(actions)]}

        def are_clean():
            """Return whether there are two workers, and no other process or zombie."""
            two.score([{"action": ""}] * 20)
            return set(descendants(os.getpid())) - before == set(pids(two))

        two.score(calls[:300])
        assert eventually(are_clean)
        fds = len(os.listdir("/proc/self/fd"))
        scores = two.score(calls)
        assert len(scores.failures) == 14
        failed = {failure.index for failure in scores.failures}
        assert failed == set(range(200, 3_000, 200))
        assert scores.rewards == [0.0 if i in failed else float(i) for i in range(3_000)]
        assert eventually(are_clean)
        assert len(os.listdir("/proc/self/fd")) == fds

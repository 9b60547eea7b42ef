"""The reward pool, with real processes and misbehaving functions."""

import ast
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards.pool import RewardPool

ROOT = Path(__file__).parents[2]
FUNCTIONS = ROOT / "tests" / "rewards" / "functions.py"
GB = 1 << 30
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


def pool(name, workers=2, time_limit=10.0, memory_limit=GB, start_limit=60.0, file=FUNCTIONS):
    return RewardPool(
        f"{file}:{name}", workers=workers, time_limit=time_limit, memory_limit=memory_limit, start_limit=start_limit
    )


@pytest.fixture(scope="module")
def patient():
    """A pool of one worker with a long time limit."""
    with pool("act", workers=1, time_limit=30.0, memory_limit=GB // 4) as one:
        yield one


@pytest.fixture(scope="module")
def hasty():
    """A pool of two workers with a short time limit."""
    with pool("act", time_limit=1.0) as one:
        yield one


def fails(pool, action, **arguments):
    """Return the failure of one call, after checking that the calls before and after it succeed."""
    start = time.monotonic()
    scores = pool.score([{"action": "", "x": 1.5}, {"action": action, **arguments}, {"action": "", "x": 2.5}])
    assert time.monotonic() - start < 30
    assert scores.rewards == [1.5, 0.0, 2.5]
    assert [failure.index for failure in scores.failures] == [1]
    return scores.failures[0]


def succeeds(pool, action, **arguments):
    """Return the reward of one call, after checking that the calls before and after it succeed."""
    scores = pool.score([{"action": "", "x": 1.5}, {"action": action, **arguments}, {"action": "", "x": 2.5}])
    assert scores.failures == []
    assert scores.rewards[::2] == [1.5, 2.5]
    return scores.rewards[1]


def is_alive(pid):
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid):
    """Return the pids of the processes below one, zombies included."""
    found = [pid]
    for parent in found:  # the list grows during the loop
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found[1:]


def eventually(condition, limit=10.0):
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit:
            return False
        time.sleep(0.02)
    return True


def stop(pid):
    """Stop the process with SIGSTOP and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def pids(pool):
    """Return the pids of the processes that make calls, once all have started."""
    while not all(worker.pid for worker in pool._workers):
        pool._receive(None)
    return [worker.pid for worker in pool._workers]


def own_descendants():
    return [pid for pid in descendants(os.getpid()) if is_alive(pid)]


def test_rewards_are_in_the_order_of_the_calls():
    seconds = [0.3, 0.01, 0.2, 0.0, 0.1, 0.02, 0.15, 0.03]
    with pool("lasting", workers=3) as three:
        assert three.score([{"seconds": s} for s in seconds]).rewards == seconds


def test_calls_run_in_parallel_in_separate_processes():
    with pool("pid", workers=3) as three:
        scores = three.score([{}] * 300)
        assert set(scores.rewards) == set(pids(three))
        assert os.getpid() not in scores.rewards
        assert three.score([]).rewards == []


def test_limits_are_in_force(patient):
    assert succeeds(patient, "limits") == 1.0


def test_a_function_in_a_package(tmp_path):
    """The worker finds the module as the trainer would."""
    with RewardPool("tests.rewards.functions:echo", workers=1, time_limit=10, memory_limit=GB) as one:
        assert one.score([{"x": 3}]).rewards == [3.0]


def test_a_file_can_import_its_neighbours_without_hiding_modules(tmp_path):
    (tmp_path / "neighbour.py").write_text("HALF = 0.5")
    (tmp_path / "json.py").write_text("from neighbour import HALF\ndef f(x): return x * HALF")
    with pool("f", file=tmp_path / "json.py") as two:
        assert two.score([{"x": 3}]).rewards == [1.5]


ENDLESS = ["spin", "sleep", "ignore_signals", "catch_everything", "backtrack"]


def test_a_call_that_closes_its_connection_and_hangs_times_out(hasty):
    assert fails(hasty, "close_all_and_hang").kind == "timeout"


@pytest.mark.slow
@pytest.mark.parametrize("action", ENDLESS)
def test_an_endless_call_times_out(hasty, action):
    failure = fails(hasty, action)
    assert failure.kind == "timeout"
    assert "ran longer than 1 s, in " in failure.message
    assert f"in {action} (functions.py, line " in failure.message


@pytest.mark.slow
def test_endless_calls_time_out_in_parallel():
    start = time.monotonic()
    with pool("act", time_limit=0.5) as two:
        scores = two.score([{"action": "ignore_signals"}] * 8)
    assert [failure.kind for failure in scores.failures] == ["timeout"] * 8
    assert [failure.index for failure in scores.failures] == list(range(8))
    assert time.monotonic() - start < 20


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


@pytest.mark.parametrize("action", ["eat_list", "eat_bytes"])
def test_memory_is_limited(patient, action):
    before = pids(patient)
    failure = fails(patient, action)
    assert failure.kind == "memory"
    assert pids(patient) != before


def test_the_memory_limit_excludes_memory_of_imports(tmp_path):
    (tmp_path / "large.py").write_text("data = bytearray(200_000_000)\ndef f(size): return sum(map(len, [bytearray(size)]))")
    with pool("f", file=tmp_path / "large.py", memory_limit=100_000_000) as two:
        scores = two.score([{"size": 50_000_000}, {"size": 150_000_000}])
    assert scores.rewards == [50_000_000.0, 0.0]
    assert scores.failures[0].kind == "memory"


CRASHES = {
    "exit_now": "exited with code 3",
    "abort": "was killed by SIGABRT",
    "segfault": "was killed by SIGSEGV",
    "kill_self": "was killed by SIGKILL",
    "close_all": "exited with code 1",
    "answer_twice": "wrote to the connection",
    "answer_other": "wrote to the connection",
    "flood": "wrote to the connection",
}


@pytest.mark.parametrize("action", CRASHES)
def test_a_crash_is_reported_for_its_call(patient, action):
    failure = fails(patient, action)
    assert failure.kind == "crash"
    assert CRASHES[action] in failure.message


@pytest.mark.parametrize(("text", "repeat"), [("garbage\n", 1), ("garbage", 1), ("{}\n", 1), ("[" * 100_000 + "\n", 1)])
def test_writing_to_every_descriptor_is_a_crash(hasty, capfd, text, repeat):
    failure = fails(hasty, "write_to_all", text=text, repeat=repeat)
    assert failure.kind == "crash"
    assert failure.message.startswith("the reward code wrote to the connection between worker and trainer: ")
    assert len(failure.message) < 200
    assert capfd.readouterr() == ("", "")


def test_a_forged_nan_reward_is_a_crash():
    with pool("act", workers=1, time_limit=10) as one:
        scores = one.score([{"action": "answer_nan"}])
    assert scores.rewards == [0.0]
    assert scores.failures[0].kind == "crash"


@pytest.mark.slow
def test_processor_time_is_limited(hasty):
    """The wall-time limit is long, so two busy threads reach the limit of processor time first."""
    with pool("act", workers=1, time_limit=1.0) as one:
        one._time_limit = 60.0  # only in the trainer; the worker's limit stays 1 s
        failure = fails(one, "burn", threads=2)
    assert failure.kind == "crash"
    assert "SIGXCPU" in failure.message


@pytest.mark.parametrize("action", ["fork_and_return", "fork_and_raise"])
def test_a_forked_child_does_not_answer(patient, action):
    for _ in range(5):
        assert succeeds(patient, action) == 1.0


def test_processes_left_behind_do_not_accumulate(patient):
    worker = succeeds(patient, "leave_children", number=40)
    assert succeeds(patient, "pid") == worker
    assert descendants(int(worker)) == []  # nor zombies


@pytest.mark.slow
def test_children_end_with_a_call_that_times_out(hasty, tmp_path):
    path = tmp_path / "child"
    assert fails(hasty, "leave_child_and_hang", path=str(path)).kind == "timeout"
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
    """A call that leaves processes costs its worker, which they are in the process group of."""
    left = [tmp_path / str(number) for number in range(10)]
    for path in left:
        assert succeeds(patient, "leave_child", path=str(path)) == 1.0
        assert eventually(lambda path=path: not is_alive(int(path.read_text())))


def test_servers_that_the_module_starts_outlive_calls_but_not_the_pool(tmp_path):
    (tmp_path / "server.py").write_text(
        "import os, subprocess\n"
        "server = subprocess.Popen(['sleep', '1000'])\n"
        "def f(x):\n    os.getppid()\n    subprocess.Popen(['sleep', '1000'])\n    return server.pid if x else 1 / 0\n"
    )
    with pool("f", workers=1, file=tmp_path / "server.py") as one:
        scores = one.score([{"x": 1}, {"x": 0}, {"x": 1}])
        assert [failure.index for failure in scores.failures] == [1]
        assert scores.rewards[0] == scores.rewards[2]
        server = int(scores.rewards[0])
        assert is_alive(server)
    assert eventually(lambda: not is_alive(server))


def test_scoring_stops_when_too_many_calls_fail():
    beats = []
    with pool("act", workers=2, time_limit=0.3) as two:
        scores = two.score([{"action": "number", "text": "2"}, *[{"action": "sleep"}] * 60], 3, lambda: beats.append(1))
        assert scores.rewards[0] == 2.0
        assert 4 <= len(scores.failures) <= 5
        assert scores.num_left == 61 - 1 - len(scores.failures)
        assert len(beats) >= 4
        assert two.score([{"action": "number", "text": "3"}] * 5).rewards == [3.0] * 5
    assert scores.num_left > 50


def test_prints_of_functions_are_discarded(patient, capfd):
    assert succeeds(patient, "print_much") == 1.0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("action", "arguments", "reward"),
    [
        ("echo", {"x": True}, 1.0),
        ("echo", {"x": False}, 0.0),
        ("echo", {"x": -3}, -3.0),
        ("number", {"text": "1e-300"}, 1e-300),
        ("array", {"values": [0.25]}, 0.25),
        ("array", {"values": [True]}, 1.0),
    ],
)
def test_numbers_are_rewards(patient, action, arguments, reward):
    # `act` takes x itself and cannot pass it to echo, so this calls `act` without an action.
    result = patient.score([{"action": "", **arguments} if action == "echo" else {"action": action, **arguments}])
    assert result.failures == []
    assert result.rewards == [reward]
    assert type(result.rewards[0]) is float


@pytest.mark.parametrize(
    ("action", "arguments", "message"),
    [
        ("number", {"text": "nan"}, "must return a finite number of float32, got nan"),
        ("number", {"text": "inf"}, "must return a finite number of float32, got inf"),
        ("number", {"text": "-inf"}, "must return a finite number of float32, got -inf"),
        ("number", {"text": "1e39"}, "must return a finite number of float32, got 1e+39"),
        ("", {"x": "text"}, "must return a number, got 'text' of type str"),
        ("", {"x": None}, "must return a number, got None of type NoneType"),
        ("", {"x": [1.0]}, "must return a number, got [1.0] of type list"),
        ("", {"x": "x" * 1_000_000}, "of type str"),
        ("array", {"values": [0.25, 0.5]}, "of type Array"),
        ("array", {"values": ["text"]}, "of type Array"),
        ("large_integer", {}, "got an integer that is too large"),
    ],
)
def test_other_results_are_invalid(patient, action, arguments, message):
    before = pids(patient)
    failure = fails(patient, action, **arguments)
    assert failure.kind == "invalid"
    assert message in failure.message
    assert len(failure.message) < 300
    assert pids(patient) != before


def line_of(text):
    return FUNCTIONS.read_text().splitlines().index(text) + 1


def test_an_exception_names_its_line(patient):
    failure = fails(patient, "raise_error")
    line = line_of('    raise ValueError("no good")')
    assert (failure.kind, failure.message) == ("exception", f"ValueError: no good (functions.py, line {line})")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("exit_python", "SystemExit: 3 "),
        ("raise_long", "ValueError: long long"),
        ("raise_strange", "ValueError:  [31m red     "),
        ("raise_unprintable", "Unprintable: (its message"),
        ("recurse", "RecursionError: "),
        ("no_such_action", "KeyError: 'no_such_action'"),
    ],
)
def test_an_exception_fails_only_its_call(patient, action, message):
    before = pids(patient)
    failure = fails(patient, action)
    assert failure.kind == "exception"
    assert failure.message.startswith(message)
    assert failure.message.isprintable()
    assert len(failure.message) < 1000
    assert pids(patient) != before


def test_wrong_arguments_are_an_exception(patient):
    scores = patient.score([{"x": 1}])
    assert scores.failures[0].kind == "exception"
    assert "missing 1 required positional argument: 'action'" in scores.failures[0].message


def test_file_sizes_are_limited(patient, tmp_path):
    assert fails(patient, "write_file", path=str(tmp_path / "file"), size=2 * GB).kind == "exception"
    assert succeeds(patient, "write_file", path=str(tmp_path / "file"), size=GB // 2) == 1.0


def test_a_call_does_not_affect_the_next(patient, tmp_path):
    here = os.getcwd()
    before = pids(patient)
    (tmp_path / "gone").mkdir()
    assert succeeds(patient, "change_surroundings", path=str(tmp_path / "gone")) == 1.0
    assert succeeds(patient, "folder", expected=here) == 1.0
    assert pids(patient) == before
    assert fails(patient, "segfault").kind == "crash"


def test_an_alarm_does_not_go_off_in_the_next_call(patient):
    scores = patient.score([{"action": "set_alarm"}, {"action": "lasting", "seconds": 0.5}])
    assert scores.failures == []
    assert scores.rewards == [1.0, 0.5]


def test_a_broken_worker_does_not_fail_the_next_call(patient):
    for _ in range(5):  # the worker can die before, while or after the next call is sent
        before = pids(patient)
        assert succeeds(patient, "damage") == 1.0
        assert pids(patient) != before


def test_large_requests(patient):
    text = "é\n" * 2_500_000
    start = time.monotonic()
    failure = fails(patient, "", x=text)
    assert failure.message.startswith(r"the function must return a number, got 'é\né\n")
    assert time.monotonic() - start < 30


def test_arguments_that_are_not_json_are_refused(patient):
    with pytest.raises(TypeError):
        patient.score([{"action": "", "x": object()}])
    assert succeeds(patient, "") == 0.0


def test_a_worker_that_dies_between_calls_fails_no_call(hasty):
    for pid in pids(hasty):
        os.kill(pid, signal.SIGKILL)
    assert succeeds(hasty, "") == 0.0


def test_workers_ignore_signals_to_the_whole_job(hasty):
    before = pids(hasty)
    for number in (signal.SIGTERM, signal.SIGINT):
        for pid in before:
            os.kill(pid, number)
    assert succeeds(hasty, "") == 0.0
    assert pids(hasty) == before


def test_a_call_that_was_not_read_is_made_again(tmp_path):
    """Stopped workers cannot read, so each dies with the call unread in its socket. The function is called exactly once."""
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


def test_a_worker_that_does_not_read_is_replaced(monkeypatch):
    monkeypatch.setattr("maxrl_fast.rewards.pool.SEND_LIMIT", 0.5)
    with pool("echo", workers=1) as one:
        stop(pids(one)[0])
        scores = one.score([{"x": "x" * 5_000_000}, {"x": 1}])
    assert scores.rewards == [0.0, 1.0]
    assert [(failure.index, failure.kind) for failure in scores.failures] == [(0, "crash")]


def test_a_thread_that_ends_the_process_later(patient):
    (pid,) = pids(patient)
    assert succeeds(patient, "die_later", seconds=0.2) == 1.0
    assert eventually(lambda: not is_alive(pid))
    assert succeeds(patient, "") == 0.0


WRITES_TO_ALL = r"""
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        os.write(int(fd), b"[1]\n")
    except OSError:
        pass
"""
BAD_FILES = {
    "import no_such_module_anywhere": "No module named 'no_such_module_anywhere'",
    "def f(:\n": "syntax error in ",
    "x = 1\nraise ValueError('not today')": "ValueError: not today (bad.py, line 2)",
    "import sys; sys.exit(4)": "called sys.exit(4)",
    "import os; os._exit(4)": "the worker process exited with code 4",
    "import ctypes; ctypes.string_at(0)": "the worker process was killed by SIGSEGV",
    "g = 1": "has no f",
    "f = [1, 2]": "f in ",
    WRITES_TO_ALL: "wrote to the connection",
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


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("tests.rewards.functions:no_such_name", "tests.rewards.functions has no no_such_name"),
        ("tests.rewards.functions:WAITS", "is not a function"),
        ("functions.py", 'got "functions.py"'),
        (":f", 'got ":f"'),
        ("functions.py:", 'got "functions.py:"'),
    ],
)
def test_an_unknown_function_is_refused(function, message):
    with pytest.raises(InputError) as error:
        RewardPool(function, workers=2, time_limit=1, memory_limit=GB)
    assert message in str(error.value)


def test_loading_time_is_limited(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(1000)")
    before = own_descendants()
    start = time.monotonic()
    with pytest.raises(InputError, match=r"loading it took longer than 1 s"):
        pool("f", file=tmp_path / "slow.py", start_limit=1.0)
    assert time.monotonic() - start < 20
    assert own_descendants() == before


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"time_limit": 0.0}, {"time_limit": math.inf}, {"memory_limit": -1}])
def test_invalid_limits_are_refused(wrong):
    with pytest.raises(InputError, match="must be positive and finite"):
        pool("echo", **wrong)


def test_workers_that_cannot_restart_are_an_error(tmp_path):
    """A function whose loading starts a thread cannot be forked, and is loaded again."""
    path, threads = tmp_path / "once.py", "import os\n" + THREAD
    path.write_text(threads + "def f(x): return x if x else os._exit(3)")
    with pool("f", file=path) as two:
        assert two.score([{"x": 1}, {"x": 0}]).rewards == [1.0, 0.0]
        path.write_text("raise OSError('the disk is gone')")
        with pytest.raises(RewardError, match="the disk is gone"):
            two.score([{"x": 0}] * 10)
        path.write_text(threads + "def f(x): return x + 1")
        assert two.score([{"x": 1}] * 3).rewards == [2.0] * 3  # the failed start is not permanent


@pytest.mark.slow
def test_stacks_are_shown(capfd):
    with pool("act", time_limit=3.0) as two:
        timer = threading.Timer(1.0, two.stacks)
        timer.start()
        scores = two.score([{"action": "backtrack"}, {"action": "sleep"}, {"action": ""}])
        timer.join()
        assert [failure.kind for failure in scores.failures] == ["timeout"] * 2
        shown = capfd.readouterr().err
        assert shown.count("reward worker ") == 2
        assert "runs call 0\n" in shown
        assert "runs call 1\n" in shown
        assert "in backtrack\n" in shown
        assert "in sleep\n" in shown


@pytest.fixture
def interruptible():
    """Handle SIGINT as Python does by default. A background process may have been started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_no_process():
    before = own_descendants()
    with pool("act", time_limit=60.0) as two:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.score([{"action": "ignore_signals"}] * 10)
        start = time.monotonic()
        assert two.score([{"action": "", "x": 1.0}]).rewards == [1.0]
        assert time.monotonic() - start < 30  # the interrupted calls no longer run
    assert own_descendants() == before
    with pytest.raises(RuntimeError, match="closed"):
        two.score([])
    two.close()


def test_ctrl_c_at_the_terminal_does_not_reach_workers():
    """Ctrl-C goes to the foreground process group, and workers are in another group."""
    with pool("pid", workers=1) as one:
        (pid,) = pids(one)
        assert os.getpgid(pid) == pid != os.getpgrp()
        assert os.getsid(pid) != os.getsid(0)


TRAINER = """
import os, sys, time
from maxrl_fast.rewards.pool import RewardPool
pool = RewardPool(f"{sys.argv[1]}:act", workers=2, time_limit=60.0, memory_limit=1 << 30)
print([worker.pid for worker in pool._workers], flush=True)
"""
ENDS = {
    "idle, killed": ("time.sleep(1000)", signal.SIGKILL),
    "busy, killed": (
        "pool.score([{'action': 'leave_child_and_hang', 'path': sys.argv[2]}])",
        signal.SIGKILL,
    ),
    "busy, terminated": ("pool.score([{'action': 'leave_child_and_hang', 'path': sys.argv[2]}])", signal.SIGTERM),
    "busy, interrupted": ("pool.score([{'action': 'leave_child_and_hang', 'path': sys.argv[2]}])", signal.SIGINT),
    "spinning, killed": ("pool.score([{'action': 'spin'}] * 2)", signal.SIGKILL),
    "killed, and copied before": ("os.fork() or time.sleep(15); pool.score([{'action': 'sleep'}] * 2)", signal.SIGKILL),
    "never closed": ("pass", None),
    "failed": ("raise ValueError", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_workers_end_with_the_trainer(tmp_path, end):
    last, number = ENDS[end]
    path = tmp_path / "child"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER + last, FUNCTIONS, path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
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


@pytest.mark.parametrize(
    "text", ["", "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"]
)
def test_workers_end_with_a_supervisor_that_is_killed_and_others_take_over(tmp_path, text):
    """The kernel kills them, whatever they do; a worker of a function that starts threads is its child too."""
    (tmp_path / "functions.py").write_text(text + FUNCTIONS.read_text())
    with pool("act", file=tmp_path / "functions.py", time_limit=60.0) as two:
        before = descendants(two._supervisor.pid)
        assert set(pids(two)) <= set(before)
        killer = threading.Timer(1.0, two._supervisor.kill)
        killer.start()
        scores = two.score([{"action": "ignore_signals"}, *[{"action": "", "x": 1.0}] * 4])
        assert [(failure.index, failure.kind) for failure in scores.failures] == [(0, "crash")]
        assert scores.rewards == [0.0, 1.0, 1.0, 1.0, 1.0]
        assert eventually(lambda: not any(map(is_alive, before)))


def test_what_a_module_starts_ends_with_a_trainer_that_is_killed_while_it_loads(tmp_path):
    server, path = tmp_path / "server.py", tmp_path / "pid"
    server.write_text(
        "import subprocess, time\n"
        f"open({str(path)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))\ntime.sleep(1000)\n"
    )
    code = f"from maxrl_fast.rewards.pool import RewardPool\nRewardPool('{server}:f', workers=1, time_limit=1, memory_limit=1)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as trainer:
        assert eventually(lambda: path.exists() and path.read_text(), limit=60)
        trainer.kill()
    assert eventually(lambda: not is_alive(int(path.read_text())))


@pytest.mark.slow
def test_a_loop_in_c_ends_at_the_processor_time_limit(tmp_path):
    """The loop holds the interpreter lock, so threads and signal handlers cannot end it. The processor time limit does."""
    start = TRAINER.replace("60.0", "1.0").replace("1 << 30)", "1 << 30)\npool._time_limit = 60.0")
    trainer = subprocess.Popen(
        [sys.executable, "-c", start + "pool.score([{'action': 'backtrack'}])", FUNCTIONS], cwd=ROOT, stdout=subprocess.PIPE
    )
    with trainer:
        workers = ast.literal_eval(trainer.stdout.readline().decode())
        time.sleep(0.5)
        trainer.kill()
        assert eventually(lambda: not any(map(is_alive, workers)), limit=30)


@pytest.mark.slow
def test_ten_thousand_calls_leak_nothing():
    before = set(descendants(os.getpid()))
    actions = ["exit_now", "sleep", "eat_bytes", "raise_error", "segfault", "close_all"]
    with pool("act", time_limit=1.0) as two:
        calls = [{"action": "", "x": i} for i in range(10_000)]
        for i in range(500, 10_000, 500):
            calls[i] = {"action": actions[i // 500 % len(actions)]}

        def are_clean():
            """Return whether there are two workers, their template and supervisor, and no other process or zombie."""
            two.score([{"action": ""}] * 2)
            started = set(descendants(os.getpid())) - before
            return len(started) == 4 and set(pids(two)) < started

        two.score(calls[:600])
        assert eventually(are_clean)
        fds = len(os.listdir("/proc/self/fd"))
        scores = two.score(calls)
        assert len(scores.failures) == 19
        failed = {failure.index for failure in scores.failures}
        assert failed == set(range(500, 10_000, 500))
        assert scores.rewards == [0.0 if i in failed else float(i) for i in range(10_000)]
        # Replacements may still be starting, but each killed worker has one.
        assert eventually(are_clean)
        assert len(os.listdir("/proc/self/fd")) == fds


def test_workers_do_not_import_heavy_modules():
    code = "import sys, maxrl_fast.rewards.supervisor; print(*{'torch', 'numpy', 'subprocess', 'asyncio'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "\n"

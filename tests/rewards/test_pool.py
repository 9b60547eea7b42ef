import ast
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from io import FileIO

import pytest

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards import pool as module
from maxrl_fast.rewards.pool import FILE_NAME, FULL, RewardOutput
from tests.rewards.pools import (
    FUNCTIONS,
    GB,
    ROOT,
    among_others,
    eventually,
    failures,
    is_alive,
    own_descendants,
    pids,
    pool,
    rewards,
)
from tests.tables import refused


def test_calls_run_in_parallel_in_separate_processes():
    with pool("pid", workers=3) as three:
        found = {*rewards(three.score([{}] * 300))}
        assert found <= {*pids(three)}
        assert len(found) > 1
        assert three.score([]) == []


def test_a_file_can_import_its_neighbours_without_hiding_modules(tmp_path):
    (tmp_path / "neighbour.py").write_text("HALF = 0.5")
    (tmp_path / "json.py").write_text("from neighbour import HALF\ndef f(x): return x * HALF")
    with pool("f", file=tmp_path / "json.py") as two:
        assert rewards(two.score([{"x": 3}])) == [1.5]


FAILURES = {  # of one worker: the kind, the message, and whether the process is replaced
    "eat_bytes": ("memory", "the call needed more memory than its limit", True),
    "exit_now": ("crash", "the worker process exited with code 3", True),
    "segfault": ("crash", "the worker process was killed by SIGSEGV", True),
    "exit_python": ("exception", "SystemExit: 3 (functions.py, line ", False),
    "raise_strange": ("exception", r"'ValueError: \x1b[31m red\n\ud800 \x00 (func", False),
    "raise_unprintable": ("exception", "Unprintable: (its message", False),
}


@pytest.mark.parametrize("action", FAILURES)
def test_a_call_fails_alone(patient, action):
    before, (kind, message, is_replaced) = pids(patient), FAILURES[action]
    outcome = among_others(patient, action)
    assert outcome.kind == kind
    assert outcome.message.startswith(message)
    assert outcome.message.isprintable()
    assert (pids(patient) != before) == is_replaced


@pytest.mark.slow
@pytest.mark.parametrize("action", ["ignore_signals", "backtrack", "leave_program_and_hang"])
def test_a_call_that_hangs_times_out_with_its_processes(hasty, action, tmp_path):
    path = tmp_path / "child"
    arguments = {"path": str(path)} if "leave" in action else {}
    outcome = among_others(hasty, action, **arguments)
    assert (outcome.kind, outcome.message) == ("timeout", "the call ran longer than 1 s")
    assert not arguments or eventually(lambda: not is_alive(int(path.read_text())))


@pytest.mark.slow
def test_time_is_counted_from_the_start_of_a_call_while_another_hangs():
    with pool("lasting", time_limit=2.0) as two:
        before = pids(two)
        hung, *others = two.score([{"seconds": 1000}] + [{"seconds": 1.2}] * 3)
        assert (hung.kind, rewards(others)) == ("timeout", [1.2] * 3)
        assert len({*before} & {*pids(two)}) == 1


def test_the_memory_limit_excludes_memory_of_imports(tmp_path):
    (tmp_path / "large.py").write_text(
        "data = bytearray(200_000_000)\ndef f(size): return sum(map(len, [bytearray(size)]))"
    )
    with pool("f", file=tmp_path / "large.py", memory_limit=100_000_000) as two:
        small, large = two.score([{"size": 50_000_000}, {"size": 150_000_000}])
    assert (small.reward, large.kind) == (50_000_000.0, "memory")


def test_scoring_stops_when_too_many_calls_fail():
    beats, calls = [], [{"action": ""}, *[{"action": "exit_now"}] * 60]
    with pool("act") as two:
        outcomes = two.score(calls, 1, 3, lambda: beats.append(1))
        kinds = [outcome.kind for outcome in outcomes]
        assert (outcomes[0].reward, kinds.count("crash"), kinds.count("left")) == (0.0, 4, 56)
        assert len(beats) >= 5
        assert rewards(two.score([{"action": "", "x": 3.0}] * 5)) == [3.0] * 5


@pytest.mark.parametrize("action", ["fork_and_return", "fork_and_raise"])
def test_a_forked_child_does_not_answer(patient, action):
    for _ in range(2):
        assert among_others(patient, action).reward == 1.0


def test_children_end_with_their_call(patient, tmp_path):
    for path in (tmp_path / "0", tmp_path / "1"):
        assert among_others(patient, "leave_child", path=str(path)).reward == 1.0
        assert eventually(lambda path=path: not is_alive(int(path.read_text())))


def test_servers_that_the_module_starts_outlive_calls_but_not_the_pool(tmp_path):
    (tmp_path / "server.py").write_text(
        "import subprocess\n"
        "server = subprocess.Popen(['sleep', '1000'])\n"
        "def f(x):\n    return server.pid if x else 1 / 0\n"
    )
    with pool("f", workers=1, file=tmp_path / "server.py") as one:
        first, failed, last = one.score([{"x": 1}, {"x": 0}, {"x": 1}])
        assert (failed.kind, first.reward) == ("exception", last.reward)
        server = int(first.reward)
        assert is_alive(server)
    assert eventually(lambda: not is_alive(server))


def test_a_call_does_not_affect_the_next(patient, tmp_path):
    before = pids(patient)
    (tmp_path / "gone").mkdir()
    assert among_others(patient, "change_surroundings", path=str(tmp_path / "gone")).reward == 1.0
    assert among_others(patient, "count").reward > 0
    assert pids(patient) == before


def test_a_deleted_working_directory_fails_no_other_call(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pool("act") as two:
        assert among_others(two, "delete_folder").reward == 1.0
        assert among_others(two, "segfault").kind == "crash"
    assert not (tmp_path / "work").exists()


def test_memory_is_closed_to_other_programs_of_the_user(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import ctypes\ndef f(prompt, response): return float(ctypes.CDLL(None).prctl(3))\n"
    )
    with pool("f", file=file) as workers:
        assert [x.reward for x in workers.score([{"prompt": "", "response": ""}])] == [0.0]
    assert ctypes.CDLL(None).prctl(3) == 0  # PR_GET_DUMPABLE: nor of this process


def test_secrets_are_not_in_the_environment_unless_they_are_named(monkeypatch):
    names = ["OPENAI_API_KEY", "HF_TOKEN", "HTTPS_PROXY", "JUDGE_KEY", "PATH", "HOME"]
    for name in names[:4]:
        monkeypatch.setenv(name, "secret")
    calls = [{"action": "variable", "name": name} for name in names]
    with pool("act", 1, env="JUDGE_KEY") as one:
        assert rewards(one.score(calls)) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    with refused("--reward-env names MISSING_KEY, which is not set"):
        pool("act", env="MISSING_KEY").__enter__()


def test_strings_hash_alike_in_every_process(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "hashes.py").write_text("def f(): return hash('maze') % 2**20\n")
    found = set()
    for _ in range(3):
        with pool("f", 1, file=tmp_path / "hashes.py") as one:
            found.update(rewards(one.score([{}])))
    assert len(found) == 1


BAD_FILES = {
    "def f(:\n": "bad.py failed: SyntaxError: ",
    "x = 1\nraise ValueError('not today')": "ValueError: not today (bad.py, line 2)",
    "import os; os._exit(4)": "the worker process exited with code 4",
    "import time; time.sleep(1000)": "loading it ran longer than 1 s",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_file_that_cannot_be_loaded_is_refused(tmp_path, text, monkeypatch):
    monkeypatch.setattr(module, "START_LIMIT", 1.0 if "sleep" in text else 60.0)
    (tmp_path / "bad.py").write_text(text)
    before = own_descendants()
    with pytest.raises(InputError) as error:
        pool("f", file=tmp_path / "bad.py").__enter__()
    assert f"{tmp_path / 'bad.py'}:f cannot be loaded: " in str(error.value)
    assert BAD_FILES[text] in str(error.value)
    assert own_descendants() == before


def test_a_function_that_can_no_longer_be_loaded_ends_the_scoring_until_it_can(tmp_path):
    path = tmp_path / "once.py"
    path.write_text("import os\ndef f(x): return x if x else os._exit(3)")
    with pool("f", file=path) as two:
        path.write_text("raise OSError('the disk is gone')")
        wanted = "once.py:f cannot be loaded: importing .*: OSError: the disk is gone"
        with pytest.raises(RewardError, match=wanted):
            two.score([{"x": 0}] * 10)
        path.write_text("def f(x): return x + 1")
        assert rewards(two.score([{"x": 1}] * 3)) == [2.0] * 3


@pytest.mark.slow
def test_an_interrupt_leaves_no_process():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = own_descendants()
    with pool("act", time_limit=60.0) as two:
        # Ctrl-C goes to the foreground process group, and workers are in groups of their own
        assert all(os.getpgid(pid) == pid != os.getpgrp() for pid in pids(two))
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            two.score([{"action": "ignore_signals"}] * 10)
        assert rewards(two.score([{"action": "", "x": 1.0}])) == [1.0]
    assert own_descendants() == before
    signal.signal(signal.SIGINT, handler)


TRAINER = """
import sys
from maxrl_fast.config.options import Reward
from maxrl_fast.rewards.pool import RewardPool
pool = RewardPool(f"{sys.argv[1]}:act", Reward(reward_seconds=60.0))
print([worker.process.pid for worker in pool._workers], flush=True)
"""
ENDS = {
    "busy, killed": "pool.score([{'action': 'leave_program_and_hang', 'path': sys.argv[2]}])",
    "holding the lock, killed": "pool.score([{'action': 'backtrack'}] * 2)",
    "never closed": "pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_workers_end_with_the_trainer(tmp_path, end):
    path = tmp_path / "child"
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER + ENDS[end], FUNCTIONS, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as trainer:
        workers = ast.literal_eval(trainer.stdout.readline().decode())
        assert len(workers) == 2
        if "killed" in end:
            assert eventually(lambda: "busy" not in end or (path.exists() and path.read_text()))
            time.sleep(0.5)
            assert all(map(is_alive, workers))
            trainer.kill()
        trainer.wait(20)
        if path.exists():
            workers.append(int(path.read_text()))
        assert eventually(lambda: not any(map(is_alive, workers)))


STOPPED = TRAINER.replace("act", "working").replace("60.0", "4.0") + (
    "print([x.reward for x in pool.score([{'seconds': 0.3}] * 2)], flush=True)"
)


@pytest.mark.slow
@pytest.mark.parametrize("is_all", [False, True])
def test_a_trainer_that_is_stopped_gets_its_reward(is_all):
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, FUNCTIONS], cwd=ROOT, stdout=subprocess.PIPE
    ) as trainer:
        stopped = [trainer.pid, *ast.literal_eval(trainer.stdout.readline().decode()) * is_all]
        time.sleep(0.1)
        for number, pause in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
            for pid in stopped:
                os.kill(pid, number)
            time.sleep(pause)
        assert trainer.stdout.readline() == b"[0.3, 0.3]\n"


@pytest.mark.slow
def test_thousands_of_calls_leak_nothing():
    actions = ["exit_now", "eat_bytes", "raise_strange", "segfault"]
    calls = [{"action": "", "x": float(i)} for i in range(3_000)]
    for i in range(200, 3_000, 200):
        calls[i] = {"action": actions[i // 200 % len(actions)]}
    with pool("act") as two:
        two.score(calls[:300])
        before = len(os.listdir("/proc/self/fd")), len(own_descendants())
        outcomes = two.score(calls)
        assert failures(outcomes).keys() == {*range(200, 3_000, 200)}
        assert all(x.reward in (None, float(i)) for i, x in enumerate(outcomes))
        assert eventually(lambda: len(own_descendants()) == before[1])
        assert len(os.listdir("/proc/self/fd")) == before[0]


PRINTS = """
import os, signal, subprocess, sys
print("loaded", flush=True)

def act(action, x=0.0, text=""):
    if text:
        print(f"<{text}>")
        print(f"<{text}>", file=sys.stderr)
        subprocess.run(["echo", f"<{text}>"])
    if action == "flood":
        print("1234567\\n" * 1_000_000)
        os.write(2, b"1234567\\n" * 1_000_000)
    if action == "forever":
        while True:
            print("1234567\\n" * 1000)
    if action == "end":
        os.kill(os.getpid(), signal.SIGSEGV)
    return x
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    return tmp_path / "prints.py"


@contextlib.contextmanager
def printing(file, workers=1, **options):
    with (
        contextlib.closing(RewardOutput()) as output,
        pool("act", workers, file=file, output=output, **options) as one,
    ):
        yield one, output


def test_prints_of_loading_of_calls_and_of_programs_are_kept_in_order(file, tmp_path):
    with printing(file) as (one, output):
        among_others(one, "", text="first")  # before the file is there
        output.open(tmp_path, is_resumed=False)
        assert among_others(one, "end", text="last words").kind == "crash"
    text = (tmp_path / FILE_NAME).read_text()
    assert text.split("\n") == ["loaded", *["<first>"] * 3, *["<last words>"] * 3, "loaded", ""]


@pytest.mark.parametrize("is_open", [False, True])
def test_a_flood_neither_waits_nor_fills_the_disk(file, tmp_path, is_open, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    with printing(file, time_limit=2.0) as (one, output):
        if is_open:
            output.open(tmp_path, is_resumed=False)
        assert among_others(one, "flood").reward == 0.0
        assert among_others(one, "forever").kind == "timeout"
        output.open(tmp_path, is_resumed=True)
    content = (tmp_path / FILE_NAME).read_bytes()
    assert content.startswith(b"loaded\n1234567\n1234567\n")
    assert len(content) - len(FULL) * content.endswith(FULL) == 100_000


def test_a_resumed_run_appends_and_a_new_one_replaces(file, tmp_path):
    wanted = [(False, b"loaded\n"), (True, b"loaded\n" * 2), (False, b"loaded\n")]
    for is_resumed, content in wanted:
        with printing(file) as (_, output):
            output.open(tmp_path, is_resumed)
        assert (tmp_path / FILE_NAME).read_bytes() == content


def test_a_full_disk_stops_no_call(file, tmp_path):
    with printing(file) as (one, output):
        output.open(tmp_path, is_resumed=False)
        output._file = FileIO("/dev/full", "wb")
        assert among_others(one, "flood", text="lost").reward == 0.0


@pytest.mark.slow
def test_a_run_has_the_file(shared_run):
    lines = (shared_run("text") / FILE_NAME).read_text().splitlines()
    assert all(line.startswith("seen ") for line in lines)
    # 4 rehearsed, two evaluations of 7 x 6, two steps of 4 x 4
    assert len(lines) == 4 + 2 * 42 + 2 * 16


@pytest.fixture(scope="module")
def patient():
    with pool("act", workers=1, time_limit=30.0, memory_limit=GB // 4) as one:
        yield one


@pytest.fixture(scope="module")
def hasty():
    with pool("act", time_limit=1.0) as one:
        yield one

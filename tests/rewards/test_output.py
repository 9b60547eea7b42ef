import contextlib
from io import FileIO

import pytest

from maxrl_fast.rewards import pool as module
from maxrl_fast.rewards.pool import FILE_NAME, FULL, RewardOutput
from tests.rewards.pools import among_others, pool

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

"""What a run prints in terminals of several widths, by a terminal of this process or by a
pseudo-terminal, and in a file.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from maxrl_fast.job.screen import Screen, wrapped
from tests.runs import SMALL

NOTE = "reward 0.512  solved 0.710  entropy 1.234  length 12.3  grad 0.05  78,695 tokens/s"
NUMBERS = NOTE.split("  ")


def drawn(width, note=NOTE, name="train", total=90, done=12):
    file = io.StringIO()
    screen = Screen(Console(file=file, force_terminal=True, width=width, color_system="standard"))
    with screen.stage(name, total) as stage:
        stage.advance(done, note)
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", file.getvalue()).rstrip()
    return re.split(r"[\r\n]", shown)[-1].rstrip()


@pytest.mark.parametrize("width", [40, 80, 132, 200])
def test_the_step_the_total_and_the_time_left_are_visible_in_every_width(width):
    line = drawn(width)
    wanted = r"train +(━+[╸╺]?━* +)?12/90 (\d:\d\d:\d\d )?left (-:--:--|\d+:\d\d:\d\d)"
    assert re.match(wanted, line), line
    assert len(line) <= width
    assert "…" not in line
    shown = [number for number in NUMBERS if number in line]
    assert shown == NUMBERS[: len(shown)]  # whole numbers, from the left
    # as many as have room
    assert len(line) + 2 + len(NUMBERS[len(shown)]) > width if len(shown) < len(NUMBERS) else True


def test_the_bar_is_the_first_to_go():
    assert "━" in drawn(200)
    assert NOTE in drawn(200)
    without = next(width for width in range(199, 30, -1) if "━" not in drawn(width))
    assert NOTE in drawn(without)
    # the time since the start is still there
    assert re.search(r"12/90 \d:\d\d:\d\d left", drawn(without))
    assert "━" in drawn(80, note="loss 2.296", name="warm start")  # which has the room


def test_lines_are_wrapped_between_words():
    text = "policy: a decoder of many words, new\n  a = 1\nresults in " + "x" * 50
    assert wrapped(text, 24).splitlines() == [
        *("policy: a decoder of", "  many words, new", "  a = 1", "results in", "  " + "x" * 50)
    ]
    assert wrapped(text, 200) == text


def printed_in_terminal(width, command):
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {x: y for x, y in os.environ.items() if x not in ("COLUMNS", "LINES")}
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen(command, env=environment | {"TERM": "xterm"}, **ends)
    os.close(terminal)
    written = b""
    while True:
        try:
            block = os.read(reader, 65536)
        except OSError:  # all who wrote have ended
            break
        written += block
    os.close(reader)
    assert process.wait(60) == 0
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", written.decode())


@pytest.mark.slow
def test_nothing_that_a_run_prints_is_wider_than_the_terminal(tmp_path):
    width = 60
    # Both streams of the run are the terminal, and the run has a warning: its rewards stay 0.
    flags = [*SMALL, *"--sft-steps 2 --steps 12 --lr 1e-9 --out run".split()]
    command = [sys.executable, "-m", "maxrl_fast.train", *flags]
    printed = printed_in_terminal(
        width, ["env", "-C", str(tmp_path), f"PYTHONPATH={os.getcwd()}", *command]
    )
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", printed)]
    assert max(map(len, lines)) <= width
    assert any(line.startswith("policy: 2-layer qwen2 decoder (native), ") for line in lines)
    assert "warning: " in printed
    assert all(words in printed for words in ("warm start", "evaluate", "held-out prompts"))
    assert any(re.match(r"train +(━+ )?12/12 ", line) for line in lines)


def test_in_a_file_every_statement_is_one_line(capsys):
    screen = Screen()
    screen.info("word " * 60)
    screen.warning("word " * 60)
    with screen.stage("evaluate", 8) as stage:
        stage.advance(8)
    output = capsys.readouterr()
    assert output.out == "word " * 60 + "\nevaluate 8/8  0 s left\n"
    assert output.err == "warning: " + "word " * 60 + "\n"

"""What a run prints in terminals of several widths, and in a file."""

import io
import re

import pytest
from rich.console import Console

from maxrl_fast.job.screen import Screen, wrapped

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


def test_lines_are_wrapped_between_words():
    text = "policy: a decoder of many words, new\n  a = 1\nresults in " + "x" * 50
    assert wrapped(text, 24).splitlines() == [
        *("policy: a decoder of", "  many words, new", "  a = 1", "results in", "  " + "x" * 50)
    ]
    assert wrapped(text, 200) == text


def test_in_a_file_every_statement_is_one_line(capsys):
    screen = Screen()
    screen.info("word " * 60)
    screen.warning("word " * 60)
    with screen.stage("evaluate", 8) as stage:
        stage.advance(8)
    output = capsys.readouterr()
    assert output.out == "word " * 60 + "\nevaluate 8/8  0 s left\n"
    assert output.err == "warning: " + "word " * 60 + "\n"

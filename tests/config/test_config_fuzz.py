"""Any flags and any TOML file give a possible configuration, or a message and exit code 2."""

import contextlib
import io
import json
import math
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import InputError
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.objectives.registry import OBJECTIVES
from tests.fuzzing import settings

OPTIONS = {name: x for name, x in parse([]).values().items() if name not in ("config", "parts")}
FLAGS = sorted(name for name, value in OPTIONS.items() if isinstance(value, bool))
VALUED = sorted(OPTIONS.keys() - set(FLAGS))
WORDS = ["", *"0 1 2 -1 16 0.5 1e-3 nan inf -inf 1e400 None none true x --".split()]
WORDS += ["9" * 30, "9" * 5000, "4 ", "a\0b", "\ud800", "x" * 300]
WORDS += "0x10 1_000 é a=b ../.. /dev/null /nowhere/x cpu".split()
WORDS += "eps=1e-4 eps=nan eps=1e999 tau=inf quantile=2 = float32 auto rloo q_proj".split()
NUMBERS = [
    *(0, 1, 2, 3, 4, 16, -1, 2**31, 2**63, 10**30, 10**400, 0.0, 0.5, 1.0, 1e-3),
    *(0.999, -0.5, 1e300, math.nan, math.inf),
]


def outcome(flags):
    """Return the configuration and None, or None and the message that refuses the flags."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            config = parse(flags)
            return resolve(config, MazeTask(9), Ranks()), None
    except InputError as error:
        return None, str(error)
    except SystemExit as stop:
        return None, said.getvalue() if stop.code == 2 else ""


def assert_explained(reason):
    words = (
        r"must|needs|requires|is not used|does not support|cannot|is only a flag|unknown "
        r"option|was asked for"
    )
    assert re.search(rf"\b({words})", reason), reason


def assert_possible(config):
    """Check the ranges that no later code checks again."""
    options = config.flat()
    for name, value in options.items():
        assert not isinstance(value, float) or math.isfinite(value), name
    for (
        name
    ) in "prompts rollouts max_new_tokens layers heads kv_heads threads token_budget".split():
        assert options[name] >= 1, name
    assert 0 <= options["seed"] < 2**63
    assert options["hidden_size"] % options["heads"] == options["heads"] % options["kv_heads"] == 0
    assert options["prompts"] % options["updates_per_step"] == 0
    row = ESTIMATORS.get(options["objective"])
    if row is not None and row.size is not None:
        size = options[row.size.name]
        assert row.size.smallest <= size <= options["rollouts"] - row.size.below_n
    assert options["top_p"] > 0
    json.dumps(options, allow_nan=False)


@settings(40)
@hypothesis.given(st.data())
def test_any_flags(data):
    names = data.draw(st.lists(st.sampled_from(VALUED), max_size=4))
    values = st.one_of(
        st.sampled_from(WORDS), st.sampled_from(NUMBERS).map(str), st.text(max_size=5)
    )
    flags = [
        *"--device cpu --dtype float32 --objective".split(),
        data.draw(st.sampled_from(sorted(OBJECTIVES))),
    ]
    for name in names:
        flag, value = "--" + name.replace("_", "-"), data.draw(values)
        flags += [f"{flag}={value}"] if data.draw(st.booleans()) else [flag, value]
    flags += [
        "--" + name.replace("_", "-")
        for name in data.draw(st.lists(st.sampled_from(FLAGS), max_size=2))
    ]
    flags += data.draw(st.lists(st.sampled_from(WORDS), max_size=1))
    config, reason = outcome(flags)
    if config is None:
        assert_explained(reason)
    else:
        assert_possible(config)


def outcome_of_file(text):
    with FILE.open("wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    return outcome(["--config", str(FILE)])


FILE = Path("unset")


@pytest.fixture(autouse=True, scope="module")
def file(tmp_path_factory):
    global FILE
    FILE = tmp_path_factory.mktemp("fuzz") / "run.toml"
    return FILE


TEXTS = [
    *'[ ] { } [a] [[a]] " \' """ # \\ é . order=0x10'.split(),
    *("k = ", "= 4", "\n", "lr = 1e-3", "k = 4", "\0", "9" * 5000, "k = {a = 1}"),
    *("k = [1, [2]]", "k = 1979-05-27", "k = 07:32:00", "k.a = 4", "\r", "\ud7ff"),
]


@settings(40)
@hypothesis.given(
    st.one_of(st.lists(st.sampled_from(TEXTS), max_size=6).map("".join), st.binary(max_size=20))
)
def test_any_text_as_a_file(text):
    config, reason = outcome_of_file(text)
    if config is None:
        assert_explained(reason)
    else:
        assert_possible(config)

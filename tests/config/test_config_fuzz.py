import contextlib
import io
import json
import math
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import InputError
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.objectives.registry import OBJECTIVES
from tests.fuzzing import settings

OPTIONS = {name: x for name, x in parse([]).values.items() if name != "config"}
WORDS = ["", *"0 1 2 -1 16 0.5 1e-3 nan inf -inf 1e400 None none true x -- float32 auto".split()]
WORDS += ["9" * 30, "9" * 5000, "4 ", "a\0b", "\ud800", "x" * 300]
WORDS += "0x10 1_000 é a=b ../.. /dev/null /nowhere/x cpu eps=nan = rloo q_proj".split()
WORDS += [*map(str, (2**31, 2**63, 10**400, 0.999, -0.5, 1e300))]
TEXTS = [
    *'[ ] { } [a] [[a]] " \' """ # \\ é . order=0x10'.split(),
    *("k = ", "= 4", "\n", "lr = 1e-3", "k = 4", "\0", "9" * 5000, "k = {a = 1}"),
    *("k = [1, [2]]", "k = 1979-05-27", "k = 07:32:00", "k.a = 4", "\r", "\ud7ff"),
]
EXPLAINED = r"\b(must|needs|requires|is not used|cannot|is only a flag|unknown option|leaves out)"


def check(flags):
    """Flags are refused in a sentence, or what no later code checks again is possible."""
    said, reason = io.StringIO(), ""
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            options = resolve(parse(flags), MazeTask(9)).flat()
    except InputError as error:
        reason = str(error)
        options = {}
    if not options:
        assert re.search(EXPLAINED, reason), reason
        return
    assert all(math.isfinite(x) for x in options.values() if isinstance(x, float))
    counts = "prompts rollouts max_new_tokens layers heads kv_heads threads token_budget top_p"
    assert all(options[name] > 0 for name in counts.split())
    assert 0 <= options["seed"] < 2**63
    assert options["hidden_size"] % options["heads"] == options["heads"] % options["kv_heads"] == 0
    assert options["prompts"] % options["updates_per_step"] == 0
    row = ESTIMATORS.get(options["objective"])
    if row is not None and row.size is not None:
        size = options[row.size.name]
        assert row.size.smallest <= size <= options["rollouts"] - row.size.below_n
    json.dumps(options, allow_nan=False)


@settings(40)
@hypothesis.given(st.data())
def test_any_flags(data):
    objective = data.draw(st.sampled_from(sorted(OBJECTIVES)))
    flags = [*"--device cpu --dtype float32 --objective".split(), objective]
    for name in data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5)):
        flag = "--" + name.replace("_", "-")
        value = data.draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=5)))
        if isinstance(OPTIONS[name], bool) and data.draw(st.booleans()):
            flags.append(flag)
        else:
            flags += [f"{flag}={value}"] if data.draw(st.booleans()) else [flag, value]
    check([*flags, *data.draw(st.lists(st.sampled_from(WORDS), max_size=1))])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "run.toml"


@settings(40)
@hypothesis.given(
    text=st.one_of(
        st.lists(st.sampled_from(TEXTS), max_size=6).map(lambda x: "".join(x).encode()),
        st.binary(max_size=20),
    )
)
def test_any_text_as_a_file(text, file):
    file.write_bytes(text)
    check(["--config", str(file)])

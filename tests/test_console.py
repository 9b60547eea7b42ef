import os
import re
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from maxrl_fast.runtime import output as console


@pytest.mark.parametrize("name", console.COMMANDS)
def test_every_command_prints_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        console.main([name, "--help"])
    assert exit_.value.code == 0
    assert f"maxrl_fast.{name} " in capsys.readouterr().out


def test_help_lists_the_commands_and_imports_none():
    code = "import sys; from maxrl_fast.__main__ import main; main(['--help']); "
    code += "assert 'torch' not in sys.modules"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert all(f"\n  {name} " in printed for name in console.COMMANDS)


def test_the_script_calls_this_module():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (target,) = re.findall('^maxrl-fast = "(.*)"$', text, re.MULTILINE)
    assert EntryPoint("maxrl-fast", target, "console_scripts").load() is console.main


def test_a_closed_pipe_makes_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command, options = [sys.executable, "-m", "maxrl_fast", "--help"], {"check": False}
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, **options)
    os.close(writer)
    assert (process.returncode, process.stderr) == (0, b"")


STOPS = "import os, time\ntry: os.kill(os.getpid(), 2); time.sleep(9)\nfinally: 1 / 0"
LACKS = "raise ModuleNotFoundError(name='torch')"


@pytest.mark.parametrize("words", ["train", " sweep"])
@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (STOPS, -signal.SIGINT, ""),
        (LACKS, 2, "error: .* has no package torch: activate .*source .venv/bin/activate.*"),
    ],
)
def test_what_ends_the_import_of_a_command(words, content, code, message, tmp_path):
    """In place of torch there is a package that does this, and swallows exceptions."""
    (tmp_path / "torch.py").write_text(content)
    module, *arguments = f"maxrl_fast.{words}".replace(". ", " ").split(" ")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command, options = [sys.executable, "-m", module, *arguments], {"timeout": 60, "check": False}
    options["env"] = {**os.environ, "PYTHONPATH": paths}
    # which a background job ignores
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.run(command, capture_output=True, text=True, **options)
    assert process.returncode == code
    assert re.fullmatch(message, process.stderr.strip())


@pytest.mark.parametrize(
    "words",
    [
        *("train --lr x", "train --dtype int8", "evaluate", "report", "sweep --seeds a"),
        *("objectives nope", "train --objective nope", "nothing"),
    ],
)
def test_errors_are_one_line_without_a_box(words, capsys):
    """A usage, a box, or a list of choices in another order each time is not a sentence."""
    outputs = []
    for _ in range(2):
        assert console.main(words.split()) == 2
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    assert outputs[0].out == ""
    assert outputs[0].err.startswith("error: ")
    assert outputs[0].err.count("\n") == 1
    assert outputs[0].err.isascii()

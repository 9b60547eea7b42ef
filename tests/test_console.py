"""The console script: it dispatches to four commands, and imports none of them before it is called."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from maxrl_fast import __main__ as console


@pytest.mark.parametrize("name", console.COMMANDS)
def test_every_command_prints_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        console.main([name, "--help"])
    assert exit_.value.code == 0
    assert f"maxrl_fast.{name} " in capsys.readouterr().out


def test_a_command_gets_its_arguments_and_returns_its_exit_code(capsys):
    assert console.main(["objectives"]) == 0
    assert "maxpo" in capsys.readouterr().out
    assert console.main(["train", "--prompts", "0"]) == 2
    assert "prompts must be" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["trian"], ["--steps", "3"]])
def test_an_unknown_command_exits_with_2(arguments, capsys):
    assert console.main(arguments) == 2
    got = arguments[0] if arguments else "none"
    assert capsys.readouterr() == ("", f"error: the command must be train, evaluate, report or objectives, got {got}\n")


def test_help_lists_the_commands_and_imports_none():
    code = "import sys; from maxrl_fast.__main__ import main; main(['--help']); assert not {'torch', 'tyro'} & set(sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in printed for name in console.COMMANDS)


def test_the_script_calls_this_module():
    (target,) = re.findall('^maxrl-fast = "(.*)"$', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    assert EntryPoint("maxrl-fast", target, "console_scripts").load() is console.main

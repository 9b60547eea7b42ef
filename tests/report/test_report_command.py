"""The command `python -m maxrl_fast.report`: bad input is refused, and a page is replaced
completely or kept."""

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.changes import OF_ONE_START, OF_TASK
from maxrl_fast.config.options import Config
from maxrl_fast.config.rules import owners_by_option
from maxrl_fast.report import main
from maxrl_fast.tasks.gym import GymOptions
from tests.browser.made_up import write_run


def refusal(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_bad_input_is_refused(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "report.html"
    write_run(run)
    assert "RUN must be 1 to 24 folders, got 0" in refusal(capsys)
    for folder in (tmp_path / "absent", tmp_path):
        assert "has neither" in refusal(capsys, folder, "--out", out)
    assert "ends in .html" in refusal(capsys, run, "--out", run / "metrics.jsonl")
    for text, said in (
        ("", "must hold at least one step"),
        ('{"step": 1}\nnonsense\n', "line 2 of"),
        ('{"reward_mean": 1}\n', "KeyError: 'step'"),
        ("[1]\n", "cannot read"),
    ):
        (run / "metrics.jsonl").write_text(text)
        assert said in refusal(capsys, run, "--out", out)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "eval.json").write_text('{"pass_at_k": {}}')
    assert "must hold pass@k" in refusal(capsys, tmp_path / "evaluation", "--out", out)
    assert not out.exists()


def test_an_existing_page_is_replaced_completely_or_kept(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")
    out = tmp_path / "report.html"
    out.write_text("the page before")

    def full(path):
        raise OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr("maxrl_fast.runtime.files.fsync", full)
        assert main([str(tmp_path / "run"), "--out", str(out)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]
    assert main([str(tmp_path / "run"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report {out}\n"
    assert out.read_text().startswith("<!doctype html>")


def test_the_names_that_it_reads_are_those_of_the_options():
    assert Config.options().keys() >= {*OF_ONE_START}
    own = {*owners_by_option("task"), "task"} - {"sft_data"}
    assert own | set(options_of(GymOptions)) == {*OF_TASK}

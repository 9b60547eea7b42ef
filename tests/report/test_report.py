"""`python -m maxrl_fast.report` embeds any contents of the files safely. tests/browser tests how the page draws them."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

from maxrl_fast.ops import effective_weight
from maxrl_fast.report import main, reading
from maxrl_fast.report.page import KEY_OPTIONS
from tests.browser.made_up import HOSTILE, KEYS, write_evaluation, write_lines, write_run


class Page(HTMLParser):
    """The elements of a page, and the text in each script and style, as a browser would find them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.is_open = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")
        self.is_open = True

    def handle_endtag(self, tag):
        self.is_open = False

    def handle_data(self, data):
        if self.is_open:
            self.texts[-1] += data

    def text_of(self, tag, **attributes):
        (text,) = [
            text
            for (name, own), text in zip(self.tags, self.texts, strict=True)
            if name == tag and attributes.items() <= own.items()
        ]
        return text

    @property
    def data(self):
        return json.loads(self.text_of("script", id="data"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture
def report(tmp_path):
    def make(*runs):
        out = tmp_path / "report.html"
        assert main([*map(str, runs), "--out", str(out)]) == 0
        return Page(out.read_text(encoding="utf-8"))

    return make


def refusal(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_embedded_numbers_equal_the_files(tmp_path, report):
    records = {name: write_run(tmp_path / name, seed=i, steps=30 + i) for i, name in enumerate(("one", "two"))}
    for run in report(tmp_path / "one", tmp_path / "two").data["runs"]:
        written, folder = records[run["name"]], tmp_path / run["name"]
        assert run["steps"] == [record["step"] for record in written]
        assert run["metrics"] == {key: [record[key] for record in written] for key in KEYS}
        evaluations = [json.loads(line) for line in (folder / "eval.jsonl").open()]
        assert run["eval_steps"] == [record["step"] for record in evaluations]
        assert run["eval_metrics"] == {"truncated": [record["truncated"] for record in evaluations]}
        for found, record in zip(run["coverage"], evaluations, strict=True):
            assert found == {
                "step": record["step"],
                "rows": [[int(k), value, None, None] for k, value in record["pass_at_k"].items()],
            }
        diagnosed = [json.loads(line) for line in (folder / "diagnostics.jsonl").open()]
        for key, name in (("id", "ids"), ("pass_rate", "pass_rate"), ("grad_norm", "grad_norm")):
            assert run["points"][key] == [value for record in diagnosed for value in record[name]]
        assert run["points"]["step"] == [10] * 3 + [20] * 3
        samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        assert run["samples"] == [sample | {"left_out": 0} for sample in samples]
        assert run["seconds"] == {"rollout": 12.25, "update": 37.75}
        assert run["seconds_from"] == "timings.json"
        assert run["warnings"] == [{"step": 12, "kind": "entropy", "message": f"it fell {HOSTILE}"}]
        assert run["notes"] == []


def test_key_options_and_differing_options_are_shown(tmp_path, report):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", maze_size=11, objective="maxrl", k=None, order=15, out="elsewhere", resume="x", data="y" * 1000)
    data = report(tmp_path / "one", tmp_path / "two").data
    assert data["key_options"] == list(KEY_OPTIONS)
    assert data["differing"] == ["maze_size", "data"]
    assert [run["options"]["maze_size"] for run in data["runs"]] == [9, 11]
    assert data["runs"][1]["options"]["data"] == "y" * 200


@pytest.mark.parametrize(
    ("options", "estimator", "size"),
    [
        ({"objective": "maxpo", "k": 3, "rollouts": 7}, "maxpo", {"k": 3}),
        ({"objective": "maxrl", "k": None, "order": 5, "rollouts": 9}, "maxrl", {"order": 5}),
        ({"objective": "grpo", "k": None, "rollouts": 8, "ddof": 0}, "grpo", {"ddof": 0.0}),
    ],
)
def test_weights_are_exact_at_the_runs_size(tmp_path, report, options, estimator, size):
    write_run(tmp_path / "run", **options)
    data = report(tmp_path / "run").data
    rates = torch.tensor(data["pass_rates"], dtype=torch.float64)
    expected = effective_weight(estimator, options["rollouts"], rates, **size)
    assert data["runs"][0]["weight"] == {"values": expected.tolist()}
    assert data["pass_rates"][0] == pytest.approx(1e-3)
    assert data["pass_rates"][-1] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"objective": "pacs", "k": None}, "has no W_N"),
        ({"objective": "unlikeliness", "k": None}, "the weight of unlikeliness"),
        ({"objective": "nothing"}, "not known: 'nothing'"),
        ({"objective": ["maxpo"]}, "not known"),
        ({"rollouts": 10**6}, "must be 1 to 2,048"),
        ({"rollouts": "16"}, "must be 1 to 2,048"),
        ({"k": 16}, "maxpo needs"),
        ({"k": [4]}, "maxpo needs"),
        ({"objective": "grpo", "k": None, "eps": "x"}, "eps must be a finite number"),
    ],
)
def test_a_missing_weight_has_a_reason(tmp_path, report, options, reason):
    write_run(tmp_path / "run", **options)
    assert reason in report(tmp_path / "run").data["runs"][0]["weight"]["reason"]


def test_hostile_text_stays_in_the_data(tmp_path, report):
    name = "</script><b>&"
    write_run(tmp_path / name.replace("/", "∕"), task=HOSTILE)
    page = report(tmp_path / name.replace("/", "∕"))
    assert [tag for tag, _ in page.tags].count("script") == 2  # the data and the program
    assert not any(tag in ("img", "b", "iframe", "object", "link") for tag, _ in page.tags)
    embedded = page.text_of("script", id="data")
    assert not set(embedded) & set("<>&\u2028\u2029\x00")
    assert embedded.isascii()
    assert page.data["runs"][0]["samples"][3]["response"] == f"needle {HOSTILE}"


def test_the_page_makes_no_network_requests(tmp_path, report):
    write_run(tmp_path / "run")
    page = report(tmp_path / "run")
    (policy,) = [
        own["content"] for tag, own in page.tags if tag == "meta" and own.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    programs = [
        text for (tag, own), text in zip(page.tags, page.texts, strict=True) if tag == "script" and own.get("id") != "data"
    ]
    for rule, text in (("script-src", programs[0]), ("style-src", page.text_of("style"))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    (program,) = programs
    assert re.findall(r"https?://[^'\"` ]*", program + page.text_of("style")) == ["http://www.w3.org/2000/svg"]  # a namespace
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|fetch\(|XMLHttp", program)
    assert not re.search(r"url\((?!#)|@import", page.text_of("style"))
    assert not any({"src", "href", "style", "onclick"} & own.keys() for _, own in page.tags)


def test_a_run_in_progress_without_optional_files(tmp_path, report, capsys):
    records = write_run(tmp_path / "run")
    for name in ("eval.jsonl", "warnings.jsonl", "diagnostics.jsonl", "samples.jsonl", "timings.json", "config.json"):
        (tmp_path / "run" / name).unlink()
    timed = [record | {"rollout_seconds": 0.5, "train_seconds": 0.25} for record in records]
    write_lines(tmp_path / "run" / "metrics.jsonl", timed)
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(whole[:-30])
    (run,) = report(tmp_path / "run").data["runs"]
    assert run["steps"] == list(range(1, 30))
    assert run["seconds"] == {"rollout": 29 * 0.5, "train": 29 * 0.25}
    assert run["seconds_from"] == "metrics.jsonl"
    assert run["coverage"] == run["samples"] == run["warnings"] == []
    assert run["weight"]["reason"] == "the objective is not known"
    torn = "the last line of metrics.jsonl is incomplete and was skipped: the run was still writing, or was killed"
    assert run["notes"] == ["config.json is missing", torn]
    assert f"warning: run: {torn}" in capsys.readouterr().err
    (tmp_path / "run" / "metrics.jsonl").write_bytes(whole[:-1])  # only the line break is missing
    assert report(tmp_path / "run").data["runs"][0]["steps"] == list(range(1, 31))


def test_a_value_that_is_not_a_finite_number_is_a_gap(tmp_path, report):
    out = tmp_path / "run"
    write_run(out)
    text = (
        '{"step": 2, "reward_mean": NaN, "loss": Infinity, "kl": "NaN", "entropy": true, "new": 5}\n'
        '{"step": 1, "reward_mean": 0.1, "loss": -Infinity, "kl": 1e999, "entropy": 0.25, "text": "x"}\n'
        f'{{"step": 3, "loss": 1{"0" * 400}, "kl": 2}}\n'
        'nonsense\n{"step": 2.5}\n[1]\n{"reward_mean": 1}\n{"step": 4, "loss": ' + "[" * 100_000 + "\n"
        '{"step": 5}\n{"step": 5, "kl": 7}\n'
    )
    (out / "metrics.jsonl").write_text(text)
    (run,) = report(out).data["runs"]
    assert run["steps"] == [1, 2, 3, 5]
    assert run["metrics"] == {
        "reward_mean": [0.1, None, None, None],
        "loss": [None, None, None, None],
        "kl": [None, None, 2, 7],
        "entropy": [0.25, None, None, None],
        "new": [None, 5, None, None],
    }
    assert run["notes"] == [
        "3 lines, the first of them 4, of metrics.jsonl cannot be read and were skipped",
        "2 lines of metrics.jsonl have no step and were skipped",
    ]


def test_an_evaluation_is_shown_beside_a_run(tmp_path, report):
    content = write_evaluation(tmp_path / "evaluation")
    write_run(tmp_path / "run")
    evaluation, run = report(tmp_path / "evaluation", tmp_path / "run").data["runs"]
    assert (evaluation["kind"], run["kind"]) == ("evaluation", "run")
    rows = [[int(k), value["mean"], value["low"], value["high"]] for k, value in content["coverage"].items()]
    assert evaluation["coverage"] == [{"step": None, "rows": rows}]
    assert evaluation["seconds"] == {"rollout": 2.5}
    assert [sample["step"] for sample in evaluation["samples"]] == [None]
    (tmp_path / "evaluation" / "eval.json").write_text('{"pass_at_k": {"4": 0.5, "1": 0.25, "x": 1, "2": "0.3", "0": 1}}')
    assert report(tmp_path / "evaluation").data["runs"][0]["coverage"][0]["rows"] == [
        [1, 0.25, None, None],
        [4, 0.5, None, None],
    ]


def test_large_files_are_thinned_with_a_note(tmp_path, report, monkeypatch):
    monkeypatch.setattr(reading, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(reading, "MOST_POINTS", 10)
    monkeypatch.setattr(reading, "LINE_BYTES", 5_000)
    monkeypatch.setattr(reading, "TEXT_LENGTH", 100)
    out = tmp_path / "run"
    write_run(out)
    samples = [{"step": 1, "id": i, "prompt": "p" * 150, "response": "", "reward": 1.0} for i in range(100)]
    write_lines(out / "samples.jsonl", [*samples[:50], {"step": 1, "prompt": "p" * 20_000}, *samples[50:]])
    write_lines(out / "diagnostics.jsonl", [{"step": s, "pass_rate": [0.5] * 4, "grad_norm": [1.0] * 4} for s in range(8)])
    (run,) = report(out).data["runs"]
    assert [sample["id"] for sample in run["samples"]] == list(range(0, 100, 4))
    assert all(sample["prompt"] == "p" * 100 and sample["left_out"] == 50 for sample in run["samples"])
    assert run["points"]["step"] == [0] * 4 + [4] * 4
    assert run["points"]["id"] == [None] * 8
    assert run["notes"] == [
        "one of 4 lines of diagnostics.jsonl is shown, because there are many",
        "line 51 of samples.jsonl cannot be read and was skipped",
        "one of 4 lines of samples.jsonl is shown, because there are many",
    ]


def test_folders_of_the_same_name_get_unique_names(tmp_path, report):
    for name in ("a/run", "b/run", "c"):
        write_run(tmp_path / name)
    folders = [tmp_path / name for name in ("a/run", "b/run", "b/run", "c")]
    assert [run["name"] for run in report(*folders).data["runs"]] == ["a/run", "b/run (2)", "b/run (3)", "c"]


def test_bad_input_is_refused(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "report.html"
    write_run(run)
    assert "RUN must be 1 to 24 folders, got 0" in refusal(capsys)
    assert "got 25" in refusal(capsys, *[run] * 25)
    assert "is not a folder" in refusal(capsys, tmp_path / "absent", "--out", out)
    assert "is not a folder" in refusal(capsys, run / "config.json", "--out", out)
    assert "has neither" in refusal(capsys, tmp_path, "--out", out)
    assert "ends in .html" in refusal(capsys, run, "--out", run / "metrics.jsonl")
    (tmp_path / "folder.html").mkdir()
    assert "is a folder" in refusal(capsys, run, "--out", tmp_path / "folder.html")
    assert "an existing folder" in refusal(capsys, run, "--out", tmp_path / "absent" / "report.html")
    (run / "metrics.jsonl").write_text("")
    assert "at least one step" in refusal(capsys, run, "--out", out)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "must be a regular file, got a folder" in refusal(capsys, run, "--out", out)
    (run / "metrics.jsonl").rmdir()
    os.mkfifo(run / "metrics.jsonl")
    assert "must be a regular file, got a pipe" in refusal(capsys, run, "--out", out)
    for content in ("[1]", "{", '{"pass_at_k": {}}', '{"pass_at_k": 3}', "[" * 100_000):
        (tmp_path / "evaluation").mkdir(exist_ok=True)
        (tmp_path / "evaluation" / "eval.json").write_text(content)
        assert "must hold pass@k" in refusal(capsys, tmp_path / "evaluation", "--out", out)
    assert not out.exists()


def test_an_existing_page_is_replaced_completely_or_kept(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")
    out = tmp_path / "report.html"
    out.write_text("the page before")
    with monkeypatch.context() as patch:
        patch.setattr("maxrl_fast.files.durable.fsync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert main([str(tmp_path / "run"), "--out", str(out)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]
    assert main([str(tmp_path / "run"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report {out}\n"
    assert out.read_text().startswith("<!doctype html>")


def test_the_command_writes_a_page(tmp_path):
    write_run(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "maxrl_fast.report", str(tmp_path / "run")], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "report report.html\n", "")
    assert (tmp_path / "report.html").stat().st_size > 50_000

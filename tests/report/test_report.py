"""`python -m maxrl_fast.report` embeds any contents of the files safely. tests/browser tests how
the page draws them."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from maxrl_fast.report import main
from maxrl_fast.report.page import read_folder
from tests.browser.made_up import HOSTILE, KEYS, write_evaluation, write_run
from tests.runs import read

VENDORED = {  # SHA-256 of the files of uplot 1.6.32 as npm distributes them
    "uPlot-LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
LAZY = ("pass_rates.jsonl", "rollouts.jsonl")


class Page(HTMLParser):
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
        elements = zip(self.tags, self.texts, strict=True)
        [text] = [x for (y, own), x in elements if y == tag and attributes.items() <= own.items()]
        return text

    @property
    def data(self):
        data = parsed(self.text_of("script", id="data"))
        text = self.text_of("script", id="samples-data")
        packed = parsed(gzip.decompress(base64.b64decode(text, validate=True)))
        for run, lazy in zip(data["runs"], packed["runs"], strict=True):
            run["prompts"] = lazy["prompts"]
            for key in ("samples", "rollouts"):
                run[key] = [x | {"prompt": packed["texts"][x["prompt"]]} for x in lazy[key]]
                assert run["shown"][key] == len(run[key])
        return data


def parsed(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture
def report(tmp_path):
    def make(*runs):
        out = tmp_path / "report.html"
        assert main([*map(str, runs), "--out", str(out)]) == 0
        return Page(out.read_text(encoding="utf-8"))

    return make


def test_embedded_numbers_equal_the_files(tmp_path, report):
    names = enumerate(("one", "two"))
    records = {name: write_run(tmp_path / name, seed=i, steps=30 + i) for i, name in names}
    for run in report(tmp_path / "one", tmp_path / "two").data["runs"]:
        written, folder = records[run["name"]], tmp_path / run["name"]
        assert run["steps"] == [record["step"] for record in written]
        assert run["metrics"] == {key: [record[key] for record in written] for key in KEYS}
        evaluations = read(folder / "eval.jsonl")
        assert run["eval_steps"] == [record["step"] for record in evaluations]
        assert run["eval_metrics"] == {"truncated": [record["truncated"] for record in evaluations]}
        for found, record in zip(run["coverage"], evaluations, strict=True):
            rows = [[int(k), value, None, None] for k, value in record["pass_at_k"].items()]
            assert found == {"step": record["step"], "rows": rows}
        nothing = {"advantage": None, "components": {}, "answer": "", "columns": ""}
        own = {"left_out": 0, "turns": None}
        assert run["samples"] == [x | nothing | own for x in read(folder / "samples.jsonl")]
        rollouts = read(folder / "rollouts.jsonl")
        assert run["rollouts"] == [
            x | own | {"columns": json.dumps(x["columns"])} for x in rollouts
        ]
        assert run["in_files"] == {"samples": 26, "rollouts": 24}
        counts = read(folder / "pass_rates.jsonl")
        assert (run["prompts"]["ids"], run["prompts"]["num_prompts"]) == (list(range(30)), 30)
        assert run["prompts"]["texts"] == [[i, f"held out {i} {HOSTILE}"] for i in range(29)]
        assert run["prompts"]["evaluations"] == [
            {key: c[key] for key in ("step", "num_samples", "num_correct")} for c in counts
        ]
        assert run["warnings"] == read(folder / "warnings.jsonl") != []
        assert run["notes"] == []


def test_hostile_text_stays_in_the_data(tmp_path, report):
    name = "</script><b>&"
    write_run(tmp_path / name.replace("/", "∕"), task=HOSTILE)
    page = report(tmp_path / name.replace("/", "∕"))
    # the data, the samples and the program
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not any(tag in ("img", "b", "iframe", "object", "link") for tag, _ in page.tags)
    embedded = page.text_of("script", id="data")
    assert not set(embedded) & set("<>&\u2028\u2029\x00")
    assert embedded.isascii()
    assert re.fullmatch("[A-Za-z0-9+/]+=*", page.text_of("script", id="samples-data"))
    assert page.data["runs"][0]["samples"][3]["response"] == f"needle {HOSTILE}"
    assert page.data["runs"][0]["rollouts"][0]["answer"] == f"answer 100 {HOSTILE}"


def test_the_page_makes_no_network_requests(tmp_path, report):
    write_run(tmp_path / "run")
    page = report(tmp_path / "run")
    (policy,) = [own["content"] for _, own in page.tags if "http-equiv" in own]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    elements = zip(page.tags, page.texts, strict=True)
    programs = [text for (tag, own), text in elements if tag == "script" and "type" not in own]
    for rule, text in (("script-src", programs[0]), ("style-src", page.text_of("style"))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    (program,) = programs
    assert re.findall(r"https?://[^'\"` ]*", program + page.text_of("style")) == [
        "https://github.com/leeoniya/uPlot",  # in a comment
        "http://www.w3.org/2000/svg",  # a namespace
    ]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write", program)


def test_a_run_in_progress_without_optional_files(tmp_path, report):
    write_run(tmp_path / "run")
    names = "eval.jsonl warnings.jsonl samples.jsonl config.json"
    for name in (*names.split(), "weight.json", *LAZY):
        (tmp_path / "run" / name).unlink()
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(whole[:-30])
    (run,) = report(tmp_path / "run").data["runs"]
    assert run["steps"] == list(range(1, 30))
    assert run["coverage"] == run["samples"] == run["rollouts"] == run["warnings"] == []
    assert run["prompts"] == {}
    assert run["weight"]["reason"] == "weight.json does not have it"
    assert run["notes"] == []


def test_a_value_that_is_not_a_finite_number_is_a_gap(tmp_path, report):
    out = tmp_path / "run"
    write_run(out)
    text = (
        '{"step": 2, "reward_mean": NaN, "loss": Infinity, "kl": "NaN", "new": 5}\n'
        '{"step": 1, "reward_mean": 0.1, "loss": -Infinity, "kl": 1e999, "text": "x"}\n'
        '{"step": 5, "loss": null}\n{"step": 5, "kl": 7, "is_last": true}\n'
    )
    (out / "metrics.jsonl").write_text(text)
    (run,) = report(out).data["runs"]
    assert run["steps"] == [1, 2, 5]
    assert run["metrics"] == {
        "reward_mean": [0.1, None, None],
        "loss": [None, None, None],
        "kl": [None, None, 7],
        "new": [None, 5, None],
    }


def test_an_evaluation_is_shown_beside_a_run(tmp_path, report):
    content = write_evaluation(tmp_path / "evaluation")
    write_run(tmp_path / "run")
    evaluation, run = report(tmp_path / "evaluation", tmp_path / "run").data["runs"]
    assert (evaluation["kind"], run["kind"]) == ("evaluation", "run")
    sides = "mean", "low", "high"
    rows = [[int(k), *map(value.get, sides)] for k, value in content["coverage"].items()]
    assert evaluation["coverage"] == [{"step": None, "rows": rows}]
    assert [sample["step"] for sample in evaluation["samples"]] == [None]
    text = '{"pass_at_k": {"4": 0.5, "1": 0.25, "2": null}}'
    (tmp_path / "evaluation" / "eval.json").write_text(text)
    [rows] = report(tmp_path / "evaluation").data["runs"][0]["coverage"]
    assert rows["rows"] == [[1, 0.25, None, None], [4, 0.5, None, None]]


def test_runs_that_differ_in_their_seeds_alone_are_a_group(tmp_path, report):
    rloo = {"objective": "rloo", "k": None}
    makes = {
        **{"a": {"seed": 0, "out": "x"}, "b": {"seed": 1, "out": "y"}, "repeated": {"seed": 1}},
        **{"c": {"seed": 0, **rloo}, "d": {"seed": 2, **rloo}},
        **{"e": {"seed": 0, "lr": 1e-3}, "f": {"seed": 1, **rloo}},
    }
    for name, options in makes.items():
        write_run(tmp_path / name, **options)
    assert report(*[tmp_path / name for name in makes]).data["groups"] == [
        {"runs": [0, 1], "name": "maxpo, 2 seeds"},
        {"runs": [3, 4, 6], "name": "rloo, 3 seeds"},
    ]
    write_run(tmp_path / "g", seed=5, lr=1e-3)
    groups = report(*[tmp_path / name for name in ("a", "b", "e", "g")]).data["groups"]
    assert [group["name"] for group in groups] == ["lr 0.0003, 2 seeds", "lr 0.001, 2 seeds"]


def test_the_vendored_library_is_the_released_one_with_its_license():
    vendor = files("maxrl_fast.report") / "page" / "vendor"
    sums = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in vendor.iterdir()}
    assert sums == VENDORED


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


def test_prompts_are_compared_where_task_own_options_and_seed_agree(tmp_path):
    def prompt_set(name, **options):
        write_run(tmp_path / name, steps=1, **options)
        return read_folder(tmp_path / name, name).prompt_set

    own = {"task_options": ["sft_data", "maze_size"]}
    first = prompt_set("first", **own)
    assert prompt_set("second", **own, lr=1.0, sft_data="shown.jsonl") == first
    others = {"task": "chain"}, {"maze_size": 11}, {"seed": 1}, {"task_options": None}
    assert first not in [prompt_set(str(x), **(own | x)) for x in others]
    write_evaluation(out := tmp_path / "evaluation")
    content = json.loads((out / "eval.json").read_text()) | own
    content["options"] |= {"maze_size": 9, "seed": 5, "task_seed": 0}
    (out / "eval.json").write_text(json.dumps(content))
    assert read_folder(out, "evaluation").prompt_set == first

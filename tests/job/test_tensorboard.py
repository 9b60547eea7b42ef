"""What TensorBoard itself shows of a run: hyperparameters with the last metrics, samples, and
pass@k in one chart.
"""

import html
import json
import re
import types

import pytest
from tensorboard.backend import application
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.hparams.hparams_plugin import HParamsPlugin
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
from tensorboard.plugins.text.text_plugin import TextPlugin
from werkzeug.test import Client

from maxrl_fast import train
from maxrl_fast.job.tensorboard import TensorBoard
from tests.test_train import SMALL, read

PLUGINS = (HParamsPlugin, TextPlugin, CustomScalarsPlugin, ScalarsPlugin)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder of two runs, one of which was stopped and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*SMALL, *"--sft-steps 2 --eval-every 2 --log-to tensorboard".split()]
    assert train.main([*flags, "--out", str(folder / "first")]) == 0
    flags += [*"--seed 1 --steps 2 --lr-schedule constant --out".split(), str(folder / "second")]
    assert train.main(flags) == 0
    assert train.main(["--resume", str(folder / "second"), "--steps", "4"]) == 0
    return folder


def tensorboard(logdir):
    """Return a function that asks TensorBoard's own server for a plugin's JSON."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    flags = types.SimpleNamespace(
        logdir=str(logdir),
        samples_per_plugin={},
        window_title="",
        path_prefix="",
        detect_file_replacement=None,
    )
    client = Client(
        application.TensorBoardWSGIApp(
            flags, PLUGINS, MultiplexerDataProvider(multiplexer, str(logdir))
        )
    )

    def ask(path, body=None, **query):
        response = client.open(
            f"/data/plugin/{path}", query_string=query, json=body, method="POST" if body else "GET"
        )
        assert response.status_code == 200, response.text
        return json.loads(response.text)

    return ask


def test_a_resumed_run_shows_every_step_once(runs):
    """The second run was resumed from a checkpoint that was written before the evaluation of its
    step.
    """
    events = EventMultiplexer({"second": str(runs / "second" / "tensorboard")}).Reload()
    assert [event.step for event in events.Tensors("second", "metrics/entropy")] == [1, 2, 3, 4]
    assert [event.step for event in events.Tensors("second", "eval/pass_at_1")] == [0, 2, 4]
    assert [event.step for event in events.Tensors("second", "samples")] == [0, 2, 4]


def test_hyperparameters_stand_beside_the_last_metrics(runs):
    ask = tensorboard(runs)
    experiment = ask("hparams/experiment", {"experimentName": "", "includeMetrics": True})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"objective", "k", "lr", "seed", "maze_size", "compile"} <= names
    assert not {"chain_length", "lora_alpha", "out", "resume"} & names  # not taken, or of one start
    columns = [{"hparam": name} for name in ("seed", "objective", "compile", "sft_lr")]
    columns += [
        {"metric": {"tag": "eval/pass_at_1", "group": ""}},
        {"metric": {"tag": "metrics/entropy", "group": ""}},
    ]
    wanted = {
        "colParams": columns,
        "startIndex": 0,
        "sliceSize": 9,
        "allowedStatuses": ["STATUS_SUCCESS"],
    }
    groups = ask("hparams/session_groups", wanted)["sessionGroups"]
    assert {group["name"] for group in groups} == {str(runs / "first"), str(runs / "second")}
    for group in groups:
        out = runs / group["sessions"][0]["name"].split("/")[0]
        options = json.loads((out / "config.json").read_text())
        assert {
            name: group["hparams"][name] for name in ("seed", "objective", "compile", "sft_lr")
        } == {name: options[name] for name in ("seed", "objective", "compile", "sft_lr")}
        values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        assert values["eval/pass_at_1"] == pytest.approx(
            read(out / "eval.jsonl")[-1]["pass_at_k"]["1"]
        )
        assert values["metrics/entropy"] == pytest.approx(
            read(out / "metrics.jsonl")[-1]["entropy"]
        )


def test_each_evaluation_shows_its_samples(runs):
    for name in ("first", "second"):
        shown = tensorboard(runs)("text/text", run=f"{name}/tensorboard", tag="samples")
        samples = read(runs / name / "samples.jsonl")
        texts = {text["step"]: text["text"] for text in shown}
        assert texts.keys() == {sample["step"] for sample in samples}
        for step, text in texts.items():
            blocks = [
                html.unescape(block)
                for block in re.findall("<code>(.*?)\n?</code>", text, re.DOTALL)
            ]
            own = [sample for sample in samples if sample["step"] == step]
            assert blocks == [sample[name] for sample in own for name in ("prompt", "response")]
            assert text.count(", reward ") == len(own)


def test_one_chart_has_pass_at_k_of_all_k(runs):
    ask = tensorboard(runs)
    (category,) = ask("custom_scalars/layout")["category"]
    (tag,) = category["chart"][0]["multiline"]["tag"]
    lines = ask("custom_scalars/scalars", run="second/tensorboard", tag=tag)["tag_to_events"]
    evaluations = read(runs / "second" / "eval.jsonl")
    assert lines.keys() == {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_4"}
    for k in (1, 2, 4):
        points = {step: value for _, step, value in lines[f"eval/pass_at_{k}"]}
        assert points == pytest.approx(
            {record["step"]: record["pass_at_k"][str(k)] for record in evaluations}
        )


HOSTILE = [
    "<script>alert(1)</script>",
    "![x](http://evil.example/pixel.png) [link](http://evil.example)",
    "```\n\n# heading\n\n<img src=x>\n```",
    "    \n</code></pre>\r<b>bold</b>\u2028- item\x85> quote\x0b1. one\n\n\n* two",
    "\ud800 lone surrogate",
    "",
    "x" * 3000,
]


@pytest.mark.parametrize("response", HOSTILE)
def test_markup_in_a_response_is_shown_and_not_obeyed(response, tmp_path):
    record = {
        "id": 3,
        "prompt": "p",
        "response": response,
        "reward": None,
        "truncated": True,
        "tokens": 7,
    }
    board = TensorBoard(tmp_path / "tensorboard", {}, "run")
    board.log_samples([record, record], 5)
    board.close(is_done=False)
    (shown,) = tensorboard(tmp_path)("text/text", run="tensorboard", tag="samples")
    assert set(re.findall("<(/?[a-z0-9]+)", shown["text"])) <= {
        *"h5 /h5 pre /pre code /code p /p".split()
    }
    assert shown["text"].count("<code>") + shown["text"].count("<p>(empty)</p>") == 4
    words = re.findall(r"\w{4,}", response[:2000].replace("\ud800", "ud800"))
    assert all(shown["text"].count(word) >= 2 for word in words)
    assert ("1,000 more characters" in shown["text"]) == (len(response) == 3000)
    assert "prompt 3, reward not known, 7 tokens, truncated" in shown["text"]

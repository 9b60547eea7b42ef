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

from maxrl_fast.job.tensorboard import TensorBoard
from tests.runs import read

PLUGINS = (HParamsPlugin, TextPlugin, CustomScalarsPlugin, ScalarsPlugin)


def tensorboard(logdir):
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    flags = {"logdir": str(logdir), "samples_per_plugin": {}, "detect_file_replacement": None}
    flags = types.SimpleNamespace(**flags, window_title="", path_prefix="")
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    client = Client(application.TensorBoardWSGIApp(flags, PLUGINS, provider))

    def ask(path, body=None, **query):
        options = {"query_string": query, "json": body, "method": "POST" if body else "GET"}
        response = client.open(f"/data/plugin/{path}", **options)
        assert response.status_code == 200, response.text
        return json.loads(response.text)

    return ask


@pytest.mark.slow
def test_a_resumed_run_shows_every_step_once(shared_run):
    """Before it was killed, it had written steps after its last checkpoint."""
    events = EventMultiplexer({"killed": str(shared_run("killed") / "tensorboard")}).Reload()
    for tag, steps in (("metrics/entropy", [*range(1, 7)]), ("eval/pass_at_1", [0, 2, 4, 6])):
        assert [event.step for event in events.Tensors("killed", tag)] == steps
    assert [event.step for event in events.Tensors("killed", "samples")] == [0, 2, 4, 6]


def test_a_run_is_shown_with_hyperparameters_samples_and_all_k_in_one_chart(maze_run):
    ask = tensorboard(maze_run)
    evaluations = read(maze_run / "eval.jsonl")
    options = json.loads((maze_run / "config.json").read_text())
    experiment = ask("hparams/experiment", {"experimentName": "", "includeMetrics": True})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"objective", "k", "lr", "seed", "maze_size", "compile"} <= names
    assert not {"chain_length", "lora_alpha", "out", "resume"} & names  # not taken, or of one start
    columns = [{"hparam": "sft_lr"}, {"metric": {"tag": "eval/pass_at_1", "group": ""}}]
    wanted = {"colParams": columns, "startIndex": 0, "sliceSize": 9}
    wanted["allowedStatuses"] = ["STATUS_SUCCESS"]
    (group,) = ask("hparams/session_groups", wanted)["sessionGroups"]
    assert group["hparams"]["sft_lr"] == options["sft_lr"]
    values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
    assert values["eval/pass_at_1"] == pytest.approx(evaluations[-1]["pass_at_k"]["1"])

    samples = read(maze_run / "samples.jsonl")
    shown = ask("text/text", run="tensorboard", tag="samples")
    texts = {text["step"]: text["text"] for text in shown}
    assert texts.keys() == {sample["step"] for sample in samples}
    for step, text in texts.items():
        blocks = re.findall("<code>(.*?)\n?</code>", text, re.DOTALL)
        of_step = [sample for sample in samples if sample["step"] == step]
        written = [sample[part] for sample in of_step for part in ("prompt", "response")]
        assert [*map(html.unescape, blocks)] == written
        assert text.count(", reward ") == len(of_step)

    (category,) = ask("custom_scalars/layout")["category"]
    (tag,) = category["chart"][0]["multiline"]["tag"]
    lines = ask("custom_scalars/scalars", run="tensorboard", tag=tag)["tag_to_events"]
    assert lines.keys() == {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_4"}
    for k in ("1", "2", "4"):
        points = {step: value for _, step, value in lines[f"eval/pass_at_{k}"]}
        assert points == pytest.approx({x["step"]: x["pass_at_k"][k] for x in evaluations})


HOSTILE = [
    "<script>alert(1)</script>",
    "![x](http://evil.example/pixel.png) [link](http://evil.example)",
    "    \n</code></pre>\r<b>bold</b>\u2028- item\x85> quote\x0b1. one\n\n\n* two",
    "\ud800 lone surrogate",
    "",
    "x" * 3000,
]


@pytest.mark.parametrize("response", HOSTILE)
def test_markup_in_a_response_is_shown_and_not_obeyed(response, tmp_path):
    record = {"id": 3, "prompt": "p", "response": response}
    record |= {"reward": None, "truncated": True, "tokens": 7}
    board = TensorBoard(tmp_path / "tensorboard", {}, "run")
    board.log_samples([record, record], 5)
    board.close(is_done=False)
    (shown,) = tensorboard(tmp_path)("text/text", run="tensorboard", tag="samples")
    allowed = {*"h5 /h5 pre /pre code /code p /p".split()}
    assert set(re.findall("<(/?[a-z0-9]+)", shown["text"])) <= allowed
    assert shown["text"].count("<code>") + shown["text"].count("<p>(empty)</p>") == 4
    words = re.findall(r"\w{4,}", response[:2000].replace("\ud800", "ud800"))
    assert all(shown["text"].count(word) >= 2 for word in words)
    assert ("1,000 more characters" in shown["text"]) == (len(response) == 3000)
    assert "prompt 3, reward not known, 7 tokens, truncated" in shown["text"]

import json
import re
import types

import pytest
from tensorboard.backend import application
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.text.text_plugin import TextPlugin
from werkzeug.test import Client

from maxrl_fast.job.run_files import _TensorBoard


def shown_samples(logdir):
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    flags = {"logdir": str(logdir), "samples_per_plugin": {}, "detect_file_replacement": None}
    flags = types.SimpleNamespace(**flags, window_title="", path_prefix="")
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    client = Client(application.TensorBoardWSGIApp(flags, (TextPlugin,), provider))
    query = {"run": "tensorboard", "tag": "samples/text_summary"}
    response = client.get("/data/plugin/text/text", query_string=query)
    assert response.status_code == 200, response.text
    return json.loads(response.text)


@pytest.mark.slow
def test_a_resumed_run_shows_every_step_once(shared_run):
    """Before it was killed, it had written steps after its last checkpoint."""
    events = EventMultiplexer({"killed": str(shared_run("killed") / "tensorboard")}).Reload()
    assert [event.step for event in events.Tensors("killed", "metrics/entropy")] == [*range(1, 7)]
    for tag in ("eval/pass_at_1", "samples/text_summary"):  # an evaluation may be repeated
        assert sorted({x.step for x in events.Tensors("killed", tag)}) == [0, 2, 4, 6]


HOSTILE = [
    "<script>alert(1)</script>",
    "![x](http://evil.example/pixel.png) [link](http://evil.example)",
    "    \n</code></pre>\r<b>bold</b>\u2028- item\x85> quote\x0b1. one\n\n\n* two",
    "\ud800 lone surrogate",
    "",
]


@pytest.mark.parametrize("response", HOSTILE)
def test_markup_in_a_response_is_shown_and_not_obeyed(response, tmp_path):
    record = {"id": 3, "prompt": "p", "response": response}
    record |= {"reward": None, "truncated": True, "tokens": 7}
    board = _TensorBoard(tmp_path / "tensorboard", 0)
    board.log_samples([record, record], 5)
    board.finish()
    (shown,) = shown_samples(tmp_path)
    allowed = {*"h5 /h5 pre /pre code /code p /p table /table tbody /tbody tr /tr td /td".split()}
    assert set(re.findall("<(/?[a-z0-9]+)", shown["text"])) <= allowed
    assert shown["text"].count("<code>") == 2
    words = re.findall(r"\w{4,}", response.replace("\ud800", "ud800"))
    assert all(shown["text"].count(word) >= 2 for word in words)
    assert "id 3, reward None, tokens 7, truncated True" in shown["text"]

"""A judge over HTTP, against a real server of this process: concurrency, time-outs, retries, the
cache, the key.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from maxrl_fast import train
from maxrl_fast.config.options import SCORE, RewardOptions
from maxrl_fast.config.parse import parse
from maxrl_fast.errors import StorageError
from maxrl_fast.job.build_rewards import build_scorer
from maxrl_fast.rewards import models as module
from maxrl_fast.rewards.models import Judge
from maxrl_fast.tasks.maze import MazeTask
from tests.tables import refused
from tests.test_train import base, read

TEMPLATE = "Rate {response} to {prompt} ({unknown}, \\boxed{x}) for {answer}."


class Server(ThreadingHTTPServer):
    """Answers requests by `reply(question)`: the text of a reply, or (status, headers, body)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = lambda question: "Score: 1"
        self.requests, self.lock = [], threading.Lock()  # (path, headers, body)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
        reply = self.server.reply(body["messages"][0]["content"])
        if isinstance(reply, str):
            reply = (
                200,
                {},
                json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}),
            )
        status, headers, content = reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.01)
    running = Server()
    yield running
    running.shutdown()
    running.server_close()


def judge(server, tmp_path, template="{response}", **options):
    settings = {
        "pattern": SCORE,
        "time_limit": 10.0,
        "concurrency": 4,
        "cache": tmp_path / "cache",
    } | options
    return Judge(f"openai:{server.url}/org/model", template, **settings)


def rows(*responses, **columns):
    return [{"prompt": "p", "response": response, **columns} for response in responses]


def test_the_question_is_the_template_and_the_score_is_parsed(server, tmp_path):
    server.reply = lambda question: (
        "8" if "good" in question else "1. It is wrong.\n**Score:** -0.5/10"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "{response}"}]
    one = judge(server, tmp_path, TEMPLATE)
    assert one.score(
        [{"prompt": messages, "response": "good {answer}", "answer": 7}, *rows("bad", answer="x")]
    ).rewards == [8, -0.5]
    asked = [
        (path, body["model"], body["temperature"], body["messages"])
        for path, _, body in server.requests
    ]
    assert {request[:3] for request in asked} == {("/v1/chat/completions", "org/model", 0)}
    assert {request[3][0]["content"] for request in asked} == {
        "Rate good {answer} to system: s\n\nuser: {response} ({unknown}, \\boxed{x}) for 7.",
        "Rate bad to p ({unknown}, \\boxed{x}) for x.",
    }


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Score: 1e-3", 1e-3),
        ("-2.5E+1 points", -25.0),
        ("Score: 8, as the 2nd step is wrong", 8.0),
        ("8/10.", 8.0),
        ("Score: 1,000", "must have a score as --judge-score finds it"),
        ("Score: 8,5", "must have a score as --judge-score finds it"),
        ("1.2.3", "must have a score as --judge-score finds it"),
        ("9" * 300, "a reward must be a finite number of float32, got 1e+300"),
        ("Score: 1e39", "a reward must be a finite number of float32, got 1e+39"),
        ("Score: 3 \ud800", 3.0),
        ("\udfff", "must have a score as --judge-score finds it"),
    ],
)
def test_a_reply_gives_a_reward_of_float32_or_a_reason(server, tmp_path, reply, reward):
    server.reply = lambda question: reply
    for _ in range(2):  # the second time from the cache, if it is there
        scores = judge(server, tmp_path).score(rows("\udc80"))
        if isinstance(reward, str):
            assert reward in scores.failures[0].message
        else:
            assert (scores.rewards, scores.failures) == ([reward], [])
    assert len(server.requests) == (2 if isinstance(reward, str) else 1)


def test_requests_run_together_up_to_the_limit(server, tmp_path):
    """Each request waits until three are there; the server never sees a fourth."""
    together, running = threading.Barrier(3), []

    def reply(question):
        running.append(1)
        seen = len(running)
        together.wait(20)
        running.pop()
        return f"Score: {seen}"

    server.reply = reply
    assert max(judge(server, tmp_path, concurrency=3).score(rows(*"abcdef")).rewards) == 3


def test_the_same_question_is_asked_once_also_by_a_later_run(server, tmp_path):
    server.reply = lambda question: "no idea" if question == "odd" else "Score: 2"
    assert judge(server, tmp_path).score(rows("a", "b", "a", "odd")).rewards == [2, 2, 2, 0]
    assert len(server.requests) == 3
    scores = judge(server, tmp_path).score(rows("b", "a", "odd"))
    assert scores.rewards == [2, 2, 0]
    assert (
        "must have a score as --judge-score finds it, got 'no idea'" in scores.failures[0].message
    )
    assert len(server.requests) == 4  # a reply without a score is not kept
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use the judge's cache"):
        judge(server, tmp_path, cache=tmp_path / "file").score(rows("a"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_and_a_broken_request_is_not(server, tmp_path, status):
    tries = []

    def reply(question):
        tries.append(question)
        if question == "wrong":
            return 401, {}, '{"error": "no key"}'
        return "Score: 3" if tries.count(question) == 3 else (status, {"Retry-After": "0"}, "busy")

    server.reply = reply
    scores = judge(server, tmp_path).score(rows("right", "wrong"))
    assert scores.rewards == [3, 0]
    assert (tries.count("right"), tries.count("wrong")) == (3, 1)
    assert [failure.kind for failure in scores.failures] == ["exception"]
    assert "answered /v1/chat/completions with status 401" in scores.failures[0].message
    server.reply = lambda question: (status, {}, "busy")
    failure = judge(server, tmp_path).score(rows("never")).failures[0]
    assert f"with status {status}: busy (after {module.TRIES} tries)" in failure.message


def test_a_server_that_hangs_or_is_gone_fails_in_time(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 2)
    hold = threading.Event()
    server.reply = lambda question: hold.wait(20) and "Score: 1"
    failure = judge(server, tmp_path, time_limit=0.3).score(rows("hangs")).failures[0]
    assert (failure.kind, failure.message) == (
        "timeout",
        "the judge has not answered /v1/chat/completions for 0.3 s (after 2 tries)",
    )
    hold.set()

    server.server_close()
    failure = judge(server, tmp_path).score(rows("gone")).failures[0]
    assert (
        "the judge cannot be reached, or closed the connection: ConnectionRefused"
        in failure.message
    )


def test_the_key_comes_from_a_named_variable_and_is_not_redirected(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "template").write_text("{response}")
    options = {"reward": (f"openai:{server.url}/m",), "judge_template": tmp_path / "template"}
    for names, expected in (("", None), ("OTHER, OPENAI_API_KEY", "Bearer secret")):
        source = build_scorer(RewardOptions(**options, reward_env=names), MazeTask(5))._source
        assert source.score(rows(f"key {names}")).rewards == [1]
        assert server.requests[-1][1].get("Authorization") == expected
    assert list((tmp_path / "maxrl_fast" / "judge").rglob("*.txt"))
    server.reply = lambda question: (307, {"Location": f"{server.url}/elsewhere"}, "")
    assert "with status 307" in source.score(rows("moved")).failures[0].message
    assert len(server.requests) == 3
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nsecond")
    with refused("the key of the judge must be printable ASCII") as error:
        build_scorer(RewardOptions(**options, reward_env="OPENAI_API_KEY"), MazeTask(5))
    assert "secret" not in str(error.value)


def test_the_rate_is_limited(server, tmp_path, monkeypatch):
    """Requests are given turns that are as far apart as the rate says; no turn is taken twice."""
    waits = []
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", waits.append)
    one = judge(server, tmp_path, rate=4.0)
    for _ in range(3):
        one._wait_for_turn(stop)
    assert waits == [0.0, 0.25, 0.5]


def test_too_many_failures_end_the_scoring(server, tmp_path):
    server.reply = lambda question: (400, {}, "")
    scores = judge(server, tmp_path, concurrency=1).score(rows(*map(str, range(50))), 2)
    assert len(scores.failures) == 3
    assert scores.num_left == 47


@pytest.mark.parametrize(
    "name",
    (
        "openai:model openai:ftp://host/v1/m openai:http://host/v1/ "
        "openai:http://u:p@host/v1/m openai:http://h:x/v1/m"
    ).split(),
)
def test_other_addresses_are_refused(name, tmp_path):
    with refused(r"--reward must be openai:URL/MODEL, such as"):
        Judge(name, "{response}", pattern=SCORE, time_limit=1, concurrency=1, cache=tmp_path)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"template": "x"}, "with {response}"),
        ({"pattern": "("}, "expression"),
        ({"pattern": "x"}, "group"),
    ],
)
def test_templates_and_patterns_are_checked(server, tmp_path, changed, sentence):
    with refused(sentence):
        judge(server, tmp_path, **changed)


def test_options_of_a_judge_are_refused_without_one():
    with refused("--judge-template needs --reward openai:"):
        parse(["--reward", "a.py:f", "--judge-template", "x"])
    assert (
        parse(
            ["--reward", "a.py:f", "openai:http://h/v1/m", "--judge-template", "x"]
        ).reward.judge_rate
        == 0
    )


@pytest.mark.slow
def test_a_run_with_a_judge_and_a_function(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.reply = lambda question: f"Score: {len(question) % 2}"
    (tmp_path / "template").write_text("{response}")
    (tmp_path / "half.py").write_text("def half(prompt, response):\n    return .5\n")
    out, names = tmp_path / "run", (f"openai:{server.url}/org/tiny", f"{tmp_path}/half.py:half")
    flags = f"--sft-steps 2 --steps 2 --objective rloo --judge-template {tmp_path}/template".split()
    flags += ["--reward", *names, *f"--reward-weights 1 2 --out {out}".split()]
    assert train.main([*base(), *flags]) == 0
    assert f"tiny at {server.url}" in capsys.readouterr().out
    for record in read(out / "metrics.jsonl"):
        assert record["reward/half"] == 0.5
        assert record["reward_mean"] == pytest.approx(record["reward/tiny"] + 1)
    (tmp_path / "template").write_text("other {response}")
    assert train.main(["--resume", str(out)]) == 2
    assert "the file of --judge-template: changed" in capsys.readouterr().err

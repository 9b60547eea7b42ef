"""The example of a judge, against a server of this process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.rewards.pools import GB, pool

JUDGE = Path(__file__).parents[2] / "examples" / "judge.py"


class Server(ThreadingHTTPServer):
    """Answers requests by `reply(question)`: the text of a reply, or a status."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = lambda question: "Score: 1"
        self.requests = []  # (path, headers, body)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers, body))
        reply = self.server.reply(body["messages"][0]["content"])
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("retry-after-ms", "10")
        self.end_headers()
        message = {"role": "assistant", "content": reply}
        self.wfile.write(json.dumps({"choices": [{"index": 0, "message": message}]}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with Server() as running:
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def judge(server):
    """The example in a worker, with up to four calls at a time."""
    pytest.importorskip("openai")
    with pytest.MonkeyPatch.context() as patch:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        names = {"JUDGE_URL": url, "JUDGE_MODEL": "org/model", "OPENAI_API_KEY": "secret"}
        for name, value in names.items():
            patch.setenv(name, value)
        options = {"time_limit": 30.0, "concurrency": 4, "environment": [*names]}
        with pool("judge", 1, memory_limit=2 * GB, file=JUDGE, **options) as one:
            yield one


def rows(*responses, prompt="p"):
    return [{"prompt": prompt, "response": text, "answer": 7, "x": 0} for text in responses]


def test_the_question_reaches_the_server_and_the_last_score_is_the_reward(server, judge):
    server.reply = lambda question: "My score: 3. It is wrong.\n**Score:** -0.5/10"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "{response}"}]
    assert judge.score(rows("good {answer}", prompt=messages)).rewards == [-0.5]
    path, headers, body = server.requests[-1]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("org/model", 0)
    assert body["messages"][0]["content"].startswith(
        "Question: system: s\n\nuser: {response}\nCorrect answer: 7\nResponse: good {answer}\nHow"
    )


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Score: 1e-3", 1e-3),
        ("score 8, as the 2nd step is wrong", 8.0),
        ("Score: 1,000", "must end with a score, got 'Score: 1,000'"),
        ("Score: 1e39", "a reward must be a finite number of float32, got 1e+39"),
        (401, "AuthenticationError"),
        ([503, 503, "Score: 3"], 3.0),  # a busy server is asked again
    ],
)
def test_a_reply_gives_a_reward_or_a_reason(server, judge, reply, reward):
    def answer(question):
        if "odd" not in question:
            return "Score: 1"
        return reply.pop(0) if isinstance(reply, list) else reply

    server.reply = answer
    scores = judge.score(rows("odd", "even"))
    if isinstance(reward, float):
        assert scores.rewards == [reward, 1.0]
    else:
        assert scores.rewards == [0.0, 1.0]
        assert reward in scores.failures[0].message

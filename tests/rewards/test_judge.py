import json
from pathlib import Path

import pytest

from tests.rewards.pools import GB, pool, rewards
from tests.server import serving

JUDGE = Path(__file__).parents[2] / "examples" / "judge.py"


class Model:
    """Answers requests by `reply(question)`: the text of a reply, or a status."""

    def __init__(self):
        self.reply = lambda question: "Score: 1"
        self.requests = []  # (path, headers, body)

    def answer(self, request, body):
        body = json.loads(body)
        self.requests.append((request.path, request.headers, body))
        reply = self.reply(body["messages"][0]["content"])
        headers = {"Content-Type": "application/json", "retry-after-ms": "10"}
        message = {"role": "assistant", "content": reply}
        content = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
        return reply if isinstance(reply, int) else 200, headers, content


@pytest.fixture(scope="module")
def server():
    model = Model()
    with serving(model.answer) as model.url:
        yield model


@pytest.fixture(scope="module")
def judge(server):
    pytest.importorskip("openai")
    with pytest.MonkeyPatch.context() as patch:
        names = {"JUDGE_URL": f"{server.url}/v1", "JUDGE_MODEL": "org/model"}
        names["OPENAI_API_KEY"] = "secret"
        for name, value in names.items():
            patch.setenv(name, value)
        options = {"time_limit": 30.0, "concurrency": 4, "env": ",".join(names)}
        with pool("judge", 1, memory_limit=2 * GB, file=JUDGE, **options) as one:
            yield one


def rows(*responses, prompt="p"):
    return [{"prompt": prompt, "response": text, "answer": 7, "x": 0} for text in responses]


def test_the_question_reaches_the_server_and_the_last_score_is_the_reward(server, judge):
    server.reply = lambda question: "My score: 3. It is wrong.\n**Score:** -0.5/10"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "{response}"}]
    assert rewards(judge.score(rows("good {answer}", prompt=messages))) == [-0.5]
    path, headers, body = server.requests[-1]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("org/model", 0)
    assert body["messages"][0]["content"].startswith(
        "Question: system: s\n\nuser: {response}\nCorrect answer: 7\nResponse: good {answer}\nHow"
    )


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("score 8, as the 2nd step is wrong", 8.0),
        ("Score: 1,000", "must end with a score, got 'Score: 1,000'"),
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
        assert rewards(scores) == [reward, 1.0]
    else:
        assert rewards(scores) == [None, 1.0]
        assert reward in scores[0].message

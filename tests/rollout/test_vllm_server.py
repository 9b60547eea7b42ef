"""--rollout vllm with --vllm-url. Tests marked vllm need the real server (`make test-vllm`)."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maxrl_fast import train
from maxrl_fast.errors import EngineError
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout import vllm_server as module
from maxrl_fast.rollout.validation import CheckedEngine
from maxrl_fast.rollout.vllm_server import VllmServerEngine
from tests.batches import make_prompts
from tests.distributed.test_torchrun import ROOT, finished, free_port, torchrun
from tests.models import tiny_decoder
from tests.tables import refused

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [9, 9]])
SAMPLING = Sampling(1.0, 8, (3,))


def sampled(engine, *request):
    return engine.generate(RolloutRequest(PROMPTS, *request))


class FakeServer:
    """Answers as vLLM does; a test replaces answers by path. An answer is (status, text), or a
    function of the request.
    """

    def __init__(self):
        self.requests, self.loaded = [], []
        options = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        self.answers = {
            "/version": (200, '{"version": "0.32.0"}'),
            "/server_info?config_format=json": (200, json.dumps(options)),
            "/collective_rpc": self.reload,
            "/reset_prefix_cache": (200, '{"success": true}'),
            "/inference/v1/generate": self.generate,
        }

    def reload(self, request):
        folder = Path(request["kwargs"]["weights_path"])
        self.loaded.append([load_file(file) for file in sorted(folder.glob("*.safetensors"))])
        return 200, '{"results": [null]}'

    def generate(self, request):
        """Return samples i of i + 1 tokens in the wrong order: the prompt's first token, repeated,
        and a stop token; sample 0 is cut off before it.
        """
        parameters = request["sampling_params"]
        stop, choices = parameters["stop_token_ids"][0], []
        token = request["token_ids"][0] if request["token_ids"][0] != stop else stop + 1
        for i in reversed(range(parameters["n"])):
            tokens = [token] * i + [stop if i else token]
            content = [{"logprob": -0.5 - j, "top_logprobs": []} for j in range(i + 1)]
            choices.append(
                {
                    "index": i,
                    "finish_reason": "stop" if i else "length",
                    "token_ids": tokens,
                    "logprobs": {"content": content},
                }
            )
        return 200, json.dumps({"choices": choices})


@pytest.fixture
def server():
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = json.loads(body) if body else None
            fake.requests.append((self.path, request))
            answer = fake.answers[self.path]
            status, text = answer(request) if callable(answer) else answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 128  # the kernel resets connections that wait beyond it

    listening = Listening(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    fake.url = f"http://127.0.0.1:{listening.server_port}"
    yield fake
    listening.shutdown()
    listening.server_close()


def test_samples_come_back_in_order_with_a_seed_for_each_prompt(server):
    engine = VllmServerEngine(tiny_decoder(), torch.float32, server.url + "/")
    rollouts = sampled(engine, 2, SAMPLING, 0, 1)
    assert rollouts.tokens.tolist() == [5, 5, 3, 9, 9, 3, 9, 9, 3]
    assert rollouts.lengths.tolist() == [1, 2] * 3
    assert rollouts.logprobs.tolist() == [-0.5, -0.5, -1.5] * 3
    assert rollouts.truncated.tolist() == [True, False] * 3
    greedy = sampled(engine, 2, SAMPLING.greedy, 0, 1)
    assert greedy.tokens.tolist() == [5, 5, 9, 9, 9, 9]
    assert not greedy.logprobs.any()
    engine.generate(RolloutRequest(PROMPTS.take(1, 2), 2, SAMPLING, 0, 1))  # some of them again
    seeds = {}
    for path, request in server.requests:
        if path == "/inference/v1/generate" and request["sampling_params"]["temperature"]:
            seeds.setdefault(tuple(request["token_ids"]), set()).add(
                request["sampling_params"]["seed"]
            )
    assert len(seeds) == len(set.union(*seeds.values())) == 3


def test_weights_are_written_in_the_compute_dtype_and_removed_at_the_end(server):
    model = tiny_decoder(1)
    engine = VllmServerEngine(tiny_decoder(), torch.bfloat16, server.url)
    engine.load_weights(model)
    expected = dict(model.weights())
    loaded = {name: weight for file in server.loaded[1] for name, weight in file.items()}
    assert loaded.keys() == {*expected, "lm_head.weight"}  # tied
    for name, weight in loaded.items():
        assert torch.equal(
            weight, expected.get(name, expected["model.embed_tokens.weight"]).bfloat16()
        )
    assert all(len(file) == 1 for file in server.loaded[1])
    folder = engine._folder
    assert folder.exists()
    del engine
    assert not folder.exists()


ANSWER = "the vLLM server at http://127.0.0.1:\\d+ answered"


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (
            "/version",
            (200, '{"version": "0.34.1"}'),
            "needs a version of vLLM from 0.32 to below 0.34, got 0.34.1",
        ),
        ("/version", (200, '{"version": "0.32\\u001b[2J"}'), r"got '0.32\\x1b\[2J'"),
        (
            "/version",
            (200, "<html>"),
            ANSWER + " /version with something else than expected: <html>; start it as VLLM_SERVER",
        ),
        (
            "/server_info?config_format=json",
            (404, "Not Found"),
            ANSWER + " /server_info.* with status 404: Not Found; start it as",
        ),
        (
            "/server_info?config_format=json",
            (200, '{"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}'),
            "--logprobs-mode processed_logprobs, got raw_logprobs; start it as",
        ),
    ],
)
def test_a_server_that_is_started_otherwise_is_refused(server, path, answer, message):
    server.answers[path] = answer
    with refused(message):
        VllmServerEngine(tiny_decoder(), torch.float32, server.url)


def test_a_server_of_raw_logprobs_serves_top_p_at_temperature_1(server):
    with refused(
        "--vllm-url with --top-p needs a server with --logprobs-mode raw_logprobs, got processed"
    ):
        VllmServerEngine(tiny_decoder(), torch.float32, server.url, filters_tokens=True)
    of_all = VllmServerEngine(tiny_decoder(), torch.float32, server.url)
    options = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
    server.answers["/server_info?config_format=json"] = (200, json.dumps(options))
    of_filters = VllmServerEngine(tiny_decoder(), torch.float32, server.url, filters_tokens=True)
    top_p, cold = (
        dataclasses.replace(SAMPLING, **options)
        for options in ({"top_p": 0.9}, {"temperature": 0.7})
    )
    for engine, sampling, is_known in (
        (of_all, SAMPLING, True),
        (of_all, cold, True),
        (of_all, top_p, False),
        (of_filters, SAMPLING, True),
        (of_filters, top_p, True),
        (of_filters, cold, False),
    ):
        logprobs = sampled(engine, 2, sampling, 0, 1).logprobs
        assert logprobs.isfinite().all() if is_known else logprobs.isnan().all()


@pytest.mark.parametrize(
    ("url", "message"),
    [("127.0.0.1:8000", "must begin with http"), ("http://127.0.0.1:1", "cannot be reached, or ")],
)
def test_a_missing_server_is_reported_before_any_work(tmp_path, capsys, url, message):
    flags = f"--rollout vllm --vllm-url {url} --sft-steps 0 --out {tmp_path}/run"
    assert train.main(flags.split()) == 2
    assert not (tmp_path / "run").exists()
    assert message in capsys.readouterr().err


def test_failures_while_sampling_are_sentences(server, monkeypatch):
    engine = VllmServerEngine(tiny_decoder(), torch.float32, server.url)

    def fails(answer, message):
        server.answers["/inference/v1/generate"] = answer
        with pytest.raises(EngineError, match=message):
            sampled(engine, 2, SAMPLING, 0, 1)

    fails(
        (500, '{"error": "engine dead"}'),
        ANSWER + " /inference/v1/generate with status 500: .*engine dead",
    )
    fails(
        (200, '{"choices": []}'),
        ANSWER + " /inference/v1/generate with something else than expected",
    )
    fails(
        lambda request: (200, server.generate(request)[1].replace('"stop"', '"abort"')),
        "with something else than expected",
    )
    monkeypatch.setattr(module, "WORK_LIMIT", 0.2)
    fails(
        lambda request: time.sleep(0.5) or (200, ""),
        "has not answered /inference/v1/generate for 0.2 s",
    )
    server.answers["/reset_prefix_cache"] = (200, '{"success": false}')
    with pytest.raises(EngineError, match="could not clear its prefix cache"):
        engine.load_weights(tiny_decoder())


def choice(**changes):
    """Return the answer of one sample, 5 and the stop token, with other values for some keys."""
    content = [{"logprob": -0.5}, {"logprob": -0.5}]
    whole = {"index": 0, "finish_reason": "stop", "token_ids": [5, 3]}
    return json.dumps({"choices": [whole | {"logprobs": {"content": content}} | changes]})


OTHERS = [
    *(choice(token_ids=x) for x in ([-1, 3], [10**30, 3], [1.7, 3], ["1", 3], [5], "53")),
    *(choice(index=x) for x in (1, False)),
    *(choice(logprobs={"content": [{"logprob": x}] * 2}) for x in (True, 10**400)),
    *(choice(logprobs=None), choice(finish_reason="abort"), "[" * 100_000, "[]", "\\x00"),
    '{"choices": [' + choice()[13:-2] + "," + choice()[13:-2] + "]}",
]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        *((answer, "something else than expected") for answer in OTHERS),
        (choice(token_ids=[10**6, 3]), "a token outside the vocabulary of 32: token 0 of sample 0"),
        (choice(logprobs={"content": [{"logprob": 5.0}] * 2}), "a log-prob above 0: token 0 of"),
        (choice(token_ids=[5, 5]), "a wrong `truncated`"),
        (choice(token_ids=[3, 3]), "a stop token before the last token: token 0 of sample 0"),
        (choice(finish_reason="length"), "a wrong `truncated`"),
        (
            choice(token_ids=[5] * 998 + [3], logprobs={"content": [{"logprob": -1.0}] * 999}),
            "999 tokens for sample 0 of prompt 0, wanted 1 to 8",
        ),
    ],
)
def test_what_a_server_cannot_have_sampled_is_refused(server, answer, message):
    model = tiny_decoder()
    engine = VllmServerEngine(model, torch.float32, server.url)
    checked = CheckedEngine(engine, "vllm", model.config.vocab_size)
    server.answers["/inference/v1/generate"] = (200, answer)
    with pytest.raises(EngineError, match=message):
        checked.generate(RolloutRequest(PROMPTS.take(0, 1), 1, SAMPLING, 0, 1))
    server.answers["/inference/v1/generate"] = (200, choice())
    assert checked.generate(
        RolloutRequest(PROMPTS.take(0, 1), 1, SAMPLING, 0, 1)
    ).tokens.tolist() == [5, 3]


def test_weights_of_a_killed_run_are_removed_by_the_next(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = VllmServerEngine(tiny_decoder(), torch.float32, server.url)
    live = engine._folder
    killed, stranger = tmp_path / f"{module.WEIGHTS}killed", tmp_path / f"{module.WEIGHTS}x"
    for folder in (killed, stranger):
        shutil.copytree(live, folder)
    (stranger / "lock").unlink()  # not a folder of ours, or one that is just being made
    VllmServerEngine(tiny_decoder(), torch.float32, server.url)
    assert live.exists()
    assert stranger.exists()
    assert not killed.exists()


def test_a_run_whose_server_fails_ends_with_a_sentence_and_resumes(server, tmp_path, capsys):
    generate, steps = server.answers["/inference/v1/generate"], []

    def failing(request):
        is_training = request["sampling_params"]["n"] == 4
        steps.extend([None] * is_training)
        return (503, "shutting down") if len(steps) == 3 else generate(request)

    server.answers["/inference/v1/generate"] = failing
    flags = [
        *"--rollout vllm --vllm-url".split(),
        server.url,
        *f"--task chain --objective grpo --out {tmp_path}".split(),
    ]
    flags += "--prompts 2 --rollouts 4 --steps 2 --eval-prompts 2 --eval-samples 1".split()
    assert train.main([*flags, "--save-every", "1", "--threads", "1"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "answered /inference/v1/generate with status 503: shutting down; the last good checkpoint "
        "is" in error
    )
    assert "Restart the server or fix the engine, then continue with --resume." in error
    server.answers["/inference/v1/generate"] = generate
    assert train.main(["--resume", str(tmp_path)]) == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_servers_own_options_are_refused():
    flags = ["--rollout", "vllm", "--vllm-url", "http://127.0.0.1:1"]
    for more in (["--vllm-tensor-parallel", "2"], ["--kv-cache-gb", "1"]):
        with refused("cannot be used with --vllm-url"):
            train.parse([*flags, *more])
    with refused("--vllm-url needs --rollout vllm"):
        train.parse(flags[2:])


JOB = "--rollout vllm --task chain --chain-length 3 --objective grpo --lr 2e-2 --steps 8".split()
JOB += "--prompts 4 --rollouts 32 --eval-prompts 8 --eval-samples 2 --threads 1".split()
JOB += ["--dtype", "float32"]  # the tolerances below are for float32


def answers(url):
    """Return whether the server there is ready."""
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.mark.vllm
def test_a_run_learns_with_a_real_server_and_says_when_it_is_gone(tmp_path):
    """Two ranks with sharded weights. `vllm serve` calls this module; the CPU build's own command
    does not start.
    """
    port = free_port()
    policy = tmp_path / "policy"
    policy.mkdir()
    sizes = {
        "vocab_size": 8,
        "hidden_size": 64,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = tiny_decoder(**sizes)
    model.initialise(0)
    write_policy(policy, "float32", model.weights(), new_files(model.config, (2,)))
    options = (
        f"--model {policy} --skip-tokenizer-init --enable-scale-out --enforce-eager --dtype float32"
    ).split()
    options += (
        f"--logprobs-mode processed_logprobs --kv-cache-memory-bytes 30000000 --port {port}"
    ).split()
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [
        sys.executable,
        *"-m vllm.entrypoints.openai.api_server --host 127.0.0.1".split(),
        *options,
    ]
    log = (tmp_path / "log").open("w")
    serving = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while not answers(url):
            assert serving.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() - start < 150
            time.sleep(1)
        flags = [
            *JOB,
            "--vllm-url",
            url,
            *f"--model {policy} --sharding full --out {tmp_path}/run".split(),
        ]
        process = torchrun(2, "-m", "maxrl_fast.train", *flags)
        output = finished(process, 200)
    finally:
        os.killpg(serving.pid, signal.SIGKILL)
        serving.wait()
        log.close()
    assert process.returncode == 0, output
    assert "rollout engine: vllm (0.3" in output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    rewards = [record["reward_mean"] for record in records]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    assert all(0 < record["logprob_diff"] < 1e-4 for record in records)
    done = subprocess.run(
        [
            sys.executable,
            *f"-m maxrl_fast.train --resume {tmp_path}/run --steps 9 --allow-changes".split(),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "cannot be reached, or closed the connection" in done.stderr

"""--rollout vllm with --vllm-url. Tests marked vllm need the real server (`make test-vllm`)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maxrl_fast import train
from maxrl_fast.errors import EngineError
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.rollout import CheckedEngine, RolloutRequest, Sampling
from maxrl_fast.rollout.vllm import VllmServerEngine, request_json
from tests.batches import make_prompts
from tests.distributed.test_torchrun import finished, free_port, torchrun
from tests.models import tiny_decoder
from tests.rollout.test_vllm import check_loaded
from tests.runs import CHAIN_TASK
from tests.server import serving
from tests.tables import refused

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [9, 9]])
SAMPLING = Sampling(1.0, 8, (3,))
GENERATE = "/inference/v1/generate"
INFO = "/server_info?config_format=json"


def sampled(engine, *request):
    return engine.generate(RolloutRequest(PROMPTS, *request))


class FakeServer:
    """Answers as vLLM does; a test replaces answers by path. An answer is (status, text), or a
    function of the request."""

    def __init__(self):
        self.requests, self.loaded = [], []
        options = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        self.answers = {
            "/version": (200, '{"version": "0.32.0"}'),
            INFO: (200, json.dumps(options)),
            "/collective_rpc": self.reload,
            "/reset_prefix_cache": (200, '{"success": true}'),
            GENERATE: self.generate,
        }

    def reload(self, request):
        folder = Path(request["kwargs"]["weights_path"])
        self.loaded.append([load_file(file) for file in sorted(folder.glob("*.safetensors"))])
        return 200, '{"results": [null]}'

    def generate(self, request):
        """Return samples i of i + 1 tokens in the wrong order: the prompt's first token, repeated,
        and a stop token; sample 0 is cut off before it."""
        parameters = request["sampling_params"]
        stop, choices = parameters["stop_token_ids"][0], []
        token = request["token_ids"][0] if request["token_ids"][0] != stop else stop + 1
        for i in reversed(range(parameters["n"])):
            tokens = [token] * i + [stop if i else token]
            content = [{"logprob": -0.5 - j, "top_logprobs": []} for j in range(i + 1)]
            choice = {"index": i, "token_ids": tokens, "logprobs": {"content": content}}
            choices.append(choice | {"finish_reason": "stop" if i else "length"})
        return 200, json.dumps({"choices": choices})


@pytest.fixture
def server():
    fake = FakeServer()

    def answer(http, body):
        request = json.loads(body) if body else None
        fake.requests.append((http.path, request))
        given = fake.answers[http.path]
        status, text = given(request) if callable(given) else given
        return status, {}, text.encode()

    with serving(answer) as fake.url:
        yield fake


def test_samples_come_back_in_order_with_a_seed_for_each_prompt(server):
    engine = VllmServerEngine(tiny_decoder(), torch.float32, server.url + "/")
    rollouts = sampled(engine, 2, SAMPLING, 0, 1)
    assert rollouts.tokens.tolist() == [5, 5, 3, 9, 9, 3, 9, 9, 3]
    assert rollouts.lengths.tolist() == [1, 2] * 3
    assert rollouts.logprobs.tolist() == [-0.5, -0.5, -1.5] * 3
    assert rollouts.truncated.tolist() == [True, False] * 3
    engine.generate(RolloutRequest(PROMPTS.take(1, 2), 2, SAMPLING, 0, 1))  # some of them again
    asked = [x for path, x in server.requests if path == GENERATE]
    seeds = {(*x["token_ids"], x["sampling_params"]["seed"]) for x in asked}
    assert len(seeds) == len({seed for *_, seed in seeds}) == 3
    greedy = sampled(engine, 2, SAMPLING.greedy, 0, 1)
    assert greedy.tokens.tolist() == [5, 5, 9, 9, 9, 9]
    assert not greedy.logprobs.any()


def test_weights_are_written_in_the_compute_dtype_and_removed_at_the_end(server):
    model = tiny_decoder(1)
    engine = VllmServerEngine(tiny_decoder(), torch.bfloat16, server.url)
    engine.load_weights(model)
    check_loaded({name: x for file in server.loaded[1] for name, x in file.items()}, model)
    assert all(len(file) == 1 for file in server.loaded[1])
    folder = engine._folder
    assert folder.exists()
    del engine
    assert not folder.exists()


RAW = '{"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}'


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/version", '{"version": "0.34.1"}', "from 0.32 to below 0.34, got 0.34.1"),
        (INFO, RAW, "--logprobs-mode processed_logprobs, got raw_logprobs; start it as"),
    ],
)
def test_a_server_that_is_started_otherwise_is_refused(server, path, answer, message):
    server.answers[path] = (200, answer)
    with refused(message):
        VllmServerEngine(tiny_decoder(), torch.float32, server.url)


def test_a_server_of_raw_logprobs_serves_top_p_at_temperature_1(server):
    url, cpu = server.url, torch.float32
    with refused("--top-p needs a server with --logprobs-mode raw_logprobs, got processed"):
        VllmServerEngine(tiny_decoder(), cpu, url, filters_tokens=True)
    of_all = VllmServerEngine(tiny_decoder(), cpu, url)
    server.answers[INFO] = (200, RAW)
    of_filters = VllmServerEngine(tiny_decoder(), cpu, url, filters_tokens=True)
    top_p, cold = Sampling(1.0, 8, (3,), top_p=0.9), Sampling(0.7, 8, (3,))
    for engine, known, unknown in ((of_all, cold, top_p), (of_filters, top_p, cold)):
        assert sampled(engine, 2, SAMPLING, 0, 1).logprobs.isfinite().all()
        assert sampled(engine, 2, known, 0, 1).logprobs.isfinite().all()
        assert sampled(engine, 2, unknown, 0, 1).logprobs.isnan().all()


def test_a_server_with_other_requests_is_a_sentence(server):
    engine = VllmServerEngine(tiny_decoder(), torch.float32, server.url)
    server.answers["/reset_prefix_cache"] = (200, '{"success": false}')
    with pytest.raises(EngineError, match="could not clear its prefix cache"):
        engine.load_weights(tiny_decoder())


def choice(**changes):
    content = [{"logprob": -0.5}, {"logprob": -0.5}]
    whole = {"index": 0, "finish_reason": "stop", "token_ids": [5, 3]}
    return json.dumps({"choices": [whole | {"logprobs": {"content": content}} | changes]})


OTHERS = [
    *(choice(token_ids=x) for x in ([1.7, 3], ["1", 3], [5], "53")),
    *(choice(index=1), choice(logprobs=None), choice(finish_reason="abort"), "[]", "\\x00"),
    '{"choices": [' + choice()[13:-2] + "," + choice()[13:-2] + "]}",
]


def test_what_a_server_cannot_have_sampled_is_refused(server):
    model = tiny_decoder()
    engine = VllmServerEngine(model, torch.float32, server.url)
    checked = CheckedEngine(engine, "vllm", model.config.vocab_size)
    asked = RolloutRequest(PROMPTS.take(0, 1), 1, SAMPLING, 0, 1)
    answers = [(answer, "something else than expected") for answer in OTHERS]
    # of what the engine lets pass, tests/rollout/test_sampling_and_scoring.py has a table
    answers.append((choice(token_ids=[10**6, 3]), "a token outside the vocabulary of 32"))
    for answer, message in answers:
        server.answers[GENERATE] = (200, answer)
        with pytest.raises(EngineError, match=message):
            checked.generate(asked)
    server.answers[GENERATE] = (200, choice())
    assert checked.generate(asked).tokens.tolist() == [5, 3]


def test_a_run_whose_server_fails_ends_with_a_sentence_and_resumes(server, tmp_path, capsys):
    generate, steps = server.answers[GENERATE], []

    def failing(request):
        is_training = request["sampling_params"]["n"] == 4
        steps.extend([None] * is_training)
        return (503, "shutting down") if len(steps) == 3 else generate(request)

    server.answers[GENERATE] = failing
    flags = f"--rollout vllm --vllm-url {server.url} --task {CHAIN_TASK} --out {tmp_path}"
    flags += " --objective grpo --prompts 2 --rollouts 4 --steps 2 --eval-prompts 2"
    flags += " --eval-samples 1 --save-every 1"
    assert train.main([*flags.split(), "--threads", "1"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "with status 503: shutting down; the last good checkpoint is" in error
    server.answers[GENERATE] = generate
    assert train.main(["--resume", str(tmp_path)]) == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


JOB = f"--rollout vllm --task {CHAIN_TASK} --length 3 --objective grpo --lr 2e-2 --steps 8".split()
JOB += "--prompts 4 --rollouts 32 --eval-prompts 8 --eval-samples 2 --threads 1".split()
JOB += ["--dtype", "float32"]  # the tolerances below are for float32


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.mark.vllm
def test_a_run_learns_with_a_real_server_and_one_that_is_gone_is_reported(tmp_path):
    """Two ranks with sharded weights. `vllm serve` calls this module; the CPU build's own command
    does not start."""
    port = free_port()
    policy = tmp_path / "policy"
    policy.mkdir()
    heads = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_decoder(vocab_size=8, hidden_size=64, **heads)
    model.initialise(0)
    write_policy(policy, "float32", model.weights(), new_files(model.config, (2,)))
    options = f"--model {policy} --skip-tokenizer-init --enable-scale-out --enforce-eager"
    options += f" --dtype float32 --logprobs-mode processed_logprobs --host 127.0.0.1 --port {port}"
    options += " --kv-cache-memory-bytes 30000000"
    environment = os.environ | {
        **{"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""},
        **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        "OMP_NUM_THREADS": "1",
    }
    module = "-m vllm.entrypoints.openai.api_server"
    command = [sys.executable, *module.split(), *options.split()]
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
        flags = f"--vllm-url {url} --model {policy} --sharding full --out {tmp_path}/run"
        process = torchrun(2, "-m", "maxrl_fast.train", *JOB, *flags.split())
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
    with refused("cannot be reached, or closed the connection"):
        VllmServerEngine(model, torch.float32, url)


OK = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def replying(*parts):
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):  # the client has closed the connection
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    for part in parts:
                        while callable(part):
                            connection.sendall(part())
                        connection.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    with listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def ask(url, read=lambda answer: answer, seconds=20.0):
    return request_json(url, "/x?y=1", read, None, seconds=seconds, most_bytes=10**6)


def test_a_server_that_stops_is_a_sentence():
    with replying(OK, lambda: time.sleep(9) or b"") as url, pytest.raises(EngineError) as error:
        ask(url, seconds=0.4)
    assert str(error.value) == f"the vLLM server at {url} has not answered /x?y=1 for 0.4 s"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([OK + b"\r\n", lambda: b"1" * 65536], "answered /x?y=1 with more than 1"),
        ([b""], "cannot be reached, or closed the connection: RemoteDisconnect"),
        ([OK + b"\r\n\x1b[2J<html>"], "than expected: '\\x1b[2J<html>'"),
    ],
)
def test_other_replies_are_errors(parts, message):
    with replying(*parts) as url, pytest.raises(EngineError) as error:
        ask(url, lambda answer: answer["a"])
    assert message in str(error.value)

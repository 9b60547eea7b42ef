import json
import re
import shutil

import pytest

from maxrl_fast import evaluate, train
from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import directory_of, find_model
from tests.distributed.test_torchrun import finished, torchrun
from tests.hub import COMMIT, LATER, Hub, use_hub
from tests.tables import refused, table
from tests.tasks.test_dataset import SUMS, save_byte_level_policy, written

NAME = f"hf://org/tiny@{COMMIT}"
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
SMALL.add("chat_template.jinja")
NOWHERE = "http://127.0.0.1:9"  # the port of the service that discards: nobody listens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = save_byte_level_policy(tmp_path_factory.mktemp("model"))
    others = "pytorch_model.bin modeling_own.py training_args.pt consolidated.safetensors README.md"
    for name in others.split():
        (directory / name).write_bytes(b"import os\n")
    return directory


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    pickled = tmp_path / "pickled"
    shutil.copytree(tiny, pickled, ignore=shutil.ignore_patterns("model.safetensors"))
    with Hub({"org/tiny": tiny, "org/pickled": pickled}).running() as hub:
        hub.errors = {"org/gated": (403, "GatedRepo")}
        use_hub(hub.url, tmp_path / "cache", monkeypatch)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def names_in(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["org/tiny", "hf://org/tiny@main"])
def test_the_commit_is_named_and_only_safe_files_are_downloaded(hub, name):
    assert find_model(name, pytest.fail) == NAME
    assert names_in(directory_of(NAME)) == SMALL
    assert names_in(directory_of(NAME, with_weights=True)) == {*SMALL, "model.safetensors"}


def test_a_commit_stays_what_it_was(hub):
    before = directory_of(NAME, with_weights=True)
    hub.main = LATER
    hub.asked.clear()
    assert find_model(NAME, pytest.fail) == NAME
    assert not hub.asked
    directory_of.cache_clear()
    assert directory_of(NAME, with_weights=True) == before
    assert find_model("org/tiny", pytest.fail) == f"hf://org/tiny@{LATER}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    table("""
    hf://org/none | cannot get hf://org/none from the hub: .*; for a private or gated model HF_TOKEN
    org/gated | cannot get hf://org/gated from the hub: .* accepted the terms at http://127.0.0.1:.*
    org/pickled | org/pickled@0123456789abcdef0123456789abcdef01234567 has no weights in
        safetensors
    """),
)
def test_failures_are_sentences(hub, name, sentence):
    with pytest.raises(InputError) as error:
        directory_of(find_model(name, pytest.fail), with_weights=True)
    assert re.search(sentence, str(error.value))
    assert "\n" not in str(error.value)


def test_without_a_network_the_copy_in_the_cache_is_taken_and_said(hub, tmp_path, monkeypatch):
    expected = directory_of(find_model("org/tiny", pytest.fail), with_weights=True)
    use_hub(NOWHERE, tmp_path / "cache", monkeypatch)
    found = []
    assert find_model("org/tiny", found.append) == NAME
    assert directory_of(NAME, with_weights=True) == expected
    [sentence] = found
    assert sentence.startswith("the hub cannot be reached (ConnectError")
    assert sentence.endswith(f"is the copy of hf://org/tiny in the cache, of commit {COMMIT}")
    with refused(r"the hub cannot be reached \(.*\), and its cache does not have hf://org/other"):
        find_model("hf://org/other", pytest.fail)


def job(tmp_path):
    reward = "def score(prompt, response, answer):\n    return float(len(response))\n"
    (tmp_path / "reward.py").write_text(reward)
    data = written(tmp_path / "sums.jsonl", SUMS)
    return (
        f"--task {tmp_path}/reward.py:score --data {data} --objective rloo --prompts 4 "
        "--rollouts 2 --steps 3 --max-new-tokens 5 --eval-prompts 2 --eval-samples 2 "
        "--threads 1 --dtype float32 --reward-workers 1 --model org/tiny"
    ).split()


def test_a_dry_run_downloads_no_weights(hub, tmp_path, capfd):
    assert train.main([*job(tmp_path), "--device", "auto", "--dry-run", "2x80"]) == 0
    assert f"model = {NAME}" in capfd.readouterr().out
    assert any("config.json" in path for path in hub.asked)
    assert not any("safetensors" in path for path in hub.asked)


def test_an_evaluation_samples_a_model_of_the_hub(hub, tmp_path):
    out, sizes = tmp_path / "out", "--eval-prompts 2 --samples 2 --max-new-tokens 5 --threads 1"
    command = ["hf://org/tiny", *job(tmp_path)[:4], *sizes.split(), "--out", str(out)]
    assert evaluate.main(command) == 0
    results = json.loads((out / "eval.json").read_text())
    assert (results["name"], COMMIT in results["checkpoint"]) == ("tiny", True)


@pytest.mark.slow
def test_two_ranks_download_each_file_once(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    command = ["-m", "maxrl_fast.train", *job(tmp_path), "--out", str(tmp_path / "run")]
    process = torchrun(2, *command)
    output = finished(process, 300)
    assert process.returncode == 0, output
    folder = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert (folder / "model.safetensors").exists()
    assert hub.asked.count(f"GET /org/tiny/resolve/{COMMIT}/model.safetensors") == 1

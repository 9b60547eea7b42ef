"""Malicious checkpoints are refused quickly, with a message that names the file, and without the
memory that they declare.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from maxrl_fast.errors import InputError
from maxrl_fast.model import tokenizer
from maxrl_fast.model.checkpoint import kept_files, load_checkpoint, read_config
from maxrl_fast.model.tokenizer import load_tokenizer, tokenizer_files
from maxrl_fast.runtime.files import JSON_BYTES
from maxrl_fast.tasks import text_codec
from maxrl_fast.tasks.maze import PATH, MazeTask
from maxrl_fast.tasks.text_codec import TextCodec
from tests.models import save_checkpoint, tiny_decoder
from tests.tables import refused

TASK = MazeTask(5)
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings"
).split()


@pytest.fixture
def directory(tmp_path):
    return save(tmp_path / "checkpoint")


def save(directory, **options):
    model = tiny_decoder()
    save_checkpoint(
        directory, model.config, model.weights(), TASK.tokenizer_files(), TASK.stop_ids, **options
    )
    return directory


def refusal(directory, load=load_checkpoint, seconds=5.0):
    """Return the error message, which must come quickly whatever the file declares."""
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        load(directory)
    assert time.monotonic() - start < seconds
    message = str(caught.value)
    assert len(message) < 1200
    assert "\n" not in message
    return message


def edit_config(directory, changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


IMPOSSIBLE = [10**15, 10**400, 2**31, 0, -1, True, 32.0, "32", float("nan"), float("inf")]
IMPOSSIBLE += [[32], {"size": 32}, "9" * 10**6]


# each size with some of the values, and each value for some of the sizes
@pytest.mark.parametrize(
    ("name", "value"),
    [(SIZES[(i + j) % 8], x) for i, x in enumerate(IMPOSSIBLE) for j in (0, 3)],
)
def test_impossible_sizes_are_refused(directory, name, value):
    edit_config(directory, {name: value})
    message = refusal(directory)
    assert "config.json: " in message
    assert "must be" in message


@pytest.mark.parametrize("name", sorted(set(SIZES) - {"max_position_embeddings"}))
@pytest.mark.parametrize("value", [2**31 - 2, 10**9, 10**6, 20])
def test_sizes_that_contradict_the_weights_are_refused(directory, name, value):
    """A huge number of layers or columns, with a file of two layers of size 32."""
    edit_config(directory, {name: value})
    assert str(directory) in refusal(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["qwen2"]},
        {"model_type": {}},
        {"model_type": "qwen2" * 10**5},
        {"layer_types": 5},
        {"layer_types": "full_attention"},
        {"layer_types": [["full_attention"]]},
        {"dtype": {"float32": 1}},
        {"dtype": 32},
        {"tie_word_embeddings": "false"},
        {"tie_word_embeddings": 1},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": "1e-6"},
        {"rms_norm_eps": True},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rope_parameters": {"rope_theta": -1.0}},
        {"rope_parameters": {"rope_theta": 10**400}},
        {"rope_parameters": {"rope_type": ["default"]}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 0.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
        {"rope_parameters": [1]},
        {"head_dim": None, "hidden_size": 33},
        {"hidden_act": ["silu"] * 10**5},
        {"use_sliding_window": {"deep": [10**400]}},
    ],
)
def test_invalid_values_are_refused(directory, changes):
    edit_config(directory, changes)
    assert "config.json" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_no_key_that_makes_transformers_run_code_is_kept(directory, name):
    code = {
        "auto_map": {"AutoConfig": "evil.Config"},
        "custom_pipelines": {"a": {}},
        "_attn_implementation": "evil/kernel",
    }
    path = directory / name
    path.write_text(
        json.dumps(json.loads(path.read_text()) | code | {"own": [{**code, "kept": 1}]})
    )
    kept = kept_files(directory, TASK.stop_ids)[name].decode()
    assert json.loads(kept)["own"] == [{"kept": 1}]
    assert not any(key in kept for key in code)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_nested_too_deeply_is_refused(directory, name):
    (directory / name).write_bytes(b'{"a":' * 10**5)
    assert name in refusal(directory, lambda path: kept_files(path, TASK.stop_ids))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b'{"vocab_size": ' + b"9" * 10**5 + b"}",
        b'{"vocab_size": 1e999999',
        b"\xff\xfe{}",
        b"",
        b"null",
        b'"text"',
        b"{}",
    ],
)
def test_broken_json_is_refused(directory, name, content):
    (directory / name).write_bytes(content)
    assert name in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_files_that_are_too_large_are_not_read(directory, name):
    with open(directory / name, "wb") as file:
        file.truncate(10**12)  # sparse: it takes no disk space
    assert f"must have at most {JSON_BYTES} bytes, got 1000000000000" in refusal(directory)
    (directory / name).unlink()
    (directory / name).symlink_to("/proc/self/status")  # its size is 0, but it has content
    assert name in refusal(directory)


def replace_file(directory, name, kind):
    path = directory / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(
            {
                "device": "/dev/zero",
                "loop": name,
                "nowhere": "nothing here",
                "pipe behind a link": "pipe",
            }[kind]
        )
        if kind == "pipe behind a link":
            os.mkfifo(directory / "pipe")


@pytest.mark.parametrize(
    "kind", ["pipe", "folder", "device", "loop", "nowhere", "pipe behind a link"]
)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
def test_files_that_are_not_regular_are_refused(directory, name, kind):
    replace_file(directory, name, kind)
    if name == "tokenizer.json":
        if kind not in ("loop", "nowhere"):
            assert name in refusal(directory, load_tokenizer, seconds=30)
            assert name in refusal(directory, tokenizer_files)
    elif name.endswith("index.json") and kind in ("loop", "nowhere"):
        load_checkpoint(directory)  # no file: the checkpoint has no index
    else:
        assert name in refusal(directory)


def test_links_of_the_hugging_face_cache_are_followed(directory):
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for path in list(directory.iterdir()):
        path.rename(blobs / f"blob-{path.name}")
        path.symlink_to(f"../blobs/blob-{path.name}")
    loaded = load_checkpoint(directory)
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.parameters(), tiny_decoder().parameters(), strict=True)
    )
    assert len(load_tokenizer(directory)) == TASK.vocab_size


def header_of(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write(path, header, data, declared=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    declared = len(text) if declared is None else declared
    path.write_bytes(declared.to_bytes(8, "little") + text + data)


NORM = "model.norm.weight"


def changed(header, **fields):
    return header | {NORM: header[NORM] | fields}


def with_duplicate(header, shape):
    """Return the header with its first tensor twice, the second time with a wrong shape."""
    text = json.dumps(header)
    lie = json.dumps(
        {NORM: {"dtype": "F32", "shape": shape, "data_offsets": header[NORM]["data_offsets"]}}
    )
    return (text[:-1] + ", " + lie[1:]).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda h, d: (h, d, len(d) * 100),
        lambda h, d: (h, d, 2**63),
        lambda h, d: (h, d, 2**64 - 1),
        lambda h, d: (h, d, 0),
        lambda h, d: (h, d, 10**8),
        lambda h, d: (json.dumps(h).encode()[:-1], d),
        lambda h, d: (b"[" * 10**5, d),
        lambda h, d: (b"\xff" * 100, d),
        lambda h, d: (with_duplicate(h, [2**40]), d),
        lambda h, d: (changed(h, data_offsets=[0, 2**62]), d),
        lambda h, d: (changed(h, data_offsets=[len(d), len(d) + 128]), d),
        lambda h, d: (changed(h, data_offsets=[128, 0]), d),
        lambda h, d: (changed(h, data_offsets=[-128, 0]), d),
        # overlaps another tensor
        lambda h, d: (changed(h, data_offsets=[0, 128]), d),
        lambda h, d: (changed(h, shape=[2**40]), d),
        lambda h, d: (changed(h, shape=[2**32, 2**32]), d),
        lambda h, d: (changed(h, shape=[2**63, 2]), d),
        lambda h, d: (changed(h, shape=[10**400]), d),
        lambda h, d: (changed(h, shape=[1] * 10**4 + [32]), d),
        lambda h, d: (changed(h, shape=[-32]), d),
        lambda h, d: (changed(h, dtype="F4096"), d),
        lambda h, d: (changed(h, dtype="F64"), d),
        lambda h, d: (h | {"x" * 10**6: h[NORM]}, d),
        lambda h, d: (h, d[:-1]),
        lambda h, d: (h, d + b"more"),
    ],
)
def test_broken_tensor_headers_are_refused(directory, damage):
    path = directory / "model.safetensors"
    write(path, *damage(*header_of(path)))
    assert "model.safetensors" in refusal(directory)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0"])
def test_tensor_files_without_a_header_are_refused(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(directory)


def test_long_names_are_cut_in_messages(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"x" * 10**6: torch.ones(1), "a\nb": torch.ones(1)}, path)
    assert "model.safetensors has the tensor " in refusal(directory)


def sharded(directory):
    path = save(directory, shard_bytes=30_000) / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    "file",
    [
        *(
            "../model.safetensors",
            "..",
            ".",
            "",
            "/etc/passwd",
            "a/b",
            "\0",
            "a\0b",
            "x" * 10**4,
            "config.json",
        ),
        *(None, 5, ["model-00001-of-00003.safetensors"], {}, "nothing.safetensors", "\ud800"),
    ],
)
def test_an_index_with_bad_file_names_is_refused(tmp_path, file):
    path, index = sharded(tmp_path / "sharded")
    (tmp_path / "model.safetensors").write_bytes(b"not to be opened")
    index["weight_map"][NORM] = file
    path.write_text(json.dumps(index))
    message = refusal(path.parent)
    assert str(path.parent) in message


@pytest.mark.parametrize("weight_map", [None, 5, [], ["a"], "text", {}])
def test_an_index_without_a_valid_map_is_refused(tmp_path, weight_map):
    path, _ = sharded(tmp_path / "sharded")
    path.write_text(json.dumps({"weight_map": weight_map}))
    assert "index.json" in refusal(path.parent)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("tokenizer.json", content)
            for content in (b"{", b"[" * 10**5, b"\xff" * 100, b"{}", b"null", b'{"model": 5}')
        ),
        (
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": '
            b'["a b"]}}',
        ),
        ("tokenizer_config.json", b"[" * 10**5),
        ("tokenizer_config.json", b'{"model_max_length": ' + b"9" * 10**5 + b"}"),
    ],
)
def test_broken_tokenizers_are_refused(directory, name, content):
    (directory / name).write_bytes(content)
    assert str(directory) in refusal(directory, load_tokenizer, seconds=60)


def codec(directory):
    return TextCodec(directory, max_prompt_tokens=100, is_plain=False)


def test_the_config_is_checked_before_the_tokenizer_is_loaded(directory, monkeypatch):
    """transformers reads config.json for the tokenizer's class, and builds a list of that many
    layers.
    """
    edit_config(directory, {"num_hidden_layers": 10**9})
    monkeypatch.setattr(text_codec, "load_tokenizer", lambda path: pytest.fail(f"{path} is loaded"))
    assert "has 26 tensors, too few for 1000000000 layers" in refusal(directory, codec)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HANGS = "PATH{% if messages[0].content == 'UP UP' %}" + LOOPS + "{% endif %}"
ENCODED = [[{"role": "user", "content": content}] for content in ("UP", "UP UP", "DOWN")]
PLACES = ["line 1", "line 2", "line 3"]


def with_template(directory, template):
    (directory / "chat_template.jinja").write_text(template)
    return directory / "chat_template.jinja"


def test_a_chat_template_that_hangs_is_refused_with_its_file_and_the_line(directory, monkeypatch):
    """Also if it hangs for a later prompt, and the tokenizer works afterwards. Other threads encode
    without the limit.
    """
    file = with_template(directory, HANGS)
    text, before = codec(directory), signal.getsignal(signal.SIGALRM)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(text.encode, [ENCODED[0], ENCODED[2]], PLACES[:2]).result() == [
            [PATH],
            [PATH],
        ]
    monkeypatch.setattr(tokenizer, "SECONDS", 1)
    message = refusal(directory, lambda _: text.encode(ENCODED, PLACES))
    assert (
        message == f"line 2: encoding a prompt with {file} must take at most 1 s, and takes longer"
    )
    assert text.encode(ENCODED[:1], PLACES[:1]) == [[PATH]]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_regular_expression_of_exponential_time_is_refused():
    """The library's own limit ends it, in Rust, where no signal could; its panic is no
    Exception.
    """
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    hostile = Tokenizer.from_str(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": split})
    )
    start = time.monotonic()
    with (
        refused(r"encoding it fails: .*limit"),
        tokenizer.time_limit("encoding it"),
    ):
        hostile.encode("a" * 40 + "b")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", ["num_labels", "n_layers"])
def test_no_list_of_as_many_labels_or_layers_as_declared_is_built(directory, name):
    """transformers would build one to find the tokenizer's class, also of layers that our decoder
    does not read.
    """
    edit_config(directory, {name: 10**9})
    assert f"config.json: {name} must be an integer from 1 to " in refusal(directory, codec)


LOAD = """
import resource, sys
from pathlib import Path
from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import load_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_checkpoint(Path(sys.argv[1]))
except InputError as error:
    print("refused:", error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_declared_sizes_are_not_allocated(directory):
    """The configuration declares a model of 8 TB that is not in the file; the process must not grow
    by 200 MB.
    """
    edit_config(
        directory,
        dict.fromkeys(("hidden_size", "intermediate_size"), 10**6) | {"vocab_size": 10**6},
    )
    run = subprocess.run(
        [sys.executable, "-c", LOAD, directory], capture_output=True, text=True, check=True
    )
    sentence, megabytes = run.stdout.splitlines()
    assert "must have shape" in sentence
    assert int(megabytes) < 200


def test_reading_a_header_does_not_read_a_sparse_file(directory):
    """A sparse file of 4 TB has the length that its header declares; loading must not read its
    pages.
    """
    size = 10**12
    path = directory / "model.safetensors"
    header, data = header_of(path)
    end = len(data)
    header["extra"] = {"dtype": "F32", "shape": [size], "data_offsets": [end, end + 4 * size]}
    write(path, header, data)
    os.truncate(path, path.stat().st_size + 4 * size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "model.safetensors" in refusal(directory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_the_undamaged_checkpoint_loads(directory):
    assert read_config(directory / "config.json").hidden_size == 32
    load_checkpoint(directory)

"""The vLLM engine. Tests marked vllm need the real one, which has its own environment (`make
test-vllm`)."""

import importlib.metadata
import random
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.rollout import RolloutRequest, Sampling, find_wrong
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.rollout.vllm import VllmEngine, check_installed, named_weights
from tests.batches import make_prompts, one_batch
from tests.distributed.test_torchrun import finished, torchrun
from tests.model.test_huggingface import tiny_policy
from tests.models import response_logits, tiny_decoder
from tests.runs import GUESS_TASK
from tests.tables import refused
from tests.tasks.test_guess import reference
from tests.test_train import read

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7] * 9, [9, 9]])
STOPS = (3, 17)
HEADS = {"head_dim": 32}  # the smallest that vLLM has on a CPU


def sampled(engine, *request):
    return engine.generate(RolloutRequest(PROMPTS, *request))


@pytest.fixture
def installed(monkeypatch):
    def pretend(version):
        own = importlib.metadata.version

        def of(name):
            if "vllm" not in name:
                return own(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", of)

    return pretend


def test_versions_are_checked(installed):
    installed("0.33.0+cpu")
    assert check_installed() == "0.33.0+cpu"
    for version, message in ((None, "not installed"), ("0.34.0", "below 0.34, got 0.34.0")):
        installed(version)
        with refused(message):
            check_installed()


class FakeLLM:
    """Stands for vLLM's LLM: records what it is told, and takes weights one at a time as vLLM
    does."""

    def __init__(self, **options):
        self.options, self.calls, self.loaded, self.most_alive = options, [], {}, 0

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        alive = []
        for name, weight in kwargs["weights_iterator"]:
            alive = [*(x for x in alive if x() is not None), weakref.ref(weight)]
            self.most_alive = max(self.most_alive, len(alive))
            self.loaded[name] = weight.clone()
            del weight


def check_loaded(loaded, model):
    """Check that the weights of a model with tied embeddings were cast."""
    expected = dict(model.weights())
    assert loaded.keys() == {*expected, "lm_head.weight"}
    for name, weight in loaded.items():
        wanted = expected.get(name, expected["model.embed_tokens.weight"])
        assert torch.equal(weight, wanted.bfloat16()), name


@pytest.fixture
def make_fake_engine(installed, monkeypatch):
    installed("0.33.0")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLLM))
    return lambda model, **options: VllmEngine(model, torch.bfloat16, **options)


def test_weights_are_cast_and_given_one_at_a_time(make_fake_engine):
    """Beside the tensor in vLLM's hands only the embedding is kept, which is the output matrix
    too."""
    model = tiny_decoder(**HEADS)
    assert model.config.tie_word_embeddings
    llm = make_fake_engine(model)._llm
    check_loaded(llm.loaded, model)
    assert llm.most_alive <= 3  # the embedding, the tensor in vLLM's hands and the one before it


@pytest.mark.parametrize(
    ("family", "embedding"), [("gpt2", "transformer.wte.weight"), ("gemma2", None)]
)
def test_a_tied_embedding_of_any_family_is_given_as_the_output_matrix_where_vllm_has_one(
    family, embedding
):
    """Otherwise vLLM keeps another output matrix, or refuses the weight. Its Gemma 2 reads logits
    from the embedding."""
    policy = tiny_policy(family)
    assert policy.config.tie_word_embeddings
    weights = dict(named_weights(policy, torch.bfloat16))
    assert ("lm_head.weight" in weights) == (embedding is not None)
    if embedding is not None:
        assert torch.equal(weights["lm_head.weight"], weights[embedding])


def test_experts_and_small_heads_are_refused(make_fake_engine):
    """vLLM 0.32's `reload_weights` leaves experts wrong on a CPU: with its own checkpoint,
    log-probs differ by 0.6 nats."""
    with refused("on a CPU needs heads of 32, 64, .* numbers, got 8; --rollout native samples it"):
        make_fake_engine(tiny_decoder())
    with refused("wrong experts once weights are loaded again, and qwen3_moe has experts"):
        make_fake_engine(tiny_policy("qwen3_moe"))


def test_sleep_discards_the_weights_and_the_kv_cache_wakes_after_new_ones(make_fake_engine):
    engine = make_fake_engine(tiny_decoder(**HEADS))
    engine._can_sleep = True  # as on a GPU
    engine._llm.calls.clear()
    engine.sleep()
    with pytest.raises(RuntimeError, match="load_weights must follow sleep"):
        sampled(engine, 1, Sampling(1.0, 4, STOPS), 0, 0)
    engine.load_weights(tiny_decoder(1, **HEADS))
    engine.load_weights(tiny_decoder(2, **HEADS))
    woken = ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset"]
    assert engine._llm.calls == [*woken, "reload_weights", "reset"]


@pytest.fixture(scope="module")
def engine():
    return VllmEngine(tiny_decoder(**HEADS), torch.float32, cache_bytes=2**28)


def own_logprobs(model, rollouts, sampling):
    """Return log-probs at the temperature, before the filters, from the forward pass of the
    training model."""
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).detach()
    log_p = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
    return log_p.gather(-1, rollouts.tokens[:, None])[:, 0]


@pytest.mark.vllm
def test_logprobs_are_those_of_the_weights_that_were_loaded_last(engine):
    for seed, temperature in ((0, 0.7), (1, 1.0), (2, 1.2), (1, 0.0)):
        model, sampling = tiny_decoder(seed, **HEADS), Sampling(temperature, 24, STOPS)
        engine.load_weights(model)
        rollouts = sampled(engine, 6, sampling, 0, seed)
        assert find_wrong(rollouts, RolloutRequest(PROMPTS, 6, sampling), 32) == ""
        if temperature:
            responses = rollouts.tokens.split(rollouts.lengths.tolist())
            assert len({tuple(x.tolist()) for x in responses}) > 12  # each sample has its own draws
            assert rollouts.logprobs.std() > 0.3
            assert (rollouts.logprobs - own_logprobs(model, rollouts, sampling)).abs().max() < 1e-4
            other = own_logprobs(tiny_decoder(seed + 5, **HEADS), rollouts, sampling)
            assert (rollouts.logprobs - other).abs().max() > 1
        else:
            native = sampled(native_engine(model, torch.float32), 6, sampling, 0, 1)
            assert torch.equal(rollouts.tokens, native.tokens)
            assert not rollouts.logprobs.any()


@pytest.mark.vllm
def test_episodes_do_not_depend_on_when_replies_come(engine):
    from tests.rollout.test_episodes import Game, episodes_of, expected_logprobs

    model, sampling, played = tiny_decoder(**HEADS), Sampling(1.0, 60, STOPS, max_turns=4), []
    engine.load_weights(model)
    for late in (None, random.Random(0), random.Random(1)):
        game = Game((1, 2, 20), late=late, vocab=32)
        rollouts = sampled(engine, 4, sampling, 0, 1, game)
        assert find_wrong(rollouts, RolloutRequest(PROMPTS, 4, sampling), 32) == ""
        expected = expected_logprobs(model, rollouts, 1.0, PROMPTS)
        assert (rollouts.logprobs - expected).abs().max() < 1e-4
        played.append([[part for part, _ in parts] for parts in episodes_of(rollouts)])
    assert max(len(parts) for parts in played[0]) > 4
    assert played[0] == played[1] == played[2]


@pytest.mark.vllm
def test_filters_and_another_family():
    """In a process of its own, because a process can have only one engine. This one gives vLLM's
    raw log-probs, those before the filters."""
    code = """
import torch
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.decode_slots import filtered_logprobs
from maxrl_fast.rollout.vllm import VllmEngine
from tests.batches import one_batch
from tests.models import response_logits, tiny_decoder
from tests.rollout.test_vllm import PROMPTS, STOPS, own_logprobs, sampled

model = tiny_decoder(model_type="qwen3", tie_word_embeddings=False, head_dim=32)
engine = VllmEngine(model, torch.float32, cache_bytes=2**28, filters_tokens=True)
for options in ({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {}):
    sampling = Sampling(1.0, 24, STOPS, **options)
    rollouts = sampled(engine, 6, sampling, 0, 1)
    assert (rollouts.logprobs - own_logprobs(model, rollouts, sampling)).abs().max() < 1e-4, options
    if options:
        logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).detach()
        kept = filtered_logprobs(logits.log_softmax(-1), sampling)
        kept = kept.gather(-1, rollouts.tokens[:, None])[:, 0]
        assert kept.isfinite().all() and (kept - rollouts.logprobs).mean() > 0.01, options
cold = Sampling(0.7, 4, STOPS)
assert sampled(engine, 2, cold, 0, 1).logprobs.isnan().all()
assert not sampled(engine, 2, cold.greedy, 0, 1).logprobs.any()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]


# the tolerances below are for float32
SHARED = "--rollout vllm --objective grpo --lr 2e-2 --prompts 4 --kv-cache-gb 0.03 --dtype float32"
SHARED += " --eval-prompts 65 --eval-samples 2 --threads 1 --hidden-size 64 --intermediate-size 64"
SHARED += " --layers 2 --heads 2 --kv-heads 2"


@pytest.mark.vllm
def test_two_ranks_that_share_an_engine_play_their_episodes(tmp_path):
    """Their weights are sharded. Of 65 held-out prompts the last one is alone in its chunk, so that
    one rank has none."""
    flags = f"{SHARED} --task {GUESS_TASK} --sft-steps 60 --steps 3 --rollouts 8"
    flags += " --vllm-tensor-parallel 2 --sharding full --keep-rollouts 64"
    process = torchrun(2, "-m", "maxrl_fast.train", *flags.split(), "--out", str(tmp_path / "run"))
    output = finished(process, 200)
    assert process.returncode == 0, output
    assert "tensor parallel over 2 processes" in output
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 3
    # after every update vLLM has the new weights: a step changes log-probs by far more
    for record in records:
        assert 0 < record["logprob_diff"] < 1e-4
        assert record["importance_weight"] == pytest.approx(1, abs=1e-4)
    games = read(tmp_path / "run" / "rollouts.jsonl")
    assert {game.get("turns", 1) for game in games} >= {1, 2, 3}
    for game in games:
        turns = re.split("⟦.*?⟧", game["response"])
        replies, is_won = reference(game["answer"], turns, 4)
        assert re.findall("⟦(.*?)⟧", game["response"]) == replies[: len(turns) - 1]
        assert game["reward"] == is_won

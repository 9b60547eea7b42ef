import itertools
import json
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.errors import EngineError
from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.model.policy import load_huggingface
from maxrl_fast.records import Rollouts, pack
from maxrl_fast.rollout import RolloutRequest, Sampling, find_wrong, sample_keys
from maxrl_fast.rollout.decode_slots import DecodeSlots
from maxrl_fast.rollout.native import CpuEngine, native_engine
from maxrl_fast.rollout.vllm import VllmServerEngine
from maxrl_fast.tasks import Reply
from tests.batches import Chosen, make_prompts, one_batch
from tests.families import tiny_config, tiny_model
from tests.models import on_threads, response_logits, tiny_decoder
from tests.rollout.test_device_decoder import fake_graphs  # noqa: F401
from tests.rollout.test_native import NoWaiting
from tests.rollout.test_vllm_server import GENERATE, server  # noqa: F401

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [*range(1, 31), *range(1, 31)], [9, 9], [30, 2, 4]])
STOPS = (3, 17, 9, 12)
ENGINES = ["C++", "grid", "plain"]
VOCAB = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = tiny_config("llama", max_position_embeddings=1024)
    tiny_model(config).save_pretrained(folder)
    return folder


def make_engine(checkpoint, kind, **options):
    if kind == "plain":
        return native_engine(load_huggingface(checkpoint, 64), torch.float32, **options)
    return native_engine(
        load_checkpoint(checkpoint), torch.float32, in_cpp=kind == "C++", **options
    )


def sampled(engine, *request):
    return engine.generate(RolloutRequest(PROMPTS, *request))


@dataclass
class Game:
    """Replies that depend only on the episode. With `late`, they come at any time and in any order,
    several at once or none."""

    sizes: tuple[int, ...] = (1, 2, 5)  # of replies
    last: float = 0.1  # the probability that a reply ends the episode
    late: random.Random | None = None
    vocab: int = VOCAB
    turns: dict[int, list[list[int]]] = field(default_factory=dict)
    given: dict[int, list[list[int]]] = field(default_factory=dict)
    due: list[Reply] = field(default_factory=list)
    calls: int = 0

    def submit(self, sample, turn):
        turns = self.turns.setdefault(sample, [])
        turns.append(turn)
        chance = random.Random(str(turns))
        tokens = [chance.randrange(self.vocab) for _ in range(chance.choice(self.sizes))]
        if chance.random() < 0.5:
            tokens[-1] = STOPS[0]
        self.due.append(Reply(sample, tokens, chance.random() < self.last))

    def replies(self, wait):
        self.calls += 1
        assert self.due or not wait
        count = len(self.due)
        if self.late:
            self.late.shuffle(self.due)
            count = min(count, self.late.choice((0, 1, 3, 9)) or int(wait))
        now, self.due = self.due[:count], self.due[count:]
        for reply in now:
            self.given.setdefault(reply.sample, []).append(reply.tokens)
        return now


def episodes_of(rollouts):
    """Return each sample's parts, (tokens, log-probs or None where inserted), in order."""
    inserted = {}  # by the sampled token that it stands before
    if rollouts.inserted is not None:
        bounds = itertools.pairwise(rollouts.inserted.cu_seqlens.tolist())
        inserted = {
            t: rollouts.inserted.tokens[a:b].tolist() for t, (a, b) in enumerate(bounds) if a < b
        }
    episodes = []
    for start, end in itertools.pairwise(rollouts.cu_seqlens.tolist()):
        cuts = [start, *(at for at in inserted if start < at < end), end]
        parts = []
        for a, b in itertools.pairwise(cuts):
            if a in inserted and a > start:
                parts.append((inserted[a], None))
            parts.append((rollouts.tokens[a:b].tolist(), rollouts.logprobs[a:b]))
        episodes.append(parts)
    return episodes


def expected_logprobs(model, rollouts, temperature, prompts=PROMPTS):
    """Return the log-probs of the sampled tokens, of a forward pass over whole episodes."""
    episodes = episodes_of(rollouts)
    tokens, cu_seqlens = pack([[t for part, _ in parts for t in part] for parts in episodes])
    is_sampled = torch.tensor(
        [p is not None for parts in episodes for part, p in parts for _ in part]
    )
    whole = Rollouts(tokens, cu_seqlens, torch.zeros(len(tokens)), rollouts.truncated)
    logits = response_logits(model, one_batch(prompts, whole), torch.float32)[is_sampled].detach()
    logp = (logits / (temperature or 1)).log_softmax(-1)
    return logp.gather(1, rollouts.tokens[:, None])[:, 0]


def same(a, b):
    for name in ("tokens", "cu_seqlens", "logprobs", "truncated"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    first, second = ([[part for part, _ in x] for x in episodes_of(y)] for y in (a, b))
    assert first == second


# C++ reads up to 96 tokens of a reply at a time, and the others one.
SIZES = {"C++": ((1, 2, 3, 94, 95, 96, 97, 98, 192, 193, 300), 420)}


@pytest.mark.parametrize("kind", ENGINES)
def test_logprobs_equal_the_full_forward_pass_and_turns_are_what_was_sampled(checkpoint, kind):
    sizes, limit = SIZES.get(kind, ((1, 2, 3, 17), 40))
    sampling = Sampling(1.3, limit, STOPS, max_turns=6)
    game, engine = Game(sizes, late=random.Random(0)), make_engine(checkpoint, kind)
    rollouts = sampled(engine, 5, sampling, 1, 2, game)
    assert find_wrong(rollouts, RolloutRequest(PROMPTS, 5, sampling), VOCAB) == ""
    expected = expected_logprobs(load_checkpoint(checkpoint), rollouts, 1.3)
    assert rollouts.logprobs.std() > 0.5
    assert (rollouts.logprobs - expected).abs().max() < 1e-4
    seen = {len(x) for xs in game.given.values() for x in xs}
    assert seen >= ({1, 2, 3, 96, 97} if kind == "C++" else set(sizes))
    for s, parts in enumerate(episodes_of(rollouts)):
        turns = [part for part, p in parts if p is not None]
        given = [part for part, p in parts if p is None]
        if turns[-1][-1] not in STOPS:  # the length limit cut it
            assert rollouts.truncated[s]
            assert sum(len(part) for part, _ in parts) == sampling.max_new_tokens
            turns.pop()
        assert turns == game.turns.get(s, [])
        assert given == game.given.get(s, [])[: len(given)]
        assert len(given) >= len(turns) - 1
    ends = {(len(game.turns.get(s, [])), bool(x)) for s, x in enumerate(rollouts.truncated)}
    assert {truncated for _, truncated in ends} == {True, False}
    assert max(turns for turns, _ in ends) == 6


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.0, 32, STOPS, max_turns=4),
        Sampling(1.1, 32, STOPS, top_k=12, top_p=0.9, max_turns=4),
    ],
)
def test_all_engines_play_the_same_episodes_whenever_replies_come(checkpoint, sampling):
    whole = sampled(make_engine(checkpoint, "C++"), 2, sampling, 1, 2, Game())
    assert int((whole.inserted.lengths > 0).sum()) > 10
    for i, (kind, max_batch) in enumerate([("C++", 1024), ("grid", 6), ("plain", 6)]):
        engine = make_engine(checkpoint, kind, max_batch=max_batch)
        other = sampled(engine, 2, sampling, 1, 2, Game(late=random.Random(i)))
        torch.testing.assert_close(other.logprobs, whole.logprobs, rtol=0, atol=1e-4)
        same(replace(other, logprobs=whole.logprobs), whole)


def play(decoder, game, keys, sampling, prompts=PROMPTS, max_batch=1024):
    num_samples = len(keys) // len(prompts)
    request = Chosen(prompts, num_samples, sampling, environments=game, chosen=keys)
    decoder.max_batch = max_batch
    return decoder.generate(request)


@pytest.mark.parametrize("arithmetic", ["float32", *_C.bfloat16_arithmetics()])
def test_when_replies_come_changes_nothing(arithmetic):
    """At temperature 0.5 many samples begin alike, and share rows until one of them waits."""
    model, num_samples = tiny_decoder(), 32
    decoder = CpuEngine(model, torch.float32, arithmetic)
    sampling = Sampling(0.5, 150, STOPS, max_turns=4)
    prompts, numbers = PROMPTS.ids.repeat_interleave(num_samples), torch.arange(num_samples)
    keys = sample_keys(1, 2, prompts, numbers.repeat(len(PROMPTS)))
    sizes, vocab = (1, 2, 40, 100), model.config.vocab_size
    whole = play(decoder, Game(sizes, vocab=vocab), keys, sampling)
    assert int((whole.inserted.lengths > 0).sum()) > 4 * num_samples
    for threads, max_batch in zip(on_threads(3, 2, 1), (1024, 7, 1), strict=True):
        game = Game(sizes, late=random.Random(threads), vocab=vocab)
        same(play(decoder, game, keys, sampling, max_batch=max_batch), whole)
    for s in range(0, len(keys), 23):  # alone
        prompt = PROMPTS.take(s // num_samples, 1)
        alone = play(decoder, Game(sizes, vocab=vocab), keys[s, None], sampling, prompt)
        same(alone, whole.select(torch.tensor([s])))


def test_captured_steps_read_given_tokens_without_waiting_for_the_device(
    checkpoint,
    monkeypatch,
    fake_graphs,  # noqa: F811
):
    sampling = Sampling(1.3, 24, STOPS, max_turns=3)
    expected = sampled(make_engine(checkpoint, "C++"), 2, sampling, 1, 2, Game())
    assert int((expected.inserted.lengths > 0).sum()) > 6
    steps = DecodeSlots.steps

    def watched(batch, *arguments):
        with NoWaiting():
            steps(batch, *arguments)

    monkeypatch.setattr(DecodeSlots, "steps", watched)
    engine = make_engine(checkpoint, "grid")
    actual = sampled(engine, 2, sampling, 1, 2, Game(late=random.Random(0)))
    same(replace(actual, logprobs=expected.logprobs), expected)
    assert {"capture", "replay"} <= {kind for kind, _ in fake_graphs}
    # a graph of single turns has no part for given tokens
    single = replace(sampling, max_turns=1)
    engines = engine, make_engine(checkpoint, "C++")
    same(*(replace(sampled(x, 2, single, 1, 2), logprobs=torch.zeros(0)) for x in engines))


class Says:
    def __init__(self, say):
        self.say, self.said, self.turns = say, [], []

    def submit(self, sample, turn):
        self.turns.append(turn)
        self.said.append(self.say(sample, turn))

    def replies(self, wait):
        said, self.said = self.said, []
        return said


@pytest.mark.parametrize("kind", ENGINES)
def test_a_reply_that_leaves_no_room_ends_the_episode_truncated(checkpoint, kind):
    sampling = Sampling(1.0, 30, tuple(range(20)), max_turns=9)
    for spare in (0, 200):
        game = Says(lambda s, turn, spare=spare: Reply(s, [7] * (30 + spare - len(turn)), False))
        dropped = sampled(make_engine(checkpoint, kind), 3, sampling, 0, 0, game)
        assert dropped.inserted is None
        assert dropped.truncated.all()
        assert len(game.turns) == 15
        assert sorted(game.turns) == sorted(parts[0][0] for parts in episodes_of(dropped))
    game = Says(lambda s, turn: Reply(s, [7] * (29 - len(turn)), False))
    fits = sampled(make_engine(checkpoint, kind), 3, sampling, 0, 0, game)
    assert int((fits.inserted.lengths > 0).sum()) == 15
    for parts in episodes_of(fits):
        assert [len(part) for part, _ in parts][1:] == [29 - len(parts[0][0]), 1]
    assert fits.truncated.all()  # a stop token there leaves no room for the reply


def bad(tokens, is_last=False, sample=None):
    return Says(lambda s, turn: Reply(s if sample is None else sample, tokens, is_last))


@pytest.mark.parametrize(
    ("game", "message"),
    [
        *((bad([5, x]), f"outside the vocabulary, 0 to 39: {x}") for x in (VOCAB, -1, True)),
        (bad([]), r"sample \d+ replied with no tokens, and not that the episode ends"),
        *((bad([], True, x), f"replied to sample {x}, which has none due") for x in (15, -1)),
        (SimpleNamespace(submit=lambda *_: None, replies=lambda wait: []), "no reply when"),
    ],
)
def test_replies_that_cannot_be_true_are_a_sentence(checkpoint, game, message):
    sampling = Sampling(1.0, 60, STOPS, max_turns=3)
    with pytest.raises(EngineError, match=message):
        sampled(make_engine(checkpoint, "C++"), 3, sampling, 0, 0, game)


def turn_of(tokens, parameters, number=0):
    """Return what a stand-in for vLLM samples after these tokens, and why it ended."""
    chance = random.Random(str((tokens, parameters["seed"] + number)))
    turn = [chance.choice((4, 5, 6, 7)) for _ in range(chance.randrange(6))] + [STOPS[0]]
    turn = turn[: parameters["max_tokens"]]
    reason = "stop" if turn[-1] in STOPS else "length"
    return turn, [-0.25 - chance.random() for _ in turn], reason


@pytest.fixture
def of_turns(server):  # noqa: F811
    def generate(request):
        parameters, choices = request["sampling_params"], []
        for i in range(parameters["n"]):
            turn, logprobs, reason = turn_of(request["token_ids"], parameters, i)
            logprobs = {"content": [{"logprob": x} for x in logprobs]}
            choice = {"index": i, "finish_reason": reason, "token_ids": turn}
            choices.append(choice | {"logprobs": logprobs})
        return 200, json.dumps({"choices": choices})

    server.answers[GENERATE] = generate
    return server


PLAYED = Sampling(1.0, 24, STOPS, max_turns=4)


def test_a_turn_is_a_request_to_the_server(of_turns):
    engine = VllmServerEngine(tiny_decoder(vocab_size=VOCAB), torch.float32, of_turns.url)
    game = Game(late=random.Random(0))
    rollouts = sampled(engine, 4, PLAYED, 1, 2, game)
    assert find_wrong(rollouts, RolloutRequest(PROMPTS, 4, PLAYED), VOCAB) == ""
    assert rollouts.inserted is not None
    for s, parts in enumerate(episodes_of(rollouts)):
        prompt, number = divmod(s, 4)
        before = PROMPTS.take(prompt, 1).tokens.tolist()
        start, turns = len(before), []
        for part, logprobs in parts:
            length = len(before) - start
            if logprobs is not None:
                seed = hash((1, 2, prompt)) % 2**62 + number
                if length:
                    seed = hash((1, 2, prompt, number, length)) % 2**62
                room = PLAYED.max_new_tokens - length
                turn, expected, reason = turn_of(before, {"seed": seed, "max_tokens": room})
                assert part == turn
                assert logprobs.tolist() == torch.tensor(expected).tolist()
                turns += [turn] if reason == "stop" else []
            before += part
        assert turns == game.turns.get(s, [])
    assert {True, False} == set(rollouts.truncated.tolist())
    at_once = sampled(engine, 4, PLAYED, 1, 2, Game(last=1.0))
    same(at_once, sampled(engine, 4, PLAYED, 1, 2))
    greedy = sampled(engine, 4, PLAYED.greedy, 1, 2, Game(late=random.Random(0)))
    assert len(greedy) == 20
    assert not greedy.logprobs.any()
    with pytest.raises(EngineError, match="replied with no tokens"):
        sampled(engine, 4, PLAYED, 1, 2, bad([]))

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.passes import run_batch
from tests.batches import make_prompts, one_batch
from tests.fuzzing import settings
from tests.models import tiny_decoder, updated
from tests.random_episodes import naive_logprobs, random_parts, rollouts_of

PROMPTS = make_prompts([[10, 11, 12], [20]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8]])  # two to each prompt


def test_the_stream_and_its_targets():
    batch = one_batch(PROMPTS, ROLLOUTS)
    # each prompt, then its responses without their last token; [3] adds none
    assert batch.tokens.tolist() == [10, 11, 12, 1, 20, 4, 5, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 1]
    assert batch.forest.lengths.tolist() == [3, 1, 1, 2, 1]
    assert batch.forest.parents.tolist() == [-1, 0, -1, 2, 2]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    predicted_from = batch.tokens[batch.rows][batch.target_rows]
    assert predicted_from.tolist() == [12, 1, 12, 20, 4, 5, 20, 7]
    assert [x.tolist() for x in batch.by_row] == [[0, 2, 1, 3, 6, 4, 5, 7], [0, 2, 3, 5, 6, 7, 8]]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 8]


def test_a_part_of_the_rollouts_has_its_own_numbers():
    numbers = torch.arange(8.0)  # of the tokens of ROLLOUTS
    rollouts = replace(ROLLOUTS, logprobs=-numbers, importance_weights=10 * numbers)
    batch = Packer(PROMPTS, rollouts, torch.tensor([0.1, 0.2, 0.3, 0.4])).pack(torch.tensor([1, 2]))
    assert batch.target_index.tolist() == [2, 3, 4, 5]
    assert batch.old_logprobs.tolist() == [-2, -3, -4, -5]
    assert batch.importance_weights.tolist() == [20, 30, 40, 50]
    assert batch.by_token(batch.advantages).tolist() == pytest.approx([0.2, 0.3, 0.3, 0.3])


def tries(rows):
    return len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})


@settings(40)
@given(st.data())
def test_forests_of_random_samples(data):
    """Each target is read at a token whose path is the sample's row up to there; without a cost the
    stream is as short as can be, and with one no longer than all rows.
    """
    few = st.integers(1, data.draw(st.integers(1, 3)))
    group = data.draw(st.integers(1, 6))
    prompts = data.draw(st.lists(st.lists(few, min_size=1, max_size=6), min_size=1, max_size=4))
    count = group * len(prompts)
    responses = data.draw(st.lists(st.lists(few, max_size=7), min_size=count, max_size=count))
    chosen = data.draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True))
    shares_all = data.draw(st.booleans())
    chosen = torch.tensor(sorted(chosen))
    packer = Packer(make_prompts(prompts), Rollouts.given(responses), torch.ones(count), shares_all)
    batch = packer.pack(chosen)
    rows = [prompts[s // group] + responses[s][:-1] for s in chosen.tolist()]
    if shares_all:
        assert len(batch.tokens) == tries(rows)
    assert tries(rows) <= len(batch.tokens) <= sum(map(len, rows))
    lengths, parents = batch.forest.lengths.tolist(), batch.forest.parents.tolist()
    paths, segment_paths = [], []
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    for start, length, parent in zip(starts.tolist(), lengths, parents, strict=True):
        path = list(segment_paths[parent]) if parent >= 0 else []
        for token in batch.tokens[start : start + length].tolist():
            path.append(token)
            paths.append(list(path))
        segment_paths.append(path)
    assert batch.positions.tolist() == [len(path) - 1 for path in paths]
    read_at = batch.rows[batch.target_rows].split(packer.lengths[chosen].tolist())
    for own, s in zip(read_at, chosen.tolist(), strict=True):
        prompt, response = prompts[s // group], responses[s]
        for t, at in enumerate(own.tolist()):
            assert paths[at] == prompt + response[:t]


def test_prompts_and_whole_rows_alone_can_be_shared():
    # Rows without their last tokens: 1 2 3 5, 1 2 3 6, twice 1 2 3 6 7, and 1 2 4
    prompts, responses = make_prompts([[1, 2]]), [[3, 5, 9], [3, 6, 9], *2 * [[3, 6, 7, 9]], [4, 9]]
    rollouts = Rollouts.given(responses)
    for shares_all, lengths in ((True, [2, 1, 1, 1, 1, 1]), (False, [2, 2, 2, 3, 1])):
        packer = Packer(prompts, rollouts, torch.ones(5), shares_all)
        assert packer.pack(torch.arange(5)).forest.lengths.tolist() == lengths


def test_micro_batches_cover_every_chosen_sequence_once_within_the_budget():
    prompt_lengths, lengths = (torch.arange(n) * 5 % m for n, m in ((6, 8), (18, 11)))
    prompts = make_prompts([[1] * (n + 1) for n in prompt_lengths.tolist()])
    rollouts = Rollouts.given([[2] * (n + 1) for n in lengths.tolist()])
    chosen = torch.tensor([0, 2, 3, 4, 5, 8, 9, 10, 12, 13, 15, 16, 17])
    packer = Packer(prompts, rollouts, torch.ones(18))
    for budget in (*range(1, 40), 10_000):
        parts = packer.split(chosen, budget)
        assert torch.equal(torch.cat(parts).sort().values, chosen)
        for part in parts:
            batch = packer.pack(part)
            assert len(batch.tokens) <= budget or len(part) == 1
            assert batch.cu_seqlens[-1] == rollouts.lengths[part].sum()
    assert len(parts) == 1
    assert packer.split(chosen[:0], 10) == []


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_get_whole_groups_and_similar_numbers_of_tokens(num_ranks):
    generator, size = torch.Generator().manual_seed(1), 32 * 4
    prompts = make_prompts([[1] * 20 for _ in range(32)])
    lengths = torch.randint(1, 80, (size,), generator=generator)
    packer = Packer(prompts, Rollouts.given([[2] * n for n in lengths.tolist()]), torch.ones(size))
    chosen = torch.arange(size)[torch.rand(size, generator=generator) < 0.7]
    shares = packer.share(chosen, num_ranks)
    assert torch.equal(torch.cat(shares).sort().values, chosen)
    groups = [(share // 4).unique() for share in shares]
    assert len(torch.cat(groups)) == len((chosen // 4).unique())  # no group on two ranks
    loads = [20 * len(g) + int(lengths[x].sum()) for g, x in zip(groups, shares, strict=True)]
    assert max(loads) <= 1.1 * sum(loads) / num_ranks


NUM_ROLLOUTS = 4


def samples_of(seed, vocabulary=32):
    """Return prompts and episodes as lists, and as samples: with a small vocabulary many begin
    alike, also across an insertion.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (5, 1, 2)]
    episodes = [random_parts(generator, vocabulary) for _ in range(NUM_ROLLOUTS * len(prompts))]
    return prompts, episodes, Samples(make_prompts(prompts), rollouts_of(episodes))


@pytest.mark.parametrize(
    ("vocabulary", "shares_all", "budget"),
    [(2, True, 1), (2, True, 10_000), (2, False, 13), (32, True, 40), (32, False, 1)],
)
def test_packed_episodes_equal_each_alone_with_dense_attention(vocabulary, shares_all, budget):
    prompts, episodes, samples = samples_of(vocabulary, vocabulary)
    model = tiny_decoder().double()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(samples.rollouts.tokens), generator=generator).double()
    own_prompts = [prompt for prompt in prompts for _ in range(NUM_ROLLOUTS)]
    naive = torch.cat([naive_logprobs(model, *x) for x in zip(own_prompts, episodes, strict=True)])
    expected = torch.autograd.grad(weights @ naive, [*model.parameters()])
    packer = Packer(samples.prompts, samples.rollouts, torch.ones(len(episodes)), shares_all)
    ours, total = torch.zeros_like(naive), torch.zeros((), dtype=torch.float64)
    read = 0
    for part in packer.split(samples.sequences, budget):
        batch = packer.pack(part)
        read += len(batch.tokens)
        assert torch.equal(batch.targets, samples.rollouts.tokens[batch.target_index])
        assert torch.equal(batch.old_logprobs, samples.rollouts.logprobs[batch.target_index])
        hidden = run_batch(model, batch, torch.float64)
        logprobs = (hidden @ model.output_matrix.T).log_softmax(-1)
        logprobs = logprobs.gather(1, batch.targets[:, None])[:, 0]
        ours[batch.target_index] = logprobs.detach()
        total = total + weights[batch.target_index] @ logprobs
    assert (ours - naive).abs().max() < 1e-12
    gradients = torch.autograd.grad(total, [*model.parameters()])
    for own, reference in zip(gradients, expected, strict=True):
        assert reference.abs().max() > 1e-3
        assert (own - reference).abs().max() < 1e-12 * max(1.0, float(reference.abs().max()))
    if budget == 10_000:
        rows = [
            [*prompt, *(x for part in parts for x in part)][:-1]
            for prompt, parts in zip(own_prompts, episodes, strict=True)
        ]
        assert read == tries(rows)
        assert packer.rows.lengths.tolist() == [*map(len, rows)]


LOSSES = {
    "reinforce": LossSettings("reinforce", "token_mean"),
    "sequences": LossSettings("reinforce", "seq_mean_token_mean", temperature=0.8),
    "constant": LossSettings("reinforce", "seq_sum_constant", max_new_tokens=24),
}


@pytest.mark.parametrize(
    ("loss", "budget"), [("reinforce", 30), ("sequences", 1), ("constant", 10_000)]
)
def test_updates_learn_from_sampled_tokens_alone(loss, budget):
    """The gradient is that of the loss of dense log-probs, whose averages count sampled tokens."""
    prompts, episodes, samples = samples_of(5)
    settings, model = LOSSES[loss], tiny_decoder()
    advantages = torch.randn(len(episodes), generator=torch.Generator().manual_seed(2))
    advantages[2] = 0.0
    lengths = [sum(map(len, parts[::2])) for parts in episodes]
    own = [
        naive_logprobs(model, prompts[s // NUM_ROLLOUTS], parts, settings.temperature)
        for s, parts in enumerate(episodes)
    ]
    sizes = {"seq_mean_token_mean": [12 * n for n in lengths], "seq_sum_constant": [12 * 24] * 12}
    sizes = sizes.get(settings.aggregation, [sum(lengths)] * 12)
    terms = [-a * x.sum() / size for a, x, size in zip(advantages, own, sizes, strict=True)]
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(torch.stack(terms).sum(), [*parameters.values()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    learner = Learner(model, optimizer, settings, 1e9, budget, torch.float32)
    metrics = updated(learner, samples, advantages, samples.sequences, when="step 1", lr=0.0)
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert gradient.abs().max() > 1e-4
        assert (parameter.grad - gradient).abs().max() < 2e-4 * gradient.abs().max(), name
    assert metrics.num_targets == sum(lengths) - lengths[2]
    rows = [sum(map(len, parts)) - 1 for parts in episodes]
    alone = sum(len(prompts[s // NUM_ROLLOUTS]) + row for s, row in enumerate(rows) if s != 2)
    assert metrics.num_tokens_alone == alone
    logprobs = learner.passes.logprobs(model, samples, torch.tensor([1, 5, 6]))
    wanted = torch.cat([own[s] for s in (1, 5, 6)]).detach()
    torch.testing.assert_close(logprobs, wanted, rtol=1e-4, atol=1e-4)

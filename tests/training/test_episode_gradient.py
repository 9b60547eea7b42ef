"""The gradient of an update over episodes of several turns is exact: seven numbers and two turns,
where every history of every group can be enumerated, against autograd of the objective in float64.
"""

import itertools

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks.guess import BOS, CORRECT, EOS, GuessTask
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.loss_settings import LossSettings
from tests.models import tiny_decoder

TASK = GuessTask(num_numbers=7, max_turns=2)
PROMPTS = TASK.prompts("train", 0, 7)  # each number once
HISTORIES = 1 + 6 * 7  # of one hidden number: a right first guess, or two guesses


def player():
    """Return a decoder that writes numbers after <bos> and replies, and <eos> after a number; all
    other tokens have a probability below 1e-40. Two coordinates of the hidden states say so, which
    no layer changes: whether the token is a number, and a constant."""
    model = tiny_decoder(vocab_size=TASK.vocab_size, tie_word_embeddings=False).double()
    numbers = slice(CORRECT + 1, None)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:2] = 0
            layer.mlp.down_proj.weight[:2] = 0
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, 0], embedding[:, 1], embedding[numbers, 0] = -4.0, 4.0, 4.0
        head[:, :2] = torch.tensor([0.0, -40.0])
        head[numbers, :2] = torch.tensor([-40.0, 0.0])
        head[EOS, :2] = torch.tensor([40.0, 0.0])
    return model


def enumerated():
    """Return the 7 x 43 histories as rows of tokens [301, 5], what the environments wrote of them
    [301, 5], their lengths [301], and the rewards [7, 43]."""
    environments = TASK.environments(PROMPTS, HISTORIES)
    tokens = torch.zeros(7 * HISTORIES, TASK.max_new_tokens, dtype=torch.int64)
    given, lengths = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(len(tokens)).long()
    games = [
        guesses
        for line in PROMPTS.columns
        for guesses in ((x, y) for x in range(1, 8) for y in (range(1, 8)))
        if guesses[0] != line["answer"] or guesses[1] == 1
    ]
    for sample, guesses in enumerate(games):
        row, is_last = [], False
        for guess in guesses:
            if is_last:
                break
            row += [CORRECT + guess, EOS]
            environments.submit(sample, row[-2:])
            ((of, reply, is_last),) = [
                (x.sample, x.tokens, x.is_last) for x in environments.replies(wait=True)
            ]
            assert of == sample
            if not is_last:
                given[sample, len(row) : len(row) + len(reply)] = True
                row += reply
        tokens[sample, : len(row)], lengths[sample] = torch.tensor(row), len(row)
    return tokens, given, lengths, torch.tensor(environments.finish().rewards).view(7, -1).double()


def dense_logprobs(model, tokens):
    rows = torch.cat([torch.full((len(tokens), 1), BOS), tokens], 1)[:, :-1]

    def attention(layer, q, k, v):
        q, k, v = (x.view(*rows.shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        future = torch.ones(rows.shape[1], rows.shape[1]).triu(1).bool()
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(0, 1)

    positions = torch.arange(rows.shape[1]).repeat(len(rows))
    hidden = model(rows.flatten(), positions, attention, torch.arange(rows.numel()), torch.float64)
    logits = (hidden @ model.lm_head.weight.T).view(*rows.shape, -1)
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def truncated_log(p, order):
    """Return log p up to the power `order` of 1 - p."""
    return -sum((1 - p) ** k / k for k in range(1, order + 1))


@pytest.mark.parametrize(
    ("estimator", "options", "objective"),
    [
        ("reinforce", {}, lambda p: p * 2 / 3),  # its baseline has the sample itself: (N - 1) / N
        ("maxrl", {}, lambda p: truncated_log(p, 2)),  # order N - 1
        ("maxrl_conditional", {}, lambda p: truncated_log(p, 3)),  # order N
        ("maxpo", {"k": 2}, lambda p: (1 - (1 - p) ** 2) / 2),
    ],
)
def test_the_mean_gradient_of_all_groups_is_the_derivative_of_the_objective(
    estimator, options, objective
):
    model, (tokens, given, lengths, rewards) = player(), enumerated()
    is_sampled = (torch.arange(tokens.shape[1]) < lengths[:, None]) & ~given
    own = dense_logprobs(model, tokens)
    probabilities = (own * is_sampled).sum(1).exp().view(7, HISTORIES)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(7).double(), rtol=0, atol=1e-12)
    rates = (probabilities * rewards).sum(1)
    assert 0.01 < rates.min() < rates.max() < 0.95
    expected = torch.autograd.grad(objective(rates).mean(), list(model.parameters()))

    # each history's advantage, summed over all groups of three histories and their probabilities
    groups = torch.tensor([*itertools.product(range(HISTORIES), repeat=3)])
    outcomes = torch.tensor([*itertools.product((0.0, 1.0), repeat=3)]).double()
    of_outcome = ops.group_advantage(outcomes, estimator, **options)
    p, advantages = probabilities.detach(), torch.zeros(7, HISTORIES).double()
    for x in range(7):
        a, b, c = rewards[x].long()[groups].unbind(1)
        of_group = of_outcome[4 * a + 2 * b + c] * p[x][groups].prod(1, keepdim=True) / 3
        advantages[x].index_add_(0, groups.flatten(), of_group.flatten())

    rollouts = Rollouts.from_padded(tokens, own.detach(), lengths, lengths < 0, given)
    samples = Samples(PROMPTS, rollouts)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = LossSettings("ppo", "seq_mean_token_sum")
    learner = Learner(model, sgd, settings, 1e9, 200, torch.float64)
    logprobs = learner.passes.logprobs(model, samples, samples.sequences)
    torch.testing.assert_close(logprobs.double(), own[is_sampled], rtol=0, atol=1e-5)
    # the loss is a mean over 301 samples, the objective one over 7 numbers
    learner.update(samples, HISTORIES * advantages.flatten(), samples.sequences, when="", lr=0.0)
    size = max(float(x.abs().max()) for x in expected)
    assert size > 1e-3
    for parameter, derivative in zip(model.parameters(), expected, strict=True):
        assert float((parameter.grad + derivative).abs().max()) < 1e-12 * max(size, 1)

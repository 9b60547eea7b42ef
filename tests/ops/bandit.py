"""A bandit with three arms of different rewards, and all 3^N groups of it: mean gradients of
estimators, exactly.
"""

import itertools

import torch

REWARDS = torch.tensor([0.0, 0.7, 2.0], dtype=torch.float64)  # ascending
LOGITS = torch.tensor([0.5, 0.1, -0.8], dtype=torch.float64)
N = 4
ARMS = torch.tensor(list(itertools.product(range(3), repeat=N)))  # [3^N, N]


def mean_gradient(advantages, logits=LOGITS):
    """Return E[(1/N) sum_i A_i grad log pi(a_i)] of advantages [3^N, N], over groups that the
    policy LOGITS has sampled; pi is that of `logits`."""
    assert advantages.abs().max() > 0.1
    # grad log pi of each arm: [3^N, N, 3]
    scores = torch.eye(3, dtype=torch.float64)[ARMS] - torch.softmax(logits, 0)
    probability = torch.softmax(LOGITS, 0)[ARMS].prod(1)
    return (probability[:, None] * (advantages[..., None] * scores).mean(1)).sum(0)


def max_at_k_gradient(k, logits=LOGITS):
    """Return the gradient of the expected maximum of k draws, by automatic differentiation."""
    logits = logits.clone().requires_grad_()
    below = torch.softmax(logits, 0).cumsum(0)  # P(maximum <= arm) = below^k
    expected = (torch.cat([below[:1] ** k, (below**k).diff()]) * REWARDS).sum()
    return torch.autograd.grad(expected, logits)[0]

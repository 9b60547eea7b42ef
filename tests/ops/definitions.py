"""A second implementation of every estimator, from its definition, in exact rationals unless it has a square root.

It uses no code of the package, only sums over subsets (tests/brute_force.py) and plain formulas, for groups of a few rewards.
"""

from fractions import Fraction
from itertools import combinations
from math import ceil, comb, prod, sqrt

from tests import brute_force


def mean(values):
    return sum(values, Fraction(0)) / len(values)


def std(values, ddof):
    centre = mean(values)
    largest = max(abs(x - centre) for x in values) or Fraction(1)  # a square may be beyond float64
    squares = sum(((x - centre) / largest) ** 2 for x in values)
    return float(largest) * sqrt(squares / (len(values) - ddof)) if len(values) > ddof else 0.0


def standardised(values, centre, spread, eps):
    divisor = spread + eps
    return [float(x - centre) / divisor if divisor else 0.0 for x in values]


def ei(r, k):
    values = brute_force.expected_improvement(r, k)
    return [values[i] for i in range(len(r))]


def ei_l1o(r, k):
    values = ei(r, k)
    return [values[i] - mean(values[:i] + values[i + 1 :]) for i in range(len(r))]


def maxrl_ratio(r, eps=0):
    divisor = mean(r) + Fraction(eps)
    return [(x - mean(r)) / divisor if divisor else Fraction(0) for x in r]


def maxrl_conditional(r):
    return [x / mean(r) if mean(r) else Fraction(0) for x in r]


def pkpo_sloo(r, k):
    n = len(r)
    return [
        Fraction(k, n) * a - Fraction(k, n - 1) * b
        for a, b in zip(brute_force.conditional_max(r, k), brute_force.leave_one_out_max(r, k), strict=True)
    ]


def passk_training(r, k):
    """Return the advantages of Chen et al. in their analytical form: mean and deviation over all groups of k."""
    n, correct = len(r), sum(x == 1 for x in r)
    wrong = n - correct
    rho = 1 - Fraction(comb(wrong, k), comb(n, k))
    sigma = sqrt(rho * (1 - rho)) + 1e-6
    lost = Fraction(comb(wrong - 1, k - 1), comb(n - 1, k - 1)) if wrong else Fraction(0)
    return [float(1 - rho) / sigma if x == 1 else float(1 - rho - lost) / sigma for x in r]


def pacs_first_update(r, beta=1):
    """Return beta rloo of x_i = w_i (R_i - 1/2): minus the slope of the cross-entropy of sigmoid(0), with balanced weights."""
    n, correct = len(r), sum(x == 1 for x in r)
    weights = [Fraction(n, 2 * (correct if x == 1 else n - correct)) if 0 < correct < n else Fraction(1) for x in r]
    values = [w * (x - Fraction(1, 2)) for w, x in zip(weights, r, strict=True)]
    return [Fraction(beta) * (x - mean(values[:i] + values[i + 1 :])) for i, x in enumerate(values)]


def bon_mean(r, k, eps=1e-6, ddof=1):
    values = [Fraction(k, len(r)) * s for s in brute_force.conditional_max(r, k)]
    return standardised(values, mean(values), std(values, ddof), eps)


def bon_max_second(r):
    best, second = sorted(r)[-1], sorted(r)[-2]
    return [best - second if x == best else Fraction(0) for x in r]


def qae(r, quantile="0.4", eps=1e-6, ddof=1):
    baseline = sorted(r)[max(1, ceil(Fraction(quantile) * len(r))) - 1]
    return standardised(r, baseline, std(r, ddof), eps)


def opo(r, lengths):
    baseline = sum(x * length for x, length in zip(r, lengths, strict=True)) / Fraction(sum(lengths))
    return [x - baseline for x in r]


def grpo(r, eps=1e-6, ddof=1):
    return standardised(r, mean(r), std(r, ddof), eps)


def grpo_nemo(r):
    """Return each reward minus the mean of the others, over their deviation; where they do not differ there is none."""
    out = []
    for i, x in enumerate(r):
        others = r[:i] + r[i + 1 :]
        centred = x - mean(others) if others else Fraction(0)
        out.append(float(centred) / (std(others, 1) + 1e-6) if len(set(others)) > 1 else centred)
    return out


def first_order(ratios, subset):
    return 1 + sum(ratios[i] - 1 for i in subset)


def product(ratios, subset):
    return prod(ratios[i] for i in subset)


def bon_off_policy(r, k, ratios, weight=first_order):
    """Return sum_{I with i, |I| = k} weight(I) max_I / C(N,k)."""
    subsets = list(combinations(range(len(r)), k))
    values = [weight(ratios, chosen) * max(r[j] for j in chosen) for chosen in subsets]
    return [sum(x for x, chosen in zip(values, subsets, strict=True) if i in chosen) / len(subsets) for i in range(len(r))]


def maxpo_off_policy(r, k, ratios, weight=first_order):
    """Return ratio_i times the mean of weight(J) (max(J, i) - max(J, j)) over J, k-1 of the others, and over the rest j."""
    out = []
    for i in range(len(r)):
        others, gains = [j for j in range(len(r)) if j != i], []
        for chosen in combinations(others, k - 1):
            with_one = [max([r[j], *(r[m] for m in chosen)]) for j in range(len(r))]
            gains.append(weight(ratios, chosen) * (with_one[i] - mean([with_one[j] for j in others if j not in chosen])))
        out.append(ratios[i] * mean(gains))
    return out


def maxrl_off_policy(r, order, ratios, weight=first_order):
    terms = [maxpo_off_policy(r, k, ratios, weight) for k in range(1, (order or len(r) - 1) + 1)]
    return [sum(column) for column in zip(*terms, strict=True)]


# Name -> function of the exact rewards, the size and the exact ratios.
OFF_POLICY = {"bon_off_policy": bon_off_policy, "maxpo_off_policy": maxpo_off_policy, "maxrl_off_policy": maxrl_off_policy}

# Name -> function of the exact rewards and the size. Estimators that need more inputs have tests of their own.
DEFINITIONS = {
    "maxpo": brute_force.maxpo,
    "expected_improvement": ei,
    "leave_two_out": brute_force.leave_two_out,
    "ei_l1o": ei_l1o,
    "maxrl": lambda r, order: brute_force.maxrl_order(r, order or len(r) - 1),
    "maxrl_ratio": lambda r, _: maxrl_ratio(r),
    "maxrl_conditional": lambda r, _: maxrl_conditional(r),
    "maxrl_control_variate": lambda r, _: [x - 1 for x in maxrl_conditional(r)],
    "rloo": lambda r, _: [x - mean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)],
    "reinforce": lambda r, _: [x - mean(r) for x in r],
    "dr_grpo": lambda r, _: [x - mean(r) for x in r],
    "reinforce_raw": lambda r, _: r,
    "grpo": lambda r, _: grpo(r),
    "grpo_verl": lambda r, _: grpo(r),
    "grpo_trl": lambda r, _: grpo(r, eps=1e-4),
    "grpo_nemo": lambda r, _: grpo_nemo(r),
    "pkpo": lambda r, k: [Fraction(k, len(r)) * x for x in ei(r, k)],
    "pkpo_sloo_minus_one": lambda r, k: [Fraction(k, len(r)) * x for x in ei(r, k)],
    "pkpo_sloo": pkpo_sloo,
    "passk_training": passk_training,
    "bon_mean": bon_mean,
    "pacs_first_update": lambda r, _: pacs_first_update(r),
    "bon_max_second": lambda r, _: bon_max_second(r),
    "psr": lambda r, _: r,
    "nsr": lambda r, _: [x - 1 for x in r],
    "w_reinforce": lambda r, _: [Fraction("0.1") * x - (1 - x) for x in r],
    "qae": lambda r, _: qae(r),
    "opo": lambda r, _: opo(r, [1] * len(r)),
    "noisy_verifier_backward": lambda r, _: [(x - mean(r)) / Fraction("0.85") for x in r],
    "noisy_verifier_forward": lambda r, _: [Fraction("0.05") if x == 1 else Fraction("0.05") - 1 for x in r],
}
OPTIONS = {
    "noisy_verifier_backward": {"false_positive_rate": 0.1, "false_negative_rate": 0.05},
    "noisy_verifier_forward": {"false_negative_rate": 0.05},
}

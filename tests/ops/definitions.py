"""A second implementation of every estimator, from its definition, in exact rationals unless it has
a square root.

It uses no code of the package, only sums over subsets (tests/brute_force.py) and plain formulas,
for groups of a few rewards.
"""

from fractions import Fraction
from itertools import chain, combinations
from math import ceil, comb, exp, inf, sqrt

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


def without(values, i):
    return values[:i] + values[i + 1 :]


def ei(r, k):
    values = brute_force.expected_improvement(r, k)
    return [values[i] for i in range(len(r))]


def leave_one_out(values):
    return [
        x - mean(without(values, i)) if len(values) > 1 else Fraction(0)
        for i, x in enumerate(values)
    ]


def maxrl_ratio(r, _=0, eps=0):
    divisor = mean(r) + Fraction(eps)
    return [(x - mean(r)) / divisor if divisor else Fraction(0) for x in r]


def maxrl_conditional(r, _=0):
    return [x / mean(r) if mean(r) else Fraction(0) for x in r]


def pkpo(r, k):
    return [Fraction(k, len(r)) * x for x in ei(r, k)]


def pkpo_sloo(r, k):
    pairs = zip(brute_force.conditional_max(r, k), brute_force.leave_one_out_max(r, k), strict=True)
    return [Fraction(k, len(r)) * a - Fraction(k, len(r) - 1) * b for a, b in pairs]


def passk_training(r, k):
    """Return the advantages of Chen et al. in their analytical form: mean and deviation over all
    groups of k.
    """
    n, correct = len(r), sum(x == 1 for x in r)
    wrong = n - correct
    rho = 1 - Fraction(comb(wrong, k), comb(n, k))
    sigma = sqrt(rho * (1 - rho)) + 1e-6
    lost = Fraction(comb(wrong - 1, k - 1), comb(n - 1, k - 1)) if wrong else Fraction(0)
    return [float(1 - rho) / sigma if x == 1 else float(1 - rho - lost) / sigma for x in r]


def pacs_first_update(r, _=0, beta=1):
    """Return beta rloo of x_i = w_i (R_i - 1/2): minus the slope of the cross-entropy of
    sigmoid(0), with balanced weights.
    """
    n, correct = len(r), sum(x == 1 for x in r)
    weights = [
        Fraction(n, 2 * (correct if x == 1 else n - correct)) if 0 < correct < n else Fraction(1)
        for x in r
    ]
    return [
        Fraction(beta) * x
        for x in leave_one_out([w * (x - Fraction(1, 2)) for w, x in zip(weights, r, strict=True)])
    ]


def bon_mean(r, k, eps=1e-6, ddof=1):
    return grpo(
        [Fraction(k, len(r)) * s for s in brute_force.conditional_max(r, k)], eps=eps, ddof=ddof
    )


def bon_max_second(r, _=0):
    best, second = ([*sorted(r, reverse=True), max(r)])[:2]
    return [best - second if x == best else Fraction(0) for x in r]


def qae(r, _=0, quantile=0.4, eps=1e-6, ddof=1):
    baseline = sorted(r)[max(1, ceil(Fraction(str(quantile)) * len(r))) - 1]
    return standardised(r, baseline, std(r, ddof), eps)


def opo(r, _=0, lengths=None):
    lengths = lengths if lengths and sum(lengths) else [1] * len(r)
    baseline = sum(x * length for x, length in zip(r, lengths, strict=True)) / Fraction(
        sum(lengths)
    )
    return [x - baseline for x in r]


def grpo(r, _=0, eps=1e-6, ddof=1):
    return standardised(r, mean(r), std(r, ddof), eps)


def grpo_nemo(r, _=0):
    """Return each reward minus the mean of the others, over their deviation; where they do not
    differ there is none.
    """
    out = []
    for i, centred in enumerate(leave_one_out(r)):
        others = without(r, i)
        out.append(float(centred) / (std(others, 1) + 1e-6) if len(set(others)) > 1 else centred)
    return out


def self_(r, _=0, greedy_correct=(), **options):
    return [
        0.0 if known else x for x, known in zip(grpo(r, **options), greedy_correct, strict=True)
    ]


def differential_smoothing(r, _=0, logprobs=(), tau=0.05, eps=1e-6, ddof=0):
    pairs = zip(grpo(r, eps=eps, ddof=ddof), r, logprobs, strict=True)
    return [a + tau * (1 - 2 * float(x)) * logp for a, x, logp in pairs]


def unlikeliness(r, _=0, logprobs=(), penalty=0.25, **options):
    ranks = [sum(y < x for y in logprobs) / len(r) for x in logprobs]
    return grpo(
        [x * Fraction(1 - penalty * rank) for x, rank in zip(r, ranks, strict=True)], **options
    )


def first_order(ratios, subset):
    return 1 + sum(ratios[i] - 1 for i in subset)


def bon_off_policy(r, k, ratios):
    """Return sum_{I with i, |I| = k} (1 + sum_I (ratio - 1)) max_I / C(N,k)."""
    subsets = list(combinations(range(len(r)), k))
    values = [first_order(ratios, chosen) * max(r[j] for j in chosen) for chosen in subsets]
    return [
        sum(x for x, chosen in zip(values, subsets, strict=True) if i in chosen) / len(subsets)
        for i in range(len(r))
    ]


def maxpo_off_policy(r, k, ratios):
    """Return ratio_i times the mean of w(J) (max(J, i) - max(J, j)), J: k-1 others, j: the rest; w
    = 1 + sum_J (ratio - 1).
    """
    out = []
    for i in range(len(r)):
        others, gains = [j for j in range(len(r)) if j != i], []
        for chosen in combinations(others, k - 1):
            with_one = [max([r[j], *(r[m] for m in chosen)]) for j in range(len(r))]
            gains.append(
                first_order(ratios, chosen)
                * (with_one[i] - mean([with_one[j] for j in others if j not in chosen]))
            )
        out.append(ratios[i] * mean(gains))
    return out


def maxrl_off_policy(r, order, ratios):
    terms = [maxpo_off_policy(r, k, ratios) for k in range(1, (order or len(r) - 1) + 1)]
    return [sum(column) for column in zip(*terms, strict=True)]


# Name -> function of the exact rewards, the size and the exact ratios.
OFF_POLICY = {
    "bon_off_policy": bon_off_policy,
    "maxpo_off_policy": maxpo_off_policy,
    "maxrl_off_policy": maxrl_off_policy,
}


def of_ratios(name):
    def definition(r, size, log_ratios, clamp_delta=0.0):
        limit = clamp_delta or inf
        return OFF_POLICY[name](
            r, size, [Fraction(1 + min(max(exp(x) - 1, -limit), limit)) for x in log_ratios]
        )

    return definition


# Name -> function of the exact rewards, the size, the options, and the inputs as lists.
DEFINITIONS = {
    "maxpo": brute_force.maxpo,
    "expected_improvement": ei,
    "leave_two_out": brute_force.leave_two_out,
    "ei_l1o": lambda r, k: leave_one_out(ei(r, k)),
    "maxrl": lambda r, order=0: brute_force.maxrl_order(r, order or len(r) - 1),
    "maxrl_ratio": maxrl_ratio,
    "maxrl_conditional": maxrl_conditional,
    "maxrl_control_variate": lambda r, _=0: [x - 1 for x in maxrl_conditional(r)],
    "rloo": lambda r, _=0: leave_one_out(r),
    "reinforce": lambda r, _=0: [x - mean(r) for x in r],
    "reinforce_raw": lambda r, _=0: r,
    "grpo": grpo,
    "grpo_nemo": grpo_nemo,
    "pkpo": pkpo,
    "pkpo_sloo": pkpo_sloo,
    "passk_training": passk_training,
    "bon_mean": bon_mean,
    "pacs_first_update": pacs_first_update,
    "bon_max_second": bon_max_second,
    "nsr": lambda r, _=0: [x - 1 for x in r],
    "w_reinforce": lambda r, _=0, correct_weight=0.1: [
        Fraction(correct_weight) * x - (1 - x) for x in r
    ],
    "qae": qae,
    "opo": opo,
    "noisy_verifier_backward": lambda r, _=0, false_positive_rate=0, false_negative_rate=0: [
        float(x - mean(r)) / (1 - false_positive_rate - false_negative_rate) for x in r
    ],
    "noisy_verifier_forward": lambda r, _=0, false_negative_rate=0: [
        Fraction(false_negative_rate) - 1 + x for x in r
    ],
    "remax": lambda r, _=0, greedy_rewards=(): [
        x - Fraction(b) for x, b in zip(r, greedy_rewards, strict=True)
    ],
    "self": self_,
    "differential_smoothing": differential_smoothing,
    "unlikeliness": unlikeliness,
    **{name: of_ratios(name) for name in OFF_POLICY},
}
OPTIONS = {
    "noisy_verifier_backward": {"false_positive_rate": 0.1, "false_negative_rate": 0.05},
    "noisy_verifier_forward": {"false_negative_rate": 0.05},
}


# --- over the batch: of groups of Fractions, and inputs as lists of the same shape; None where a
# part does not apply


def centred(groups):
    return [[x - mean(group) for x in group] for group in groups]


def flat(groups):
    return list(chain(*groups))


def lite_ppo(groups, eps=1e-6, ddof=1):
    return [standardised(group, mean(group), std(flat(groups), ddof), eps) for group in groups]


def reinforce_pp(groups, eps=1e-8, ddof=1):
    x = centred(groups)
    return [standardised(group, 0, std(flat(x), ddof), eps) for group in x]


def reinforce_pp_tokens(groups, lengths, eps=1e-8, ddof=1):
    x = centred(groups)
    tokens = [
        value for value, length in zip(flat(x), flat(lengths), strict=True) for _ in range(length)
    ]
    return [standardised(group, mean(tokens), std(tokens, ddof), eps) for group in x]


def gdpo(groups, reward_parts, reward_weights, eps=1e-4, ddof=1):
    sums = [[Fraction(0) for _ in group] for group in groups]
    for part, weight in zip(reward_parts, reward_weights, strict=True):
        for g, group in enumerate(part):
            members = [i for i, x in enumerate(group) if x is not None]
            for i, x in zip(
                members,
                grpo([group[i] for i in members], eps=eps, ddof=ddof) if members else [],
                strict=True,
            ):
                sums[g][i] += Fraction(weight) * Fraction(x)
    spread = std(flat(sums), ddof)
    return [standardised(group, 0, spread, eps) for group in sums]


def hero(groups, reward_parts, reward_weights, score_range=0.05, eps=1e-6, ddof=1):
    verifier, *scores = reward_parts
    weighted = list(zip(reward_weights[1:], scores, strict=True))

    def score_of(g, i):
        """The sum of the scores that apply to a response; None if none does."""
        own = [w * part[g][i] for w, part in weighted if part[g][i] is not None]
        return sum(own) if own else None

    d = [[score_of(g, i) for i in range(len(group))] for g, group in enumerate(groups)]
    known = [[Fraction(x) for x in group if x is not None] for group in d]
    spreads = [std(group, ddof) if group else 0.0 for group in known]
    advantages = []
    for v, score, spread in zip(verifier, d, spreads, strict=True):
        shares = {}  # of responses with a score, by verdict
        for verdict in set(v):
            own = {
                i: x
                for i, (other, x) in enumerate(zip(v, score, strict=True))
                if other == verdict and x is not None
            }
            low, high = min(own.values(), default=0), max(own.values(), default=0)
            shares[verdict] = {
                i: float((x - low) / (high - low + eps)) if high > low else 0.0
                for i, x in own.items()
            }
        ranged = []
        for i, verdict in enumerate(v):
            own = shares[verdict]
            otherwise = sum(own.values()) / len(own) if own else 0.0
            ranged.append(Fraction(verdict - score_range + 2 * score_range * own.get(i, otherwise)))
        weight = 0.5 + 1.5 / (1 + exp(-5 * (spread - sum(spreads) / len(spreads))))
        advantages.append([weight * float(x - mean(ranged)) for x in ranged])
    return advantages


OVER_THE_BATCH = {f.__name__: f for f in (lite_ppo, reinforce_pp, reinforce_pp_tokens, gdpo, hero)}

"""The command `python -m maxrl_fast.objectives`: print every objective with its formula, weight,
requirements and source, every token loss, and every correction for a rollout engine that is not
the policy."""

from maxrl_fast.__main__ import run_command

if __name__ == "__main__":
    run_command("objectives")

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from maxrl_fast.algorithms.estimators import ALIASES, ESTIMATORS, find_estimator
from maxrl_fast.algorithms.known import explain_name
from maxrl_fast.algorithms.losses import ALIASES as LOSS_ALIASES
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.algorithms.method import Method
from maxrl_fast.errors import InputError
from maxrl_fast.job.plots import draw_weights
from maxrl_fast.job.screen import show
from maxrl_fast.ops.register import effective_weight
from maxrl_fast.runtime.output import CommandParser, command
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.registry import OBJECTIVE_CLASSES

# of each list: the title of each attribute of a method, the methods, and a note
_LISTS: tuple[tuple[dict[str, str], Mapping[str, Method], str], ...] = (
    (
        {"formula": "advantage A_i", "weight": "weight W_N(p)", "needs": "needs"},
        {**ESTIMATORS, **OBJECTIVE_CLASSES},
        "N rewards r_i per prompt, C of them correct, F = N - C wrong; mu and std: their mean and "
        "standard deviation; p: the pass rate. S_i and S_-i: the mean of the maximum over the "
        "size-k subsets of rollouts with and without i; M_-i: the same over the size-(k-1) subsets "
        "of the others; rho_i: the policy's probability of a response over the sampler's. PACS: "
        "R_i the outcome, B the number of rollouts in the batch. "
        f"Other names: {'; '.join(map(explain_name, ALIASES))}.",
    ),
    (
        {
            "formula": "loss of a token",
            "weight": "weight",
            "shown_options": "options",
        },
        LOSSES,
        "--loss NAME. A: advantage; rho = pi / pi_old of a token; sg: a constant factor, without a "
        "gradient; weight: the factor of A grad logp, 1 for every loss at rho = 1, except for "
        "entropy_adv and tokens that clip_cov, lp_reg and simko choose. "
        f"Other names: {'; '.join(map(explain_name, LOSS_ALIASES))}.",
    ),
    (
        {
            "formula": "factor of a token's advantage",
            "needs": "forward passes",
            "shown_options": "options",
        },
        CORRECTIONS,
        "--correction NAME. w_t: a token's probability under the policy before the step's first "
        "update over its probability in the rollout engine, both before top-p.",
    ),
)
_SHOWN = ("maxrl", "maxpo:4", "grpo", "rloo")
_PASS_RATES = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95)


@command
def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 0, or 2 on bad input."""
    parser = CommandParser(
        prog="python -m maxrl_fast.objectives",
        description="Print every objective: the formula of its advantage, its effective weight, "
        "what it needs, and its source; "
        "every token loss of --loss and every correction of --correction. "
        "With --weights, plot and print W_N(p), the weight of the gradient of a prompt with pass "
        "rate p, exact at finite N.",
    )
    add = parser.add_argument
    what = "plot W_N(p) of --estimators to this file, and print it"
    add("--weights", type=Path, metavar="OUT.png", help=what)
    what = f"names of estimators, with k or the order after a colon (default: {' '.join(_SHOWN)})"
    add("--estimators", nargs="+", default=_SHOWN, metavar="NAME[:SIZE]", help=what)
    what = "rollouts per prompt (default: %(default)s)"
    add("--rollouts", type=int, default=16, metavar="N", help=what)
    try:
        return _show(parser.parse_args(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if options.weights is None:
        for titles, methods, notation in _LISTS:
            for name, method in methods.items():
                shown = titles | {"source": "source"}
                cells = [f"{t}: {getattr(method, key) or '-'}" for key, t in shown.items()]
                _print(console, "\n  ".join([name, *cells]))
            _print(console, f"\n{notation}\n")
        return 0
    grid = torch.logspace(-2.5, 0, 400, dtype=torch.float64)
    curves = {name: (grid, _weight(name, options.rollouts, grid)) for name in options.estimators}
    numbers = {
        name: _weight(name, options.rollouts, torch.tensor(_PASS_RATES))
        for name in options.estimators
    }
    try:
        draw_weights(curves, options.rollouts, options.weights)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--weights must be a picture file that can be written, got {options.weights}: {error}"
        ) from error
    table = Table("p =", title=f"W_N(p), N = {options.rollouts} rollouts")
    for p in _PASS_RATES:
        table.add_column(f"{p:g}", justify="right", no_wrap=True)
    for name, weights in numbers.items():
        table.add_row(name, *(f"{weight:.3f}" for weight in weights.tolist()))
    console.print(table)
    console.print(f"plot: {options.weights}", highlight=False)
    return 0


def _print(console: Console, text: str) -> None:
    show(console, text)


def _weight(name: str, n: int, pass_rates: Tensor) -> Tensor:
    """Return the weight W_N(p) of an estimator such as "maxpo:4"."""
    estimator, _, size = name.partition(":")
    if size and not size.isdecimal():
        raise InputError(f"a size must be an integer, got {name!r}")
    try:
        kind = find_estimator(estimator).size
        sizes = {"k" if kind is None else kind.name: int(size)} if size else {}
        return effective_weight(estimator, n, pass_rates, **sizes)
    except ValueError as error:
        raise InputError(str(error)) from error

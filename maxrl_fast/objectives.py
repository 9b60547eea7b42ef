"""The command `python -m maxrl_fast.objectives`: print every objective with its formula, weight,
requirements and source, every token loss, and every correction for a rollout engine that is not
the policy."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.errors import InputError
from maxrl_fast.job.plots import draw_weights
from maxrl_fast.job.screen import wrapped
from maxrl_fast.ops.effective_weight import effective_weight
from maxrl_fast.runtime.output import CommandParser, protect_output
from maxrl_fast.runtime.version import FLAG, version_text
from maxrl_fast.training.correction import CORRECTIONS, DEFAULT_CAP
from maxrl_fast.training.objectives.registry import OWN

_NOTATION = (
    "N rewards r_i per prompt, C of them correct, F = N - C wrong; mu and std: their mean and "
    "standard deviation; p: the pass "
    "rate. S_i and S_-i: the mean of the maximum over the size-k subsets of rollouts with and "
    "without i; M_-i: the same over "
    "the size-(k-1) subsets of the others; rho_i: the policy's probability of a response over the "
    "sampler's. PACS: R_i the "
    "outcome, B the number of rollouts in the batch."
)
_COLUMNS = ("advantage A_i", "weight W_N(p)", "needs", "source")
_LOSS_NOTATION = (
    "--loss NAME. A: advantage; rho = pi / pi_old of a token; sg: a constant factor, without a "
    "gradient; weight: the factor of "
    "A grad logp, 1 for every loss at rho = 1, except for tokens that clip_cov, lp_reg and simko "
    "choose."
)
_LOSS_COLUMNS = ("loss of a token", "weight", "--loss-options", "source")
_CORRECTION_NOTATION = (
    "--correction NAME. w_t: a token's probability under the policy before the step's first update "
    "over its probability in the "
    "rollout engine, both before top-p."
)
_CORRECTION_COLUMNS = (
    "factor of a token's advantage",
    "forward passes",
    "--correction-options",
    "source",
)
_TABLE_WIDTH = 130  # columns; below it, words of the table would be cut
_SHOWN = ("maxrl", "maxpo:4", "grpo", "rloo")
_PASS_RATES = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 on bad input."""
    protect_output()
    parser = CommandParser(
        prog="python -m maxrl_fast.objectives",
        description="Print every objective: the formula of its advantage, its effective weight, "
        "what it needs, and its source; "
        "every token loss of --loss and every correction of --correction. "
        "With --weights, plot and print W_N(p), the weight of the gradient of a prompt with pass "
        "rate p, exact at finite N.",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="OUT.png",
        help="plot W_N(p) of --estimators to this file, and print it",
    )
    parser.add_argument(
        "--estimators",
        nargs="+",
        default=list(_SHOWN),
        metavar="NAME[:SIZE]",
        help="names of estimators, with k or the order after a colon (default: "
        f"{' '.join(_SHOWN)})",
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=16,
        metavar="N",
        help="rollouts per prompt (default: %(default)s)",
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    if FLAG in arguments:
        print(version_text())
        return 0
    try:
        return _show(parser.parse_args(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if options.weights is None:
        if console.width < _TABLE_WIDTH:
            _print_rows(console, _COLUMNS, _registry(), _NOTATION)
            _print_rows(console, _LOSS_COLUMNS, _losses(), _LOSS_NOTATION)
            _print_rows(console, _CORRECTION_COLUMNS, _corrections(), _CORRECTION_NOTATION)
        else:
            console.print(_table(_COLUMNS, _registry(), _NOTATION))
            console.print(_table(_LOSS_COLUMNS, _losses(), _LOSS_NOTATION))
            console.print(_table(_CORRECTION_COLUMNS, _corrections(), _CORRECTION_NOTATION))
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


def _weight(name: str, n: int, pass_rates: Tensor) -> Tensor:
    """Return the weight W_N(p) of an estimator such as "maxpo:4". Raises InputError if the name or
    the size is not valid.
    """
    estimator, _, size = name.partition(":")
    if n < 1:
        raise InputError(f"rollouts must be at least 1, got {n}")
    if size and not size.isdecimal():
        raise InputError(f"a size must be an integer, got {name!r}")
    row = ESTIMATORS.get(estimator)
    kind = row.size.name if row is not None and row.size is not None else "k"
    try:
        if row is not None and row.size is not None and row.size.required and not size:
            raise ValueError(f"{estimator} needs {row.size.wanted(n)}, for example {estimator}:4")
        return effective_weight(estimator, n, pass_rates, **({kind: int(size)} if size else {}))
    except ValueError as error:
        raise InputError(str(error)) from error


def _registry() -> dict[str, tuple[str, str, str, str]]:
    """Return the formula, the weight, the needs and the source of every objective."""
    rows = {
        name: (row.formula, row.weight, row.needs, row.source) for name, row in ESTIMATORS.items()
    }
    return rows | {name: (row.formula, "-", row.needs, row.source) for name, row in OWN.items()}


def _losses() -> dict[str, tuple[str, str, str, str]]:
    """Return the formula, the weight, the options and the source of every token loss."""
    rows = {}
    for name, row in LOSSES.items():
        options = [f"{option}={number.default:g}" for option, number in row.options.items()]
        options += ["--clip-low, --clip-high"] * row.clips
        rows[name] = (row.formula, row.weight, " ".join(options) or "-", row.source)
    return rows


def _corrections() -> dict[str, tuple[str, str, str, str]]:
    """Return the formula, the forward passes, the options and the source of every correction."""
    rows = {}
    for name, row in CORRECTIONS.items():
        options = [f"{option}={default:g}" for option, default in row.options.items()]
        options += [f"--importance-cap {DEFAULT_CAP:g}"] * row.has_cap
        rows[name] = (row.formula, row.passes, " ".join(options) or "-", row.source)
    return rows


def _table(columns: Sequence[str], rows: Mapping[str, Sequence[str]], notation: str) -> Table:
    table = Table("name", *columns, show_lines=True, caption=notation, caption_justify="left")
    for name, cells in rows.items():
        table.add_row(name, *map(escape, cells))  # rich takes brackets for markup
    return table


def _print_rows(
    console: Console, columns: Sequence[str], rows: Mapping[str, Sequence[str]], notation: str
) -> None:
    """Print what a table has as lines, for a terminal in which its columns would be too narrow for
    their words.
    """
    for name, cells in rows.items():
        lines = [
            name,
            *(f"  {column}: {cell}" for column, cell in zip(columns, cells, strict=True)),
        ]
        console.print(
            wrapped("\n".join(lines), console.width), markup=False, highlight=False, soft_wrap=True
        )
    console.print(
        wrapped(f"\n{notation}\n", console.width), markup=False, highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    sys.exit(main())

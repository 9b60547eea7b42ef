"""The command `python -m maxrl_fast.objectives [NAME ...]`: list objectives, token losses and
corrections, a line each, or print all that is known of those that are named."""

from maxrl_fast.runtime.output import run_command

if __name__ == "__main__":
    run_command("objectives")

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from maxrl_fast.algorithms.estimators import ALIASES
from maxrl_fast.algorithms.known import explain_name, method_hint
from maxrl_fast.algorithms.losses import ALIASES as LOSS_ALIASES
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.algorithms.method import Method
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.output import command, show_help
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.registry import METHODS

# of each kind: the methods, other names of them, the title of the formula, and the notation
KINDS: dict[str, tuple[Mapping[str, Method], Mapping[str, Method], str, str]] = {
    "objective": (
        METHODS,
        ALIASES,
        "advantage A_i",
        "N rewards r_i per prompt, C of them correct, F = N - C wrong; mu and std: their mean and "
        "standard deviation; p: the pass rate. S_i and S_-i: the mean of the maximum over the "
        "size-k subsets of rollouts with and without i; M_-i: the same over the size-(k-1) subsets "
        "of the others; rho_i: the policy's probability of a response over the sampler's. PACS: "
        "R_i the outcome, B the number of rollouts in the batch.",
    ),
    "loss": (
        LOSSES,
        LOSS_ALIASES,
        "loss of a token",
        "A: advantage; rho = pi / pi_old of a token; sg: a constant factor, without a gradient; "
        "weight: the factor of A grad logp, 1 for every loss at rho = 1, except for entropy_adv "
        "and tokens that clip_cov, lp_reg and simko choose.",
    ),
    "correction": (
        CORRECTIONS,
        {},
        "factor of a token's advantage",
        "w_t: a token's probability under the policy before the step's first update over its "
        "probability in the rollout engine, both before top-p.",
    ),
}


HELP = """usage: python -m maxrl_fast.objectives [NAME ...]

List the objectives, the token losses of --loss and the corrections of --correction, a line each
with what it needs and where it is from; of those that are named print the formula, the weight, the
options and the notation too."""


@command
def main(names: Sequence[str]) -> int:
    """Run the command."""
    show_help(names, HELP)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    show = partial(console.print, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    known = {x for methods, aliases, *_ in KINDS.values() for x in (*methods, *aliases)}
    for name in names:
        if name not in known:
            said = "no objective, loss or correction has the name"
            raise InputError(f"{said} {name!r:.80}{method_hint(name, known)}")
    for kind, (methods, aliases, title, notation) in KINDS.items():
        if names:
            for name in (x for x in names if x in methods or x in aliases):
                method = methods.get(name) or aliases[name]
                show(f"--{kind} {explain_name(name)}\n{_details(method, title)}")
                show(f"  {notation}\n")
            continue
        table = Table(f"--{kind}", "needs", "from", box=None, pad_edge=False)
        for column in table.columns:
            column.no_wrap = True
        table.columns[0].min_width = max(map(len, methods))
        for name, method in methods.items():
            table.add_row(name, method.needs, method.source)
        console.print(table)
        others = "; ".join(map(explain_name, aliases))
        show(f"Other names: {others}.\n" if others else "")
    return 0


def _details(method: Method, title: str) -> str:
    rows = {title: method.formula, "weight": method.weight, "needs": method.needs}
    rows |= {"options": method.shown_options, "from": method.source}
    return "\n".join(f"  {key}: {text or '-'}" for key, text in rows.items())

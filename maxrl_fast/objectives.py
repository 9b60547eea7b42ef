"""usage: python -m maxrl_fast.objectives [NAME ...]

List the objectives, the token losses of --loss and the corrections of --correction, a line each
with what it is for and what it needs; of those that are named print the formula, the weight, the
options and the source too."""

from maxrl_fast.runtime.output import run_command

if __name__ == "__main__":
    run_command("objectives")

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from maxrl_fast.algorithms.estimators import ALIASES
from maxrl_fast.algorithms.losses import ALIASES as LOSS_ALIASES
from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.algorithms.method import Method
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.output import command, show_help
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.registry import METHODS, explain_name, method_hint

# of each kind: the methods, other names of them, the title of the formula, and the page of docs/
# with the notation
KINDS: dict[str, tuple[Mapping[str, Method], Mapping[str, Method], str, str]] = {
    "objective": (METHODS, ALIASES, "advantage A_i", "objectives/README.md"),
    "loss": (LOSSES, LOSS_ALIASES, "loss of a token", "token_loss.md"),
    "correction": (CORRECTIONS, {}, "factor of a token's advantage", "rollout.md"),
}
# what methods are for; reinforce and ppo are an objective first, and then a loss
_FOR = """
most successes on the first try: rloo reinforce reinforce_raw grpo grpo_nemo lite_ppo reinforce_pp
 reinforce_pp_tokens opo remax qae
hard prompts count more: maxrl maxrl_ratio maxrl_conditional maxrl_control_variate
the best of k responses: maxpo expected_improvement ei_l1o pkpo pkpo_sloo passk_training
 bon_max_second bon_mean
best of k or maxrl, stale samples: maxpo_off_policy maxrl_off_policy bon_off_policy
a baseline, without a gradient: leave_two_out
rewards as labels of a classifier: pacs pacs_paper pacs_first_update
diverse responses: nsr w_reinforce differential_smoothing unlikeliness
verifiers that err: noisy_verifier_backward noisy_verifier_forward
several rewards: gdpo hero
prompts that greedy decoding fails: self
to learn from a teacher: distill
a critic, advantages by token: ppo
the worst bundles of prompts: riskpo
reference answers, no verifier: verifree
groups of equal rewards too: rl_zvp
one update a step: reinforce
several updates, clipped ratios: ppo dispo vespo
clipped tokens keep a gradient: cispo sapo
ratios of whole responses: gspo gmpo
entropy that stays: kl_cov clip_cov lp_reg entropy_adv
probability for several tokens: simko
asynchronous samples: dppo topr topr_token
an engine exact as the trainer: none
other engines, weights are capped: tis tis_sequence
other engines, some are left out: icepop mis
updates far from the sampler: sequence_mask
"""
WIDEST = 34  # of a purpose


def purpose_of(kind: str, name: str) -> str:
    """Return what a method is for; "" for one that was registered later."""
    rows = (row.split(": ") for row in _FOR.replace("\n ", " ").strip().splitlines())
    found = [said for said, names in rows if name in names.split()]
    return found[-1 if kind == "loss" else 0] if found else ""


@command
def main(names: Sequence[str]) -> int:
    show_help(names, str(__doc__))
    console = Console() if sys.stdout.isatty() else Console(width=160)
    show = partial(console.print, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    known = {x for methods, aliases, *_ in KINDS.values() for x in (*methods, *aliases)}
    for name in names:
        if name not in known:
            said = f"no objective, loss or correction has the name {name!r:.80}"
            raise InputError(said + method_hint(name, known))
    for kind, (methods, aliases, title, page) in KINDS.items():
        for name in (x for x in names if x in methods or x in aliases):
            x = methods.get(name) or aliases[name]
            rows = {title: x.formula, "weight": x.weight, "needs": x.needs}
            rows |= {"options": x.shown_options, "from": x.source}
            show(f"--{kind} {explain_name(name)}")
            show(*(f"  {key}: {text or '-'}" for key, text in rows.items()), sep="\n")
            show(f"  notation: docs/{page}\n")
        if names:
            continue
        table = Table(f"--{kind}", "what for", "needs", box=None, pad_edge=False)
        for column, width in zip(table.columns, (max(map(len, methods)), WIDEST, 5), strict=True):
            column.no_wrap, column.min_width = True, width
        for name, method in methods.items():
            table.add_row(name, purpose_of(kind, name), method.needs)
        console.print(table)
        others = "; ".join(map(explain_name, aliases))
        show(f"Other names: {others}.\n" if others else "")
    return 0

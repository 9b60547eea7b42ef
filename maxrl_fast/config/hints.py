"""The option that a user probably meant: by the names that other libraries give it, else by its spelling."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from maxrl_fast.config.metadata import Aka, options_of
from maxrl_fast.config.options import Config
from maxrl_fast.errors import InputError

OTHER_NAMES = {
    name: f"{option.name} {other.value}".strip()
    for option in options_of(Config).values()
    for other in option.of(Aka)
    for name in other.names
}
# What `maxrl_fast.evaluate` calls what the trainer calls so.
_OF_EVALUATION = {"rollouts": "samples", "eval_samples": "samples", "eval_prompts": "prompts"}


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the word that is most like this one, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def meant_by(name: str, known: Collection[str]) -> str | None:
    """Return the option among `known` that is probably meant by a flag or key of this name, perhaps with a value, or None.

    The name may have the prefixes that other libraries give it (trainer.total_epochs).
    """
    parts = name.lower().replace("-", "_").split(".")
    for word in ("_".join(parts), "_".join(parts[-2:]), parts[-1]):
        meant = word if word in known else OTHER_NAMES.get(word, "")
        for option in (meant, _OF_EVALUATION.get(meant, "")):
            if option.partition(" ")[0] in known:
                return option
    close = difflib.get_close_matches("_".join(parts), list(known), n=1, cutoff=0.73)  # below are words that mean others
    return close[0] if close else None


def as_flag(option: str) -> str:
    """Return an option, perhaps with a value behind it, as it stands in a command."""
    name, _, value = option.partition(" ")
    return f"--{name.replace('_', '-')} {value}".strip()


def flag_hint(name: str, known: Collection[str]) -> str:
    """Return "; did you mean --...?" for a flag that does not exist or is not taken, or nothing."""
    meant = meant_by(name, known)
    return f"; did you mean {as_flag(meant)}?" if meant else ""


def key_hint(key: str, known: Collection[str]) -> str:
    """Return "; did you mean '...'?" for a key of a file that is no option, or nothing."""
    meant = meant_by(key, known)
    return f"; did you mean {meant.partition(' ')[0]!r}?" if meant else ""


def refuse_unknown_flags(
    arguments: Sequence[str], known: Collection[str], switches: Collection[str], several: Collection[str] = ()
) -> None:
    """Refuse flags that do not exist, with the one that was probably meant.

    Args:
        known: the options.
        switches: those of them that are on or off, which have a --no-... too.
        several: those of them that take several values, such as --loss-options kl=0 low=0.1.

    Raises:
        InputError: naming the flag. Options without two dashes, as in trainer.lr=1e-3 of other libraries, are named too.
    """
    flags = {*known, *(f"no_{name}" for name in switches), "help", ""}
    is_value, takes_more = False, False  # whether a flag before may take this word as its value, and those behind it
    for argument in arguments:
        given = argument.partition("=")[0][:80]
        name = given.lstrip("-+").replace("-", "_")
        if argument.startswith("--"):
            if name not in flags and not name.startswith("tyro_"):  # tyro's own print completions for shells
                raise InputError(f"unknown option {given}{flag_hint(name, known) or '; --help lists the options'}")
            is_value, takes_more = "=" not in argument, name in several
            continue
        if not is_value and re.match(r"-[a-zA-Z_]{2}|\+{0,2}[a-zA-Z_][\w.]*=", argument) and meant_by(name, known):
            raise InputError(f"unknown option {given}: options begin with two dashes{flag_hint(name, known)}")
        is_value = is_value and takes_more

"""From where options are given (flags, a TOML file, the config.json of a run, or Python) to a
configuration.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from maxrl_fast.algorithms.options import Option, nearest
from maxrl_fast.config.aliases import IN_EVALUATION, OTHER_NAMES, PROCESSES, SENTENCES
from maxrl_fast.config.changes import checkpoints_of
from maxrl_fast.config.help_page import show_help, split_help
from maxrl_fast.config.metadata import (
    AnyGroups,
    Note,
    Resume,
    as_list,
    inapplicable_options,
    names_with,
    options_of,
)
from maxrl_fast.config.options import Config, known_options, options_with
from maxrl_fast.config.resolve import absolute_function
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, printable, read_json
from maxrl_fast.runtime.loading import is_code
from maxrl_fast.training.objectives.registry import objective_presets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python

SAME = {"bf16": "bfloat16", "fp32": "float32", "gpu": "cuda"}  # as others call a choice
AUTO = Path("auto")  # the value of --resume
TASK_IS_MISSING = (
    "requires --task: gsm8k, math, dataset with --data FILE, maze or another (--help lists them)"
)


@dataclass(frozen=True)
class RawOption:
    """The value of an option as it is given.

    Args:
        value: the text of a flag, or a value of TOML, JSON or Python.
        name: the option as the user writes it: "--lr" or "lr".
        place: returns "FILE, line N: " or nothing.
    """

    value: Any
    name: str
    place: Callable[[], str] = str


def convert(option: Option, given: RawOption) -> Any:
    value = given.value
    # a flag that stands alone, or no flag
    if Note.OPTIONAL_VALUE in option.notes and isinstance(value, bool):
        return "" if value else None
    if option.takes_several:
        one = replace(option, kind=get_args(option.kind)[0])
        return tuple(convert(one, replace(given, value=item)) for item in as_list(value))
    if isinstance(value, str) and value == "None" and option.default is None:
        return None
    try:
        return _convert(option.kind, value)
    except ValueError:
        wanted = {int: "an integer", float: "a number", bool: "true or false"}.get(option.kind)
        text = "text without null bytes or half characters"
        wanted = wanted or f"one of {', '.join(option.choices)}" * bool(option.choices) or text
        meant = nearest(str(value), option.choices)
        where = f"{given.place()}{given.name}"
        raise InputError(f"{where} must be {wanted}, got {value!r:.80}{meant}") from None


def _convert(kind: Any, value: Any) -> Any:
    """Return a value as a `kind`, through its text; raise ValueError where it has another type."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is bool or isinstance(value, bool) or not isinstance(value, (int, float, str, Path)):
        raise ValueError
    text = str(value)
    if kind in (int, float):
        return kind(text)
    text = SAME.get(text, text) if SAME.get(text) in get_args(kind) else text
    # which raises on half characters
    if text not in get_args(kind) if get_args(kind) else b"\0" in os.fsencode(text):
        raise ValueError
    return kind(text) if kind is Path else text


def read_flags(
    arguments: Sequence[str], options: Mapping[str, Option]
) -> tuple[dict[str, RawOption], list[str]]:
    """Return what flags give by name of the option, and the words that belong to no flag. The last
    of equal flags wins."""
    given: dict[str, RawOption] = {}
    others, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            others.append(word)
            continue
        flag, equals, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        positive = options.get(name.removeprefix("no_"))
        if positive is not None and positive.kind is bool:
            if equals:
                raise InputError(f"{flag} must be given without a value, got {text!r:.80}")
            given[positive.name] = RawOption(name == positive.name, flag)
            continue
        option = options.get(name)
        takes_several = option is not None and option.takes_several
        values = [text] if equals else []
        while not equals and words and not words[0].startswith("--"):
            if values and not takes_several:
                break
            values.append(words.pop(0))
        needs_value = option is not None and Note.OPTIONAL_VALUE not in option.notes
        if needs_value and not values and not takes_several:
            raise InputError(f"{flag} needs a value")
        given[name] = RawOption(values if takes_several else "".join(values), flag)
    return given, others


def read_toml(path: Path) -> dict[str, RawOption]:
    """Return the options in a TOML file by name; tables are refused."""
    try:
        check_regular(path, JSON_BYTES)
        text = path.read_text()
        options = tomllib.loads(text)
    # of TOML, of UTF-8, of a number of too many digits
    except (OSError, ValueError, RecursionError) as error:
        why = f"{error}; write lines KEY = VALUE" if path.suffix != ".toml" else error
        raise InputError(f"--config must be a readable TOML file, got {path}: {why}") from error
    given, known = {}, options_of(Config)
    for key, value in options.items():
        place, option = partial(_place, path, text, key), known.get(key)
        if any(isinstance(item, dict) for item in (value, *as_list(value))):
            there = "write its keys there"
            if option and Note.JSON in option.notes:
                there = "give it as a string of JSON"
            elif option and option.takes_several:
                there = 'give a list such as ["kl=0"]'
            raise InputError(
                f"{place()}options must stand at the top of the file, without tables, got the "
                f"table [{key:.80}]; {there}"
            )
        if option and Note.NOT_IN_A_FILE in option.notes:
            raise InputError(f"{place()}{key} is only a flag")
        given[key] = RawOption(value, key, place)
    return given


def _place(path: Path, text: str, key: str) -> str:
    """Return "FILE, line N: " for a key, or "FILE: " for one that is written with escapes."""
    lines = text.splitlines()
    statement = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[].=]")
    for i, line in enumerate(lines):
        if statement.match(line):
            try:
                tomllib.loads("\n".join(lines[:i]))
            except (ValueError, RecursionError):  # the line is within a string or an array
                continue
            return f"{path}, line {i + 1}: "
    return f"{path}: "


def read_run(out: Path, overriding: Mapping[str, RawOption]) -> dict[str, RawOption]:
    """Return the options in the config.json of a run, or of what a session has saved, that have a
    value, without those that say how it was started.

    A folder of another user prints a warning with the code that it names. Nothing is imported here.
    """
    file = out / "config.json"
    if not file.exists():
        why = "has no config.json" if out.exists() else "does not exist"
        raise InputError(f"--resume must be the folder of a run, got {out}, which {why}")
    options, saved = read_json(file), out / "progress.json"
    if saved.exists():  # then config.json is the policy's
        options = read_json(saved).get("options")
    if not isinstance(options, dict):
        raise InputError(f"{saved} must hold the options of a run, got {options!r:.80}; restore it")
    left_out = {"versions", "command", *names_with(Config, Resume.NOT_COMPARED)}
    given = {
        key: RawOption(value, key, partial("{}: ".format, file))
        for key, value in options.items()
        if key not in left_out and value is not None
    }
    _warn_of_foreign_code(out, {**given, **overriding})
    return given


def _warn_of_foreign_code(out: Path, given: Mapping[str, RawOption]) -> None:
    owners = sorted({path.stat().st_uid for path in (out, out / "config.json")} - {os.getuid()})
    if not owners:
        return
    code = [
        f"{option.name} {printable(value)}"
        for option in options_of(Config).values()
        for value in as_list(given[option.name].value if option.name in given else None)
        if Note.NAMES_CODE in option.notes
        or (Note.MAY_NAME_CODE in option.notes and is_code(str(value)))
    ]
    whose = f"{printable(out)} belongs to uid {' and '.join(map(str, owners))}"
    runs = f"what its options name runs with your rights: {', '.join(code) or 'no code'}"
    print(f"warning: {whose}, and {runs}", file=sys.stderr, flush=True)


def hint(name: str, known: Mapping[str, Option], is_flag: bool = True) -> str:
    """Return "; did you mean --...?" with the option among `known`, perhaps with a value, that is
    probably meant by a flag or key of this name, or nothing. The name may have the prefixes that
    other libraries give it (trainer.total_epochs).
    """
    parts = name.lower().replace("-", "_").split(".")
    if "sharding" in known and PROCESSES.fullmatch(parts[-1]):  # not in an evaluation
        return "; torchrun --nproc-per-node N starts a process for each of N GPUs"
    if (said := SENTENCES.get(parts[-1])) and "objective" in known:
        return f"; {said}"
    words = ("_".join(parts), "_".join(parts[-2:]), parts[-1], parts[-1].removeprefix("no_"))
    names = [word if word in known else OTHER_NAMES.get(word, word) for word in words]
    names = [option for x in names for option in (x, IN_EVALUATION.get(x, ""))]
    found = [option for option in names if option.partition(" ")[0] in known]
    # below this cutoff are words that mean others
    found += difflib.get_close_matches("_".join(parts), list(known), n=1, cutoff=0.73)
    if not found:
        return ""
    option, _, value = found[0].partition(" ")
    meant = f"--{option.replace('_', '-')} {value}".strip() if is_flag else option
    return f"; did you mean {meant}?"


def refuse_unknown(
    given: Mapping[str, RawOption], words: Sequence[str], known: Mapping[str, Option]
) -> None:
    """Refuse the first option or word that is not known, naming the one that was probably meant."""
    for name, x in given.items():
        if name not in known:
            is_flag = x.name.startswith("--")
            found = hint(name, known, is_flag) or "; --help lists the options" * is_flag
            raise InputError(f"{x.place()}unknown option {x.name:.80}{found}")
    for word in words:
        name = word.partition("=")[0]
        meant = hint(name.lstrip("-+"), known)
        raise InputError(f"unknown option {name:.80}: options begin with two dashes{meant}")


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration of the run of --resume, the TOML file of --config and flags, each
    overriding those before it. --help prints the options that this run uses, and exits.
    `--resume auto` becomes the folder of --out if there is a run in it; otherwise the run is new.
    """
    words, asks_for_help = split_help(arguments)
    config = _parse(*read_flags(words, known_options()))
    if asks_for_help:
        options = options_with(config.objective.objective)
        show_help(config, options, prog="python -m maxrl_fast.train")
    return config


def parse_options(options: Mapping[str, Any]) -> Config:
    """Return the configuration of options by name, as `parse` does of their flags; None is an
    option that is not given.
    """
    given = {str(name): RawOption(x, str(name)) for name, x in options.items() if x is not None}
    return _parse(given, [])


def _parse(flags: Mapping[str, RawOption], words: Sequence[str]) -> Config:
    def early(name: str, *layers: Mapping[str, RawOption]) -> Any:
        """Return the value in the first layer that gives the option, or None."""
        found = next((layer[name] for layer in layers if name in layer), None)
        return None if found is None else convert(options_of(Config)[name], found)

    path, run = early("config", flags), early("resume", flags)
    file = {} if path is None else read_toml(path)
    is_auto = run == AUTO
    if is_auto:
        out = early("out", flags, file)
        if out is None:
            raise InputError("--resume auto needs --out DIR, the folder of the run")
        run = out if (out / "config.json").exists() else None
    of_run: dict[str, RawOption] = {}
    # A run that ended before its first checkpoint restarts with this command's options.
    if run is not None and not (is_auto and not checkpoints_of(run)):
        of_run = read_run(run, {**file, **flags})
    objective, loss = early("objective", flags, file), early("loss", flags, file)
    kept = {*of_run}
    if of_run and objective and absolute_function(objective) != early("objective", of_run):
        kept &= options_of(Config).keys() - names_with(Config, Note.FOLLOWS_OBJECTIVE)
    if of_run and loss and loss != early("loss", of_run):
        kept -= {*names_with(Config, Note.FOLLOWS_LOSS)}
    of_run = {name: x for name, x in of_run.items() if name in kept}
    given = {**of_run, **file, **flags}
    name = early("objective", given) or Config().objective.objective
    options = options_with(name)
    refuse_unknown(given, words, {**known_options(), **options})
    for key in [key for key in given if key not in options]:
        raise _inapplicable(given[key], key, f"is not used by objective {name}", options)
    if "model" in given and "task" not in given:
        raise InputError(f"{given['model'].place()}{given['model'].name} {TASK_IS_MISSING}")
    # A run's config.json has the defaults of options that it does not use too.
    config = configure(Config(), options, given, file.keys() | flags, objective_presets(name))
    if not is_auto:
        return config
    return config.replace(resume=run, allow_changes=config.run.allow_changes and run is not None)


def configure(
    default: AnyGroups,
    options: Mapping[str, Option],
    given: Mapping[str, RawOption],
    by_user: Collection[str],
    presets: Mapping[str, Any] | None = None,
) -> AnyGroups:
    """Return a configuration with the values that are given, without those of options that the run
    does not use.

    Args:
        by_user: options that are refused where the run does not use them.
        presets: other defaults.
    """
    values = dict(presets or {}) | {key: convert(options[key], x) for key, x in given.items()}
    unused = inapplicable_options(type(default), default.replace(**values).flat())
    for key in [key for key in unused if key in by_user]:
        raise _inapplicable(given[key], key, unused[key], options)
    return default.replace(**{key: value for key, value in values.items() if key not in unused})


def _inapplicable(
    given: RawOption, key: str, reason: str, known: Mapping[str, Option]
) -> InputError:
    # Where another library means something else by the name, as by beta, PACS's, the weight of the
    # divergence.
    meant = hint(key, known, given.name.startswith("--")) if key in OTHER_NAMES else ""
    return InputError(f"{given.place()}{given.name} {reason}{meant}")


def source_location(error: InputError, arguments: Sequence[str]) -> str:
    """Return " (lr: FILE, line 3)" where an error is about a value that the file of --config gives,
    or nothing.
    """
    try:
        flags = read_flags(arguments, known_options())[0]
        file = read_toml(Path(flags["config"].value)) if "config" in flags else {}
    except InputError:  # which is the error
        return ""
    names = [name for name in error.options if name in file and name not in flags]
    places = [f"{name}: {file[name].place().removesuffix(': ')}" for name in names]
    return f" ({'; '.join(places)})" if places else ""

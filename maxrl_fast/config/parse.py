"""From flags, the TOML file of --config and the run of --resume to a configuration."""

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import os
import pwd
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.config import conditions as when
from maxrl_fast.config.changes import OF_ONE_START
from maxrl_fast.config.conditions import Choices
from maxrl_fast.config.hints import OTHER_NAMES, as_flag, flag_hint, key_hint, refuse_unknown_flags
from maxrl_fast.config.metadata import Note, inapplicable_options, names_with, options_of, read_options
from maxrl_fast.config.option_file import OptionFile
from maxrl_fast.config.options import Config, as_json, as_list
from maxrl_fast.config.resolve import absolute_function
from maxrl_fast.config.run_folder import checkpoints_of
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, shown
from maxrl_fast.runtime.plugins import describe_installed, is_file, is_installed

Options = dict[str, Any]  # by name
AUTO = "auto"  # the value of --resume
OPTIONS = options_of(Config)
ESTIMATOR_OPTIONS = tuple(name for name in OPTIONS if any(name in row.options for row in ESTIMATORS.values()))
SEVERAL = tuple(option.name for option in OPTIONS.values() if option.takes_several)
CODE = tuple(option.name for option in OPTIONS.values() if {Note.MAY_NAME_CODE, Note.NAMES_CODE} & {*option.notes})
AnyOptions = TypeVar("AnyOptions")


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration that the run of --resume, the TOML file of --config and flags give, each overriding those before
    it. A flag that is wrong in itself exits with code 2. A run's folder that is another user's prints a warning, before any
    code that it names is loaded.

    `--resume auto` becomes the folder of --out if there is a run in it; otherwise the run is new.

    Raises:
        InputError: on a file that cannot be read or has an unknown key or a value of the wrong type, on a flag that does not
            exist, and on an option that the run does not take.
    """
    refuse_unknown(Config(), arguments)
    flags = _find(arguments, ("config", "resume", "out"))
    file = _file_of(arguments)
    of_file = file.options
    run, is_auto = flags.get("resume"), flags.get("resume") == AUTO
    if is_auto:
        run = _run_in(flags.get("out") or of_file.get("out"))
    # A run that ended before its first checkpoint restarts with this command's options.
    of_run = {} if run is None or (is_auto and not checkpoints_of(Path(run))) else _options_of_run(Path(run))
    if run is not None and of_run:
        overriding = {name: value for name, value in _find(arguments, CODE).items() if value is not None}
        if sentence := foreign_code(Path(run), of_run | overriding):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
    objective = _find(arguments, ("objective",))["objective"] or of_file.get("objective")
    if of_run and objective and absolute_function(str(objective)) != of_run.get("objective"):
        of_run = _without_notes(of_run, when.OBJECTIVE, Note.FOLLOWS_OBJECTIVE)
    loss = _find(arguments, ("loss",))["loss"] or of_file.get("loss")
    if of_run and loss and loss != of_run.get("loss"):
        of_run = _without_notes(of_run, Note.FOLLOWS_LOSS)
    hidden = hidden_options(of_run | of_file, arguments)
    of_run = {name: value for name, value in of_run.items() if name not in hidden}  # their defaults, written down
    refuse(of_file, hidden)
    _check_types(file, hidden)
    given = [*_as_flags(of_run), *_as_flags(of_file)]
    # The last of two equal flags wins, so a flag overrides a file, and all go through the same checks.
    config = parse_shown(Config, [*given, *arguments], hidden, "python -m maxrl_fast.train")
    if not is_auto:
        return config
    return config.replace(resume=None if run is None else Path(run), allow_changes=config.run.allow_changes and run is not None)


def _without_notes(options: Options, *notes: Any) -> Options:
    """Return the options that have none of these notes."""
    return {name: value for name, value in options.items() if not {*notes} & {*OPTIONS[name].notes}}


def source_location(sentence: str, arguments: Sequence[str]) -> str:
    """Return " (lr: FILE, line 3)" where a message refuses a value that the file of --config gives, or nothing."""
    try:
        file = _file_of(arguments)
    except InputError:  # which is the message
        return ""
    given = _find(arguments, list(file.options))
    return file.source_location(sentence, {name: value for name, value in given.items() if value is not None})


def _file_of(arguments: Sequence[str]) -> OptionFile:
    path = _find(arguments, ("config",))["config"]
    if path is None:
        return OptionFile(Path())
    file = OptionFile.read(Path(path))
    _check(file.place, file.options)
    return file


def refuse_unknown(defaults: Any, arguments: Sequence[str]) -> None:
    """Raise InputError naming the first flag that is none of these options (Config or EvaluationConfig)."""
    names = defaults.flat()
    refuse({name.removeprefix("no_"): None for name in _names_of_flags(arguments)}, {})
    refuse_unknown_flags(arguments, names, [name for name, value in names.items() if isinstance(value, bool)], SEVERAL)


def _names_of_flags(arguments: Sequence[str]) -> list[str]:
    return [argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]


def parse_options(options: Mapping[str, Any]) -> Config:
    """Return the configuration of options by name, as `parse` does of their flags; None is an option that is not given.

    Raises:
        InputError: as `parse`, and where a flag would exit with code 2, with the sentence that it would print.
    """
    given = {name: as_json(value) for name, value in options.items() if value is not None}
    known = Config().flat()
    unknown = [str(name) for name in given if name not in known]
    if unknown and (meant := unknown[0].replace("-", "_")) in known:
        raise InputError(f"unknown option {unknown[0]!r}; did you mean {meant!r}?")
    for name, value in given.items() if not unknown else ():
        if isinstance(known[name], bool) != isinstance(value, bool) and name != "dry_run":
            wanted = "True or False" if isinstance(known[name], bool) else "a number or a string"
            raise InputError(f"{name} must be {wanted}, got {value!r}")
        if isinstance(value, list) and name not in SEVERAL:
            raise InputError(f"{name} must be one value, got {value!r}")
        _check_text(name, value)
    said, unseen = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # which tells tyro how to draw its boxes
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(unseen):
            config = parse(_as_flags(dict.fromkeys(unknown[:1], True) or given))
    except SystemExit:
        raise InputError(_sentence_of(said.getvalue()) or f"unknown option {unknown[0]}") from None  # help, which says nothing
    sys.stderr.write(said.getvalue())  # a warning
    return config


def _sentence_of(boxed: str) -> str:
    """Return what is in the first part of the box that tyro prints before it exits."""
    lines = [line.strip(" │") for line in boxed.splitlines() if line[:1] not in "╭╰"]
    return " ".join("\n".join(lines).split("─" * 5)[0].split()).rstrip(".")


def _run_in(out: str | None) -> str | None:
    """Return the folder of --out if there is a run in it."""
    if out is None:
        raise InputError("--resume auto needs --out DIR, the folder of the run")
    return out if (Path(out) / "config.json").exists() else None


def foreign_code(out: Path, options: Options) -> str:
    """Return a sentence on the code that a run runs if its folder is another user's; "" if the folder is the user's own.

    Args:
        options: of the folder's config.json, and flags that override them. Nothing that they name is imported here.
    """
    owners = sorted({path.stat().st_uid for path in (out, out / "config.json")} - {os.getuid()})
    if not owners:
        return ""
    code = [f"{name} {shown(value)}" for name in CODE if _is_code(name, options) for value in as_list(options[name])]
    whose = " and ".join(map(_user, owners))
    names = ", ".join(code) or "no code of its own"
    return f"{shown(out)} belongs to {whose}, and what its options name runs with your rights: {names}"


def _is_code(name: str, options: Options) -> bool:
    """Return whether an option names code: a function of a file or module, or a tracker."""
    if options.get(name) is None or Note.NAMES_CODE in OPTIONS[name].notes:
        return options.get(name) is not None
    return is_file(str(options[name])) or is_installed(name, str(options[name]))


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:  # a user of another machine
        return f"uid {number}"


def hidden_options(options: Options, arguments: Sequence[str]) -> dict[str, str]:
    """Return the options that a run of these options and flags does not take, each with who does not take it.

    Raises:
        InputError: where a flag is one of them.
    """
    names = [option.name for option in dataclasses.fields(Choices)]
    choices = options | {name: value for name, value in _find(arguments, names).items() if value is not None}
    hidden = inapplicable_options(Config, Choices.of(choices))
    refuse({name.removeprefix("no_"): None for name in _names_of_flags(arguments)}, hidden)
    return hidden


def refuse(given: Iterable[str], hidden: Mapping[str, str]) -> None:
    """Raise InputError where a given option is hidden, or is one that no longer is."""
    for name in given:
        if name == "estimator_options":
            own = ", ".join(f"--{option.replace('_', '-')}" for option in ESTIMATOR_OPTIONS)
            raise InputError(f"--estimator-options was removed; use {own}")
        if name in hidden:
            # Where another library means something else by the name, as by beta, PACS's, the weight of the divergence.
            hint = flag_hint(name, Config().flat().keys() - hidden) if name in OTHER_NAMES else ""
            raise InputError(f"{hidden[name]} takes no {name}{hint}")


def _find(arguments: Sequence[str], names: Sequence[str]) -> Options:
    """Return the values of some flags as text, before all are parsed; None for those not given."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        nargs = "*" if name in SEVERAL else "?"
        finder.add_argument("--" + name.replace("_", "-"), f"--{name}", dest=name, nargs=nargs)
    return vars(finder.parse_known_args(list(arguments))[0])


def parse_shown(
    kind: type[AnyOptions], arguments: Sequence[str], hidden: Collection[str], prog: str, default: Any = None
) -> AnyOptions:
    """Return `kind`, a dataclass of groups of options, from flags; the hidden options are not among them nor in --help."""
    more: Options = {}
    if {"-h", "--help"} & {*arguments}:
        seldom = [name for name in names_with(kind, Note.SELDOM) if name not in hidden]
        others = f"More, in docs/options.md: {', '.join(map(as_flag, seldom))}." if seldom else ""
        more["description"] = "\n\n".join(filter(None, [inspect.getdoc(kind), others, describe_installed()]))
        hidden = {*hidden, *seldom}
    shown: Any = _without(kind, frozenset(hidden))  # type: ignore[arg-type]
    if default is not None:
        more["default"] = _converted(default, shown)
    parsed = tyro.cli(shown, args=list(arguments), prog=prog, config=(tyro.conf.OmitArgPrefixes,), **more)
    return _converted(parsed, kind)


@lru_cache(maxsize=16)
def _without(kind: type, hidden: frozenset[str]) -> type:
    """Return a subclass of a dataclass of groups whose hidden options tyro does not see."""

    def suppressed(group: type) -> type:
        fields = []
        for option in read_options(group):  # without our notes, which tyro's messages would print
            hint: Any = option.kind
            for note in (option.shown, *option.of(PrimitiveConstructorSpec)):
                hint = Annotated[hint, note]
            fields.append((option.name, Annotated[hint, tyro.conf.Suppress] if option.name in hidden else hint, option.default))
        own_help = {"__doc__": group.__doc__}
        return dataclasses.make_dataclass(group.__name__, fields, bases=(group,), frozen=True, namespace=own_help)

    groups = []
    for field in dataclasses.fields(kind):
        group = get_type_hints(kind)[field.name]
        if dataclasses.is_dataclass(group):
            shown = suppressed(group)  # type: ignore[arg-type]
            groups.append((field.name, shown, dataclasses.field(default_factory=shown)))
    return dataclasses.make_dataclass(kind.__name__, groups, bases=(kind,), frozen=True, namespace={"__doc__": kind.__doc__})


def _converted(options: Any, kind: type[AnyOptions]) -> AnyOptions:
    """Return the same options as a `kind`, group by group."""
    hints = get_type_hints(kind)
    values = {
        field.name: hints[field.name](**vars(value)) if dataclasses.is_dataclass(value) else value
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        for value in [getattr(options, field.name)]
    }
    return kind(**values)


def _check_types(file: OptionFile, hidden: Mapping[str, str]) -> None:
    """Raise InputError naming the first value of a file that its option cannot have, as a word for a number."""
    if not file.options or _fits(file.options, hidden):
        return
    for key, value in file.options.items():
        if not _fits({key: value}, hidden):
            raise InputError(f"{file.place(key)}: {key} must be {_wanted(key)}, got {value!r:.80}")


def _wanted(name: str) -> str:
    """Return what the value of an option must be, in words."""
    hint = OPTIONS[name].kind
    kinds = [kind for kind in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) if kind is not NoneType]
    if get_origin(kinds[0]) is Literal:
        return f"one of {', '.join(get_args(kinds[0]))}"
    return {int: "an integer", float: "a number"}.get(kinds[0], f"a value of --{name.replace('_', '-')}")


def _fits(options: Options, hidden: Iterable[str]) -> bool:
    shown = _without(Config, frozenset(hidden))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(shown, args=_as_flags(options), config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit:
        return False
    return True


def _options_of_run(out: Path) -> Options:
    file = out / "config.json"
    if not file.exists():
        what = "has no config.json" if out.exists() else "does not exist"
        raise InputError(f"--resume must be the folder of a run, got {out}, which {what}")
    try:
        check_regular(file, JSON_BYTES)
        options = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"--resume must be the folder of a run, got {out}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} must be JSON, got {error}; restore it, or use another --out") from error
    if not isinstance(options, dict):
        raise InputError(f"{file} must hold a JSON object, got {options!r:.80}")
    own = {"versions", "command", *OF_ONE_START}
    options = {key: value for key, value in options.items() if key not in own and value is not None}
    _check(lambda key: str(file), options)
    return options


def _check(place: Callable[[str], str], options: Options) -> None:
    """Raise InputError naming the first key that is no option, or a value of another type, with its place."""
    refuse(options, {})
    known = {key: value for key, value in Config().flat().items() if Note.NOT_IN_A_FILE not in OPTIONS[key].notes}
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{place(key)}: unknown key {key!r:.80}{key_hint(key, known)}")
        _check_text(key, value)
        if key == "dry_run" and isinstance(value, bool):  # the flag without a value, or no flag
            continue
        if isinstance(known[key], bool):
            if not isinstance(value, bool):
                raise InputError(f"{place(key)}: {key} must be true or false, got {value!r}")
        elif not all(isinstance(x, (int, float, str)) and not isinstance(x, bool) for x in _values(key, value)):
            raise InputError(f"{place(key)}: {key} must be a number or a string, got {value!r}")


def _as_flags(options: Options) -> list[str]:
    flags = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):  # --no-NAME overrides a file; a dry run is no switch, and off where it is not given
            flags += [f"--{name}"] if value else [f"--no-{name}"] if key != "dry_run" else []
        else:
            flags.append(f"--{name}={value}")
    return flags


def _check_text(key: str, value: Any) -> None:
    """Raise InputError on strings of JSON, TOML or Python that cannot be the value of a flag."""
    for text in (x for x in as_list(value) if isinstance(x, str)):
        try:
            is_text = b"\0" not in os.fsencode(text)
        except UnicodeEncodeError:  # half of a surrogate pair
            is_text = False
        # In a list it is a word of its own, which would be read as another option.
        if not is_text or (isinstance(value, list) and re.match(r"-[^\d.]", text)):
            raise InputError(f"{key} must not have a null byte or half a character, nor begin with a dash, got {text!r:.80}")


def _values(key: str, value: Any) -> list[Any]:
    """Return the values that a file gives an option; a list stands for several only where the option takes them."""
    return as_list(value) if key in SEVERAL else [value]

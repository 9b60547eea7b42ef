"""From flags, the TOML file of --config and the run of --resume to a configuration."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxrl_fast.algorithms.options import Option
from maxrl_fast.config.checks import TASK_IS_MISSING
from maxrl_fast.config.given import (
    ANY_OBJECTIVES,
    OPTIONS,
    OTHER_NAMES,
    Given,
    convert,
    hint,
    read_flags,
    read_run,
    read_toml,
    refuse_unknown,
)
from maxrl_fast.config.metadata import Note, inapplicable_options, names_with
from maxrl_fast.config.options import Config, options_with
from maxrl_fast.config.options_page import show_help, split_help
from maxrl_fast.config.resolve import absolute_function
from maxrl_fast.config.run_folder import checkpoints_of
from maxrl_fast.errors import InputError
from maxrl_fast.training.objectives.registry import objective_presets

AUTO = "auto"  # the value of --resume
FOLLOWING_OBJECTIVE, FOLLOWING_LOSS = (
    names_with(Config, Note.FOLLOWS_OBJECTIVE),
    names_with(Config, Note.FOLLOWS_LOSS),
)


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration that the run of --resume, the TOML file of --config and flags give,
    each overriding those before it. --help prints the options that this run uses, and exits.

    `--resume auto` becomes the folder of --out if there is a run in it; otherwise the run is new.

    Raises:
        InputError: on a file that cannot be read, an unknown option, a value of the wrong type, and
        an option that the run does
            not use.
    """
    words, asks_for_help = split_help(arguments)
    config = _parse(*read_flags(words, OPTIONS | ANY_OBJECTIVES))
    if asks_for_help:
        show_help(
            config,
            options_with(config.objective.objective),
            arguments,
            "python -m maxrl_fast.train",
        )
    return config


def parse_options(options: Mapping[str, Any]) -> Config:
    """Return the configuration of options by name, as `parse` does of their flags; None is an
    option that is not given.
    """
    return _parse(
        {
            str(name): Given(value, str(name))
            for name, value in options.items()
            if value is not None
        },
        [],
    )


def _parse(flags: Mapping[str, Given], words: Sequence[str]) -> Config:
    def early(name: str, *layers: Mapping[str, Given]) -> Any:
        found = next((layer[name] for layer in layers if name in layer), None)
        return None if found is None else convert(OPTIONS[name], found)

    path = early("config", flags)
    file = {} if path is None else read_toml(path)
    run = early("resume", flags)
    is_auto = run == Path(AUTO)
    if is_auto:
        run = _run_in(early("out", flags, file))
    # A run that ended before its first checkpoint restarts with this command's options.
    of_run = (
        {}
        if run is None or (is_auto and not checkpoints_of(run))
        else read_run(run, {**file, **flags})
    )
    objective, loss = early("objective", flags, file), early("loss", flags, file)
    if of_run and objective and absolute_function(objective) != early("objective", of_run):
        of_run = {
            name: x
            for name, x in of_run.items()
            if name in OPTIONS and name not in FOLLOWING_OBJECTIVE
        }
    if of_run and loss and loss != early("loss", of_run):
        of_run = {name: x for name, x in of_run.items() if name not in FOLLOWING_LOSS}
    given = {**of_run, **file, **flags}
    if "estimator_options" in given:
        raise InputError(
            "--estimator-options was removed; use --eps, --ddof and others, which --objective NAME "
            "--help lists"
        )
    name = early(
        "objective", given, {"objective": Given(Config().objective.objective, "objective")}
    )
    options = options_with(name)
    refuse_unknown(given, words, {**OPTIONS, **ANY_OBJECTIVES, **options})
    for key in [key for key in given if key not in options]:
        raise _inapplicable(key, given[key], f"is not used by objective {name}", options)
    values = {key: convert(options[key], x) for key, x in given.items()}
    values = {**objective_presets(name), **values}
    if "model" in values and "task" not in values:
        raise InputError(f"{given['model'].place}{given['model'].name} needs {TASK_IS_MISSING}")
    hidden = inapplicable_options(Config, Config().replace(**values).flat())
    for key in hidden:
        if key in file or key in flags:
            raise _inapplicable(key, given[key], hidden[key], options)
    # A run's config.json has the defaults of hidden options too.
    config = Config().replace(**{key: value for key, value in values.items() if key not in hidden})
    if not is_auto:
        return config
    return config.replace(resume=run, allow_changes=config.run.allow_changes and run is not None)


def _inapplicable(key: str, given: Given, reason: str, known: Mapping[str, Option]) -> InputError:
    """Return the error of an option that the run does not use."""
    # Where another library means something else by the name, as by beta, PACS's, the weight of the
    # divergence.
    meant = hint(key, known, given.name.startswith("--")) if key in OTHER_NAMES else ""
    return InputError(f"{given.place}{given.name} {reason}{meant}")


def source_location(sentence: str, arguments: Sequence[str]) -> str:
    """Return " (lr: FILE, line 3)" where a message refuses a value that the file of --config gives,
    or nothing.
    """
    try:
        flags = read_flags(arguments, OPTIONS | ANY_OBJECTIVES)[0]
        file = read_toml(Path(flags["config"].value)) if "config" in flags else {}
    except InputError:  # which is the message
        return ""
    found = [
        f"{key}: {x.place.removesuffix(': ')}"
        for key, x in file.items()
        if key not in flags and x.place not in sentence and _refuses(sentence, key, x.value)
    ]
    return f" ({'; '.join(found)})" if found else ""


def _refuses(sentence: str, key: str, value: Any) -> bool:
    """Return whether a message is about an option: it begins with the name, ends with it, or says
    the name and the value.
    """
    name = rf"(?:--)?(?:{re.escape(key)}|{re.escape(key.replace('_', '-'))})"
    if re.match(rf"{name} (?:must|needs|is|cannot)\b", sentence) or re.search(
        rf"does not support {name}\b", sentence
    ):
        return True
    is_named = re.search(rf"\b{name}\b", sentence)
    return bool(is_named and re.search(rf"got\b.*(?<!\w){re.escape(str(value))}(?!\w)", sentence))


def _run_in(out: Path | None) -> Path | None:
    """Return the folder of --out if there is a run in it."""
    if out is None:
        raise InputError("--resume auto needs --out DIR, the folder of the run")
    return out if (out / "config.json").exists() else None

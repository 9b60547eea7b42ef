"""From flags, the TOML file of --config and the run of --resume to a configuration."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxrl_fast.algorithms.options import Option
from maxrl_fast.config.aliases import OTHER_NAMES
from maxrl_fast.config.metadata import AnyGroups, Note, inapplicable_options, names_with, options_of
from maxrl_fast.config.options import Config, objective_table, options_with
from maxrl_fast.config.options_page import show_help, split_help
from maxrl_fast.config.resolve import absolute_function
from maxrl_fast.config.run_folder import checkpoints_of
from maxrl_fast.config.sources import (
    RawOption,
    convert,
    hint,
    read_flags,
    read_run,
    read_toml,
    refuse_unknown,
)
from maxrl_fast.errors import InputError
from maxrl_fast.training.objectives.registry import objective_presets

AUTO = Path("auto")  # the value of --resume
TASK_IS_MISSING = (
    "requires --task: gsm8k, math, dataset with --data FILE, maze or another (--help lists them)"
)


def known_options() -> dict[str, Option]:
    """Return all options by name, those of each built-in objective included."""
    own = {name: next(iter(rows.values())) for name, rows in objective_table().items()}
    return options_of(Config) | own


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration of the run of --resume, the TOML file of --config and flags, each
    overriding those before it. --help prints the options that this run uses, and exits.
    `--resume auto` becomes the folder of --out if there is a run in it; otherwise the run is new.
    """
    words, asks_for_help = split_help(arguments)
    config = _parse(*read_flags(words, known_options()))
    if asks_for_help:
        show_help(
            config, options_with(config.objective.objective), prog="python -m maxrl_fast.train"
        )
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
        raise InputError(f"{given['model'].place}{given['model'].name} {TASK_IS_MISSING}")
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
    """Return the error of an option that the run does not use."""
    # Where another library means something else by the name, as by beta, PACS's, the weight of the
    # divergence.
    meant = hint(key, known, given.name.startswith("--")) if key in OTHER_NAMES else ""
    return InputError(f"{given.place}{given.name} {reason}{meant}")


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
    places = [f"{name}: {file[name].place.removesuffix(': ')}" for name in names]
    return f" ({'; '.join(places)})" if places else ""

"""From flags, a TOML file, the config.json of a run or Python to a configuration."""

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxrl_fast.algorithms.options import REQUIRED, Option, options_of
from maxrl_fast.config.help_page import show_help, split_help
from maxrl_fast.config.names import OF_ONE_START
from maxrl_fast.config.options import Config, Options, Run
from maxrl_fast.config.parts import SECTIONS, default_of, options_of_part, owners_by_option
from maxrl_fast.config.rules import check, unused_options
from maxrl_fast.errors import InputError, printable, warn
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.files import JSON_BYTES, RunFolder, check_regular
from maxrl_fast.runtime.loading import is_file
from maxrl_fast.training.objectives.registry import objective_presets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python

AnyOptions = TypeVar("AnyOptions", bound=Options)
Known = dict[str, dict[str, Option]]  # options by name, of each group and, as --loss, each part
TASK_IS_MISSING = (
    "requires --task: gsm8k, math, dataset with --data FILE, maze or another (--help lists them)"
)
# what people who come from TRL, verl and OpenRLHF write most; docs/options.md has more
_ELSEWHERE = {
    "rollouts": "num_generations n n_samples_per_prompt",
    "samples": "rollouts eval_samples",
    "prompts": "per_device_train_batch_size train_batch_size rollout_batch_size",
    "max_new_tokens": "max_completion_length max_response_length",
    "max_prompt_tokens": "max_prompt_length",
    "lr": "learning_rate",
    "steps": "max_steps",
    "steps (n prompts are an epoch after n / --prompts)": "epochs total_epochs num_train_epochs",
    "clip_grad": "max_grad_norm",
    "kl_coef": "beta kl_loss_coef",
    "objective": "adv_estimator",
    "reward": "reward_funcs",
    "out": "output_dir",
    "model": "model_name_or_path pretrain",
    "hub": "dataset_name",
    "rollout vllm": "use_vllm",
    "dtype bfloat16": "bf16",
    "truncated mask": "mask_truncated_completions",
    "checkpoint_activations": "gradient_checkpointing",
    "sharding under torchrun --nproc_per_node N": "nproc_per_node num_processes n_gpus_per_node",
}
ELSEWHERE = {name: option for option, names in _ELSEWHERE.items() for name in names.split()}
# what follows from the objective or the loss
_FOLLOWS = {
    "objective": ("loss", "aggregation", "correction", "importance_cap"),
    "loss": ("aggregation",),
}


class Given(NamedTuple):
    value: Any  # of a flag a list of words
    name: str  # as the user writes it: "--lr" or "lr"
    place: str = ""  # "FILE, line N: " or nothing

    def read(self, option: Option) -> Any:
        return option.convert(self.value, f"{self.place}{self.name}")


def parse(arguments: Sequence[str]) -> Config:
    """Return the checked configuration of the run of --resume, the TOML file of --config and flags,
    each overriding those before it. --help prints the options that this run uses, and exits."""
    words, asks_for_help = split_help(arguments)
    return _parse(read_flags(words), asks_for_help)


def parse_options(options: Mapping[str, Any]) -> Config:
    """As `parse`, of options by name; None: not given."""
    return _parse({str(key): Given(x, str(key)) for key, x in options.items() if x is not None})


def _parse(given: dict[str, Given], asks_for_help: bool = False) -> Config:
    def path(name: str) -> Path | None:
        return given[name].read(options_of(Run)[name]) if name in given else None

    if (file := path("config")) is not None:
        given = read_toml(file) | given
    folder = path("resume")
    if folder == Path("auto"):
        if (folder := path("out")) is None:
            raise InputError("--resume auto needs --out DIR, the folder of the run")
        is_run = (folder / "config.json").exists()
        given["resume"] = Given(folder if is_run else None, "resume")
        if not is_run:
            given.pop("allow_changes", None)
        # before its first checkpoint it restarts with this command's options
        folder = folder if is_run and RunFolder(folder).checkpoints else None
    of_run = {} if folder is None else read_run(folder)
    if "model" in given and not {"task"} & {*given, *of_run}:
        raise InputError(f"{given['model'].place}{given['model'].name} {TASK_IS_MISSING}")
    places = {name: x.place.removesuffix(": ") for name, x in given.items() if x.place}
    with located(places):
        config, known = build(Config, given, of_run)
        if asks_for_help:
            show_help(config, known, prog="python -m maxrl_fast.train")
        check(config)
    return replace(config, places=places)


def read_flags(words: Sequence[str]) -> dict[str, Given]:
    """Return the words of each flag, by name of the option; the last of equal flags wins."""
    given: dict[str, Given] = {}
    for word in words:
        flag, equals, text = word.partition("=")
        if word.startswith("--"):
            name = flag[2:].replace("-", "_")
            given.pop(name, None)
            given[name] = Given([text] if equals else [], flag)
        elif given:
            given[name].value.append(word)
        else:
            meant = hint(flag.lstrip("-+"), _options_of_all_parts())
            raise InputError(f"unknown option {flag:.80}: options begin with two dashes{meant}")
    return given


def names_of_lists() -> set[str]:
    """Return the options that take several values themselves, such as reward and data."""
    groups = [*map(options_of, Config.groups().values()), options_of_part("task", "dataset")]
    return {name for own in groups for name, x in own.items() if x.takes_several}


def read_toml(path: Path) -> dict[str, Given]:
    try:
        check_regular(path, JSON_BYTES)
        text = path.read_text()
        options = tomllib.loads(text)
    # of TOML, of UTF-8, of a number of too many digits
    except (OSError, ValueError, RecursionError) as error:
        why = f"{error}; write lines KEY = VALUE" if path.suffix != ".toml" else error
        raise InputError(f"--config must be a readable TOML file, got {path}: {why}") from error
    given, lines = {}, dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[*\s*[\"']?([\w-]+)[\"']?\s*[].=]", line):
            lines.setdefault(found[1], number)  # a later one may be within a string
    for key, value in options.items():
        place = f"{path}, line {lines[key]}" if key in lines else str(path)
        if key in ("config", "resume"):
            raise InputError(f"{place}: {key} is only a flag")
        given[key] = Given(value, key, f"{place}: ")
    return given


def read_run(out: Path) -> dict[str, Given]:
    """Return the options of a run, or of what a session has saved. Nothing is imported; a folder of
    another user prints a warning."""
    file = out / "config.json"
    if not file.exists():
        why = "has no config.json" if out.exists() else "does not exist"
        raise InputError(f"--resume must be the folder of a run, got {out}, which {why}")
    options = RunFolder(out).options
    if others := {path.stat().st_uid for path in (out, file)} - {os.getuid()}:
        whose = f"{printable(out)} belongs to uid {' and '.join(map(str, sorted(others)))}"
        warn(f"{whose}, and the code that its config.json names runs with your rights")
    return {x: Given(y, x, f"{file}: ") for x, y in options.items() if x not in OF_ONE_START}


def absolute_function(name: str) -> str:
    """Return the name of a function by the absolute path of its file, if it has one."""
    if name.startswith(CLASSIFIER):
        return f"{CLASSIFIER}{Path(name.removeprefix(CLASSIFIER)).absolute()}"
    file, _, function = name.rpartition(":")
    return f"{Path(file).absolute()}:{function}" if is_file(name) else name


def build(
    command: type[AnyOptions], by_user: Mapping[str, Given], of_run: Mapping[str, Given]
) -> tuple[AnyOptions, Known]:
    """Return the configuration, and its options by group and part. Where a user chooses another
    part, the run's options of that part go, and those that follow from it."""
    known: Known = {name: options_of(group) for name, group in command.groups().items()}
    options = {name: option for own in known.values() for name, option in own.items()}
    given, chosen = {**of_run, **by_user}, dict[str, str]()

    def value(name: str) -> Any:
        return given[name].read(options[name]) if name in given else None

    for section in (x for x in SECTIONS if x in options):
        if not (name := value(section) or options[section].default):
            name = default_of(section, chosen, value("ahead") or 0, "importance_cap" in given)
        before = of_run[section].value if section in of_run else name
        if name not in (before, absolute_function(before)):
            gone = {*options_of_part(section, before), *_FOLLOWS.get(section, ())}
            given = {key: x for key, x in given.items() if key in by_user or key not in gone}
        chosen[section] = name
        known[f"--{section}"] = options_of_part(section, name)
        options |= known[f"--{section}"]
    values = _values(given, options, chosen)
    unused = unused_options(values)
    for key, said in unused.items():
        if said and key in by_user and by_user[key].value is not None:
            raise _refused(by_user[key], key, said)
        values[key] = options[key].default
    groups = {
        name: group(**{key: values[key] for key in known[name]})
        for name, group in command.groups().items()
    }
    parts = {section: {key: values[key] for key in known[f"--{section}"]} for section in chosen}
    own = {flag: x.own_name for flag, x in options.items() if x.own_name}
    return command(**groups, parts=parts, unused=frozenset(unused), own_names=own), known


def _values(
    given: Mapping[str, Given], options: Mapping[str, Option], chosen: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options as given, else as the objective presets them, or their defaults."""
    values = {name: option.default for name, option in options.items()}
    values |= objective_presets(chosen.get("objective", ""))
    for name, x in given.items():
        positive = options.get(name.removeprefix("no_"))
        if name in options:
            value = x.read(options[name])
            values[name] = values[name] if value is None else value
        elif positive and positive.kind is bool:
            values[positive.name] = not x.read(positive)
        else:
            raise _unknown(name, x, options, chosen)
    for name, option in options.items():
        if values[name] is REQUIRED:
            owner = next(f"{x} {y}" for x, y in chosen.items() if name in options_of_part(x, y))
            raise InputError(f"{owner} needs {option.flag}, {option.wanted}", name)
    return {**values, **chosen}


def _unknown(
    name: str, x: Given, options: Mapping[str, Option], chosen: Mapping[str, str]
) -> InputError:
    is_flag, unknown = x.name.startswith("--"), f"{x.place}unknown option {x.name:.80}"
    for flag, option in options.items():
        if option.own_name == name:  # another part has the name
            return InputError(unknown + hint(flag, options, is_flag))
    for section, part in chosen.items():
        if owners := owners_by_option(section).get(name):
            others = ", ".join([*owners[:4], *["..."] * (len(owners) > 4)])
            return _refused(x, name, f"is not used by {section} {part}, but by {others}")
    known = _options_of_all_parts() | options.keys() if "objective" in chosen else options
    return InputError(
        unknown + (hint(name, known, is_flag) or "; --help lists the options" * is_flag)
    )


def _options_of_all_parts() -> set[str]:
    return Config.names().union(*map(owners_by_option, SECTIONS))


def _refused(x: Given, key: str, said: str) -> InputError:
    # where another library means something else by the name, as by beta
    meant = f"; did you mean {_flag(ELSEWHERE[key])}?" if key in ELSEWHERE else ""
    return InputError(f"{x.place}{x.name} {said}{meant}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def hint(name: str, known: Collection[str], is_flag: bool = True) -> str:
    """Return "; did you mean --...?", perhaps with a value, or nothing. The name may have prefixes
    of other libraries: trainer.total_epochs."""
    words = name.lower().replace("-", "_").split(".")
    tried = "_".join(words), words[-1], words[-1].removeprefix("no_")
    meant = [x if x in known else ELSEWHERE.get(x, x) for x in tried]
    found = [x for x in meant if x.partition(" ")[0] in known]
    # below this cutoff are words that mean others
    found += difflib.get_close_matches("_".join(words), list(known), n=1, cutoff=0.73)
    return f"; did you mean {_flag(found[0]) if is_flag else found[0]}?" if found else ""


@contextlib.contextmanager
def located(places: Mapping[str, str]) -> Iterator[None]:
    """Add "(lr: FILE, line 3)" to an error about values of the file of --config."""
    try:
        yield
    except InputError as error:
        said = "; ".join(f"{name}: {places[name]}" for name in error.options if name in places)
        if not said:
            raise
        raise InputError(f"{error} ({said})") from error

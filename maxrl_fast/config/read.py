"""From flags, a TOML file, the config.json of a run or Python to a configuration, and --help."""

import contextlib
import difflib
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maxrl_fast.algorithms.method import Method
from maxrl_fast.algorithms.options import REQUIRED, Option, absolute_path, options_of
from maxrl_fast.config.changes import OF_ONE_START
from maxrl_fast.config.options import Config, Options
from maxrl_fast.config.rules import (
    SECTIONS,
    check,
    options_of_part,
    owners_by_option,
    part,
    unused_options,
)
from maxrl_fast.errors import InputError, printable, warn
from maxrl_fast.runtime.files import JSON_BYTES, RunFolder, check_regular
from maxrl_fast.training.objectives.registry import METHODS, objective_class

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python

AnyOptions = TypeVar("AnyOptions", bound=Options)
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
_FOLLOWS = {"loss": {"aggregation"}}
_FOLLOWS["objective"] = {"loss", "aggregation", "correction", "importance_cap"}
WIDEST, FLAG_WIDTH = 110, 30  # of the page of --help and its column of flags
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", absolute_path: "PATH", dict: "JSON"}


class Given(NamedTuple):
    value: Any  # of a flag a list of words
    name: str  # as the user writes it: "--lr" or "lr"
    place: str = ""  # "FILE, line N: " or nothing

    def read(self, option: Option) -> Any:
        return option.convert(self.value, f"{self.place}{self.name}")

    def refused(self, said: str) -> InputError:
        name = self.name.removeprefix("--").replace("-", "_")
        # where another library means something else by the name, as by beta
        meant = f"; did you mean {_flag(ELSEWHERE[name])}?" if name in ELSEWHERE else ""
        return InputError(f"{self.place}{self.name} {said}{meant}")


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
        return given[name].read(Config.options()[name]) if name in given else None

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
        raise given["model"].refused(TASK_IS_MISSING)
    places = {name: x.place.removesuffix(": ") for name, x in given.items() if x.place}
    with located(places):
        config = build(Config, given, of_run)
        if asks_for_help:
            show_help(config, "train")
        check(config)
    return replace(config, places=places)


def read_flags(words: Sequence[str]) -> dict[str, Given]:
    """Return the words of each flag by the option's name; the last of equal flags wins."""
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
    """The options that take several values themselves, such as reward and data."""
    options = Config.options() | options_of_part("task", "dataset")
    return {name for name, x in options.items() if x.takes_several}


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


def build(
    command: type[AnyOptions], by_user: Mapping[str, Given], of_run: Mapping[str, Given]
) -> AnyOptions:
    """Return the configuration. Where a user chooses another part, the run's options of that part
    go, and those that follow from it. What is not given is as the objective presets it, or has its
    default."""
    options, given, chosen = command.options(), {**of_run, **by_user}, dict[str, str]()

    def value(name: str) -> Any:
        return given[name].read(options[name]) if name in given else None

    flags = dict[str, dict[str, str]]()
    for section in (x for x in SECTIONS if x in options):
        if not (name := value(section) or options[section].default):
            objective = objective_class(chosen["objective"])
            # samples of older weights, and the loss has no ratio
            is_stale = value("ahead") and chosen.get("loss") == "reinforce"
            is_other = chosen["rollout"] != "native" or is_stale
            has_weights = "importance_cap" in given or (is_other and not objective.owns_loss)
            name = objective.loss if section == "loss" else "tis" if has_weights else "none"
        before = of_run[section].read(options[section]) if section in of_run else name
        if name != before:
            gone = {*options_of_part(section, before), *_FOLLOWS.get(section, ())}
            given = {key: x for key, x in given.items() if key in by_user or key not in gone}
        chosen[section], own = name, options_of_part(section, name)
        flags[section] = {x.own_name: flag for flag, x in own.items()}
        options |= own
    values = {name: option.default for name, option in options.items()}
    values |= getattr(METHODS.get(chosen.get("objective", "")), "presets", {})
    for name, x in given.items():
        option = options.get(name) or options.get(name.removeprefix("no_"))
        if option is None or (option.name != name and option.kind is not bool):
            raise _unknown(name, x, options, chosen)
        if (found := x.read(option)) is not None:
            values[option.name] = found if option.name == name else not found
    for section, name in chosen.items():
        for key in flags[section].values():
            if values[key] is REQUIRED:
                needed = f"{options[key].flag}, {options[key].wanted}"
                raise InputError(f"{section} {name} needs {needed}")
    values |= chosen
    unused = unused_options(values)
    for key, said in unused.items():
        if said and key in by_user and by_user[key].value is not None:
            raise by_user[key].refused(said)
        values[key] = options[key].default
    return command.of(values, flags=flags, unused=frozenset(unused))


def _unknown(
    name: str, x: Given, options: Mapping[str, Option], chosen: Mapping[str, str]
) -> InputError:
    # the flag is longer where another part has the name
    flag = next((key for key, option in options.items() if option.own_name == name), name)
    for section, own in chosen.items() if flag == name else ():
        if owners := owners_by_option(section).get(name):
            others = ", ".join([*owners[:4], *["..."] * (len(owners) > 4)])
            return x.refused(f"is not used by {section} {own}, but by {others}")
    is_flag = x.name.startswith("--")
    known = _options_of_all_parts() | options.keys() if "objective" in chosen else options
    meant = hint(flag, known, is_flag) or "; --help lists the options" * is_flag
    return InputError(f"{x.place}unknown option {x.name:.80}{meant}")


def _options_of_all_parts() -> set[str]:
    return {*Config.options()}.union(*map(owners_by_option, SECTIONS))


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
    """Add "(lr: FILE, line 3)" to an error that names values of the file of --config."""
    try:
        yield
    except InputError as error:
        text = str(error)
        words = re.findall(r"(?<![\w/.-])(?:--)?(\w[\w-]*)(?![\w/.-])", text)
        named = {word.replace("-", "_") for word in words} & places.keys()
        said = [f"{name}: {place}" for name, place in places.items() if name in named]
        if not said or any(place in text for place in places.values()):
            raise
        raise InputError(f"{text} ({'; '.join(said)})") from error


def show_help(config: Options, command: str) -> NoReturn:
    groups = [
        (f"{name.replace('_', ' ')} options", group, options_of(group))
        for name, group in config.groups().items()
    ]
    for section in config.flags:
        name = config.values[section]
        own = part(section, name), options_of_part(section, name)
        groups.append((f"options of --{section} {name}", *own))
    pages = []
    for title, found, options in groups:
        purpose = found.formula if isinstance(found, Method) else inspect.getdoc(found)
        rows = [help_row(x) for flag, x in options.items() if flag not in config.unused]
        pages.append((title, purpose or "", rows))
    print_help(f"python -m maxrl_fast.{command}", inspect.getdoc(type(config)) or "", pages)


def help_row(option: Option) -> tuple[str, str]:
    default = f" (default: {option.shown_default})" if option.shown_default else ""
    takes = f", --no-{option.flag[2:]}" if option.kind is bool else f" {metavar(option)}"
    return option.flag + takes, option.help + default


def print_help(
    prog: str, description: str, groups: Sequence[tuple[str, str, Sequence[tuple[str, str]]]]
) -> NoReturn:
    """groups: title, purpose, and rows of a flag and its help."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDEST)
    paragraphs = re.sub(r"(?<=\S)\n(?=\S)", " ", description)
    console.print(Text(f"usage: {prog} [OPTIONS]\n\n{paragraphs}\n"))
    for title, purpose, rows in groups:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=FLAG_WIDTH, overflow="fold", style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        content = Group(*[Text(purpose, "italic")] * bool(purpose), table)
        if rows:
            console.print(Panel(content, title=title, title_align="left", border_style="dim"))
    sys.exit(0)


def split_help(arguments: Sequence[str]) -> tuple[list[str], bool]:
    words = [word for word in arguments if word not in ("-h", "--help")]
    return words, len(words) < len(arguments)


def metavar(option: Option) -> str:
    if option.choices:
        return "{" + ", ".join(option.choices) + "}"
    return _METAVARS.get(option.kind, "STR") + " ..." * option.takes_several

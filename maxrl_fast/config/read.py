"""From where options are given (flags, a TOML file, the config.json of a run, Python) to a
configuration."""

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxrl_fast.algorithms.options import REQUIRED, Option, options_of
from maxrl_fast.config.changes import checkpoints_of
from maxrl_fast.config.help_page import show_help, split_help
from maxrl_fast.config.names import OF_ONE_START
from maxrl_fast.config.options import Config, Options, as_list, fields_of
from maxrl_fast.config.parts import SECTIONS, default_of, options_of_part, owners_by_option
from maxrl_fast.config.rules import check, unused_options
from maxrl_fast.errors import InputError
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.files import JSON_BYTES, check_regular, printable, read_json
from maxrl_fast.runtime.loading import is_code, is_file
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
NAMES_CODE = (
    *("objective", "loss", "task", "rollout", "environment", "teacher_prompt", "schedule"),
    *("reward", "log_to"),
)
# What people who come from TRL, verl and OpenRLHF write most; docs/options.md has more.
_ELSEWHERE = {
    "rollouts": "num_generations n n_samples_per_prompt group_size",
    "samples": "rollouts eval_samples",
    "eval_prompts": "prompts",
    "prompts": "per_device_train_batch_size train_batch_size rollout_batch_size",
    "max_new_tokens": "max_completion_length max_response_length",
    "max_prompt_tokens": "max_prompt_length",
    "lr": "learning_rate",
    "steps": "max_steps",
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
}
ELSEWHERE = {name: option for option, names in _ELSEWHERE.items() for name in names.split()}
_EPOCHS = "--steps sets the length: an epoch of n prompts has n / --prompts steps"
SENTENCES = {
    **dict.fromkeys(("epochs", "num_epochs", "total_epochs", "num_train_epochs"), _EPOCHS),
    "push_to_hub": "`hf upload ORG/NAME RUN/latest` uploads a checkpoint",
    "callbacks": "maxrl_fast.Session is for a loop of your own",
    "wandb_project": "--log-to wandb logs to the project in the environment's WANDB_PROJECT",
}
PROCESSES = re.compile(
    r"\w*gpus(_per_node)?|\w*nodes|nproc_per_node|num_processes|world_size|devices"
)


class Given(NamedTuple):
    value: Any
    name: str  # as the user writes it: "--lr" or "lr"
    place: str = ""  # "FILE, line N: " or nothing


def parse(arguments: Sequence[str]) -> Config:
    """Return the checked configuration of the run of --resume, the TOML file of --config and flags,
    each overriding those before it. --help prints the options that this run uses, and exits.
    `--resume auto` becomes the folder of --out if there is a run in it; otherwise the run is new.
    """
    words, asks_for_help = split_help(arguments)
    config, known = _parse(read_flags(words))
    if asks_for_help:
        show_help(config, known, prog="python -m maxrl_fast.train")
    with located(config):
        check(config)
    return config


def parse_options(options: Mapping[str, Any]) -> Config:
    """Return the configuration of options by name, as `parse` does of their flags; None is an
    option that is not given.
    """
    config, _ = _parse(
        {str(key): Given(x, str(key)) for key, x in options.items() if x is not None}
    )
    check(config)
    return config


def _parse(flags: dict[str, Given]) -> tuple[Config, Known]:
    given = dict(flags)
    if path := _text(flags, "config"):
        given = {**read_toml(Path(path)), **flags}
    folder = _text(given, "resume")
    is_auto, of_run = folder == "auto", dict[str, Given]()
    if is_auto:
        if (out := _text(given, "out")) is None:
            raise InputError("--resume auto needs --out DIR, the folder of the run")
        folder = out if (Path(out) / "config.json").exists() else None
        given.pop("resume")
        if folder:
            given["resume"] = Given(folder, "--resume")
        else:
            given.pop("allow_changes", None)
    # A run that ended before its first checkpoint restarts with this command's options.
    if folder is not None and not (is_auto and not checkpoints_of(Path(folder))):
        of_run = read_run(Path(folder), given)
    if "model" in given and not {"task"} & {*given, *of_run}:
        raise InputError(f"{given['model'].place}{given['model'].name} {TASK_IS_MISSING}")
    return build(Config, given, of_run)


def _text(given: Mapping[str, Given], name: str) -> str | None:
    option = options_of(Config.groups()["run"])[name]
    return str(convert(option, given[name])) if name in given else None


def read_flags(words: Sequence[str]) -> dict[str, Given]:
    """Return what flags give by name of the option: True without a value, a list of several. The
    last of equal flags wins."""
    given: dict[str, Given] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, text = word.partition("=")
            name = flag[2:].replace("-", "_")
            given.pop(name, None)
            given[name] = Given([text] if equals else [], flag)
        elif not flag:
            raise _no_flag(word)
        else:
            given[name].value.append(word)
    return given


def _no_flag(word: str) -> InputError:
    name = word.partition("=")[0]
    meant = hint(name.lstrip("-+"), {*fields_of(Config), *_of_all_parts()})
    return InputError(f"unknown option {name:.80}: options begin with two dashes{meant}")


def _of_flag(option: Option, x: Given) -> Given:
    """Return the one value of a flag that was read as words."""
    if option.name == "dry_run" and isinstance(x.value, bool):  # of Python or TOML
        return x._replace(value="" if x.value else None)
    if not (x.name.startswith("--") and isinstance(x.value, list)):
        return x
    words = x.value
    if option.kind is bool:
        if words:
            raise InputError(f"{x.name} must be given without a value, got {words[0]!r:.80}")
        return x._replace(value=not x.name.startswith("--no-"))
    if option.takes_several:
        return x
    if option.name == "dry_run" and not words:
        return x._replace(value="")
    if not words:
        raise InputError(f"{x.name} needs a value")
    if words[1:]:
        raise _no_flag(words[1])
    return x._replace(value=words[0])


def read_toml(path: Path) -> dict[str, Given]:
    """Return the options in a TOML file by name; tables are refused."""
    try:
        check_regular(path, JSON_BYTES)
        text = path.read_text()
        options = tomllib.loads(text)
    # of TOML, of UTF-8, of a number of too many digits
    except (OSError, ValueError, RecursionError) as error:
        why = f"{error}; write lines KEY = VALUE" if path.suffix != ".toml" else error
        raise InputError(f"--config must be a readable TOML file, got {path}: {why}") from error
    given, lines = {}, _lines(text)
    for key, value in options.items():
        place = f"{path}, line {lines[key]}" if key in lines else str(path)
        if any(isinstance(item, dict) for item in (value, *as_list(value))):
            raise InputError(
                f"{place}: options must stand at the top of the file, without tables, got the "
                f"table [{key:.80}]; write its keys there, and a JSON object as a string"
            )
        if key in ("config", "resume"):
            raise InputError(f"{place}: {key} is only a flag")
        given[key] = Given(value, key, f"{place}: ")
    return given


def _lines(text: str) -> dict[str, int]:
    """Return the first line that begins with each key; a line within a string may be wrong."""
    found: dict[str, int] = {}
    for i, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[*\s*[\"']?([\w-]+)[\"']?\s*[].=]", line):
            found.setdefault(match[1], i)
    return found


def read_run(out: Path, overriding: Mapping[str, Given]) -> dict[str, Given]:
    """Return the options in the config.json of a run, or of what a session has saved, that have a
    value, without those that say how it was started.

    A folder of another user prints a warning with the code that it names. Nothing is imported here.
    """
    file = out / "config.json"
    if not file.exists():
        why = "has no config.json" if out.exists() else "does not exist"
        raise InputError(f"--resume must be the folder of a run, got {out}, which {why}")
    options: Any = read_json(file)
    saved = out / "progress.json"
    if saved.exists():  # then config.json is the policy's
        options = read_json(saved).get("options")
    if not isinstance(options, dict):
        raise InputError(f"{saved} must hold the options of a run, got {options!r:.80}; restore it")
    given = {
        key: Given(value, key, f"{file}: ")
        for key, value in options.items()
        if key not in ("versions", "command", *OF_ONE_START) and value is not None
    }
    owners = sorted({path.stat().st_uid for path in (out, file)} - {os.getuid()})
    if owners:
        code = [
            f"{name} {printable(value)}"
            for name, x in {**given, **overriding}.items()
            for value in as_list(x.value)
            if name in NAMES_CODE and (name in ("reward", "log_to") or is_code(str(value)))
        ]
        whose = f"{printable(out)} belongs to uid {' and '.join(map(str, owners))}"
        runs = f"what its options name runs with your rights: {', '.join(code) or 'no code'}"
        print(f"warning: {whose}, and {runs}", file=sys.stderr, flush=True)
    return given


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
    kind: Any = command
    groups, taken = command.groups(), fields_of(kind)
    known: Known = {name: options_of(group) for name, group in groups.items()}
    base = {name: option for own in known.values() for name, option in own.items()}
    given, chosen = {**of_run, **by_user}, dict[str, str]()
    sections = [section for section in SECTIONS if section in base]
    for section in sections:
        name = convert(base[section], given[section]) if section in given else None
        # on which the choice of a part depends
        early = {name: _early(base, given, name) for name in ("importance_cap", "ahead")}
        name = name or base[section].default or default_of(section, chosen, early)
        before = of_run[section].value if section in of_run else None
        if before and before not in (name, absolute_function(name)):
            gone = {*options_of_part(section, before, taken), *_FOLLOWS.get(section, ())}
            given = {key: x for key, x in given.items() if key in by_user or key not in gone}
        chosen[section] = name
        known[f"--{section}"] = options_of_part(section, name, taken)
    cap = given.get("importance_cap")
    is_none = chosen.get("correction") == "none"
    if cap and is_none and convert(Option("importance_cap", float, None), cap) == 0:
        given.pop("importance_cap")
    presets = objective_presets(chosen["objective"]) if "objective" in chosen else {}
    values = _converted(given, known, chosen, dict(presets))
    config = command(
        **{
            group: kind(**{x.name: values[x.name] for x in fields(kind) if x.name in values})
            for group, kind in groups.items()
        },
        parts={
            section: {key: values.get(key, x.default) for key, x in known[f"--{section}"].items()}
            for section in sections
        },
        places={key: x.place.removesuffix(": ") for key, x in by_user.items() if x.place},
    )
    config = replace(config, chosen=replace(config.chosen, **chosen))
    unused = unused_options(config.values())
    for key, said in unused.items():
        if said and key in by_user and by_user[key].value is not None:
            raise _refused(by_user[key], key, said)
    defaults = {name: option.default for own in known.values() for name, option in own.items()}
    config = config.replace(**{key: defaults[key] for key in unused})
    return replace(config, unused=frozenset(unused)), known


# options whose defaults follow from the objective or the loss
_FOLLOWS = {
    "objective": ("loss", "aggregation", "correction", "importance_cap"),
    "loss": ("aggregation",),
}


def _early(base: Mapping[str, Option], given: Mapping[str, Given], name: str) -> Any:
    """Return an option on which the choice of a part depends; 0 for one that cannot be read yet."""
    option = base.get(name, Option(name, float, None))
    with contextlib.suppress(InputError):
        return convert(option, given[name]) if name in given else None
    return 0


def convert(option: Option, x: Given) -> Any:
    """Return the value of an option as it is given."""
    x = _of_flag(option, x)
    try:
        return option.convert(x.value, f"{x.place}{x.name}")
    except InputError as error:
        if not error.options or not x.place:
            raise
        raise InputError(f"{error} ({option.name}: {x.place.removesuffix(': ')})") from error


def _converted(
    given: Mapping[str, Given], known: Known, chosen: Mapping[str, str], presets: dict[str, Any]
) -> dict[str, Any]:
    options = {name: option for own in known.values() for name, option in own.items()}
    values = dict(presets)
    for name, x in given.items():
        key = name
        if key not in options and name.startswith("no_"):
            key = name.removeprefix("no_")
        option = options.get(key)
        if option is None or (key != name and option.kind is not bool):
            raise _unknown(name, x, options, chosen)
        value = convert(option, x)
        if value is not None:
            values[key] = value
    for section, own in known.items():
        for option in own.values():
            if option.default is REQUIRED and option.name not in values:
                owner = f"{section[2:]} {chosen[section[2:]]}"
                raise InputError(f"{owner} needs {option.flag}, {option.wanted}", option.name)
    return values


def _unknown(
    name: str, x: Given, options: Mapping[str, Option], chosen: Mapping[str, str]
) -> InputError:
    is_flag, taken = x.name.startswith("--"), fields_of(Config)
    for part in chosen.values():  # a name that another part has
        if (flag := f"{part.rpartition(':')[2]}_{name}") in options:
            return InputError(f"{x.place}unknown option {x.name:.80}{hint(flag, options, is_flag)}")
    for section in chosen:
        if owners := owners_by_option(section, taken).get(name):
            more = ", ..." * (len(owners) > 4)
            said = f"is not used by {section} {chosen[section]}"
            said += f", but by {', '.join(owners[:4])}{more}"
            return _refused(x, name, said)
    known = {*options, *_of_all_parts()} if "objective" in chosen else options
    meant = hint(name, known, is_flag) or "; --help lists the options" * is_flag
    return InputError(f"{x.place}unknown option {x.name:.80}{meant}")


def _of_all_parts() -> Iterator[str]:
    return (name for section in SECTIONS for name in owners_by_option(section, fields_of(Config)))


def _refused(x: Given, key: str, said: str) -> InputError:
    # where another library means something else by the name, as by beta
    meant = f"; did you mean --{ELSEWHERE[key].replace('_', '-')}?" if key in ELSEWHERE else ""
    return InputError(f"{x.place}{x.name} {said}{meant}")


def hint(name: str, known: Collection[str], is_flag: bool = True) -> str:
    """Return "; did you mean --...?" with the option among `known`, perhaps with a value, that is
    probably meant by a flag or key of this name, or nothing. The name may have the prefixes that
    other libraries give it (trainer.total_epochs).
    """
    words = name.lower().replace("-", "_").split(".")
    if "sharding" in known and PROCESSES.fullmatch(words[-1]):  # not in an evaluation
        return "; torchrun --nproc-per-node N starts a process for each of N GPUs"
    if (said := SENTENCES.get(words[-1])) and "seed" in known:
        return f"; {said}"
    tried = "_".join(words), words[-1], words[-1].removeprefix("no_")
    meant = [x if x in known else ELSEWHERE.get(x, x) for x in tried]
    found = [x for x in meant if x.partition(" ")[0] in known]
    # below this cutoff are words that mean others
    found += difflib.get_close_matches("_".join(words), list(known), n=1, cutoff=0.73)
    if not found:
        return ""
    return f"; did you mean {'--' + found[0].replace('_', '-') if is_flag else found[0]}?"


@contextlib.contextmanager
def located(config: Options) -> Iterator[None]:
    """Add "(lr: FILE, line 3)" to an error about values that the file of --config gives."""
    try:
        yield
    except InputError as error:
        names = [name for name in error.options if name in config.places]
        if not names:
            raise
        places = "; ".join(f"{name}: {config.places[name]}" for name in names)
        raise InputError(f"{error} ({places})") from error

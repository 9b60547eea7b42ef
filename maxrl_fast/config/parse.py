"""From flags and the TOML file to the resolved configuration."""

import argparse
import difflib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

from maxrl_fast.config.options import Config
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError
from maxrl_fast.files.untrusted import JSON_BYTES, check_regular
from maxrl_fast.hardware import resolve_device, resolve_dtype
from maxrl_fast.objectives import OBJECTIVES
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import is_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python


# Of options that differ when a run is resumed: those that say how it was started,
OF_ONE_START = ("out", "config", "resume", "allow_changes", "dry_run")
# those that change nothing that is learned,
FREE = (
    *("save_every", "keep_checkpoints", "eval_every", "eval_prompts", "eval_samples", "stall_limit"),
    *("reward_workers", "reward_seconds", "reward_memory_gb", "max_reward_error_rate"),
    *("keep_samples", "diagnose_every", "log_to", "log_project"),
)
# those that a trained policy has taken on for good,
POLICY = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "rope_theta", "lora_rank", "lora_targets")
# and those that change it by rounding alone. All others change the mathematics.
ROUNDING = ("device", "threads", "sharding", "decoder", "token_budget", "checkpoint_activations", "compile", "kv_cache_gb")


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that the run of --resume, the TOML file of --config and flags give; what is wrong with a flag exits
    with 2.

    Raises:
        InputError: on a file that cannot be read or has an unknown key.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    finder.add_argument("--resume", type=Path)
    found = finder.parse_known_args(arguments)[0]
    from_run = [] if found.resume is None else _run_as_flags(found.resume)
    from_file = [] if found.config is None else _toml_as_flags(found.config)
    # The last of two equal flags wins, so a flag overrides a file, and all go through the same checks.
    return tyro.cli(
        Config,
        args=[*from_run, *from_file, *arguments],
        prog="python -m maxrl_fast.train",
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _toml_as_flags(file: Path) -> list[str]:
    try:
        check_regular(file, JSON_BYTES)
        options = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # of TOML, of UTF-8, of a number of too many digits
        raise InputError(f"--config must be a readable TOML file, got {file}: {error}") from error
    return _as_flags(file, options)


def _run_as_flags(out: Path) -> list[str]:
    file = out / "config.json"
    try:
        check_regular(file, JSON_BYTES)
        options = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--resume must be the folder of a run, got {out}: {error}") from error
    if not isinstance(options, dict):
        raise InputError(f"{file} must hold a JSON object, got {options!r:.80}")
    own = {"versions", "command", *OF_ONE_START}
    return _as_flags(file, {key: value for key, value in options.items() if key not in own and value is not None})


def _as_flags(file: Path, options: dict[str, Any]) -> list[str]:
    known = {key: value for key, value in Config().flat().items() if key not in ("config", "resume")}
    flags = []
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{file} has the unknown key {key!r}{nearest(key, known)}")
        flag = "--" + key.replace("_", "-")
        if isinstance(known[key], bool):
            if not isinstance(value, bool):
                raise InputError(f"{file}: {key} must be true or false, got {value!r}")
            flags += [flag] if value else []
        elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
            flags += [f"{flag}={value}"]
        else:
            raise InputError(f"{file}: {key} must be a number or a string, got {value!r}")
    return flags


def nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def default_k(config: Config) -> int | None:
    """--k, or 4 where the objective has one and none was given."""
    return 4 if takes_size(config, "k") and config.objective.k is None else config.objective.k


def leaves_out(config: Config) -> bool:
    """Whether the sampling gives some tokens no probability."""
    return config.rollout.top_k > 0 or config.rollout.top_p < 1 or config.rollout.min_p > 0


def takes_size(config: Config, name: str) -> bool:
    row = OBJECTIVES[config.objective.objective].row
    return row is not None and row.size is not None and row.size.name == name


def _absolute(config: Config) -> dict[str, Any]:
    """The files that a run reads again when it is resumed, perhaps from another folder."""
    paths = {"model": config.model.model, "data": config.task.data, "test_data": config.task.test_data}
    resolved: dict[str, Any] = {name: path.absolute() for name, path in paths.items() if path is not None}
    for name, value in (("reward", config.task.reward), ("task", config.task.task)):
        if value is not None and is_file(value):
            file, _, function = value.rpartition(":")
            resolved[name] = f"{Path(file).absolute()}:{function}"
    return resolved


def _refuse_used(out: Path) -> None:
    try:
        is_free = not out.exists() or (out.is_dir() and {path.name for path in out.iterdir()} <= {"lock"})
    except OSError as error:
        raise InputError(f"cannot read --out {out}: {error}") from error
    if not is_free:
        what = "another run" if (out / "config.json").exists() else "something else"
        go_on = f"; --resume {out} goes on with it" if (out / "config.json").exists() else ""
        raise InputError(f"--out must be a new or empty folder, got {out}, which holds {what}{go_on}")


def changes(before: dict[str, Any], config: Config) -> tuple[list[str], list[str], list[str]]:
    """What differs from the options of a run that is resumed, as "lr: 0.1 before, 0.2 now": what would change the policy's
    shape, what changes the mathematics, and what changes rounding."""
    now = config.flat()
    differing = [name for name in now if name in before and before[name] != now[name] and name not in (*OF_ONE_START, *FREE)]
    if config.optimizer.lr_schedule == "constant" and "steps" in differing:
        differing.remove("steps")  # else the learning rate depends on how many there are
    kinds: dict[bool | None, list[str]] = {None: [], False: [], True: []}
    for name in differing:
        kinds[None if name in POLICY else name in ROUNDING].append(f"{name}: {before[name]} before, {now[name]} now")
    return kinds[None], kinds[False], kinds[True]


def resolve(config: Config, task: Task, ranks: Ranks | None = None) -> Config:
    """The checked configuration with every default worked out.

    Raises:
        InputError: where the device is absent, OUT holds something, or there are more processes than prompts.
    """
    objective, ranks = OBJECTIVES[config.objective.objective], ranks or Ranks()
    if config.rollout.prompts < ranks.size:
        raise InputError(f"prompts must be at least the number of processes, {ranks.size}, got {config.rollout.prompts}")
    if config.rollout.rollout == "vllm" and ranks.size > 1:
        raise InputError(f"--rollout vllm runs in one process, got {ranks.size}; --rollout native samples on all of them")
    has_none = config.model.model is not None or not task.has_demonstrations
    sft_steps = (0 if has_none else 100) if config.warm_start.sft_steps is None else config.warm_start.sft_steps
    if sft_steps and not task.has_demonstrations:
        raise InputError(f"sft_steps must be 0, as {task.name} has no solutions to learn from, got {sft_steps}")
    held_out = task.num_test_prompts or 2**63
    eval_prompts = config.evaluation.eval_prompts or min(256, held_out)
    if eval_prompts > held_out:
        raise InputError(f"eval_prompts must be at most the {held_out} prompts that are held out, got {eval_prompts}")
    device = resolve_device(config.run.device)
    corrects = objective.row is not None and (config.rollout.rollout == "vllm" or leaves_out(config))
    if config.rollout.decoder != "auto" and (device.type != "cpu" or config.rollout.rollout != "native"):
        raise InputError(f"decoder is of the native engine on a CPU, got {config.rollout.decoder} with another")
    out = config.run.resume or config.run.out or Path("runs") / f"{config.objective.objective}-{time.strftime('%Y%m%d-%H%M%S')}"
    if ranks.is_first and config.run.resume is None:  # which alone writes; the others may come when it has begun
        _refuse_used(out)
    order = config.objective.order
    pacs: dict[str, Any] = {}
    if objective.row is None:
        pacs = {"beta": 1.0, "score": "rloo", "class_weight": "balanced"}
        pacs |= {"ref_reset_interval": 50} if config.objective.objective == "pacs_paper" else {}
        pacs |= {name: value for name in pacs if (value := getattr(config.objective, name)) is not None}
    return config.replace(
        k=default_k(config),
        order=config.rollout.rollouts - 1 if takes_size(config, "order") and order is None else order,
        **pacs,
        max_new_tokens=config.rollout.max_new_tokens or task.max_new_tokens,
        importance_cap=2.0 * corrects if config.rollout.importance_cap is None else config.rollout.importance_cap,
        sft_steps=sft_steps,
        sft_beta2=config.optimizer.beta2 if config.warm_start.sft_beta2 is None else config.warm_start.sft_beta2,
        eval_prompts=eval_prompts,
        loss=config.loss.loss or objective.loss,
        aggregation=config.loss.aggregation or objective.aggregation,
        **_absolute(config),
        out=out,
        device=device.type,
        dtype=str(resolve_dtype(config.run.dtype, device)).removeprefix("torch."),
        threads=config.run.threads or torch.get_num_threads(),  # what affinity and OMP_NUM_THREADS leave
    )

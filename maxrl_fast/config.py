"""From flags and the TOML file to the resolved configuration, with every check that needs no work."""

import argparse
import difflib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro

from maxrl_fast.errors import InputError
from maxrl_fast.hardware import resolve_device, resolve_dtype
from maxrl_fast.model.files import JSON_BYTES, check_regular
from maxrl_fast.objectives import OBJECTIVES, estimator_options
from maxrl_fast.ops import ESTIMATORS, group_advantage
from maxrl_fast.ops.token_batch import AGGREGATIONS
from maxrl_fast.options import Config
from maxrl_fast.parallel import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.kinds import KINDS
from maxrl_fast.tasks.registry import GYM, TASKS, is_file, unknown_task
from maxrl_fast.trackers import check_tracker

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
            raise InputError(f"{file} has the unknown key {key!r}{_nearest(key, known)}")
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


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def check(config: Config) -> None:
    """Everything that can be known to be wrong before any work.

    Raises:
        InputError: with a sentence that says what was wanted and what came.
    """
    options = config.flat()
    if options["objective"] not in OBJECTIVES:
        raise InputError(
            f"objective must be one of {', '.join(OBJECTIVES)}, got {options['objective']!r}"
            f"{_nearest(options['objective'], OBJECTIVES)}"
        )
    if options["aggregation"] not in (None, *AGGREGATIONS):
        raise InputError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {options['aggregation']!r}"
            f"{_nearest(options['aggregation'], AGGREGATIONS)}"
        )
    at_least_one = (
        "prompts rollouts max_new_tokens sft_batch updates_per_step token_budget hidden_size intermediate_size layers heads "
        "kv_heads eval_prompts eval_samples threads reward_workers max_prompt_tokens"
    )
    _require(options, at_least_one, "at least 1", lambda x: x >= 1)
    _require(
        options,
        "top_k sft_steps steps warmup_steps eval_every save_every keep_checkpoints lora_rank dynamic_sampling keep_samples "
        "diagnose_every",
        "at least 0",
        lambda x: x >= 0,
    )
    _require(options, "seed", "in [0, 2^63)", lambda x: 0 <= x < 2**63)
    _require(
        options,
        "temperature kv_cache_gb sft_lr lr clip_grad rope_theta lora_alpha reward_seconds reward_memory_gb stall_limit",
        "a finite number above 0",
        lambda x: 0 < x < math.inf,
    )
    _require(
        options,
        "importance_cap clip_high weight_decay entropy_coef kl_coef",
        "finite and at least 0",
        lambda x: 0 <= x < math.inf,
    )
    _require(options, "reward_threshold", "finite", math.isfinite)
    _require(options, "min_p max_reward_error_rate", "in [0, 1]", lambda x: 0 <= x <= 1)
    _require(options, "top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
    _require(options, "clip_low beta1 beta2", "in [0, 1)", lambda x: 0 <= x < 1)
    _require(options, "dual_clip", "above 1", lambda x: 1 < x < math.inf)
    _check_task(options)
    if OBJECTIVES[options["objective"]].row is None:
        _check_pacs(options)
    else:
        _check_estimator(config, options)
    check_tracker(options["log_to"])
    if options["resume"] is not None and options["out"] not in (None, options["resume"]):
        raise InputError(f"--resume goes on in its own folder, {options['resume']}, got --out {options['out']}")
    if options["prompts"] % options["updates_per_step"]:
        raise InputError(
            f"prompts must be a multiple of updates_per_step, got {options['prompts']} and {options['updates_per_step']}"
        )
    for whole, part in (("hidden_size", "heads"), ("heads", "kv_heads")):
        if options[whole] % options[part]:
            raise InputError(f"{whole} must be a multiple of {part}, got {options[whole]} and {options[part]}")
    if options["hidden_size"] // options["heads"] % 2:
        raise InputError(f"hidden_size / heads must be even, got {options['hidden_size']} / {options['heads']}")


def _check_task(options: dict[str, Any]) -> None:
    """What is wrong with options of a task that is another."""
    task = options["task"]
    is_gym, is_own, has_lines = task.startswith(GYM), is_file(task), is_file(task) or task in KINDS
    if not (is_gym or has_lines or task in TASKS):
        raise InputError(unknown_task(task))
    for names, is_taken in (
        ("data test_data hub prompt_key", has_lines),
        ("answer_key", has_lines and task in KINDS and KINDS[task].gold is not None),
        ("prompt_suffix", has_lines or is_gym),
        ("gym_config", is_gym),
        ("reward", not is_own),  # it is one
    ):
        for name in names.split():
            if options[name] not in (None, "") and not is_taken:
                raise InputError(f"task {task} takes no {name}, got {options[name]!r}")


def _check_estimator(config: Config, options: dict[str, Any]) -> None:
    """What is wrong with the options of an objective that is a group advantage."""
    name, n = options["objective"], options["rollouts"]
    row = OBJECTIVES[name].row
    assert row is not None
    if n < row.min_rollouts:
        raise InputError(f"{name} needs at least {row.min_rollouts} rollouts per prompt, got {n}")
    try:
        row.resolve_size(name, n, default_k(config), options["order"])
        row.resolve_options(name, estimator_options(options["estimator_options"]))
    except ValueError as error:
        raise InputError(str(error)) from error
    if options["dynamic_sampling"] and _learns_from_equal_rewards(config, options):
        raise InputError(f"dynamic_sampling leaves out groups whose rewards are equal, from which {name} learns")
    if options["scale_by_k"] and not row.scales_by_k:
        raise InputError(f"{name} takes no scale_by_k")
    _refuse_options(options, "beta score class_weight ref_reset_interval")


def _learns_from_equal_rewards(config: Config, options: dict[str, Any]) -> bool:
    """Whether rollouts of a group that all failed, or all succeeded, have advantages."""
    name, n = options["objective"], options["rollouts"]
    rewards = torch.tensor([[0.0], [1.0]]).expand(2, n)
    known = {
        "lengths": torch.ones(2, n, dtype=torch.int64),
        "logprobs": -torch.arange(1.0, n + 1).expand(2, n),
        "greedy_correct": torch.tensor([False, False]),
    }
    inputs: dict[str, Any] = {name_of: known[name_of] for name_of in ESTIMATORS[name].inputs}
    more = estimator_options(options["estimator_options"])
    return bool(group_advantage(rewards, name, k=default_k(config), order=options["order"], **inputs, **more).any())


def _check_pacs(options: dict[str, Any]) -> None:
    """The same for PACS."""
    name, objective = options["objective"], OBJECTIVES[options["objective"]]
    _refuse_options(options, "k order scale_by_k estimator_options")
    if name != "pacs_paper":
        _refuse_options(options, "ref_reset_interval")
    _require(options, "beta", "a finite number above 0", lambda x: 0 < x < math.inf)
    _require(options, "ref_reset_interval", "at least 0", lambda x: x >= 0)
    if options["rollouts"] < 2 and options["score"] != "naive":
        raise InputError(f"{name} needs at least 2 rollouts per prompt, but with --score naive, got {options['rollouts']}")
    if options["importance_cap"]:
        raise InputError(f"{name} takes no importance_cap: it learns from rollouts as from data, whoever sampled them")
    for option, needed in (("loss", objective.loss), ("aggregation", objective.aggregation)):
        if options[option] not in (None, needed):
            raise InputError(f"{option} must be {needed} for {name}, whose loss it is a part of, got {options[option]}")


def _refuse_options(options: dict[str, Any], names: str) -> None:
    for name in names.split():
        if options[name] not in (None, False, ""):
            raise InputError(f"{options['objective']} takes no {name}")


def _require(options: dict[str, Any], names: str, wanted: str, holds: Callable[[Any], bool]) -> None:
    for name in names.split():
        if options[name] is not None and not holds(options[name]):
            raise InputError(f"{name} must be {wanted}, got {options[name]}")


def default_k(config: Config) -> int | None:
    """--k, or 4 where the objective has one and none was given."""
    return 4 if _takes_size(config, "k") and config.objective.k is None else config.objective.k


def leaves_out(config: Config) -> bool:
    """Whether the sampling gives some tokens no probability."""
    return config.rollout.top_k > 0 or config.rollout.top_p < 1 or config.rollout.min_p > 0


def _takes_size(config: Config, name: str) -> bool:
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
        order=config.rollout.rollouts - 1 if _takes_size(config, "order") and order is None else order,
        **pacs,
        max_new_tokens=config.rollout.max_new_tokens or task.max_new_tokens,
        importance_cap=2.0 * corrects if config.rollout.importance_cap is None else config.rollout.importance_cap,
        sft_steps=sft_steps,
        eval_prompts=eval_prompts,
        loss=config.loss.loss or objective.loss,
        aggregation=config.loss.aggregation or objective.aggregation,
        **_absolute(config),
        out=out,
        device=device.type,
        dtype=str(resolve_dtype(config.run.dtype, device)).removeprefix("torch."),
        threads=config.run.threads or torch.get_num_threads(),  # what affinity and OMP_NUM_THREADS leave
    )

"""Training from Python: `run`, with the numbers of the command (docs/python.md), and `Session`, for
your own loop on the trainer's engine, learner and checkpoints (docs/session.md):

sample --texts, log-probs--> your rewards --advantages--> forward_backward --> optim_step
"""

import atexit
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.algorithms.losses import find_loss
from maxrl_fast.algorithms.options import REQUIRED, Count, NotNegative, make_option
from maxrl_fast.config.options import Config, Place
from maxrl_fast.config.read import hint, parse_options
from maxrl_fast.errors import InputError, warn
from maxrl_fast.evaluation import label_of, score_of
from maxrl_fast.job.build import RunContext, prepare
from maxrl_fast.job.build_parts import build_run_task
from maxrl_fast.job.checkpoints import (
    Snapshot,
    check_weights,
    load_learner,
    progress_record,
    random_states,
    set_random_states,
    write_checkpoint,
)
from maxrl_fast.job.launch import train
from maxrl_fast.job.run_files import Progress, Saved, find_saved, flat
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.policy import Model
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Prompts, Rollouts, Samples, unpack
from maxrl_fast.rollout import Decoding, RolloutRequest, check_finite, sample_and_score
from maxrl_fast.rollout.vllm import VllmOptions
from maxrl_fast.runtime.device import resolve_device
from maxrl_fast.runtime.files import CHECKSUMS, RunFolder, atomic_file, read_json
from maxrl_fast.runtime.loading import OBJECT, check_members, naming_user_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, response_texts
from maxrl_fast.tasks.conversation import TextOptions
from maxrl_fast.tasks.dataset import DatasetOptions
from maxrl_fast.tasks.dataset_specs import is_dataset
from maxrl_fast.tasks.sources import check_utf8, read_prompt
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.training.learner import TOKEN_METRICS, LossOptions, UpdateMetrics
from maxrl_fast.training.trainer import OptimizerOptions


class Log(list[dict[str, Any]]):
    """Rows are dicts; `log["reward_mean"]` is a column, a NumPy array of numbers with NaN where a
    row has none, or a list; `pandas.DataFrame(log)` is a table."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        values = [row.get(key) for row in self]
        if not any(key in row for row in self):
            names = dict.fromkeys(name for row in self for name in row)
            raise KeyError(f"the log has no column {key!r}, only {', '.join(names)}")
        if all(value is None or isinstance(value, int | float) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        return values


@dataclass(repr=False)
class Run:
    """The results of a run."""

    out: Path
    exit: int  # 0, or 130 where Ctrl-C or an interrupted kernel of a notebook ended it early
    task: Task  # `run.task.decode(tokens)` returns text
    policy: PolicyModel  # after the last step, in evaluation mode with float32 weights
    _objects: dict[str, Any]  # arguments of `run` that the folder cannot store

    def log(self, name: str) -> Log:
        """Return the rows of NAME.jsonl (docs/metrics.md)."""
        return Log(map(flat, RunFolder(self.out).log(name)))

    @cached_property
    def metrics(self) -> Log:
        """A row per step."""
        return self.log("metrics")

    @cached_property
    def evaluations(self) -> Log:
        """A row per evaluation on held-out prompts, with pass_at_1, pass_at_2, ..."""
        return self.log("eval")

    def resume(self, **options: Any) -> "Run":
        """Resume from the newest checkpoint. Options not given keep their values."""
        return run(resume=self.out, **{**self._objects, **options})

    def __repr__(self) -> str:
        shown = f", ended early with exit {self.exit}" * bool(self.exit)
        if records := RunFolder(self.out).log("eval"):
            score = score_of(records)
            first, last = (records[i][score]["1"] for i in (0, -1))
            shown = f", {label_of(score, 1)} {first:.3f} to {last:.3f}{shown}"
        return f"Run({str(self.out)!r}: {len(self.metrics)} steps{shown})"


@naming_user_code()
def run(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    task: str | Task | None = None,
    reward: Any = None,
    environment: str | type | None = None,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train as `python -m maxrl_fast.train` does, bitwise identically, and return the results
    (docs/python.md). Signal handlers, random states and the number of CPU threads are restored.

    Args:
        config: options by name, or a TOML file of them; keyword options override them.
        task, reward, environment: as on the command line; or a `maxrl_fast.tasks.Task`, functions
            (prompt, response, **columns) -> float, and a class, which live in this process.
        quiet: print only warnings and errors.
        options: as on the command line, with underscores; None: not given. `data`, `test_data` and
            `sft_data` may be a list of dicts, or what has `to_list()` or `to_dict("records")`.

    Raises:
        InputError, and if the run failed NonFiniteError, RewardError, StorageError, EngineError or
        UserCodeError.
    """
    given: dict[str, Any] = {**config} if isinstance(config, Mapping) else {"config": config}
    options |= {"task": task, "reward": reward, "environment": environment}
    given |= {name: x for name, x in options.items() if x is not None}
    folder = Path(given.get("out") or given.get("resume") or "runs/run").absolute().parent
    for name in ("data", "test_data", "sft_data"):
        given[name] = _stored(name, given.get(name), folder)
    objects, functions = _named_objects(given)
    ranks = Ranks.of_environment()
    with ExitStack() as held:
        held.callback(set_random_states, random_states())  # parsing options changes them too
        parsed = parse_options(given)
        if parsed.run.dry_run is not None:
            command = "python -m maxrl_fast.train --dry-run"
            raise InputError(f"dry_run works only on the command line: {command}")
        ending = train(
            parsed,
            ranks,
            Screen(not ranks.is_first, quiet),
            lambda found: objects.get("task") or build_run_task(found, objects.get("environment")),
            functions,
            ends_process=ranks.size > 1,
        )
    if ending.error is not None:
        raise ending.error
    # SIGTERM or SIGHUP: everything is saved, so let this process handle it
    if ending.code not in (0, 128 + signal.SIGINT):
        signal.raise_signal(ending.code - 128)
    done = ending.run
    assert done is not None  # None only after an error
    return Run(done.config.run.out, ending.code, done.task, done.policy.eval(), objects)


def _named_objects(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Put names in the place of objects; return those by option, and rewards by name."""
    objects, functions = dict[str, Any](), dict[str, Callable[..., Any]]()
    for name in ("task", "environment"):
        if not isinstance(given.get(name, ""), str):
            objects[name], given[name] = given[name], _name_of(given[name])
    if (rewards := given.get("reward")) is not None:
        given["reward"] = names = list[str]()
        for one in rewards if isinstance(rewards, list | tuple) else [rewards]:
            if not isinstance(one, str) and not callable(one):
                raise InputError(f"reward must be a name or a function, got {one!r:.80}")
            name = _name_of(one)
            names.append(f"{name}-{len(names)}" if name in functions else name)  # two lambdas
            if not isinstance(one, str):
                functions[names[-1]], objects["reward"] = one, rewards
    if own := objects.get("task"):
        check_members(f"task {type(own).__name__}", own, Task)
    return objects, functions


def _stored(option: str, value: Any, folder: Path) -> Any:
    """Return the file of rows that are given in place of one, named by its content; a resumed run
    reads it again. Names of files stay."""
    if hasattr(value, "to_list"):  # a Dataset, whose images are not decoded
        value = value.to_list()
    elif hasattr(value, "to_dict"):
        value = value.to_dict("records")
    if not (isinstance(value, list) and isinstance([*value, ""][0], Mapping)):
        return value

    def plain(x: Any) -> Any:  # as of files of Parquet
        is_text = isinstance(x, (date, time, timedelta, Decimal, UUID))
        return None if isinstance(x, bytes) else str(x) if is_text else x.tolist()

    try:
        content = "".join(json.dumps(row, default=plain) + "\n" for row in value)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{option} must be rows of JSON values: {error}") from error
    path = folder / f"data-{hashlib.sha256(content.encode()).hexdigest()[:12]}.jsonl"
    if Ranks.of_environment().is_first:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(content)
    return path


def _name_of(value: Any) -> str:
    own = getattr(value, "__name__", type(value).__name__)
    return value if isinstance(value, str) else f"{OBJECT}{own}"


_GROUPS = Model, OptimizerOptions, LossOptions, Decoding, Place, TextOptions, VllmOptions
_OF_RUNS = "model teacher_prompt prompt_suffix max_prompt_tokens steps warmup_steps lr_schedule "
_OF_RUNS += "updates_per_step teacher_template teacher_ema"
_OPTIONS = {x.name for group in _GROUPS for x in fields(group)} - {*_OF_RUNS.split()}
_OPTIONS |= {"loss", "rollout", "seed", "sharding"}


class _GivenTexts(TextTask):
    name = "texts of a session"
    prompt_length, max_new_tokens, num_test_prompts = 1, 256, 1


@dataclass(frozen=True)
class SessionSamples(Samples):
    """N responses to each of G prompts. Lists are [G][N]."""

    task: Any
    temperature: float
    is_given: bool = False  # no policy has sampled them, and `forward` has not read them

    def _by_prompt(self, values: Iterable[Any]) -> list[list[Any]]:
        return np.fromiter(values, object).reshape(-1, self.num_rollouts).tolist()

    @property
    def texts(self) -> list[list[str]]:
        return self._by_prompt(response_texts(self.task, self.rollouts))

    @property
    def tokens(self) -> list[list[list[int]]]:
        """Token ids, with the stop token."""
        return self._by_prompt(unpack(self.rollouts.tokens, self.rollouts.lengths))

    @property
    def logprobs(self) -> list[list[np.ndarray]]:
        """Of the tokens, float32: when they were sampled, or by `forward`."""
        lengths = self.rollouts.lengths.tolist()
        return self._by_prompt(x.numpy() for x in self.rollouts.logprobs.cpu().split(lengths))

    @property
    def truncated(self) -> np.ndarray:
        """[G, N] bool, responses that the length limit ended."""
        return self.rollouts.truncated.view(-1, self.num_rollouts).cpu().numpy()


class Session:
    """A policy, the engine that samples from it and the learner that trains it (docs/session.md).
    A wrong argument raises InputError and changes nothing.

    Args:
        model: a Hugging Face folder, or hf://ORG/NAME.
        options: of the model, the loss, the engine and the optimizer, as on the command line."""

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        self._start(_parsed(options, task="dataset", model=model), None)

    @classmethod
    def from_run(cls, folder: str | os.PathLike[str], **options: Any) -> "Session":
        """Continue from the newest checkpoint of a run, or from what `save` wrote; options that are
        not given keep their values."""
        path = Path(folder).expanduser().absolute()
        is_saved = RunFolder(path).checkpoints or (path / "progress.json").exists()
        if not (is_saved and (saved := find_saved(path, Ranks(), warn))):
            raise InputError(f"folder must be of a run with a checkpoint, or of save, got {folder}")
        if "loss" not in options:  # it would follow from the objective, which is the caller's
            kept = saved.options.keys() & {"loss", "aggregation"}
            options = {x: saved.options[x] for x in kept} | options
        session = cls.__new__(cls)
        session._start(_parsed(options, resume=saved.directory, objective="maxpo"), saved)
        return session

    def _start(self, config: Config, saved: Saved | None) -> None:
        ranks = Ranks.of_environment()
        _connect(resolve_device(config.run.device))
        if is_text := is_dataset(config.chosen.task):  # without data, or a teacher's
            none = dict.fromkeys(("eval_prompts", "teacher_prompt", "teacher_template"))
            config = config.replace(sft_steps=0, teacher_ema=0.0, **none)

        def make_task(found: Config) -> Any:
            folder = saved.directory if saved else found.model.directory
            if is_text and folder:
                return _GivenTexts(folder, DatasetOptions(**found.parts["task"]))
            return build_run_task(found)

        self.task: Any
        config, self.task = prepare(config, ranks, warn, make_task)
        torch.set_num_threads(config.run.threads)
        self._run = run = RunContext.begin(config, self.task, ranks, saved)
        run.place()
        self.config, self.engine, self.learner = run.config, run.engine, run.learner
        self._positions = run.policy.config.max_position_embeddings
        self.learner.copy_policy()
        if saved:
            load_learner(saved.directory / "state", self.learner, ranks)
        self._settings = self.learner.settings  # without a call's own loss
        _ = run.policy_files  # the model's folder may be a temporary one
        self._draws = saved.progress.step if saved else 0
        self._is_new = True  # whether the engine has other weights
        ranks.wait_for_all()  # the model's folder may be a temporary one of the first rank

    def encode(
        self, prompts: Any, responses: Sequence[Sequence[str]] | None = None
    ) -> SessionSamples:
        """Return texts [G][N] as samples, with log-probs of 0. prompts: G texts, or lists of
        messages; or `Prompts` of a task."""
        task, most, read, given = self.task, self._positions, list[Any](), list[list[int]]()
        if not isinstance(prompts, Prompts):
            if not isinstance(task, TextTask):
                raise InputError(f"prompts must be Prompts, as {task.name} returns them")
            ids = list[list[int]]()
            for i, prompt in enumerate(_list("prompts", prompts)):
                found = read_prompt(prompt, place := f"prompts[{i}]")
                read.append(task.prompt(found) if isinstance(found, str) else found)
                ids.append(task.encode_prompt(read[-1], place))
                if not ids[-1]:
                    raise InputError(f"{place} must be text that the tokenizer knows")
            prompts = prompts_of(ids, range(len(ids)), [{}] * len(ids))
        if responses is not None:
            rows = [_list("responses", row) for row in _list("responses", responses)]
            if len(rows) != len(read) or len({*map(len, rows)}) > 1:
                wanted = f"as many to each of {len(read)} prompts of text"
                raise InputError(f"responses must be {wanted}, got {responses!r:.80}")
            for prompt, row in zip(read, rows, strict=True):
                for text in row:
                    check_utf8(text, "responses")
                    given.append(task.encode_demonstration(prompt, text, "responses")[1])
        parts = prompts.to(self.learner.device), Rollouts.given(given).to(self.learner.device), task
        samples = SessionSamples(*parts, self._settings.temperature, is_given=True)
        lengths = samples.prompts.lengths
        each = lengths.repeat_interleave(samples.num_rollouts) + samples.rollouts.lengths
        if not 0 < (longest := max([0, *lengths.tolist(), *each.tolist()])) <= most:
            wanted = f"from 1 to {most} tokens, got {longest}"
            raise InputError(f"prompts, and each with a response, must have {wanted}")
        return samples

    def _checked(self, samples: Any) -> SessionSamples:
        if isinstance(samples, SessionSamples) and len(samples.rollouts):
            tokens = torch.cat([samples.prompts.tokens, samples.rollouts.all_tokens])
            if int(tokens.max()) < self._run.policy.config.vocab_size:
                return samples
        wanted = "samples must have responses, of sample or encode of this session"
        raise InputError(f"{wanted}, got {samples!r:.80}")

    def sample(
        self,
        prompts: Any,
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> SessionSamples:
        """Sample n responses to each prompt with the newest weights and new random numbers. None:
        the session's option, or as many tokens as the positions leave."""
        run, own, n = self._run, self.encode(prompts).prompts, _number("n", Count, n)
        usual, room = run.sampling, self._positions - int(own.lengths.max())
        limit = max(1, min(usual.max_new_tokens, room))
        sampling = replace(
            usual,
            temperature=_number("temperature", NotNegative, temperature, usual.temperature),
            max_new_tokens=_number("max_new_tokens", Count, max_new_tokens, limit),
        )
        if self._is_new:
            self.engine.load_weights(self.learner.model)
            self._is_new = False
        part, seed = own.take(*run.ranks.part(len(own))), run.config.run.seed
        request = RolloutRequest(part, n, sampling, seed, self._draws + 1)
        rollouts = run.ranks.gather(
            sample_and_score(self.engine, self.task, None, request).rollouts
        )
        self._draws += 1
        check_finite(rollouts, own, self._draws)
        return SessionSamples(own, rollouts, self.task, sampling.temperature)

    def forward(self, samples: SessionSamples) -> SessionSamples:
        """Return the samples with their log-probs under the policy."""
        model, samples = self.learner.model, self._checked(samples)
        logprobs = self.learner.passes.logprobs(model, samples, samples.sequences)
        rollouts = replace(samples.rollouts, logprobs=logprobs)
        return replace(samples, rollouts=rollouts, is_given=False)

    def forward_backward(
        self,
        samples: SessionSamples,
        advantages: Any,
        loss: str | Callable[..., Tensor] | None = None,
    ) -> None:
        """Add to the gradient since the last `optim_step`. advantages: [G, N]; loss: a name or a
        function (docs/token_loss.md), None: the session's option."""
        samples, learner, settings = self._checked(samples), self.learner, self._settings
        values, shape = torch.empty(0), (len(samples.prompts), samples.num_rollouts)
        with suppress(TypeError, ValueError, RuntimeError):  # where it is not a tensor
            values = torch.as_tensor(advantages, device=self.learner.device).detach().float()
        if values.shape != shape or not values.isfinite().all():
            raise InputError(f"advantages must be finite, {[*shape]}, got {advantages!r:.80}")
        if (found := samples.temperature) != settings.temperature:
            wanted = f"the temperature of the session, {settings.temperature:g}"
            raise InputError(f"samples must have {wanted}, got {found:g}")
        if loss is not None:
            try:
                how = find_loss(loss).aggregation or settings.aggregation
                settings = replace(settings, loss=loss, loss_options=None, aggregation=how)
            except (TypeError, ValueError) as error:
                raise InputError(f"loss must be a name or a function: {error}") from error
        # an interrupted call discards the sum
        earlier, learner.accumulated, learner.settings = learner.accumulated, [], settings
        self.engine.sleep()
        self._is_new = True
        if samples.is_given:  # a ratio is to the policy's own log-probs
            samples = self.forward(samples)
        if not settings.divergence_coef:
            samples = replace(samples, rollouts=learner.with_reference(samples))
        draw = self._draws, len(earlier)  # of losses that draw tokens
        learner.accumulated = earlier
        learner.forward_backward(samples, values.flatten(), samples.sequences, draw)

    def optim_step(self, lr: float | None = None) -> UpdateMetrics:
        """Take an optimizer step; TOKEN_METRICS are means over the tokens trained on.
        NonFiniteError: loss or gradient are not finite; the weights are unchanged."""
        if not self.learner.accumulated:
            raise InputError("optim_step needs a forward_backward since the last one, got none")
        rate = _number("lr", NotNegative, lr, self.config.optimizer.lr)
        self._is_new = True
        found = self.learner.optim_step(when=f"draw {self._draws}", lr=rate)
        means = {x: getattr(found, x) / max(found.num_targets, 1) for x in TOKEN_METRICS}
        return replace(found, **means if found.num_targets else {"ratio": 1.0})

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write a Hugging Face folder that `from_run` continues, in place of an older save."""
        ranks, path, model = self._run.ranks, Path(out).expanduser().resolve(), self.config.model
        check_weights(self.learner, f"draw {self._draws}", ranks)
        if other := ranks.values(ranks.is_first and _other_file(path))[0]:
            wanted = f"a new folder or one of save, got {path}, which has {other}: move it away"
            raise InputError(f"out must be {wanted}")
        read_again = self.config.loss.reference, model.model if model.lora_rank else None
        if str(path) in read_again:
            raise InputError(f"out must not be the model that from_run will read, got {path}")
        saved = Snapshot.of(self.learner, ranks.is_first)
        if ranks.is_first or saved.is_sharded:
            record = progress_record(self._run, Progress("session", self._draws), {}, {})
            write_checkpoint(path, self._run, record, saved)
        ranks.wait_for_all()


def _other_file(path: Path) -> str:
    """Return a file in the place of a save that no save has written, "" if there is none."""
    record, written = path / "progress.json", set[str]()
    if record.exists() and read_json(record).get("progress", {}).get("phase") == "session":
        written = {CHECKSUMS, *read_json(path / CHECKSUMS)}
    files = {str(x.relative_to(path)) for x in path.rglob("*") if x.is_symlink() or not x.is_dir()}
    return path.name if path.is_file() else min(files - written, default="")


@cache  # once in a program
def _connect(device: torch.device) -> None:
    connection = Ranks.of_environment().connected(device)
    connection.__enter__()

    @atexit.register
    def leave() -> None:
        error = getattr(sys, "last_value", None)  # what ends the program; other ranks end too
        connection.__exit__(type(error) if error else None, error, None)


def _parsed(options: dict[str, Any], **own: Any) -> Config:
    for name in options:
        if name not in _OPTIONS:
            raise InputError(f"unknown option {name:.80}{hint(name, _OPTIONS, is_flag=False)}")
    return parse_options({**own, **options})


def _number(name: str, kind: Any, value: Any, usual: Any = None) -> Any:
    if value is None and usual is not None:
        return usual
    return make_option(name, kind, REQUIRED).convert(str(value), name)


def _list(name: str, value: Any) -> Any:
    if not (isinstance(value, (list, tuple)) and value):
        raise InputError(f"{name} must be a list of at least one, got {value!r:.80}")
    return value

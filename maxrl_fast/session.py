"""Your own loop on the trainer's engine, learner and checkpoints (docs/session.md):

sample --texts, log-probs--> your rewards --advantages--> forward_backward --> optim_step
"""

import atexit
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.algorithms.options import REQUIRED, Count, NotNegative, make_option
from maxrl_fast.config.options import Config, Decoding, Loss, Place
from maxrl_fast.config.parts import part
from maxrl_fast.config.read import hint, parse_options
from maxrl_fast.config.resolve import resolve, tensor_parallel
from maxrl_fast.errors import InputError, warn
from maxrl_fast.job.build import build_context, build_learner, build_policies
from maxrl_fast.job.build_policy import build_policy_files, build_sampling, find_policy
from maxrl_fast.job.build_task import build_run_task
from maxrl_fast.job.checkpoints import check_weights, progress_record, write_checkpoint
from maxrl_fast.job.learner_state import Snapshot, load_learner
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import find_saved
from maxrl_fast.records import Prompts, Rollouts, Samples, unpack
from maxrl_fast.rollout import RolloutRequest, check_finite
from maxrl_fast.rollout.sampling_and_scoring import sample_and_score
from maxrl_fast.runtime.device import resolve_device
from maxrl_fast.runtime.files import read_json, storing
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.run_folder import RunFolder
from maxrl_fast.tasks.dataset import DatasetOptions
from maxrl_fast.tasks.jsonl import check_utf8, read_prompt
from maxrl_fast.tasks.names import dataset_spec
from maxrl_fast.tasks.text_codec import TextOptions, TextTask, prompts_of
from maxrl_fast.tasks.texts import response_texts
from maxrl_fast.training.learner import TOKEN_METRICS, UpdateMetrics

_OPTIONS = {x.name for group in (Loss, Decoding, Place, TextOptions) for x in fields(group)} | {
    *("model_backend", "lora_rank", "lora_alpha", "lora_targets", "loss", "lr", "beta2"),
    *("weight_decay", "clip_grad", "token_budget", "checkpoint_activations", "rollout", "vllm_url"),
    *("vllm_tensor_parallel", "seed", "sharding"),
}
_OPTIONS -= {"teacher_prompt", "prompt_suffix", "max_prompt_tokens"}


class _GivenTexts(TextTask):
    name, fingerprint, reward, answer_limit = "texts of a session", "", None, None
    prompt_length, max_new_tokens, num_test_prompts, has_demonstrations = 1, 256, 1, False


@dataclass(frozen=True)
class SessionSamples(Samples):
    """N responses to each of G prompts. Lists are [G][N]."""

    task: Any
    temperature: float
    is_given: bool = False  # no policy has sampled them, and `forward` has not read them

    def _by_prompt(self, values: Sequence[Any]) -> list[list[Any]]:
        n = self.num_rollouts
        return [[*values[i : i + n]] for i in range(0, len(values), n)]

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
        ends = self.rollouts.cu_seqlens[1:-1].cpu().numpy()
        return self._by_prompt(np.split(self.rollouts.logprobs.cpu().numpy(), ends))

    @property
    def truncated(self) -> np.ndarray:
        """[G, N] bool, responses that the length limit ended."""
        return self.rollouts.truncated.view(-1, self.num_rollouts).cpu().numpy()


class Session:
    """A policy, the engine that samples from it and the learner that trains it.

    Under torchrun all ranks call every method with the same arguments. An interrupted call loses
    the gradient that was being summed, and nothing else; an interrupted `optim_step` may have
    changed weights. A wrong argument raises InputError and changes nothing.

    Args:
        model: a Hugging Face folder, or hf://ORG/NAME.
        options: of the model, the loss, the engine and the optimizer, as on the command line.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        self._start(_parsed(options, task="dataset", model=model))

    @classmethod
    def from_run(cls, folder: str | os.PathLike[str], **options: Any) -> "Session":
        """Continue from the newest checkpoint of a run, or from what `save` wrote, with its Adam
        moments; options not given keep their values. `session.task` is the run's, or for text one
        without its data."""
        path, new = _places("folder", folder)
        path = new if new.exists() else path  # a whole save, which a kill kept from its name
        is_saved = RunFolder(path).checkpoints or (path / "progress.json").exists()
        saved = find_saved(path, Ranks(), warn) if is_saved else None
        if saved is None:
            raise InputError(f"folder must be of a run with a checkpoint, or of save, got {folder}")
        config = _parsed(options, resume=path)
        # objective and rewards are the caller's; a session has no data of text
        kept = {*_OPTIONS, *config.parts["loss"], *config.parts["rollout"], "prompts", "rollouts"}
        if dataset_spec(config.chosen.task) is None:
            kept |= {"task", *config.parts["task"], *vars(config.warm_start), "eval_prompts"}
        values = {name: x for name, x in config.flat().items() if name in kept}
        session = cls.__new__(cls)
        # a checkpoint is also the folder of a model
        session._start(parse_options({"task": "dataset", **values, "model": saved.directory}))
        session._base = saved.options.get("model")
        load_learner(saved.directory / "state", session.learner, session._ranks)
        session._draws = saved.progress.step
        return session

    def _start(self, config: Config) -> None:
        self._ranks, device = Ranks.of_environment(), resolve_device(config.run.device)
        _connect(device)
        config = find_policy(config, self._ranks, warn)
        self._base = config.model.model  # what adapters are trained on
        folder = config.model.directory
        self.task: Any  # a Task
        if dataset_spec(config.chosen.task) is None or folder is None:
            self.task = build_run_task(config)
        else:
            self.task = _GivenTexts(folder, DatasetOptions(**config.parts["task"]))
        resolved = resolve(config, self.task, self._ranks, warn=warn)
        torch.set_num_threads(resolved.run.threads)
        place = self._ranks, device
        self.config, policy, teacher = build_policies(resolved, self.task, *place, None)
        context, _ = build_context(self.config, self.task, policy, teacher, *place)
        self.engine, self.learner = context.engine, build_learner(context)
        self.learner.copy_policy()
        self._settings = self.learner.settings  # without a call's own loss
        self._files = build_policy_files(self.task, policy, self.config.model.directory)
        self._positions = self.learner.model.config.max_position_embeddings
        self._draws, self._is_new = 0, True  # whether the engine has other weights
        self._ranks.wait_for_all()  # the model's folder may be a temporary one of the first rank

    def encode(
        self, prompts: Any, responses: Sequence[Sequence[str]] | None = None
    ) -> SessionSamples:
        """Return given texts as samples, with log-probs of 0.

        Args:
            prompts: G texts, each a user's message where there is a chat template, or lists of
                messages; or `Prompts`, as tasks return them.
            responses: [G][N] texts, which end as the template ends them.
        """
        given = list[list[int]]()
        if not isinstance(prompts, Prompts):
            prompts, given = self._read(prompts, responses)
        elif responses is not None or not len(prompts):
            raise InputError("prompts must be at least one, of text where responses are given")
        device, rollouts = self.learner.model.lm_head.weight.device, Rollouts.given(given)
        parts = prompts.to(device), rollouts.to(device), self.task, self._settings.temperature
        samples = SessionSamples(*parts, is_given=True)
        each = prompts.lengths.repeat_interleave(samples.num_rollouts) + rollouts.lengths
        found, most = int(torch.cat([prompts.lengths, each]).max()), self._positions
        if found > most:
            raise InputError(
                f"a prompt with a response must have at most {most} tokens, got {found}"
            )
        return samples

    def _read(self, prompts: Any, responses: Any) -> tuple[Prompts, list[list[int]]]:
        task = self.task
        if not isinstance(task, TextTask):
            raise InputError(f"prompts must be Prompts, as {task.name} returns them")
        places = [f"prompts[{i}]" for i in range(len(_list("prompts", prompts)))]
        read = [*map(read_prompt, prompts, places)]
        read = [task.prompt(x) if isinstance(x, str) else x for x in read]
        ids = [*map(task.encode_prompt, read, places)]
        if [] in ids:
            raise InputError(f"{places[ids.index([])]} must be text that the tokenizer knows")
        pairs = list[tuple[Any, str]]()
        if responses is not None:
            rows = [_list("responses", row) for row in _list("responses", responses)]
            if len(rows) != len(read) or len({*map(len, rows)}) > 1:
                wanted = f"as many to each of {len(read)} prompts"
                raise InputError(f"responses must be {wanted}, got {responses!r:.80}")
            pairs = [(x, y) for x, row in zip(read, rows, strict=True) for y in row]
        names = [f"responses, {i}" for i in range(len(pairs))]
        for (_, text), name in zip(pairs, names, strict=True):
            check_utf8(text, name)
        given = [task.encode_demonstration(*x, y)[1] for x, y in zip(pairs, names, strict=True)]
        return prompts_of(ids, range(len(ids)), [{}] * len(ids)), given

    def _checked(self, samples: Any) -> SessionSamples:
        wanted = "samples must have responses, of sample or encode of this session"
        if isinstance(samples, SessionSamples) and len(samples.rollouts):
            tokens = torch.cat([samples.prompts.tokens, samples.rollouts.all_tokens])
            if int(tokens.max()) < self.learner.model.config.vocab_size:
                return samples
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
        n = _number("n", Count, n)
        own, sampling = self.encode(prompts).prompts, build_sampling(self.config, self.task)
        room = self._positions - int(own.lengths.max())
        given: dict[str, Any] = {"max_new_tokens": max(1, min(sampling.max_new_tokens, room))}
        if temperature is not None:
            given["temperature"] = _number("temperature", NotNegative, temperature)
        if max_new_tokens is not None:
            given["max_new_tokens"] = _number("max_new_tokens", Count, max_new_tokens)
        sampling = replace(sampling, **given)
        if self._is_new:
            self.engine.load_weights(self.learner.model)
            self._is_new = False
        part = own.take(*self._ranks.part(len(own)))
        asked = part, n, sampling, self.config.run.seed, self._draws + 1
        shared = tensor_parallel(self.config) > 1
        found = sample_and_score(
            self.engine, self.task, None, RolloutRequest(*asked), shares_engine=shared
        )
        rollouts = self._ranks.gather(found.rollouts)
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
        """Add the gradient of the loss to that of earlier calls since the last `optim_step`.
        advantages: [G, N]; loss: as of `policy_gradient_loss`, None: the session's option."""
        samples, learner, settings = self._checked(samples), self.learner, self._settings
        values, shape = torch.empty(0), [len(samples.prompts), samples.num_rollouts]
        device = samples.rollouts.tokens.device
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of what is no tensor
            given = torch.as_tensor(advantages, device=device).detach()
            values = values if given.is_complex() else given.float()
        if [*values.shape] != shape or not values.isfinite().all():
            raise InputError(f"advantages must be finite, {shape}, got {advantages!r:.80}")
        if (found := samples.temperature) != settings.temperature:
            wanted = f"the temperature of the session, {settings.temperature:g}"
            raise InputError(f"samples must have {wanted}, got {found:g}")
        if loss is not None:
            known = part("loss", loss) if isinstance(loss, str) else None
            how = (known and known.aggregation) or settings.aggregation
            function = known.function if known else loss
            try:
                settings = replace(settings, loss=function, loss_options=None, aggregation=how)
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
        """Take an optimizer step on the summed gradient. lr: None: the session's option. From
        `ratio` to `logprob_diff`, the metrics are means over the tokens trained on. NonFiniteError:
        loss or gradient are not finite; the weights are unchanged."""
        if not self.learner.accumulated:
            raise InputError("optim_step needs a forward_backward since the last one, got none")
        rate = self.config.optimizer.lr if lr is None else _number("lr", NotNegative, lr)
        self._is_new = True
        found = self.learner.optim_step(when=f"draw {self._draws}", lr=rate)
        means = {x: getattr(found, x) / max(found.num_targets, 1) for x in TOKEN_METRICS}
        return replace(found, **means if found.num_targets else {"ratio": 1.0})

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write, or replace, a Hugging Face folder with the state that `from_run` continues."""
        ranks, wrong, (path, new) = self._ranks, "", _places("out", out)
        check_weights(self.learner, f"draw {self._draws}", ranks)
        if ranks.is_first:
            _finish(new, path)
            record = path / "progress.json"
            is_own = record.exists() and not read_json(record).get("logs", 1)
            is_base = self.config.model.lora_rank and self._base == str(path)
            if is_base or (path.exists() and not is_own):
                wrong = f"out must be a new folder or one of save, not the adapters' model: {path}"
        if wrong := ranks.values(wrong)[0]:
            raise InputError(wrong)
        saved = Snapshot.of(self.learner, ranks.is_first)
        if ranks.is_first or saved.is_sharded:
            progress, sizes = Progress("training", self._draws), self.learner.model.config
            options = self.config.flat() | {"model": self._base}
            content = progress_record(progress, sizes, {}, options, {}, ranks)
            write_checkpoint(new, content, saved, *self._files, self._base, ranks)
        if ranks.is_first:
            _finish(new, path)
        ranks.wait_for_all()


def _finish(new: Path, path: Path) -> None:
    """Put a whole save in its place; a kill may have kept an earlier one from it."""
    if new.exists():
        with storing(str(path)):
            old = new.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            new.rename(path)
            shutil.rmtree(old, ignore_errors=True)


@cache
def _connect(device: torch.device) -> None:
    """Connect the ranks, once in a program."""
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


def _number(name: str, kind: Any, value: Any) -> Any:
    return make_option(name, kind, REQUIRED).convert(str(value), name)


def _list(name: str, value: Any) -> Any:
    if not (isinstance(value, (list, tuple)) and value):
        raise InputError(f"{name} must be a list of at least one, got {value!r:.80}")
    return value


def _places(name: str, folder: Any) -> tuple[Path, Path]:
    """Return the folder, and where `save` has a whole one before it renames it."""
    text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else ""
    if not (isinstance(text, str) and text.isprintable() and text):
        raise InputError(f"{name} must be the path of a folder, got {folder!r:.80}")
    path = Path(os.path.expanduser(text)).absolute()
    return path, path.parent / f".{path.name}.new"

"""Your own loop on the trainer's engine, learner and checkpoints (docs/session.md):

sample --texts, log-probs--> your rewards --advantages--> forward_backward --> optim_step
"""

import atexit
import os
import shutil
import string
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.config.checks import check
from maxrl_fast.config.conditions import loss_of
from maxrl_fast.config.options import Config, LossOptions, ModelOptions, known_options
from maxrl_fast.config.parse import RawOption, parse_options, refuse_unknown
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import InputError
from maxrl_fast.job.build import build_context, build_learner, build_policies
from maxrl_fast.job.build_policy import build_policy_files, build_sampling, find_policy
from maxrl_fast.job.build_task import build_run_task, text_options
from maxrl_fast.job.checkpoints import progress_record, write_checkpoint
from maxrl_fast.job.learner_state import Snapshot, load_learner
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import find_saved
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.model.policy import new_policy
from maxrl_fast.records import Prompts, Rollouts, Samples, unpack
from maxrl_fast.rollout import RolloutRequest, check_finite
from maxrl_fast.rollout.sampling_and_scoring import sample_and_score
from maxrl_fast.runtime.device import resolve_device
from maxrl_fast.runtime.files import read_json
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.jsonl import read_prompt
from maxrl_fast.tasks.names import dataset_spec
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.tasks.texts import response_texts
from maxrl_fast.tasks.words import word_tokenizer_files
from maxrl_fast.training.learner import UpdateMetrics

_OPTIONS = {field.name for group in (ModelOptions, LossOptions) for field in fields(group)} | {
    *("lr", "beta2", "weight_decay", "clip_grad", "token_budget", "checkpoint_activations"),
    *("rollout", "vllm_url", "vllm_tensor_parallel", "kv_cache_gb", "max_new_tokens", "top_p"),
    *("temperature", "stop", "plain_prompts", "system_prompt", "allow_special_tokens"),
    *("chat_template", "chat_template_kwargs", "template_date"),
    *("seed", "device", "dtype", "compile", "sharding", "threads"),
} - {"model", "teacher_prompt"}


class _GivenTexts(TextTask):
    name, fingerprint, reward, answer_limit = "texts of a session", "", None, None
    prompt_length, max_new_tokens, num_test_prompts, has_demonstrations = 1, 256, 1, False


@dataclass(frozen=True)
class SessionSamples(Samples):
    """N responses to each of G prompts. Lists are [G][N]."""

    task: Task
    temperature: float

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

    Under torchrun all ranks call every method with the same arguments. After an interrupted call
    the session is as before it, without the gradient that was being summed; an interrupted
    `optim_step` may have changed weights. A wrong argument raises InputError, which names it.

    Args:
        model: a Hugging Face folder, or hf://ORG/NAME.
        options: of the model, the loss, the engine and the optimizer, as on the command line.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        _refuse_others(options)
        self._start(parse_options({"task": "dataset", "model": os.fspath(model), **options}))

    @classmethod
    def from_run(cls, folder: str | os.PathLike[str], **options: Any) -> "Session":
        """Continue from the newest checkpoint of a run, or from what `save` wrote, with its Adam
        moments; options not given keep their values. `session.task` is the run's, or for text one
        without its data."""
        _refuse_others(options)
        saved = find_saved(Path(folder), Ranks(), _warn)
        if saved is None:
            raise InputError(f"folder must have a checkpoint, got {folder}")
        config = parse_options({"resume": os.fspath(folder), **options})
        session = cls.__new__(cls)
        # a checkpoint is also the folder of a model
        session._start(config.replace(resume=None, model=str(saved.directory), reward=()))
        load_learner(saved.directory / "state", session.learner, session._ranks)
        session._draws = saved.progress.step
        return session

    @classmethod
    def tiny(cls, **options: Any) -> "Session":
        """Return a session on a new policy of 0.1 million parameters, whose words are "after", the
        letters a to z and the digits."""
        special = "<pad>", "<bos>", "<eos>", "<unk>"
        words = [*special, "after", *string.ascii_lowercase, *string.digits]
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
        sizes |= {"vocab_size": len(words), "max_position_embeddings": 512}
        policy = new_policy(seed=0, rope_theta=100.0, **sizes)
        files = word_tokenizer_files(words, len(words)) | new_files(policy.config, (2,))
        with tempfile.TemporaryDirectory() as folder:
            write_policy(Path(folder), "float32", policy.weights(), files)
            return cls(folder, **{"lr": 3e-3, "clip_grad": 1.0, **options})

    def _start(self, config: Config) -> None:
        check(config)
        self._ranks, device = Ranks.of_environment(), resolve_device(config.run.device)
        connection = self._ranks.connected(device)
        connection.__enter__()

        @atexit.register
        def leave() -> None:
            error = getattr(sys, "last_value", None)  # what ends the program; other ranks end too
            connection.__exit__(type(error) if error else None, error, None)

        config = find_policy(config, self._ranks, _warn)
        folder = config.model.directory
        self.task: Any  # a Task
        if dataset_spec(config.task.task) is None or folder is None:
            self.task = build_run_task(config)
        else:
            self.task = _GivenTexts(folder, "", False, **text_options(config.task))
        resolved = resolve(config, self.task, self._ranks, warn=_warn)
        torch.set_num_threads(resolved.run.threads)
        place = self._ranks, device
        self.config, policy, teacher = build_policies(resolved, self.task, *place, None)
        context, _ = build_context(self.config, self.task, policy, teacher, *place)
        self.engine, self.learner = context.engine, build_learner(context)
        self.learner.copy_policy()
        self._files = build_policy_files(self.task, policy, self.config.model.directory)
        self._draws, self._is_new = 0, True  # whether the engine has other weights

    def encode(self, prompts: Any, responses: Sequence[Sequence[str]] = ()) -> SessionSamples:
        """Return given texts as samples, with log-probs of 0.

        Args:
            prompts: G texts or lists of messages; a text is a message of the user where the
                tokenizer has a chat template. Or `Prompts`, as tasks return them.
            responses: [G][N] texts, which end as the template ends them.
        """
        given = list[list[int]]()
        if not isinstance(prompts, Prompts):
            task, read = self.task, list[Any]()
            if not isinstance(task, TextTask):
                raise InputError(f"prompts must be Prompts, as {task.name} returns them")
            if isinstance(prompts, str) or not prompts:
                raise InputError(f"prompts must be a list of at least one, got {prompts!r:.80}")
            for i, x in enumerate(prompts):
                x = read_prompt(x, f"prompts[{i}]")
                read.append(task.prompt(x) if isinstance(x, str) else x)
            if responses and (len(responses) != len(read) or len({*map(len, responses)}) > 1):
                raise InputError(f"responses must be as many to each of {len(read)} prompts")
            pairs = [(x, y) for x, own in zip(read, responses, strict=False) for y in own]
            names = [f"responses, {i}" for i in range(len(pairs))]
            given = [tokens for _, tokens in task.encode_demonstrations(pairs, names)]
            ids = [task.encode_prompt(x, f"prompts[{i}]") for i, x in enumerate(read)]
            prompts = prompts_of(ids, range(len(ids)), [{}] * len(ids))
        device, rollouts = self.learner.model.lm_head.weight.device, Rollouts.given(given)
        temperature = self.config.rollout.temperature
        return SessionSamples(prompts.to(device), rollouts.to(device), self.task, temperature)

    def sample(
        self,
        prompts: Any,
        n: int = 1,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> SessionSamples:
        """Sample n responses to each prompt, as of `encode`, with the newest weights. None: the
        session's option, or as many tokens as the positions leave. Each call draws other random
        numbers."""
        own, sampling = self.encode(prompts).prompts, build_sampling(self.config, self.task)
        room = self.learner.model.config.max_position_embeddings - int(own.lengths.max())
        sampling = replace(
            sampling,
            temperature=sampling.temperature if temperature is None else temperature,
            max_new_tokens=max_new_tokens or max(1, min(sampling.max_new_tokens, room)),
        )
        if self._is_new:
            self.engine.load_weights(self.learner.model)
            self._is_new = False
        start, count = self._ranks.part(len(own))
        asked = own.take(start, count), n, sampling, self.config.run.seed, self._draws + 1
        shared = self.config.rollout.vllm_tensor_parallel > 1
        request = RolloutRequest(*asked)
        part = sample_and_score(self.engine, self.task, None, request, shares_engine=shared)
        rollouts = self._ranks.gather(part.rollouts)
        self._draws += 1
        check_finite(rollouts, own, self._draws)
        return SessionSamples(own, rollouts, self.task, sampling.temperature)

    def forward(self, samples: SessionSamples) -> SessionSamples:
        """Return the samples with their log-probs under the policy."""
        model = self.learner.model
        logprobs = self.learner.passes.logprobs(model, samples, samples.sequences)
        return replace(samples, rollouts=replace(samples.rollouts, logprobs=logprobs))

    def forward_backward(
        self,
        samples: SessionSamples,
        advantages: Any,
        loss: str | Callable[..., Tensor] | None = None,
    ) -> None:
        """Add the gradient of the loss to that of earlier calls since the last `optim_step`.

        Args:
            advantages: [G, N], a list or a tensor.
            loss: as of `policy_gradient_loss`; None: the session's option.
        """
        device, learner = samples.rollouts.tokens.device, self.learner
        weights = torch.as_tensor(advantages, dtype=torch.float32, device=device)
        wanted, settings = [len(samples.prompts), samples.num_rollouts], learner.settings
        if [*weights.shape] != wanted or not weights.isfinite().all():
            raise InputError(f"advantages must be finite, {wanted}, got {[*weights.shape]}")
        if samples.temperature != settings.temperature:
            raise InputError(
                f"samples must have the temperature of the session, {settings.temperature:g}, got "
                f"{samples.temperature:g}"
            )
        try:
            if loss is not None:
                known = loss_of(loss) if isinstance(loss, str) else None
                learner.settings = replace(
                    settings,
                    loss=known.function if known else loss,
                    loss_options=None,
                    aggregation=(known and known.aggregation) or settings.aggregation,
                )
            self.engine.sleep()
            self._is_new = True
            if not settings.divergence_coef:
                samples = replace(samples, rollouts=learner.with_reference(samples))
            draw = self._draws, len(learner.accumulated)  # of losses that draw tokens
            learner.forward_backward(samples, weights.flatten(), samples.sequences, draw)
        except BaseException:
            learner.accumulated = []
            raise
        finally:
            learner.settings = settings

    def optim_step(self, lr: float | None = None) -> UpdateMetrics:
        """Take an optimizer step on the summed gradient. lr: None: the session's option.

        Raises:
            NonFiniteError: if loss or gradient are not finite; the weights are unchanged.
        """
        if not self.learner.accumulated:
            raise InputError("optim_step needs a forward_backward since the last one, got none")
        self._is_new, rate = True, self.config.optimizer.lr if lr is None else lr
        return self.learner.optim_step(when=f"draw {self._draws}", lr=rate)

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write a Hugging Face folder with the state that `from_run` continues from. It replaces
        one of an earlier `save`."""
        path, ranks = Path(out).absolute(), self._ranks
        new, old = (path.with_name(f".{path.name}.{x}") for x in ("new", "old"))
        saved = Snapshot.of(self.learner, ranks.is_first)
        if ranks.is_first:
            record = path / "progress.json"
            is_own = record.exists() and not (path.is_symlink() or read_json(record)["logs"])
            if path.exists() and not is_own:
                raise InputError(f"out must be a new folder or one of save, got {out}")
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)
        if ranks.is_first or saved.is_sharded:
            progress, options = Progress("training", self._draws), self.config.flat()
            sizes = self.learner.model.config
            content = progress_record(progress, sizes, {}, options, {}, ranks)
            write_checkpoint(new, content, saved, *self._files, options["model"], ranks)
        if ranks.is_first:  # a kill leaves the earlier folder, perhaps as `old`
            if path.exists():
                path.rename(old)
            new.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        ranks.wait_for_all()


def _refuse_others(options: Mapping[str, Any]) -> None:
    known = {name: x for name, x in known_options().items() if name in _OPTIONS}
    refuse_unknown({name: RawOption(x, name) for name, x in options.items()}, [], known)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)

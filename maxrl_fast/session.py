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
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.config.changes import checkpoints_of
from maxrl_fast.config.options import SHAPE, Config, Loss, Model
from maxrl_fast.config.parts import loss_of
from maxrl_fast.config.read import hint, parse_options
from maxrl_fast.config.resolve import resolve, tensor_parallel
from maxrl_fast.errors import InputError
from maxrl_fast.job.build import build_context, build_learner, build_policies
from maxrl_fast.job.build_policy import build_policy_files, build_sampling, find_policy
from maxrl_fast.job.build_task import build_run_task
from maxrl_fast.job.checkpoints import check_weights, progress_record, write_checkpoint
from maxrl_fast.job.learner_state import Snapshot, load_learner
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import find_saved
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.model.policy import new_policy
from maxrl_fast.records import Prompts, Rollouts, Samples, unpack
from maxrl_fast.rollout import RolloutRequest, check_finite
from maxrl_fast.rollout.sampling_and_scoring import sample_and_score
from maxrl_fast.runtime.device import resolve_device
from maxrl_fast.runtime.files import read_json, storing
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.dataset import DatasetOptions
from maxrl_fast.tasks.jsonl import check_utf8, read_prompt
from maxrl_fast.tasks.names import dataset_spec
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.tasks.texts import response_texts
from maxrl_fast.tasks.words import word_tokenizer_files
from maxrl_fast.training.learner import TOKEN_METRICS, UpdateMetrics

_OPTIONS = {field.name for group in (Model, Loss) for field in fields(group)} | {
    *("loss", "lr", "beta2", "weight_decay", "clip_grad", "token_budget", "checkpoint_activations"),
    *("rollout", "vllm_url", "vllm_tensor_parallel", "kv_cache_gb", "max_new_tokens", "top_p"),
    *("temperature", "stop", "plain_prompts", "system_prompt", "allow_special_tokens"),
    *("chat_template", "chat_template_kwargs", "template_date"),
    *("seed", "device", "dtype", "compile", "sharding", "threads"),
} - {"model", "teacher_prompt"}


_SIZES = SHAPE - {"lora_rank", "lora_targets", "model_backend"}


class _GivenTexts(TextTask):
    name, fingerprint, reward, answer_limit = "texts of a session", "", None, None
    prompt_length, max_new_tokens, num_test_prompts, has_demonstrations = 1, 256, 1, False


@dataclass(frozen=True)
class SessionSamples(Samples):
    """N responses to each of G prompts. Lists are [G][N]."""

    task: Task
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
        _refuse_others(options)
        model = _path_text("model", model)
        self._start(parse_options({"task": "dataset", "model": model, **options}))

    @classmethod
    def from_run(cls, folder: str | os.PathLike[str], **options: Any) -> "Session":
        """Continue from the newest checkpoint of a run, or from what `save` wrote, with its Adam
        moments; options not given keep their values. `session.task` is the run's, or for text one
        without its data."""
        _refuse_others(options)
        places = _places("folder", folder)
        path = next(filter(os.path.lexists, places), places[0])  # where a kill left it
        is_saved = checkpoints_of(path) or (path / "progress.json").exists()
        saved = find_saved(path, Ranks(), _warn) if is_saved else None
        if saved is None:
            raise InputError(f"folder must be of a run with a checkpoint, or of save, got {folder}")
        config = parse_options({"resume": str(path), **options})
        # objective and rewards are the caller's; a session has no data of text
        kept = {*_OPTIONS, *config.parts["loss"], *config.parts["rollout"], "prompts", "rollouts"}
        if dataset_spec(config.chosen.task) is None:
            kept |= {"task", *config.parts["task"], *vars(config.warm_start), "eval_prompts"}
        # a checkpoint is also the folder of a model, with sizes of its own
        values = {name: x for name, x in config.flat().items() if name in kept - _SIZES}
        session = cls.__new__(cls)
        of_run = {"task": "dataset", **values, "model": str(saved.directory)}
        session._start(parse_options(of_run))
        session._base = saved.options.get("model")
        load_learner(saved.directory / "state", session.learner, session._ranks)
        session._draws = saved.progress.step
        return session

    @classmethod
    def tiny(cls, **options: Any) -> "Session":
        """Return a session on a new policy of 0.1 million parameters, whose words are "after", the
        letters a to z and the digits."""
        special = "<pad>", "<bos>", "<eos>", "<unk>"
        words = [*special, "after", *string.ascii_lowercase, *string.digits]
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        sizes |= {"vocab_size": len(words), "max_position_embeddings": 512}
        policy = new_policy(seed=0, rope_theta=100.0, **sizes)
        files = word_tokenizer_files(words, len(words)) | new_files(policy.config, (2,))
        with tempfile.TemporaryDirectory() as folder:
            write_policy(Path(folder), "float32", policy.weights(), files)
            session = cls(folder, **{"lr": 3e-3, "clip_grad": 1.0, **options})
        session._base = None
        return session

    def _start(self, config: Config) -> None:
        self._ranks, device = Ranks.of_environment(), resolve_device(config.run.device)
        _connect(device)
        config = find_policy(config, self._ranks, _warn)
        self._base = config.model.model  # what adapters are trained on
        folder = config.model.directory
        self.task: Any  # a Task
        if dataset_spec(config.chosen.task) is None or folder is None:
            self.task = build_run_task(config)
        else:
            self.task = _GivenTexts(folder, DatasetOptions(**config.parts["task"]))
        resolved = resolve(config, self.task, self._ranks, warn=_warn)
        torch.set_num_threads(resolved.run.threads)
        place = self._ranks, device
        self.config, policy, teacher = build_policies(resolved, self.task, *place, None)
        context, _ = build_context(self.config, self.task, policy, teacher, *place)
        self.engine, self.learner = context.engine, build_learner(context)
        self.learner.copy_policy()
        self._files = build_policy_files(self.task, policy, self.config.model.directory)
        self._draws, self._is_new = 0, True  # whether the engine has other weights
        self._ranks.wait_for_all()  # the folder of `tiny` is the first rank's

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
        temperature = self.config.sampling.temperature
        made = prompts.to(device), rollouts.to(device), self.task, temperature
        return self._checked(SessionSamples(*made, is_given=True))

    def _read(self, prompts: Any, responses: Any) -> tuple[Prompts, list[list[int]]]:
        task = self.task
        if not isinstance(task, TextTask):
            raise InputError(f"prompts must be Prompts, as {task.name} returns them")
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise InputError(f"prompts must be a list of at least one, got {prompts!r:.80}")
        places, pairs = [f"prompts[{i}]" for i in range(len(prompts))], list[Any]()
        read = [*map(read_prompt, prompts, places)]
        read = [task.prompt(x) if isinstance(x, str) else x for x in read]
        if responses is not None:
            rows = responses if isinstance(responses, (list, tuple)) else ()
            sizes = {len(x) if isinstance(x, (list, tuple)) else 0 for x in rows}
            is_right = len(rows) == len(read) and len(sizes) == 1 and 0 not in sizes
            if not is_right or not all(isinstance(y, str) for x in rows for y in x):
                wanted = f"lists of texts, as many to each of {len(read)} prompts"
                raise InputError(f"responses must be {wanted}, got {responses!r:.80}")
            pairs = [(x, y) for x, own in zip(read, rows, strict=True) for y in own]
        names = [f"responses, {i}" for i in range(len(pairs))]
        texts = [y for _, y in pairs]
        for text, name in zip(texts, names, strict=True):
            check_utf8(text, name)
        given = [tokens for _, tokens in task.encode_demonstrations(pairs, names)]
        ids = [*map(task.encode_prompt, read, places)]
        # `tiny` knows words, and its tokenizer leaves out others
        is_words = len(task.tokenizer.added_tokens_decoder) == len(task.tokenizer)
        for text, tokens, place in zip(read + texts, ids + given, places + names, strict=True):
            if not tokens or (is_words and task.decode(tokens) != "".join(text.split())):
                raise InputError(f"{place} must be text that the tokenizer knows, got {text!r:.80}")
        return prompts_of(ids, range(len(ids)), [{}] * len(ids)), given

    def _checked(self, samples: Any) -> SessionSamples:
        if not isinstance(samples, SessionSamples):
            raise InputError(f"samples must be of sample or encode, got {samples!r:.80}")
        own, rollouts, sizes = samples.prompts, samples.rollouts, self.learner.model.config
        lengths = own.lengths.repeat_interleave(samples.num_rollouts) + rollouts.lengths
        found = max(lengths.tolist(), default=0)
        last = int(torch.cat([own.tokens, rollouts.all_tokens]).max())
        if found > sizes.max_position_embeddings or last >= sizes.vocab_size:
            wanted = f"at most {sizes.max_position_embeddings} tokens below {sizes.vocab_size}"
            raise InputError(f"samples must have {wanted}, got {found} tokens, up to {last}")
        return samples

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
        n = _number("n", n, Integral)
        own, sampling = self.encode(prompts).prompts, build_sampling(self.config, self.task)
        room = self.learner.model.config.max_position_embeddings - int(own.lengths.max())
        if temperature is None:
            temperature = sampling.temperature
        if max_new_tokens is None:
            max_new_tokens = max(1, min(sampling.max_new_tokens, room))
        sampling = replace(
            sampling,
            temperature=_number("temperature", temperature, Real),
            max_new_tokens=_number("max_new_tokens", max_new_tokens, Integral),
        )
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
        if not len(samples.rollouts):
            raise InputError("samples must have responses, got none")
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
        samples, learner = self._checked(samples), self.learner
        shape, usual = [len(samples.prompts), samples.num_rollouts], learner.settings
        try:
            weights = torch.as_tensor(advantages, device=samples.rollouts.tokens.device).detach()
            is_right = [*weights.shape] == shape and not weights.is_complex()
            is_right = is_right and bool(weights.isfinite().all())
        except (TypeError, ValueError, RuntimeError, OverflowError):  # of what is no tensor
            is_right = False
        if not is_right:
            raise InputError(f"advantages must be finite, {shape}, got {advantages!r:.80}")
        if (found := samples.temperature) != usual.temperature:
            wanted = f"the temperature of the session, {usual.temperature:g}"
            raise InputError(f"samples must have {wanted}, got {found:g}")
        try:
            if loss is not None:
                known = loss_of(loss) if isinstance(loss, str) else None
                try:
                    learner.settings = replace(
                        usual,
                        loss=known.function if known else loss,
                        loss_options=None,
                        aggregation=(known and known.aggregation) or usual.aggregation,
                    )
                except (TypeError, ValueError) as error:
                    raise InputError(f"loss must be a name or a function: {error}") from error
            self.engine.sleep()
            self._is_new = True
            if samples.is_given:  # a ratio is to the policy's own log-probs
                samples = self.forward(samples)
            if not learner.settings.divergence_coef:
                samples = replace(samples, rollouts=learner.with_reference(samples))
            draw = self._draws, len(learner.accumulated)  # of losses that draw tokens
            values = weights.float().flatten()
            learner.forward_backward(samples, values, samples.sequences, draw)
        except InputError:  # of an argument: nothing has begun
            raise
        except BaseException:
            learner.accumulated = []
            raise
        finally:
            learner.settings = usual

    def optim_step(self, lr: float | None = None) -> UpdateMetrics:
        """Take an optimizer step on the summed gradient. lr: None: the session's option. From
        `ratio` to `logprob_diff`, the metrics are means over the tokens trained on. NonFiniteError:
        loss or gradient are not finite; the weights are unchanged."""
        if not self.learner.accumulated:
            raise InputError("optim_step needs a forward_backward since the last one, got none")
        rate = self.config.optimizer.lr if lr is None else _number("lr", lr, Real)
        self._is_new = True
        found = self.learner.optim_step(when=f"draw {self._draws}", lr=rate)
        means = {x: getattr(found, x) / max(found.num_targets, 1) for x in TOKEN_METRICS}
        return replace(found, **means if found.num_targets else {"ratio": 1.0})

    def save(self, out: str | os.PathLike[str]) -> None:
        """Write, or replace, a Hugging Face folder with the state that `from_run` continues."""
        path, new, old = places = _places("out", out)
        ranks, left, wrong = self._ranks, path, ""
        check_weights(self.learner, f"draw {self._draws}", ranks)
        if ranks.is_first:
            left = next(filter(os.path.lexists, places), path)
            record = left / "progress.json"
            is_own = record.exists() and not (left.is_symlink() or read_json(record).get("logs", 1))
            is_base = self.config.model.lora_rank and self._base == str(path)
            if is_base or (os.path.lexists(left) and not is_own):
                wrong = f"out must be a new folder or one of save, not the adapters' model: {left}"
        if wrong := ranks.values(wrong)[0]:
            raise InputError(wrong)
        saved = Snapshot.of(self.learner, ranks.is_first)
        with storing(str(path)):
            if ranks.is_first:
                if left != path:  # a kill left it between the renames below
                    left.rename(path)
                shutil.rmtree(new, ignore_errors=True)
            if ranks.is_first or saved.is_sharded:
                progress, sizes = Progress("training", self._draws), self.learner.model.config
                options = self.config.flat() | {"model": self._base}
                content = progress_record(progress, sizes, {}, options, {}, ranks)
                write_checkpoint(new, content, saved, *self._files, self._base, ranks)
            if ranks.is_first:  # a kill leaves a whole folder, perhaps as `new` and `old`
                if path.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    path.rename(old)
                new.rename(path)
                shutil.rmtree(old, ignore_errors=True)
        ranks.wait_for_all()


@cache
def _connect(device: torch.device) -> None:
    """Connect the ranks, once in a program."""
    connection = Ranks.of_environment().connected(device)
    connection.__enter__()

    @atexit.register
    def leave() -> None:
        error = getattr(sys, "last_value", None)  # what ends the program; other ranks end too
        connection.__exit__(type(error) if error else None, error, None)


def _number(name: str, value: Any, kind: type) -> Any:
    is_whole, is_kind = kind is Integral, isinstance(value, kind) and not isinstance(value, bool)
    if not is_kind or not is_whole <= value < 2**31:  # a NaN is in no range
        wanted = "an integer of at least 1" if is_whole else "finite and not negative"
        raise InputError(f"{name} must be {wanted}, got {value!r:.80}")
    return int(value) if is_whole else float(value)


def _path_text(name: str, path: Any) -> str:
    try:
        text = os.path.expanduser(path)
        if text and isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    except (TypeError, ValueError):  # of what is no path, of half characters
        pass
    raise InputError(f"{name} must be the path of a folder, got {path!r:.80}")


def _places(name: str, folder: Any) -> list[Path]:
    """Return where `save` has whole folders, the one that counts first."""
    path = Path(_path_text(name, folder)).absolute()
    return [path, *(path.parent / f".{path.name}.{x}" for x in ("new", "old"))]


def _refuse_others(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise InputError(f"unknown option {name:.80}{hint(name, _OPTIONS, is_flag=False)}")


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)

"""Every option of `python -m maxrl_fast.evaluate`, with its help and default: as parsed, and as resolved."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from maxrl_fast.config.conditions import NO_VLLM_SERVER
from maxrl_fast.config.metadata import (
    AT_LEAST_1,
    BetweenZeroAndOne,
    Count,
    CountOrZero,
    Default,
    NotNegative,
    Positive,
    Seed,
    Share,
    UnitInterval,
)
from maxrl_fast.config.options import RewardOptions, TaskOptions, as_json


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured."""

    prompts: Annotated[Count | None, Default("256, or all that are held out")] = None
    """Number of prompts: the first of the split."""
    samples: Annotated[int, AT_LEAST_1] = 256
    """Responses to each prompt (n)."""
    k: Annotated[tuple[int, ...], Default("1 2 4 ... up to --samples", "INT ...")] = ()
    """Sizes at which pass@k, max@k and maj@k are reported, each from 1 to --samples."""
    split: Literal["test", "train"] = "test"
    """Held-out prompts, or training prompts, which repeat where a file has fewer."""
    baseline: Annotated[str | None, Default("none", "DIR")] = None
    """Compare with this: another CHECKPOINT, which is then sampled too, or the folder of a finished evaluation of the same
    prompts, samples and sampling."""
    bootstrap: Annotated[int, AT_LEAST_1] = 1000
    """Bootstrap resamples of the prompts for the intervals."""
    confidence: BetweenZeroAndOne = 0.95
    """Confidence of the intervals."""
    embeddings: Annotated[Path | None, Default("none, counts of token n-grams", "DIR")] = None
    """Local embedding model (transformers, safetensors) by which diversity is measured: its mean last hidden state."""
    compare: Annotated[tuple[Path, ...], Default("none", "RUN ...")] = ()
    """Compare these folders of finished evaluations, in a table and a picture; takes no CHECKPOINT."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled. The papers evaluate language models with --temperature .6 --top-p .95."""

    temperature: NotNegative = 1.0
    """Sampling temperature; 0: greedy decoding, with one sample."""
    top_k: CountOrZero = 0
    """Top-k sampling: sample from this many of the most probable tokens; 0: from all."""
    top_p: Share = 1.0
    """Nucleus (top-p) sampling: sample from the most probable tokens that have this much of the probability; 1: from all."""
    min_p: UnitInterval = 0.0
    """Min-p sampling: sample from tokens with at least this fraction of the most probable token's probability."""
    max_new_tokens: Annotated[Count | None, Default("the run's, else the task's")] = None
    """Response limit, in tokens."""
    rollout: str = "native"
    """Rollout engine: native; vllm where that is installed; FILE.py:CLASS, your own; or the name of an installed one."""
    kv_cache_gb: Annotated[Positive | None, Default("an eighth of the memory, a quarter of a GPU's"), NO_VLLM_SERVER] = None
    """KV-cache limit, in 1e9 bytes, on a GPU with the tensors of a decoding step; samples that do not fit wait for others to
    end."""
    seed: Annotated[Seed | None, Default("the run's, else 0")] = None
    """Seed of the sampling and the bootstrap: a sample depends on it, its prompt and its number alone (vllm: on the batch)."""


@dataclass(frozen=True)
class PlaceOptions:
    """Where it is computed and written."""

    out: Annotated[Path | None, Default("evaluations/<name>-<time>", "DIR")] = None
    """Folder of results, new or empty."""
    task_seed: Annotated[Seed | None, Default("the run's, else 0")] = None
    """Seed of the mazes and of the order of training prompts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    threads: Annotated[Count | None, Default("those this process may use")] = None
    """Number of CPU threads."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Sample many responses to each held-out prompt, and report pass@k, max@k, maj@k and diversity.

    CHECKPOINT is a Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION of the hub, or the folder of a run of
    maxrl_fast.train: its best checkpoint, else its latest. Of a run, and of a checkpoint in its folder, the task's options are
    the run's, unless others are given.

    Examples: python -m maxrl_fast.evaluate runs/maxpo-... --samples 256

    python -m maxrl_fast.evaluate runs/maxpo-... --baseline runs/maxpo-.../checkpoints/step-000000

    python -m maxrl_fast.evaluate DIR --task dataset --data prompts.jsonl --reward reward.py:score --temperature .6 --top-p .95

    python -m maxrl_fast.evaluate --compare evaluations/one evaluations/other
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT", help_behavior_hint="")] = None
    """Checkpoint directory, hf://ORG/NAME of the hub, or the folder of a run."""
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    task: TaskOptions = field(default_factory=TaskOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    place: PlaceOptions = field(default_factory=PlaceOptions)

    def flat(self) -> dict[str, Any]:
        """All options by flag name, in the types of JSON."""
        groups = (self.measure, self.sampling, self.task, self.place)
        values = {"checkpoint": self.checkpoint} | {name: value for group in groups for name, value in vars(group).items()}
        return {name: _json(value) for name, value in values.items()} | {
            name: as_json(value) for name, value in vars(self.reward).items()
        }


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True, kw_only=True)
class ResolvedMeasure(MeasureOptions):
    prompts: int


@dataclass(frozen=True, kw_only=True)
class ResolvedSampling(SamplingOptions):
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ResolvedPlace(PlaceOptions):
    out: Path
    task_seed: int
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    threads: int


@dataclass(frozen=True, kw_only=True)
class ResolvedEvaluationConfig(EvaluationConfig):
    """A checked configuration whose defaults are all worked out."""

    measure: ResolvedMeasure
    sampling: ResolvedSampling
    place: ResolvedPlace

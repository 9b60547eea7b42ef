"""The estimates of memory that --dry-run prints: against measured peaks, and what divides them."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maxrl_fast import train
from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.describe import estimate_memory
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.runtime.device import Machine
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import Learner, LossSettings, make_optimizer
from tests.batches import make_prompts
from tests.model.test_huggingface import tiny_policy
from tests.models import updated


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside make, while they live."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            {x.untyped_storage()._cdata: x for x in tree_leaves(y) if torch.is_tensor(x)}
            for y in ((args, kwargs), out)
        )
        for key, x in made.items():
            if key not in given and key not in self.live and not x.is_meta:
                self.live[key] = x.untyped_storage().nbytes()
                self.now += self.live[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(x.untyped_storage(), self._free, key)
        return out

    def _free(self, key):
        self.now -= self.live.pop(key)


def measured_update(model, dtype, lengths=(64, 48)):
    """Return the peak of the bytes that an update allocates beside the training state, and the
    tokens of its one pass.
    """
    prompts = make_prompts([list(range(3, 3 + lengths[0]))] * 4)
    generator = torch.Generator().manual_seed(0)
    rollouts = Rollouts.given(
        [torch.randint(3, 290, (lengths[1],), generator=generator).tolist() for _ in range(16)]
    )
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.01)
    settings = LossSettings("ppo", "token_mean")
    learner = Learner(model, optimizer, settings, 1e9, 10_000, dtype)
    given = Samples(prompts, rollouts), torch.randn(16, generator=generator), torch.arange(16)
    updated(learner, *given, when="step 1", lr=0.0)  # makes gradients and moments
    with LiveBytes() as counted:
        done = updated(learner, *given, when="step 2", lr=0.0)
    return counted.peak, done.num_tokens


def estimated(model, machine, *flags, sharding="none"):
    task = MazeTask(9)
    config = resolve(parse([*flags]), task).replace(sharding=sharding)
    return estimate_memory(RunContext(config, task, model), machine)


SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 300}
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("family", "dtype", "checkpoint", "rank"),
    [
        ("qwen3", "bfloat16", False, 0),
        ("llama", "float32", True, 4),
        ("gemma3_text", "bfloat16", True, 0),
    ],
)
def test_the_estimate_of_an_update_is_near_its_measured_peak(family, dtype, checkpoint, rank):
    model = tiny_policy(family, **SIZES, **HEADS) if family == "gemma3_text" else None
    if model is None:
        model = Decoder(DecoderConfig(**SIZES, **HEADS, model_type=family))
        model.initialise(0)
    if rank:
        add_adapters(model, rank, 32.0, "q_proj,v_proj,down_proj", 0)
    model.checkpoint_activations = checkpoint
    peak, tokens = measured_update(model, getattr(torch, dtype))
    flags = f"--dtype {dtype} --token-budget {tokens}".split()
    flags += ["--checkpoint-activations"] * checkpoint
    memory = estimated(model, Machine("cpu", 1, 10**10), *flags)
    own = ("activations", "copies", "logits")
    update = sum(size for name, size in memory.items() if name.startswith(own))
    most = 1.6 if family != "gemma3_text" else 1.7
    assert 0.8 < update / peak < most  # less is kept where weights have no gradients


SEVEN_BILLION = (
    "--hidden-size 4096 --intermediate-size 16384 --layers 28 --heads 32 --kv-heads 8".split()
)


def test_a_dry_run_for_a_machine_that_is_not_here_says_whether_it_fits(capsys):
    assert train.main(["--dry-run", "8x80", *SEVEN_BILLION]) == 0
    text = capsys.readouterr().out
    asked = "memory of each of 8 GPUs of 80 GB|It fits|sharding = full|dtype = bfloat16"
    assert all(words in text for words in asked.split("|"))  # for that machine
    assert train.main(["--dry-run", "1x24", *SEVEN_BILLION]) == 0
    assert "It does not fit: it needs" in capsys.readouterr().out

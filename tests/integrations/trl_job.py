"""A tiny GRPOTrainer that keeps its rewards, its logged advantages and those that its loss saw.

    python -m tests.integrations.trl_job CLASS JSON FOLDER

CLASS is a name in TRAINERS, JSON has the options of `build`. Each process writes what it kept to
FOLDER/RANK.json."""

import json
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from examples.trl_pacs import PACSTrainer
from maxrl_fast.integrations.trl import AdvantageMixin, MaxPOTrainer, MaxRLTrainer

WORDS = ["<pad>", "<eos>", *"abcdefghijklmn"]


class OwnTrainer(AdvantageMixin, GRPOTrainer):
    """A subclass as a user writes it."""


TRAINERS = {"maxrl": MaxRLTrainer, "maxpo": MaxPOTrainer, "own": OwnTrainer, "pacs": PACSTrainer}


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def policy():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    # else padding has no gradient
    special = {"eos_token_id": 1, "pad_token_id": None, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), **sizes, **special)).float()


def recorded(base):
    """Return a subclass of the trainer that keeps each generated batch, the weights that sampled
    it, and what its loss saw."""

    class Recorded(base):
        def __init__(self, *args, **kwargs):
            self.generated, self.seen = [], []
            super().__init__(*args, **kwargs)

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
            responses = gather_object([list(ids) for ids in completion_ids])
            kept = {"prompts": gather_object(list(prompts)), "responses": responses}
            self.generated.append(kept | {"rewards": rewards.tolist()})
            return rewards

        def _generate_and_score_completions(self, inputs):
            model = self.accelerator.unwrap_model(self.model)
            self.sampler = {name: weight.clone() for name, weight in model.state_dict().items()}
            output = super()._generate_and_score_completions(inputs)
            size = len(self.generated[-1]["responses"])
            self.generated[-1]["logged"] = list(self._logs["advantages"])[-size:]
            assert len(self._logs["advantages"]) == len(self._logs["completion"])
            return output

    return Recorded


def score(completion_ids, *, unknown, binary):
    """Return how often two of the words occur, or whether; None where the reward is not known."""
    scores = []
    for ids in completion_ids:
        count = ids.count(2) + ids.count(3)
        scores.append(float(count > 0 if binary else count))
        if unknown and sum(ids) % 5 == 0:
            scores[-1] = None
    return scores


def build(
    name, folder, *, arguments=None, config=None, unknown=False, weights=(1.0,), callbacks=None
):
    """Return the trainer. arguments, config: those of the trainer, and of GRPOConfig; unknown:
    whether some rewards are not known; weights: those of the rewards; the second is by length, and
    never known for some responses."""

    def reward(completion_ids, **_):
        return score(completion_ids, unknown=unknown, binary=name == "pacs")

    def length(completion_ids, **_):
        return [None if sum(ids) % 3 == 0 else len(ids) / 4 for ids in completion_ids]

    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    settings |= {"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": []}
    settings |= {"save_strategy": "no", "use_cpu": True, "bf16": False, "seed": 1}
    settings |= {"disable_tqdm": True, "gradient_checkpointing": False, "max_grad_norm": 0.0}
    return recorded(TRAINERS[name])(
        model=policy(),
        reward_funcs=[reward, length][: len(weights)],
        args=GRPOConfig(
            output_dir=str(folder), reward_weights=list(weights), **(settings | (config or {}))
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{a} {b}" for a in "cdef" for b in "ghijk"]}),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **(arguments or {}),
    )


def train(trainer):
    """Train; `seen` then has prompt, response and advantage of each row of TRL's own loss."""
    original = GRPOTrainer._compute_loss

    def compute_loss(self, model, inputs):
        prompts, responses = (
            [
                ids[mask.bool()].tolist()
                for ids, mask in zip(inputs[f"{part}_ids"], inputs[f"{part}_mask"], strict=True)
            ]
            for part in ("prompt", "completion")
        )
        trainer.seen += zip(prompts, responses, inputs["advantages"].tolist(), strict=True)
        return original(self, model, inputs)

    GRPOTrainer._compute_loss = compute_loss
    try:
        trainer.train()
    finally:
        GRPOTrainer._compute_loss = original


def run(name, folder, **options):
    trainer = build(name, folder, **options)
    train(trainer)
    return trainer


if __name__ == "__main__":
    trainer = run(sys.argv[1], sys.argv[3], **json.loads(sys.argv[2]))
    rank, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    record = {"processes": processes, "generated": trainer.generated, "seen": trainer.seen}
    (Path(sys.argv[3]) / f"{rank}.json").write_text(json.dumps(record))

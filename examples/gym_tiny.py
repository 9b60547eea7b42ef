"""Reinforcement learning on text without a download.

The script makes a tokenizer and a Qwen2 model with 0.7 million parameters, which learns to spell
short words of reasoning-gym backward. The rewards come from reasoning-gym's own checker, in worker
processes.

    make setup-hf
    python examples/gym_tiny.py [OUT] [OPTION ...]

OUT is the folder of the policy and the run (default: runs/gym_tiny). The options are those of
maxrl_fast.train, and override the script's. It takes two minutes on two cores.
"""

import json
import sys
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from maxrl_fast import train

TASK, OPTIONS = "spell_backward", {"min_word_len": 3, "max_word_len": 4}


def make_policy(directory: Path) -> None:
    """Save a byte-level BPE tokenizer, trained on the task's questions, and a new Qwen2 for it.

    The few merges all go to words that every question has, so the word to spell stays split into
    letters.
    """
    questions = [
        entry["question"]
        for entry in reasoning_gym.create_dataset(TASK, size=2000, seed=1, **OPTIONS)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(questions, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    config = Qwen2Config(
        vocab_size=len(fast),
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_theta=1000.0,
        eos_token_id=fast.eos_token_id,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def main() -> int:
    """Train by supervised learning until some answers are correct, then by reinforcement
    learning.
    """
    more = sys.argv[1:]
    if {"-h", "--help"} & {*more}:
        print(__doc__)
        return 0
    out = Path(more.pop(0) if more and not more[0].startswith("-") else "runs/gym_tiny")
    logging.disable_progress_bar()
    model, run = out / "policy", out / "run"
    make_policy(model)
    flags = {
        "objective": "maxrl",
        "task": f"gym:{TASK}",
        **OPTIONS,
        # the checker gives part of the reward for each letter in its place
        "reward-threshold": 0.99,
        "model": model,
        "max-prompt-tokens": 48,
        "max-new-tokens": 6,
        "sft-steps": 250,
        "sft-batch": 64,
        "sft-lr": 3e-3,
        "steps": 100,
        "prompts": 32,
        "rollouts": 16,
        "lr": 1e-3,
        "out": run,
    }
    code = train.main([f"--{name}={value}" for name, value in flags.items()] + more)
    if code:
        return code
    for line in (run / "samples.jsonl").read_text().splitlines()[-4:]:
        sample = json.loads(line)
        print(f"{sample['prompt']!r} -> {sample['response']!r}: {sample['reward']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

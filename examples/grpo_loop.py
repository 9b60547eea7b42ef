"""GRPO in plain PyTorch, with a model of transformers and without a trainer: `python
examples/grpo_loop.py`.

A tiny random model learns to answer "after c" with "d" in 10 seconds. For a model and a reward of
your own, change PROMPTS and `reward`, then `python examples/grpo_loop.py --model
Qwen/Qwen2.5-0.5B-Instruct --lr 1e-6 --tokens 512`.
"""

import argparse
import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from maxrl_fast import ops

# G; yours: a batch of your data in each step
PROMPTS = [f"after {letter}" for letter in "abcdefgh"]


def reward(prompt: str, response: str) -> float:
    return float(response.split()[:1] == [chr(ord(prompt[-1]) + 1)])


def tiny() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    words = ["<pad>", "<end>", "after", *string.ascii_lowercase]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Qwen2Config(
        vocab_size=len(words), num_key_value_heads=4, eos_token_id=1, bos_token_id=None, **sizes
    )
    return Qwen2ForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )


parser = argparse.ArgumentParser(description=__doc__)
for name, default in {
    "model": "",
    "lr": 3e-3,
    "steps": 60,
    "tokens": 4,
    "rollouts": 16,
    "estimator": "grpo",
    "k": 0,
}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
options = parser.parse_args()
torch.manual_seed(0)
if options.model:  # float32, as bfloat16 would round small updates away
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
else:
    model, tokenizer = tiny()
tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
model.to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
for step in range(options.steps + 1):
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(model.device)
    sampling = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sampling |= {"max_new_tokens": options.tokens, "num_return_sequences": options.rollouts}
    sequences = model.generate(**inputs, **sampling)  # [S, P + T], S = G N
    length = inputs["input_ids"].shape[1]  # P
    responses = sequences[:, length:]
    ends = responses == tokenizer.eos_token_id
    mask = ends.cumsum(1) - ends.long() == 0  # [S, T], up to and with the stop token
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = torch.tensor(
        [reward(PROMPTS[i // options.rollouts], text) for i, text in enumerate(texts)]
    )
    if step % 20 == 0:
        print(
            f"step {step:3d}: mean reward {rewards.mean():.2f}, for example {PROMPTS[0]!r} "
            f"{texts[0]!r}"
        )
    sizes = {"k": options.k} if options.k else {}  # of max@k: --estimator maxpo --k 4
    # [S]
    advantages = ops.group_advantage(
        rewards.view(-1, options.rollouts), options.estimator, **sizes
    ).flatten()
    attention = torch.cat(
        [inputs["attention_mask"].repeat_interleave(options.rollouts, 0), mask.long()], 1
    )
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(
        input_ids=sequences, attention_mask=attention, position_ids=positions
    ).last_hidden_state
    # packed: no padding reaches the loss
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    before, weight = hidden[:, length - 1 : -1][mask], model.get_output_embeddings().weight
    loss, _ = ops.linear_policy_gradient_loss(
        before, weight, responses[mask], advantages.to(model.device), cu_seqlens
    )
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

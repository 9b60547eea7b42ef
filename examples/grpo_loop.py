"""Your own training loop on maxrl_fast.Session: `python examples/grpo_loop.py`.

A tiny random model learns to answer "after c" with "d" in 10 seconds. For a model and a reward of
your own, change PROMPTS and `reward`, then `python examples/grpo_loop.py --model
hf://Qwen/Qwen2.5-0.5B-Instruct --lr 1e-6 --tokens 512`. docs/session.md explains the calls.
"""

import argparse

from tiny import tiny_session

from maxrl_fast import Session, group_advantage

# G; yours: a batch of your data in each step
PROMPTS = [f"after {letter}" for letter in "abcdefgh"]


def reward(prompt: str, response: str) -> float:
    return float(response[:1] == chr(ord(prompt[-1]) + 1))


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
session = Session(options.model) if options.model else tiny_session()
sizes = {"k": options.k} if options.k else {}  # of max@k: --estimator maxpo --k 4
for step in range(options.steps + 1):
    rollouts = session.sample(PROMPTS, n=options.rollouts, max_new_tokens=options.tokens)
    rewards = [
        [reward(prompt, text) for text in texts]
        for prompt, texts in zip(PROMPTS, rollouts.texts, strict=True)
    ]  # [G][N]
    if step % 20 == 0:
        mean = sum(map(sum, rewards)) / len(PROMPTS) / options.rollouts
        example = f"{PROMPTS[0]!r} {rollouts.texts[0][0]!r}"
        print(f"step {step:3d}: mean reward {mean:.2f}, for example {example}")
    advantages = group_advantage(rewards, options.estimator, **sizes)
    session.forward_backward(rollouts, advantages)
    session.optim_step(lr=options.lr)

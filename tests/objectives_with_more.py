"""Flags of runs with objectives that need more than the rewards of one group: for tests of several
processes and resuming.
"""

REWARDS = """
def is_even(prompt, response):
    return float(len(response.split()) % 2 == 0)

def share_of_right(prompt, response):
    return response.count("RIGHT") / (1 + len(response.split()))

def dense(prompt, response):
    words = response.split()
    return {"right": words.count("RIGHT") / (1 + len(words)), "even": float(len(words) % 2 == 0)}
"""
ADVANTAGE = """
import torch

def by_token(rewards, lengths, texts, components):
    even = torch.tensor([[parts["even"] for parts in group] for group in components])
    same = torch.tensor([[group.count(text) for text in group] for group in texts])
    values = rewards / same + even
    each = zip((values - values.mean(1, keepdim=True)).flatten(), lengths.flatten().tolist())
    return torch.cat([value * 0.8 ** torch.arange(n) for value, n in each])
"""
NAMES = ("gdpo", "hero", "rl_zvp", "riskpo", "by_token")


def flags_of(name, folder):
    """Return the flags of an objective; `folder` gets the file of the rewards. The prompts must be
    a multiple of 4.
    """
    (folder / "rewards.py").write_text(REWARDS)
    if name == "by_token":
        (folder / "mine.py").write_text(ADVANTAGE)
        flags = ["--objective", f"{folder}/mine.py:by_token", "--updates-per-step", "2"]
        return [*flags, "--reward", f"{folder}/rewards.py:dense"]
    flags = ["--objective", name, "--updates-per-step", "2"]
    if name == "riskpo":  # with 3 or 6 prompts on each of two processes, a bundle is of both
        flags += ["--bundle-size", "4", "--reward", f"{folder}/rewards.py:share_of_right"]
    if name in ("gdpo", "hero"):
        flags += ["--reward", f"{folder}/rewards.py:is_even", f"{folder}/rewards.py:share_of_right"]
    return flags

"""Flags of runs with objectives that need more than the rewards of one group: for tests of several
processes and resuming.
"""

REWARDS = """
def is_even(prompt, response):
    return float(len(response.split()) % 2 == 0)

def share_of_right(prompt, response):
    return response.count("RIGHT") / (1 + len(response.split()))
"""
NAMES = ("gdpo", "hero", "rl_zvp", "riskpo")


def flags_of(name, folder):
    """Return the flags of an objective; `folder` gets the file of the rewards. The prompts must be
    a multiple of 4.
    """
    (folder / "rewards.py").write_text(REWARDS)
    flags = ["--objective", name, "--updates-per-step", "2"]
    if name == "riskpo":  # with 3 or 6 prompts on each of two processes, a bundle is of both
        flags += ["--bundle-size", "4", "--reward", f"{folder}/rewards.py:share_of_right"]
    if name in ("gdpo", "hero"):
        flags += ["--reward", f"{folder}/rewards.py:is_even", f"{folder}/rewards.py:share_of_right"]
    return flags

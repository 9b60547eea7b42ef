"""A tiny policy with a token for every byte and a template like Qwen3's, and scripted turns."""

import json
import random
from pathlib import Path

import pytest

from maxrl_fast.config.options import Reward
from maxrl_fast.job.build_parts import build_task
from tests.tasks.test_dataset import CHAT_TOKENS, save_byte_level_policy, written

ENVIRONMENTS = Path(__file__).parent / "tasks" / "environments.py"
CALCULATOR = Path(__file__).parents[1] / "examples" / "calculator_environment.py"
TOOL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL_TOKENS += ("<tool_response>", "</tool_response>")
NL = r"{{ '\n' }}"  # Jinja drops a line's end after a block
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    f"{{{{ messages[0].content }}}}{NL}{NL}{{% endif %}}# Tools"
    f"{{% for tool in tools %}}{NL}{{{{ tool | tojson }}}}{{% endfor %}}"
    "<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    f"{{% for call in m.tool_calls or [] %}}{{% if m.content or not loop.first %}}{NL}{{% endif %}}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    f"{NL}<tool_response>\n{{{{ m.content }}}}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tool_policy(directory, chat=TEMPLATE, positions=4096, added=TOOL_TOKENS):
    marked = ("<|endoftext|>",)
    policy = save_byte_level_policy(directory, positions, CHAT_TOKENS, marked, added, chat)
    config = policy / "tokenizer_config.json"
    # as Qwen3's; otherwise it would be <|endoftext|>
    config.write_text(json.dumps(json.loads(config.read_text()) | {"unk_token": None}))
    # all that a worker reads to make schemas of tools; torch itself takes 3 s
    (policy / "torch.py").write_text("class Tensor: ...")
    return policy


def tool_task(
    policy, data, environment, max_turns=4, rewards=(), cls=None, needs_reward=True, **options
):
    """Return the task of an environment of `environments.py`, with limits for tests."""
    options = {"reward_workers": 2, "reward_seconds": 5.0, "reward": rewards, **options}
    name = environment if ":" in environment else f"{ENVIRONMENTS}:{environment}"
    own = {"data": (data,), "environment": name, "max_turns": max_turns, "max_prompt_tokens": 2000}
    rewards, needs = Reward(**options), {"needs_reward": needs_reward}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(policy)
        return build_task("dataset", own, 0, policy, rewards, environment=cls, **needs)


SUBMITTED = '<tool_call>\n{"name": "submit", "arguments": {"number": 2}}\n</tool_call><|im_end|>'


def calculator_job(folder):
    """Return the flags of a short run whose warm start teaches a call that is right for every other
    prompt.
    """
    lines = [{"prompt": f"{i}: What is 1 + {i % 2}?", "answer": 1 + i % 2} for i in range(24)]
    shown = [{"prompt": line["prompt"], "response": SUBMITTED} for line in lines]
    return (
        f"--task dataset --data {written(folder / 'data.jsonl', lines)} --environment "
        f"{CALCULATOR}:Calculator --model {save_tool_policy(folder / 'policy')} "
        f"--sft-data {written(folder / 'shown.jsonl', shown)} --allow-special-tokens "
        "--max-prompt-tokens 2000 --sft-steps 80 --sft-batch 4 --sft-lr 1e-2 --steps 3 --prompts 4 "
        "--rollouts 4 --max-new-tokens 200 --max-turns 2 --objective rloo --eval-prompts 1 "
        "--eval-samples 1 --device cpu --threads 1 --dtype float32 --keep-rollouts 16"
    ).split()


def turn_of(tokenizer, *calls, text=""):
    """Return the tokens of a turn: text, calls (a tool and its arguments, or raw text), stop."""
    blocks = [
        f"<tool_call>\n{call if isinstance(call, str) else _written(*call)}\n</tool_call>"
        for call in calls
    ]
    return tokenizer.encode("\n".join(filter(None, [text, *blocks])) + "<|im_end|>")


def _written(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def play(task, scripts, num_samples=1, order=0):
    """Play scripted turns (token lists), one list of turns for each sample, as an engine would.

    order: seed of the order in which turns are submitted and replies are read; 0: as they come.
    Return the tokens of each episode after its prompt, and the scores.
    """
    prompts = task.prompts("train", 0, len(scripts) // num_samples)
    episodes = task.environments(prompts, num_samples)
    generator = random.Random(order)
    written = [[] for _ in scripts]
    num_turns = [0] * len(scripts)
    waiting = set()

    def write(s):
        turn = scripts[s][num_turns[s]]
        num_turns[s] += 1
        written[s] += turn
        episodes.submit(s, turn)
        if num_turns[s] < task.max_turns:
            waiting.add(s)

    samples = [*range(len(scripts))]
    if order:
        generator.shuffle(samples)
    for s in samples:
        write(s)
    while waiting:
        replies = episodes.replies(wait=True)
        assert replies
        if order:
            generator.shuffle(replies)
        for reply in replies:
            waiting.remove(reply.sample)
            if reply.is_last:
                continue
            assert reply.tokens
            written[reply.sample] += reply.tokens
            if num_turns[reply.sample] < len(scripts[reply.sample]):
                write(reply.sample)
    return written, episodes.finish()

"""`python -m bench.episodes`: episodes of several turns by the native engine against a loop around
transformers' generate, and what slow environments cost.

    guess     64 prompts x 32 samples of the task guess, by a policy after a warm start. The loop
              generates one turn of all episodes at a time, from all tokens so far, as TRL's
              trainer does. Rates are sampled tokens a second: both sides draw other games.
    waiting   512 samples of the same games, whose replies come 50 ms after each turn. The bound is
              the longest chain of replies plus the time of the same games without waiting.

All computes in float32. It takes a minute on two cores, half of it for the warm start. The last
line is one JSON document.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.measure import (
    argument_parser,
    describe,
    machine,
    milliseconds,
    prepare,
    run_command,
)
from bench.whole_step import warm_started
from examples.guess import BOS, CORRECT, PAD, GuessEpisodes, GuessTask
from maxrl_fast.config.read import parse_options
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Prompts
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.tasks.episode import Reply

DELAY = 0.05  # seconds from a turn to its reply
NUM_SAMPLES = 32
# so that the policy plays games to their end
POLICY = {"task": "examples.guess:GuessTask", "sft_steps": 200, "sft_batch": 128, "sft_lr": 3e-3}
POLICY |= {"hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 8, "kv_heads": 4}
POLICY |= {"dtype": "float32"}


class SlowEpisodes(GuessEpisodes):
    """Games whose replies come DELAY seconds after their turns."""

    def __init__(self, hidden: list[int], max_turns: int):
        super().__init__(hidden, max_turns)
        self.due: list[tuple[float, Reply]] = []  # in the order of their times

    def submit(self, sample: int, turn: list[int]) -> None:
        super().submit(sample, turn)
        self.due.append((time.monotonic() + DELAY, self._replies.pop()))

    def replies(self, wait: bool) -> list[Reply]:
        if wait and self.due:
            time.sleep(max(self.due[0][0] - time.monotonic(), 0))
        now = time.monotonic()
        there = [reply for at, reply in self.due if at <= now]
        self.due = self.due[len(there) :]
        return there


def loop_of_generate(
    ours: Decoder, task: GuessTask, prompts: Prompts, folder: Path
) -> Callable[[], int]:
    """Return a call that plays the games turn by turn, and returns the number of sampled tokens."""
    from transformers import AutoModelForCausalLM

    device = prompts.tokens.device
    files = new_files(ours.config, task.stop_ids) | task.tokenizer_files()
    write_policy(folder, ours.config.dtype, ours.weights(), files)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()

    def play() -> int:
        episodes = task.environments(prompts, NUM_SAMPLES)
        rows = [[BOS] for _ in range(len(prompts) * NUM_SAMPLES)]
        active, count = list(range(len(rows))), 0
        for _ in range(task.max_turns):
            width = max(len(rows[s]) for s in active)
            padded = [[PAD] * (width - len(rows[s])) + rows[s] for s in active]
            mask = [[0] * (width - len(rows[s])) + [1] * len(rows[s]) for s in active]
            out = model.generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=task.max_new_tokens - (width - 1),
                eos_token_id=list(task.stop_ids),
                pad_token_id=PAD,
            )
            for s, row in zip(active, out[:, width:].tolist(), strict=True):
                stop = row.index(task.stop_ids[0]) + 1 if task.stop_ids[0] in row else 0
                turn = row[:stop] if stop else row
                count += len(turn)
                rows[s] += turn
                if stop:
                    episodes.submit(s, turn)
            active = []
            for reply in episodes.replies(wait=False):
                if not reply.is_last and len(rows[reply.sample]) < task.max_new_tokens:
                    rows[reply.sample] += reply.tokens
                    active.append(reply.sample)
            if not active:
                break
        return count

    return play


def measure(num_prompts: int, rounds: int, device: torch.device) -> dict[str, Any]:
    _, task, model = warm_started(parse_options(POLICY | {"device": str(device)}))
    assert isinstance(task, GuessTask)
    assert isinstance(model, Decoder)
    engine = NativeEngine(model.requires_grad_(False), torch.float32)
    sampling = Sampling(1.0, task.max_new_tokens, task.stop_ids, max_turns=task.max_turns)

    def native(num_prompts: int, kind: type[GuessEpisodes] = GuessEpisodes) -> int:
        prompts = task.prompts("train", 0, num_prompts).to(device)
        hidden = [CORRECT + line["answer"] for line in prompts.columns or ()]
        episodes = kind([x for x in hidden for _ in range(NUM_SAMPLES)], task.max_turns)
        rollouts = engine.generate(RolloutRequest(prompts, NUM_SAMPLES, sampling, 0, 1, episodes))
        return len(rollouts.tokens)

    with tempfile.TemporaryDirectory() as folder:
        prompts = task.prompts("train", 0, num_prompts).to(device)
        sides = {
            "native": lambda: native(num_prompts),
            "loop": loop_of_generate(model, task, prompts, Path(folder)),
        }
        tokens = {side: play() for side, play in sides.items()}
        guess = milliseconds(sides, rounds, device)
    delays = {"at once": lambda: native(16), "after 50 ms": lambda: native(16, SlowEpisodes)}
    waiting = milliseconds(delays, rounds, device)
    rates = {side: tokens[side] / guess[side] * 1e3 for side in tokens}
    # turn max_turns ends an episode without waiting for its reply
    bound = waiting["at once"] + (task.max_turns - 1) * DELAY * 1e3
    return {
        "guess": {
            "milliseconds": guess,
            "tokens": tokens,
            "tokens_per_second": rates,
            "native_over_loop": rates["native"] / rates["loop"],
        },
        "waiting": {
            "milliseconds": waiting,
            "bound_milliseconds": bound,
            "over_bound": waiting["after 50 ms"] / bound,
        },
    }


def main() -> int:
    parser = argument_parser("episodes", __doc__, rounds=5)
    parser.add_argument("--prompts", type=int, default=64, help="of the case guess")
    options = parser.parse_args()
    device = prepare(options)
    about = machine(device, torch.float32)
    print(describe(about))
    cases = measure(options.prompts, options.rounds, device)
    guess, waiting = cases["guess"], cases["waiting"]
    for side, rate in guess["tokens_per_second"].items():
        print(
            f"guess, {side:<7}{guess['milliseconds'][side]:10,.1f} ms{rate:12,.0f} sampled tokens/s"
        )
    print(f"native over the loop: {guess['native_over_loop']:.1f}")
    for side, time_ in waiting["milliseconds"].items():
        print(f"512 samples, replies {side:<12}{time_:10,.1f} ms")
    print(f"bound {waiting['bound_milliseconds']:.1f} ms, over it: {waiting['over_bound']:.2f}")
    print(json.dumps({"benchmark": "episodes", "machine": about, "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

"""`python -m bench.gpu_train`: the commands on this device, side by side: train, resume, evaluate.

Each chain of commands runs in processes of its own at tiny sizes, all chains at once, so that all
that can fail early in a run fails within a minute: warm start, sampling, update, evaluation,
checkpoint and resume; a critic, a reference, several updates, top-p, LoRA on a checkpoint,
torch.compile, episodes. The last line is one JSON document; the exit code is 1 if a command failed.

`make gpu-smoke` gives it 80 seconds.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure import argument_parser, machine, prepare, run_command

TRAIN = (
    "train --steps 3 --lr-schedule constant --sft-steps 10 --sft-batch 8 --eval-prompts 32 "
    "--eval-samples 4 --prompts 8 --reward REWARD"
)
# so that groups differ in their rewards, and every update has a gradient
REWARD = "def of_length(prompt, response, **columns):\n    return float(len(response) % 2)\n"
# by chain, its commands; OUT is a folder of the chain
CHAINS = {
    "maxpo": (
        f"{TRAIN} --objective maxpo --k 4 --out OUT",
        "train --resume OUT --steps 4",
        "evaluate OUT --samples 16 --eval-prompts 32 --out OUT-eval",
        f"{TRAIN} --task maze --model OUT/checkpoints/step-000004 --lora-rank 4 --out OUT-lora",
    ),
    "pacs": (f"{TRAIN} --objective pacs --top-p .9 --out OUT",),
    "ppo": (f"{TRAIN} --objective ppo --kl-coef .01 --updates-per-step 2 --out OUT",),
    "compile": (f"{TRAIN} --objective grpo --diagnose-every 1 --compile --out OUT",),
    "episodes": (
        f"{TRAIN.partition(' --reward')[0]} --objective maxrl --task examples/guess.py:GuessTask "
        "--out OUT",
    ),
}


def run_chains(device: str, folder: Path, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Return the exit code and seconds of every command; a chain ends at its first failure, and
    all chains after these seconds."""
    (folder / "reward.py").write_text(REWARD)
    start, records = time.monotonic(), {name: list[dict[str, Any]]() for name in CHAINS}
    running: dict[str, subprocess.Popen[bytes]] = {}

    def begin(name: str) -> None:
        text = CHAINS[name][len(records[name])].replace("OUT", str(folder / name))
        words = text.replace("REWARD", f"{folder}/reward.py:of_length").split()
        command = [sys.executable, "-m", f"maxrl_fast.{words[0]}", *words[1:]]
        with (folder / f"{name}.log").open("ab") as log:
            running[name] = subprocess.Popen(
                [*command, "--device", device], stdout=log, stderr=subprocess.STDOUT
            )

    for name in CHAINS:
        begin(name)
    while running:
        time.sleep(0.2)
        passed = time.monotonic() - start
        for name, process in list(running.items()):
            if process.poll() is None and passed < seconds:
                continue
            if process.poll() is None:
                process.kill()
                process.wait(10)
            del running[name]
            record = {"code": process.returncode, "seconds_since_start": passed}
            records[name].append(record | {"command": CHAINS[name][len(records[name])]})
            if process.returncode == 0 and len(records[name]) < len(CHAINS[name]):
                begin(name)
    return records


def main() -> int:
    parser = argument_parser("gpu_train", __doc__)
    parser.add_argument("--seconds", type=float, default=75, help="limit (default: %(default)s)")
    options = parser.parse_args()
    device = prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        records = run_chains(options.device, Path(folder), options.seconds)
        failed = [name for name, chain in records.items() if any(x["code"] for x in chain)]
        for name, chain in records.items():
            for x in chain:
                print(f"{x['code']:4} after {x['seconds_since_start']:5.1f} s: {x['command']}")
            if name in failed:
                log = (Path(folder) / f"{name}.log").read_text(errors="replace")
                print(f"the end of the output of {name}:\n{log[-3000:]}")
    print(json.dumps({"benchmark": "gpu_train", "machine": machine(device), "chains": records}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run_command(main))

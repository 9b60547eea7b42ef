"""`python -m bench.save`: how long a save blocks the training, written in the foreground and by a
thread.

The state is that of a Qwen-shaped policy with random weights: float32 weights and Adam's two
moments, and the policy itself in bfloat16. The thread writes a copy of it, so the machine needs
twice the memory of the state.

    foreground   the step waits until everything is on the disk, checksums included
    thread       the step waits for the copy to the host alone

The floor of the foreground is its bytes over the disk's measured bandwidth, write and fsync; that
of the copy is its bytes over the bandwidth of copies into fresh memory. The last line is one JSON
document.

It takes some minutes, by the speed of the disk.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.measure import argument_parser, describe, machine, prepare, run_command, synchronize
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.control import StopSignal
from maxrl_fast.job.learner_state import host_copy, learner_tensors
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.optimizer import make_optimizer
from maxrl_fast.training.stopwatch import Stopwatch

BLOCK = 1 << 28  # bytes


def qwen(layers: int) -> DecoderConfig:
    """Return the sizes of Qwen2.5-0.5B, which has 24 layers, with another number of layers."""
    return DecoderConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )


def make_learner(config: DecoderConfig, device: torch.device) -> Learner:
    model = Decoder.empty(config, device)
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.01)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
        moments = {
            name: torch.rand_like(parameter, requires_grad=False)
            for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = {"step": torch.ones((), device=device), **moments}
    return Learner(
        model, optimizer, LossSettings("reinforce", "token_mean"), 1.0, 4096, torch.float32
    )


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def disk_bandwidth(folder: Path) -> float:
    """Return the bytes per second of writing 2 GiB and waiting until they are on the disk."""
    block, path = bytes(BLOCK), folder / "probe"

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            for _ in range(8):
                file.write(block)
            os.fsync(file.fileno())

    seconds = seconds_of(write, torch.device("cpu"))
    path.unlink()
    return 8 * BLOCK / seconds


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of copies from the device into fresh host memory."""
    source = torch.ones(BLOCK, dtype=torch.uint8, device=device)
    copies = [seconds_of(lambda: host_copy(source), device) for _ in range(5)]
    return BLOCK / statistics.median(copies)


def multiplications(until: Callable[[], bool], device: torch.device) -> float:
    a, count, start = torch.rand(768, 768, device=device), 0, time.perf_counter()
    while not until():
        torch.mm(a, a)
        synchronize(device)
        count += 1
    return count / (time.perf_counter() - start)


def measured(folder: Path, learner: Learner, rounds: int, device: torch.device) -> dict[str, float]:
    """Return medians over the rounds; each round saves once in the foreground and once in the
    thread.
    """
    folder.mkdir()
    files, progress = RunFiles(folder, {}), Progress("training")
    checkpoints = Checkpoints(files, {}, {}, {}, 0, 1, Ranks(), StopSignal(), Stopwatch(), None)
    times: dict[str, list[float]] = {
        name: [] for name in ("foreground", "thread", "thread_until_written", "slowdown")
    }

    def foreground() -> None:
        checkpoints.save(progress, learner)
        checkpoints.wait()

    def is_written() -> bool:
        return checkpoints.newest == folder / "checkpoints" / progress.name

    for _ in range(rounds):
        progress.step += 1
        times["foreground"].append(seconds_of(foreground, device))
        end = time.perf_counter() + 2
        alone = multiplications(lambda end=end: time.perf_counter() > end, device)  # type: ignore[misc]
        progress.step += 1
        start = time.perf_counter()
        times["thread"].append(seconds_of(lambda: checkpoints.save(progress, learner), device))
        times["slowdown"].append(alone / multiplications(is_written, device))
        times["thread_until_written"].append(time.perf_counter() - start)
        checkpoints.wait()
    files.close({})
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argument_parser("save", __doc__, rounds=3)
    parser.add_argument(
        "--layers", type=int, default=24, help="of the policy (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("."),
        help="on the disk to write to (default: %(default)s)",
    )
    options = parser.parse_args()
    device = prepare(options)
    learner = make_learner(qwen(options.layers), device)
    state_bytes = sum(tensor.nbytes for tensor in learner_tensors(learner).values())
    policy_bytes = sum(weight.nbytes for _, weight in learner.model.weights()) // 2  # bfloat16
    place = machine(device)
    parameters = Decoder.count(learner.model.config)
    print(describe(place))
    print(
        f"{parameters:,} parameters: {state_bytes / 1e9:.2f} GB of state, {policy_bytes / 1e9:.2f} "
        "GB of bfloat16 weights"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        disk, copy = disk_bandwidth(Path(folder)), copy_bandwidth(device)
        seconds = measured(Path(folder) / "run", learner, options.rounds, device)
    floors = {"foreground": (state_bytes + policy_bytes) / disk, "thread": state_bytes / copy}
    print(f"disk {disk / 1e9:.2f} GB/s, copies {copy / 1e9:.2f} GB/s")
    for name, floor in floors.items():
        print(
            f"{name:<12}blocks {seconds[name]:6.2f} s, floor {floor:6.2f} s, "
            f"{seconds[name] / floor:.2f} x the floor"
        )
    print(f"the thread blocks {seconds['foreground'] / seconds['thread']:.1f} times less")
    print(
        f"it has written everything after {seconds['thread_until_written']:.2f} s, and until then "
        "matrix multiplications are"
    )
    print(f"{seconds['slowdown']:.2f} times slower")
    sizes = {"parameters": parameters, "state_bytes": state_bytes, "policy_bytes": policy_bytes}
    rates = {"disk_bytes_per_second": disk, "copy_bytes_per_second": copy}
    print(
        json.dumps(
            {
                "benchmark": "save",
                "machine": place,
                **sizes,
                **rates,
                "seconds": seconds,
                "floor_seconds": floors,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

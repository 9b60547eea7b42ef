"""The CUDA kernels on an emulated GPU under ThreadSanitizer: they have no race and no misaligned
access, and every one that is planted is found.

The emulator (emulation.cpp) makes every CUDA thread a fiber that ThreadSanitizer takes for a
thread, so that only barriers and fences order memory. races.cpp launches the kernels.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# a GPU ends a kernel at a misaligned access
ALIGNMENT = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
FLAGS = "-std=c++17 -O1 -g1 -w -DMAXRL_FAST_CUDA -DMAXRL_RACES -U_FORTIFY_SOURCE".split()
FLAGS += [f"-I{HERE / 'include'}", *ALIGNMENT]
LIMIT = 300  # seconds for a compiler or a run
PARTS = (  # of races.cpp
    *("token_loss", "token_loss_in_clusters", "token_loss_pipelined", "token_logprobs"),
    *("decode_attention", "decode_sample", "divergence", "layer", "group_advantage", "log_ratio"),
)


@dataclass(frozen=True)
class Planted:
    """A statement, or an expression, that is replaced, mostly a barrier or a fence that is taken
    out: the first `what` in `file` after the text `after`.
    """

    part: str
    file: str
    after: str
    what: str = "__syncthreads();"
    to: str = ""


PLANTED = [
    Planted("decode_sample", "decode_sample.cu", "tiles[i] = tile;"),
    Planted("group_advantage", "reduce.cuh", "value = combine(value, __shfl_xor_sync"),
    Planted(
        "group_advantage",
        "reduce.cuh",
        "if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;",
    ),
    Planted("token_loss", "reduce.cuh", "rows[block * size + threadIdx.x] = sum_of(threadIdx.x);"),
    Planted(
        "token_loss",
        "reduce.cuh",
        "rows[block * size + threadIdx.x] = sum_of(threadIdx.x);",
        "__threadfence();",
    ),
    Planted("token_loss", "reduce.cuh", "is_last = atomicAdd", "__threadfence();"),
    Planted("token_loss", "softmax_rows.cuh", "memory.rows[0]);", "sync_team();"),
    Planted("token_loss", "softmax_rows.cuh", "store_sums(mine, memory", "sync_row();"),
    Planted("token_loss", "softmax_layout.cuh", "out[k] = chunk_of(c);", "sync_team();"),
    Planted(
        "token_loss", "softmax_rows.cuh", "no thread writes the last row any more", "sync_team();"
    ),
    Planted("token_loss", "softmax_rows.cuh", "the others have read this block's sums"),
    Planted("token_loss_in_clusters", "softmax_rows.cuh", "store_sums(mine, memory", "sync_row();"),
    Planted(
        "token_loss_in_clusters", "softmax_rows.cuh", "resolve(task.work, memory", "sums_turn ^= 1;"
    ),
    Planted("decode_attention", "decode_attention.cu", "to[i] = attended.values[r][i];"),
    Planted("layer", "layer_norms.cu", "of_warps[warp] = value;"),
    Planted("group_advantage", "group_advantage.cu", ": Real(INFINITY);"),
    Planted("group_advantage", "group_advantage.cu", "sums[j] += base;"),
    Planted("token_loss_pipelined", "softmax_pipeline.cuh", "const int turns = ", "kTurns", "3"),
    Planted(
        "token_loss_pipelined", "softmax_pipeline.cuh", "__syncwarp();", "wait_until_ready(j);"
    ),
    Planted("token_loss_pipelined", "softmax_pipeline.cuh", "read(j + 1);", "wait_until_ready(j);"),
    *(
        Planted(part, f"{file}.cu", f"{kernel}(", "wait_for_predecessor();")
        for part, file, kernel in (
            ("decode_attention", "decode_attention", "attend_to_own"),
            ("decode_attention", "decode_attention", "merge_splits"),
            ("decode_sample", "decode_sample", "sample_rows"),
            ("layer", "layer_norms", "add_rms_norm_kernel"),
            ("layer", "layer_heads", "rotate_heads_kernel"),
            ("layer", "layer_mlp", "swiglu_kernel"),
        )
    ),
    Planted("divergence", "divergence.cu", "teacher + kSize * c"),
    Planted("divergence", "divergence.cu", "float last = 0.0f;"),
]
# the place of a row is copied over before it has been read, by the same thread
COPIED_EARLY = Planted(
    "token_loss_pipelined",
    "softmax_pipeline.cuh",
    "const int i = stripe",
    "writer.write(part.start_of(part.first + i), gradient_of(in.kept[i]));",
    "if (copies) copy_stripe(next.row, next.part, s, in.kept);"
    "writer.write(part.start_of(part.first + i), gradient_of(in.kept[i]));",
)


# loads of 16 bytes, and asynchronous copies
MISALIGNED = [
    Planted(
        part,
        "softmax_layout.cuh",
        "const int wanted = beyond ?",
        "head = wanted < size ? wanted : size;",
        "head = 0;",
    )
    for part in ("token_loss", "token_loss_in_clusters")
]
FAULTS = [*PLANTED, *MISALIGNED, COPIED_EARLY]


def plant_faults(csrc: Path) -> None:
    """Put every fault under the condition that the emulator was told its number."""
    for number, fault in enumerate(FAULTS):
        path = csrc / "cuda" / fault.file
        before, found, rest = path.read_text().partition(fault.after)
        assert found, f"{fault.file} has no {fault.after!r}"
        assert fault.what in rest
        is_planted = f"emulation::fault == {number}"
        either = f"{{ if ({is_planted}) {{ {fault.to} }} else {{ {fault.what} }} }}"
        if not fault.what.endswith(";"):
            either = f"({is_planted} ? {fault.to} : {fault.what})"
        path.write_text(before + found + rest.replace(fault.what, either, 1))


def run(
    program: Path, part: str, copies: str = "late", fault: int = -1, **env: str
) -> tuple[int, str]:
    """Run a part; return its exit status and its standard error, which has the report of the first
    data race or misaligned access, if there is one.
    """
    command = [str(program), part]
    alone = ["setarch", "-R"]  # older ThreadSanitizers need memory at their own addresses
    if shutil.which("setarch"):
        tried = subprocess.run([*alone, "true"], capture_output=True)
        command = [*alone, *command] if tried.returncode == 0 else command
    settings = {"TSAN_OPTIONS": "halt_on_error=1", "MAXRL_EMULATED_COPIES": copies}
    env = os.environ | settings | {"MAXRL_FAULT": str(fault)} | env
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    return ended.returncode, ended.stderr


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("races")
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    plant_faults(csrc)
    compiler, objects = os.environ.get("CXX", "c++"), []
    sources = sorted(csrc.glob("cuda/*.cu"))
    for source in (*sources, HERE / "races.cpp", HERE / "emulation.cpp"):
        objects.append(folder / f"{source.stem}.o")
        command = [compiler, *FLAGS, f"-I{csrc}", "-x", "c++", "-c", source, "-o", objects[-1]]
        if source.stem != "emulation":  # not one of the threads that it runs
            command.append("-fsanitize=thread")
        subprocess.run(command, check=True, timeout=LIMIT)
    program = folder / "races"
    subprocess.run([compiler, "-fsanitize=thread", *ALIGNMENT, *objects, "-o", program], check=True)
    return program


@pytest.mark.parametrize(
    ("part", "copies"),
    [
        *((part, "late") for part in PARTS),
        *((part, "early") for part in PARTS if part.startswith("token")),  # the others copy nothing
    ],
)
def test_the_kernels_have_no_race(program, part, copies):
    lags = ["99", "8", "9"]  # a warp that comes last: none, the pipeline's resolver, its planner
    for lag in lags if "pipelined" in part else lags[:1]:
        assert run(program, part, copies, MAXRL_EMULATED_LAG=lag) == (0, "")


@pytest.mark.parametrize(
    "fault", PLANTED, ids=lambda fault: f"{fault.file}-{fault.after}-{fault.what}"
)
def test_a_missing_barrier_is_found(program, fault):
    # on a loaded machine a run may order what the barrier ordered: one of a dozen
    runs = (run(program, fault.part, fault=FAULTS.index(fault)) for _ in range(5))
    assert any("ThreadSanitizer: data race" in stderr for _, stderr in runs)


def test_a_copy_before_the_place_was_read_is_found(program):
    number = FAULTS.index(COPIED_EARLY)
    code, stderr = run(program, COPIED_EARLY.part, "early", number)
    assert code == 1
    assert "the kernels differ" in stderr


@pytest.mark.parametrize("fault", MISALIGNED, ids=lambda fault: fault.part)
def test_a_misaligned_access_is_found(program, fault):
    _, stderr = run(program, fault.part, fault=FAULTS.index(fault))
    assert "misaligned" in stderr

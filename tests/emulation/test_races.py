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
FLAGS = [
    *(
        "-std=c++17",
        "-O1",
        "-g",
        "-w",
        "-DMAXRL_FAST_CUDA",
        "-DMAXRL_RACES",
        "-U_FORTIFY_SOURCE",
        f"-I{HERE / 'include'}",
    ),
    *ALIGNMENT,
]
LIMIT = 300  # seconds for a compiler or a run
PARTS = {  # of races.cpp: the file with its kernels
    "token_loss": "token_loss",
    "token_loss_in_clusters": "token_loss",
    "token_logprobs": "token_logprobs",
    "decode_attention": "decode_attention",
    "decode_sample": "decode_sample",
    "layer": "layer",
    "group_advantage": "group_advantage",
    "pacs": "pacs",
}


@dataclass(frozen=True)
class Planted:
    """A barrier or a fence that is taken out: the first one in `file` after the text `after`."""

    part: str
    file: str
    after: str
    what: str = "__syncthreads();"


PLANTED = [
    Planted("decode_sample", "reduce.cuh", "value = combine(value, __shfl_xor_sync"),
    Planted(
        "decode_sample",
        "reduce.cuh",
        "if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;",
    ),
    Planted("decode_sample", "reduce.cuh", "const Value before_in_warp"),
    Planted("decode_sample", "reduce.cuh", "if (lane == kWarp - 1)"),
    Planted("pacs", "reduce.cuh", "rows[block * size + threadIdx.x] = sum_of(threadIdx.x);"),
    Planted(
        "pacs",
        "reduce.cuh",
        "rows[block * size + threadIdx.x] = sum_of(threadIdx.x);",
        "__threadfence();",
    ),
    Planted("pacs", "reduce.cuh", "is_last = atomicAdd", "__threadfence();"),
    Planted("pacs", "reduce.cuh", "is_last = atomicAdd"),
    Planted("pacs", "reduce.cuh", "if (lane == 0) workspace[i] = sum;"),
    Planted("pacs", "pacs.cu", "if (lane == 0) of_warps[warp][i] = sums[i];"),
    Planted("token_loss", "softmax_rows.cuh", "memory.rows[0]);", "sync_team();"),
    Planted("token_loss", "softmax_rows.cuh", "store_sums(mine, memory", "sync_row();"),
    Planted("token_loss", "softmax_rows.cuh", "sums_turn ^= 1;", "sync_team();"),
    Planted("token_loss", "softmax_rows.cuh", "return Element{}; });", "sync_team();"),
    Planted(
        "token_loss",
        "softmax_rows.cuh",
        "no thread writes the last row any more",
        "sync_team();",
    ),
    Planted("token_loss", "softmax_rows.cuh", "the others have read this block's sums"),
    Planted("token_loss_in_clusters", "softmax_rows.cuh", "store_sums(mine, memory", "sync_row();"),
    Planted(
        "token_loss_in_clusters", "softmax_rows.cuh", "resolve(task.work, memory", "sums_turn ^= 1;"
    ),
    Planted("decode_attention", "decode_attention.cu", "to[i] = attended.values[r][i];"),
    Planted("layer", "layer.cu", "first = warp / warps * warps;"),
    Planted("layer", "layer.cu", "of_warps[warp] = value;"),
    Planted("group_advantage", "group_advantage.cu", "stride > 0; stride /= 2) {"),
    Planted("group_advantage", "group_advantage.cu", "indices[high] = index;"),
]


def compiled(source: Path, csrc: Path, to: Path, *flags: str) -> Path:
    """Compile a C++ or CUDA file for the CPU; return the object file."""
    command = [
        os.environ.get("CXX", "c++"),
        *FLAGS,
        *flags,
        f"-I{csrc}",
        "-x",
        "c++",
        "-c",
        str(source),
        "-o",
        str(to),
    ]
    subprocess.run(command, check=True, timeout=LIMIT)
    return to


def linked(objects: list[Path], to: Path) -> Path:
    command = [
        os.environ.get("CXX", "c++"),
        "-fsanitize=thread",
        *ALIGNMENT,
        *map(str, objects),
        "-o",
        str(to),
    ]
    subprocess.run(command, check=True)
    return to


def run(program: Path, part: str, copies: str = "late") -> subprocess.CompletedProcess[str]:
    """Run a part; its standard error has the report of the first data race, if there is one."""
    command = [str(program), part]
    if (
        shutil.which("setarch")
        and subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode
        == 0
    ):
        # older ThreadSanitizers need memory at their own addresses
        command = ["setarch", "-R", *command]
    settings = {"TSAN_OPTIONS": "halt_on_error=1", "MAXRL_EMULATED_COPIES": copies}
    return subprocess.run(
        command,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """The object files of the kernels, by name, and of the program that launches them."""
    folder = tmp_path_factory.mktemp("races")
    made = {
        name: compiled(CSRC / f"cuda/{name}.cu", CSRC, folder / f"{name}.o", "-fsanitize=thread")
        for name in PARTS.values()
    }
    made["races"] = compiled(HERE / "races.cpp", CSRC, folder / "races.o", "-fsanitize=thread")
    # not one of the threads that it runs
    made["emulation"] = compiled(HERE / "emulation.cpp", CSRC, folder / "emulation.o")
    return made


@pytest.fixture(scope="session")
def program(objects, tmp_path_factory):
    return linked(list(objects.values()), tmp_path_factory.mktemp("races") / "races")


@pytest.mark.parametrize("copies", ["late", "early"])
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_have_no_race(program, part, copies):
    ended = run(program, part, copies)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "planted", PLANTED, ids=lambda planted: f"{planted.file}-{planted.after}-{planted.what}"
)
def test_a_missing_barrier_is_found(objects, planted, tmp_path):
    stderr = with_change(
        objects, tmp_path, planted.part, planted.file, planted.after, planted.what, ""
    )
    assert "ThreadSanitizer: data race" in stderr


# loads of 16 bytes, and asynchronous copies
@pytest.mark.parametrize("part", ["token_loss", "token_loss_in_clusters"])
def test_a_misaligned_access_is_found(objects, part, tmp_path):
    head = "head = wanted < size ? wanted : size;"
    stderr = with_change(
        objects,
        tmp_path,
        part,
        "softmax_rows.cuh",
        "const int wanted = beyond ?",
        head,
        "head = 0;",
    )
    assert "misaligned" in stderr


def with_change(objects, folder: Path, part: str, file: str, after: str, what: str, to: str) -> str:
    """Replace the first `what` in a file after the text `after`; return the standard error of the
    part.
    """
    shutil.copytree(CSRC, folder / "csrc")
    path = folder / "csrc/cuda" / file
    before, found, rest = path.read_text().partition(after)
    assert found, f"{file} has no {after!r}"
    assert what in rest
    path.write_text(before + found + rest.replace(what, to, 1))
    name = PARTS[part]
    changed = compiled(
        folder / f"csrc/cuda/{name}.cu", folder / "csrc", folder / f"{name}.o", "-fsanitize=thread"
    )
    return run(linked([*(objects | {name: changed}).values()], folder / "races"), part).stderr

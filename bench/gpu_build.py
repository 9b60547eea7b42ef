"""`python -m bench.gpu_build`: the extension with CUDA kernels in place, carried or built here.

`make gpu-wheels` builds it for another machine: `--for-python python3.12 --to FOLDER`, which needs
that interpreter's headers. Without options, an extension in the folder of MAXRL_FAST_WHEELS is used
if it was built for this interpreter from the sources that are here; otherwise one is built here,
and the reason is printed. The exit code is 1, after a sentence, where that fails. A build takes
minutes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEELS = "MAXRL_FAST_WHEELS"
DIGEST = "extension_sources.sha256"
ARCHITECTURE = "90a-real"  # Hopper, if the environment variable CUDAARCHS names no other one


def digest_of_sources() -> str:
    digest = hashlib.sha256()
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    for file in [ROOT / "CMakeLists.txt", *sources]:
        digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def build_for(python: str, folder: Path) -> None:
    """Build the extension for another interpreter; write it and the digest of its sources into a
    folder."""
    import pybind11

    folder.mkdir(parents=True, exist_ok=True)
    build = ROOT / "build/extension-gpu"
    settings = {
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": folder.resolve(),
        "Python_EXECUTABLE": python,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "MAXRL_FAST_CUDA": "ON",
        "CMAKE_CUDA_ARCHITECTURES": os.environ.get("CUDAARCHS", ARCHITECTURE),
    }
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    (folder / DIGEST).write_text(digest_of_sources() + "\n")


def interpreter(python: str) -> str:
    """Return the path of an interpreter that runs here.

    Raises:
        OSError: if it does not; a command of pyenv's may choose none.
    """
    code = "import sys; print(sys.executable)"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode:
        raise OSError(
            f"GPU_PYTHON_PATH must name an interpreter that runs, got {python}: of pyenv's, name "
            "the path below its folder versions"
        )
    return run.stdout.strip()


def has_kernels() -> bool:
    code = "from maxrl_fast import _C; raise SystemExit(not _C.cuda)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def install() -> bool:
    """Copy the prebuilt extension into the package, or build it in place; return whether it has
    CUDA kernels."""
    folder = Path(os.environ.get(WHEELS) or "no folder, as MAXRL_FAST_WHEELS is not set")
    extension = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    digest = folder / DIGEST  # absent where a build was stopped
    if not (extension.exists() and digest.exists()):
        why = f"{folder} has no {extension.name} with its {DIGEST}"
    elif digest.read_text().strip() != digest_of_sources():
        why = f"{extension} was built from other sources"
    else:
        shutil.copy(extension, ROOT / "maxrl_fast")
        if has_kernels():
            print(f"the extension is the one that was carried here, {extension}", flush=True)
            return True
        why = f"{extension} does not load, or has no CUDA kernels"
    print(f"the extension is built here: {why}", flush=True)
    environment = {"CUDAARCHS": "native"} | os.environ | {"MAXRL_FAST_CUDA": "ON"}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return has_kernels()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--for-python", metavar="PYTHON", help="build for this interpreter")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where --for-python writes")
    options = parser.parse_args()
    if (options.for_python is None) != (options.to is None):
        parser.error("--for-python and --to must be given together")
    try:
        if options.for_python is None:
            return 0 if install() else 1
        build_for(interpreter(options.for_python), options.to)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python tests/dist/check_dist.py DIST`: the sdist and the wheel in that folder have the files
they should have, and no others.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
VERSION = re.search(
    r'^__version__ = "(.*)"$', (ROOT / "maxrl_fast" / "__init__.py").read_text(), re.MULTILINE
)[1]
BUILD_FILES = ("CHANGELOG.md CMakeLists.txt LICENSE MANIFEST.in README.md constraints.txt " "pyproject.toml setup.py").split()
METADATA = re.compile(r"PKG-INFO|setup\.cfg|maxrl_fast\.egg-info/.*")  # written by setuptools


def sources(*paths: str) -> set[str]:
    command = ["git", "ls-files", *"--cached --others --exclude-standard --".split(), *paths]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return {name for name in listed if (ROOT / name).exists()}


def compare(what: str, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        sys.exit(
            f"{what} must have other files: missing {sorted(wanted - found)}, too many {sorted(found - wanted)}"
        )
    print(f"{what}: {len(found)} files, as wanted")


def check(dist: Path) -> None:
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    top = f"maxrl_fast-{VERSION}"
    if sdist.name != f"{top}.tar.gz" or not wheel.name.startswith(f"{top}-cp"):
        sys.exit(f"the files must be of version {VERSION}, got {sdist.name} and {wheel.name}")
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{top}/") for member in archive if member.isfile()}
    compare(
        sdist.name,
        {name for name in names if not METADATA.fullmatch(name)},
        sources("maxrl_fast", "csrc", *BUILD_FILES),
    )
    with zipfile.ZipFile(wheel) as zipped:
        names = set(zipped.namelist())
    extensions = {name for name in names if re.fullmatch(r"maxrl_fast/_C\.cpython-.*\.so", name)}
    if len(extensions) != 1:
        sys.exit(f"{wheel.name} must have one extension, got {sorted(extensions)}")
    info = {name for name in names if name.startswith(f"{top}.dist-info/")}
    if f"{top}.dist-info/licenses/LICENSE" not in info:
        sys.exit(f"{wheel.name} must have the licence, got {sorted(info)}")
    compare(wheel.name, names - extensions - info, sources("maxrl_fast"))


if __name__ == "__main__":
    check(Path(sys.argv[1]))

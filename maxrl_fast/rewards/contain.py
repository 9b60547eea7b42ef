"""What the kernel offers to contain the processes of a reward function: subreapers, parent-death signals, cgroups, and /proc.

Names are imported one by one, so that this still works if the reward function replaces attributes of os.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from itertools import chain
from os import WEXITED, WNOHANG, WNOWAIT, getpid, getppid, kill, listdir, waitid, waitpid
from pathlib import Path
from time import sleep

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
PROCESS_LIMIT = 1024  # of a control group: processes and threads


def become_subreaper() -> None:
    """Make this process the parent of every orphan among its descendants, whatever session or environment they have."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def fork() -> int:
    """Return as os.fork. The child is a subreaper, leads a session of its own, and the kernel kills it when its parent ends.

    PR_SET_PDEATHSIG acts when the thread that forked ends, so only a process with a single thread may call this.
    """
    parent = getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        become_subreaper()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if getppid() != parent:  # it has ended before the line above
            os._exit(1)
    return child


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the pids of a process's descendants, but for `spared` ones and theirs; none if the process has ended."""
    found = list[int]()
    for parent in chain([pid], found):  # the list grows during the loop
        with contextlib.suppress(OSError):  # the process has ended
            for thread in listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    found += [int(child) for child in file.read().split() if int(child) not in spared]
    return found


def kill_descendants(spared: Collection[int] = ()) -> None:
    """Kill the descendants of this subreaper, but for `spared` ones and theirs, until none is left."""
    while has_children() and (left := descendants(getpid(), spared)):
        for pid in left:
            with contextlib.suppress(OSError):  # it has ended
                kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(OSError):  # its parent has not ended yet
                waitpid(pid, WNOHANG)
        sleep(0.0002)  # the others need the processor to end


def has_children() -> bool:
    """Return whether this process has children, zombies included. It costs one system call."""
    try:
        waitid(os.P_ALL, 0, WEXITED | WNOHANG | WNOWAIT)
    except ChildProcessError:
        return False
    return True


def memory(pid: int, exactly: bool = True) -> int:
    """Return bytes of private and shared memory without files: exactly, where a page that n processes map counts 1/n; else at
    least as many, and in little time."""
    if exactly and (sizes := _sizes(f"/proc/{pid}/smaps_rollup")):
        return sizes["Pss"] + sizes["SwapPss"] - sizes.get("Pss_File", 0)
    sizes = _sizes(f"/proc/{pid}/status")
    return sum(sizes.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))


def exceeds(pids: Collection[int], limit: int) -> bool:
    """Return whether processes together use more memory than a limit."""
    return all(sum(memory(pid, exactly) for pid in pids) > limit for exactly in (False, True))


def data_size() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    return _sizes("/proc/self/status").get("VmData", 0)


def _sizes(path: str) -> dict[str, int]:
    """Return the lines "name: number kB" of a file of /proc in bytes; none if the process has ended or may not be read."""
    try:
        with open(path) as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


class ControlGroup:
    """A cgroup v2 for one process and its descendants, whose memory and number the kernel limits. The kernel's refusals are
    OSErrors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @staticmethod
    def parent(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
        """Return a cgroup in which this process may make others with a memory limit: its own or the one above; else None.

        The kernel gives limits only to the children of a cgroup without processes, or of the root.
        """
        for path in (line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")):
            for place in (mount / path, (mount / path).parent)[: 2 if path else 1]:
                with contextlib.suppress(OSError):
                    if "memory" not in (place / "cgroup.subtree_control").read_text().split():
                        (place / "cgroup.subtree_control").write_text("+memory +pids")
                    probe = ControlGroup(place / f"maxrl-reward-{getpid()}")
                    probe.make(1 << 30)
                    probe.remove()
                    if os.access(place / "cgroup.procs", os.W_OK):  # otherwise no process may move
                        return place
        return None

    def make(self, memory_limit: int) -> None:
        """Make the cgroup, with a limit in bytes."""
        self._path.mkdir(exist_ok=True)
        (self._path / "memory.max").write_text(str(memory_limit))
        for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1), ("pids.max", PROCESS_LIMIT)):
            self._write(name, value)

    def join(self) -> None:
        """Move this process, whose later descendants follow."""
        (self._path / "cgroup.procs").write_text("0")

    def kill(self) -> None:
        """Kill all processes at once, from Linux 5.14 on."""
        self._write("cgroup.kill", 1)

    def remove(self) -> bool:
        """Remove the cgroup, which has no process left. Return whether the kernel has killed some at the memory limit."""
        if not self._path.exists():
            return False
        events = (self._path / "memory.events").read_text().split()
        self._path.rmdir()
        return events[events.index("oom_kill") + 1] != "0"

    def _write(self, name: str, value: int) -> None:
        """Set what not every kernel or parent offers."""
        if (self._path / name).exists():
            (self._path / name).write_text(str(value))

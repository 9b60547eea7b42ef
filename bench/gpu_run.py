"""Runs a step of `make gpu` within its time limit; its output goes to the screen and to the log."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.gpu_steps import Step, environment_of

ROOT = Path(__file__).parent.parent
QUIET_SECONDS = 15  # without output before the screen says that a step is running
TAIL = 4000  # characters of a failed step's output in the results
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)\b")


def run_step(step: Step, limit: float, log: Path) -> dict[str, Any]:
    """Run a step, append its output to the log, and return its record.

    The record's `state` is "done", "failed", "past its limit" or "absent".
    """
    record: dict[str, Any] = {
        "state": "absent",
        "why": step.absent,
        "command": " ".join(step.command),
        "limit_seconds": limit,
    }
    if step.absent:
        return record
    environment = environment_of(step)
    start = time.monotonic()
    with log.open("ab") as output:
        output.write(f"\n== {step.name}: {record['command']}\n".encode())
        output.flush()
        begin = output.tell()
        # A new session: its process group has every process that the step starts, and Ctrl-C in the
        # terminal does not reach it.
        process = subprocess.Popen(
            step.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    try:
        is_late = _follow(process, log, begin, start, limit)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # longer: it hangs in the driver, and stays behind
    text = log.read_bytes()[begin:].decode(errors="replace")
    record |= {"seconds": time.monotonic() - start, "exit_code": process.returncode}
    if step.has_figures:
        record["figures"] = last_document(text)
    else:
        record["figures"] = {
            kind.rstrip("s"): int(number) for number, kind in COUNT.findall(text[-2000:])
        }
    if is_late:
        record |= {"state": "past its limit", "why": f"killed after {limit:.0f} s"}
    elif process.returncode:
        record |= {"state": "failed", "why": f"exit code {process.returncode}"}
    elif record["figures"] is None:
        record |= {"state": "failed", "why": "no line of its output is a JSON document"}
    else:
        record["state"] = "done"
    if record["state"] != "done":
        record["tail"] = text[-TAIL:]
    return record


def _follow(
    process: "subprocess.Popen[bytes]", log: Path, begin: int, start: float, limit: float
) -> bool:
    """Show what a process writes to the log until it ends; return whether it exceeded its limit
    instead.
    """
    rest, last_output = b"", time.monotonic()
    with log.open("rb") as written:
        written.seek(begin)
        while True:
            # checked before reading, so that no output is missed
            has_ended = process.poll() is not None
            *lines, rest = (rest + written.read()).split(b"\n")
            for line in lines:
                if not line.startswith(b'{"benchmark"'):  # figures go to the results
                    print(f"    {line.decode(errors='replace'):.160}", flush=True)
                last_output = time.monotonic()
            if has_ended:
                return False
            now = time.monotonic()
            if now - start > limit:
                return True
            if now - last_output > QUIET_SECONDS:
                print(
                    f"    ... running for {now - start:.0f} s, {limit - (now - start):.0f} s are "
                    "left",
                    flush=True,
                )
                last_output = now
            time.sleep(0.1)


def last_document(text: str) -> dict[str, Any] | None:
    """Return the last line that is a benchmark's JSON document; warnings may follow it."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"benchmark"'):
            document: dict[str, Any] = json.loads(line)
            return document
    return None

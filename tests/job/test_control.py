import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from maxrl_fast.job.control import ECHO, StallWatchdog, StoppedNow, StopSignal, Stopwatch
from tests.distributed.test_torchrun import finished, torchrun
from tests.runs import ROOT, SMALL, read


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop_and_a_later_one_exits(number, monkeypatch, capfd):
    now, before = [100.0], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("maxrl_fast.job.control.time.monotonic", lambda: now[0])
    with StopSignal() as stop:
        assert stop.number == 0
        signal.raise_signal(number)
        assert stop.number == number
        assert "saving and stopping after this step" in capfd.readouterr().err
        # torchrun forwards the terminal's signal, so this one is ignored
        signal.raise_signal(signal.SIGTERM)
        now[0] += 2 * ECHO
        with pytest.raises(StoppedNow) as stopped:
            signal.raise_signal(number)
    assert stopped.value.signal == number
    assert signal.getsignal(signal.SIGINT) == before


def test_the_watchdog_of_a_process_that_is_not_the_runs_own_does_not_end_it(capfd, monkeypatch):
    """A stop of the process for 100 s does not count."""
    clock, now = Stopwatch(), time.monotonic
    start = now() + 0.03
    monkeypatch.setattr(time, "monotonic", lambda: now() + 100 * (now() > start))
    with clock("rollout"):
        watchdog = StallWatchdog(clock, 0.05, ends_process=False)
        watchdog.start()
        watchdog.join(60)
    assert not watchdog.is_alive()
    error = capfd.readouterr().err
    assert "error: the run is stuck in rollout: no progress for 0 s, --stall-limit is" in error
    assert "Current thread" in error


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.number == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def start(out, *flags, **options):
    command = [sys.executable, "-m", "maxrl_fast.train", *SMALL, "--out", str(out), *flags]
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **options
    )


@pytest.mark.slow
def test_a_run_whose_output_breaks_goes_on_to_its_end(tmp_path):
    out = tmp_path / "run"
    with open("/dev/full", "w") as full:
        # without a warm start there are warnings on stderr
        process = start(out, *"--steps 4 --sft-steps 0".split(), stdout=full, stderr=full)
        assert process.wait(120) == 0
    assert len(read(out / "metrics.jsonl")) == 4
    assert (out / "latest").resolve().name == "step-000004"


@pytest.mark.slow
def test_a_run_whose_terminal_goes_away_saves_and_exits_with_129(tmp_path):
    out, (terminal, end) = tmp_path / "run", os.openpty()
    more = "--sft-steps 0 --steps 100000".split()
    process = start(out, *more, stdin=end, stdout=end, stderr=end, preexec_fn=own_terminal)
    os.close(end)
    try:
        deadline = time.monotonic() + 120
        while not ((out / "metrics.jsonl").exists() and len(read(out / "metrics.jsonl")) > 1):
            assert time.monotonic() < deadline
            if select.select([terminal], [], [], 0.2)[0]:
                os.read(terminal, 1 << 16)
        os.close(terminal)  # writing fails from here on, and the kernel sends SIGHUP
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert (out / "latest").resolve().name == f"step-{len(read(out / 'metrics.jsonl')):06d}"
    assert (out / "curves.png").exists()


def own_terminal():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


STUCK = """
import sys, time
from maxrl_fast import train
from maxrl_fast.rollout import NativeEngine
from maxrl_fast.runtime.ranks import Ranks

generate = NativeEngine.generate

def stuck_in_the_engine(self, request):
    while request.step == 2 and Ranks.of_environment().is_first:
        time.sleep(0.1)
    return generate(self, request)

NativeEngine.generate = stuck_in_the_engine
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_stuck_run_ends_with_its_stacks_and_ends_the_other_process(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    flags = ["--out", str(tmp_path / "run"), *"--stall-limit 12".split()]
    process = torchrun(2, str(script), *SMALL, *flags)
    output = finished(process, 200)
    assert process.returncode == 1, output
    wanted = r"the run is stuck in rollout: no progress for 1[2-9] s, --stall-limit is 12 s"
    assert re.search(wanted, output)
    assert "in stuck_in_the_engine" in output

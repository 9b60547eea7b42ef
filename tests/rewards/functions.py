import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time


def pid(x=None):
    return os.getpid()


def act(action, x=0.0, **arguments):
    """Call one of the functions below, so that one pool can test them all. Without an action,
    return x."""
    return globals()[action](**arguments) if action else x


def lasting(seconds):
    time.sleep(seconds)
    return seconds


def working(seconds):
    """Use the processor for so long, which being stopped is not."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


def ignore_signals():
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.1)


def backtrack():
    """Never release the interpreter lock."""
    import re

    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))


def eat_bytes():
    return len(bytearray(100 << 30))


def exit_python():
    sys.exit(3)


def exit_now():
    os._exit(3)


def segfault():
    ctypes.string_at(0)


def fork_and_return():
    if os.fork() == 0:
        return 2.0
    time.sleep(0.3)  # the child's answer would be the first
    return 1.0


def fork_and_raise():
    if os.fork() == 0:
        raise ValueError("the child")
    return 1.0


def leave_child(path):
    """Leave a child that keeps running and keeps the connection open."""
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    with open(path, "w") as file:
        file.write(str(child))
    return 1.0


def leave_program_and_hang(path):
    program = subprocess.Popen(["sleep", "1000"])
    with open(path, "w") as file:
        file.write(str(program.pid))
    time.sleep(1000)


def raise_strange():
    raise ValueError("\x1b[31m red\n\ud800 \x00")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def raise_unprintable():
    raise Unprintable


def change_surroundings(path):
    os.chdir(path)
    os.rmdir(path)
    sys.stdout = sys.stderr = sys.stdin = None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 1.0


def delete_folder():
    shutil.rmtree(os.getcwd())
    return 1.0


num_calls = 0


def count():
    global num_calls
    num_calls += 1
    return num_calls


def variable(name):
    return name in os.environ

import contextlib
import os
import time
from pathlib import Path

from maxrl_fast.config.options import Reward
from maxrl_fast.rewards.pool import RewardPool

ROOT = Path(__file__).parents[2]
FUNCTIONS = ROOT / "tests" / "rewards" / "functions.py"
GB = 1 << 30


@contextlib.contextmanager
def pool(name, workers=2, time_limit=10.0, memory_limit=GB, file=FUNCTIONS, **options):
    """Options: more of `Reward`, without "reward_", and of RewardPool."""
    more = {key: options.pop(key) for key in ("output", "is_environment") if key in options}
    given = {f"reward_{key}": value for key, value in options.items()}
    given |= {"reward_workers": workers, "reward_seconds": time_limit}
    limits = Reward(reward_memory_gb=memory_limit / 1e9, **given)
    with contextlib.closing(RewardPool(f"{file}:{name}", limits, **more)) as found:
        yield found


def rewards(outcomes):
    return [outcome.reward for outcome in outcomes]


def failures(outcomes):
    return {i: outcome for i, outcome in enumerate(outcomes) if outcome.has_failed}


def among_others(pool, action, **arguments):
    """Return the outcome of one call, after checking that the calls before and after it succeed."""
    calls = [{"action": "", "x": 1.5}, {"action": action, **arguments}, {"action": "", "x": 2.5}]
    start = time.monotonic()
    before, outcome, after = pool.score(calls)
    assert time.monotonic() - start < 30
    assert (before.reward, after.reward) == (1.5, 2.5)
    return outcome


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid):
    found = [pid]
    for parent in found:  # the list grows during the loop
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(
                    int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
                )
    return found[1:]


def eventually(condition, limit=10.0):
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit:
            return False
        time.sleep(0.02)
    return True


def pids(pool):
    """Return the pids of the processes that make calls, once all have started."""
    list(pool.results(0.0))
    return [worker.process.pid for worker in pool._workers]


def own_descendants():
    return [pid for pid in descendants(os.getpid()) if is_alive(pid)]

"""What gives responses their rewards. Every reward worker imports this package at its start, so
nothing slow may be imported here."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxrl_fast.errors import InputError, printable
from maxrl_fast.runtime.background import Progress as Progress
from maxrl_fast.runtime.background import no_progress as no_progress
from maxrl_fast.runtime.loading import SHORT_REPR, describe_error

PROGRESS_INTERVAL = 1.0  # seconds between two calls of `on_progress` where nothing else happens
LONGEST_MESSAGE, LONGEST_FEEDBACK = 1000, 4000  # characters

Rows = Sequence[dict[str, Any]]  # each has "prompt", "response" and the columns of the prompt


class InvalidReward(Exception):
    """The function did not return a finite number."""


class LateCall(BaseException):
    """A call has exceeded its limit, in seconds. No Exception, which functions catch."""


class Outcome(NamedTuple):
    """What scoring one response has given; between processes a JSON list."""

    reward: float | None = None  # finite in float32; None: it has failed, or does not apply
    components: Mapping[str, float] = {}  # of the reward, by name
    # of a failure: "exception", "timeout", "crash" (the process ended), "memory", "invalid" (no
    # finite number), or "left" (too many others failed). A late verifier has one, and reward 0.
    kind: str = ""
    message: str = ""  # of a failure, one printable line
    text: str | None = None  # what an environment returned, or the feedback of a reward

    @property
    def has_failed(self) -> bool:
        return bool(self.kind) and self.reward is None

    def or_failure(self) -> "Outcome":
        """Return a failure if the reward does not apply."""
        return self if self.kind or self.reward is not None else NOT_APPLIED


def failure(kind: str, message: str) -> Outcome:
    return Outcome(None, {}, kind, printable(message, LONGEST_MESSAGE))


LEFT = failure("left", "")
NOT_APPLIED = failure("invalid", "no reward applies to this response: it is None or NaN")
Outcomes = Generator[tuple[int, Outcome] | None, None, None]


def outcome_of(value: Any) -> Outcome:
    """Return the outcome of a value that a function has returned, or raised. A dict of components
    has its reward under "reward" or, as verl's, under "score", beside which some may be no numbers;
    else it is their sum. Components that are None or NaN are left out. Text under "feedback" is for
    --teacher-prompt."""
    try:
        if isinstance(value, BaseException):
            raise value
        if not isinstance(value, dict):
            return Outcome(_number(value, "a reward"))
        own, components = "reward" if "reward" in value else "score", dict[str, float]()
        value, said = {**value}, None
        if isinstance(value.get("feedback"), str):  # half a surrogate pair cannot be encoded
            said = value.pop("feedback")[:LONGEST_FEEDBACK].encode(errors="replace").decode()
        for name, part in value.items():
            if name == own or "score" not in value or hasattr(part, "__float__"):
                number = _number(part, f"component {name!r}")
                components |= {} if number is None else {str(name): number}
        if own in value:
            reward = components.pop(own, None)
        else:
            reward = _number(sum(components.values()) if components else None, "a reward")
        return Outcome(reward, components, text=said)
    except KeyboardInterrupt:  # in the trainer, where it ends the run
        raise
    except InvalidReward as error:
        return failure("invalid", str(error))
    except LateCall as error:
        return failure("timeout", f"the call ran longer than {error.args[0]:g} s")
    except MemoryError:
        return failure("memory", "the call needed more memory than its limit")
    except BaseException as error:
        return failure("exception", describe_error(error))


def _number(value: Any, what: str) -> float | None:
    """Return a number, or the one element of a tensor or array, which must be finite in float32;
    None and NaN as None."""
    if value is None:
        return None
    try:
        number = (value.item() if hasattr(value, "item") else value).__float__()
    except Exception:  # text, more than one element, or an integer that is too large
        number = math.inf
    if math.isnan(number):
        return None
    if abs(number) <= 3.4028234663852886e38:  # the largest float32
        return number
    given = f"{SHORT_REPR.repr(value)} of type {type(value).__name__}"
    raise InvalidReward(f"{what} must be a finite number of float32, got {given}")


class RewardSource:
    name = ""  # as in --reward
    wants_raw = False  # whether its rows have "response_raw", which includes special tokens
    weights: Mapping[str, float] = {}  # of several rewards, by the names of their components
    wrong_kinds: tuple[str, ...] = ()  # of failures that have reward 0, of a built-in verifier

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        """Yield the index and outcome of each row in any order, and None at least every second;
        `group` successive rows have the same prompt."""
        raise NotImplementedError

    def score(
        self,
        rows: Rows,
        group: int = 1,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
    ) -> list[Outcome]:
        """Return the outcome of each row; LEFT for the rest after more than `max_failures`
        failures. `on_progress` is called at least every second."""
        found, num_failed = [LEFT] * len(rows), 0
        with contextlib.closing(self.outcomes(rows, group)) as coming:
            for one in coming:
                on_progress()
                if one is not None:
                    found[one[0]] = one[1].or_failure()
                    num_failed += found[one[0]].has_failed
                if max_failures is not None and num_failed > max_failures:
                    break
        return found

    def lines(self) -> list[str]:
        """What the start of a run says about it."""
        return []

    def close(self) -> None:
        """End what it has started."""


class WeightedRewards(RewardSource):
    """The weighted sum of several rewards. One that is None is left out, as in TRL; a response to
    which none applies, or for which one fails, has failed. The components are each source's value,
    by its name, and its components, by NAME.COMPONENT."""

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float]) -> None:
        names = [source.name for source in sources]
        self.name, self._sources = " ".join(names), sources
        self.weights = dict(zip(short_names(names), weights, strict=True))
        self.wants_raw = any(source.wants_raw for source in sources)

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        sums: list[float | None] = [None] * len(rows)
        components, failed = [dict[str, float]() for _ in rows], set[int]()
        texts = ["" for _ in rows]
        for source, (name, weight) in zip(self._sources, self.weights.items(), strict=True):
            with contextlib.closing(source.outcomes(rows, group)) as coming:
                for one in coming:
                    i, outcome = one or (-1, Outcome())
                    if outcome.has_failed and i not in failed:
                        failed.add(i)
                        yield i, failure(outcome.kind, f"{name}: {outcome.message}")
                        continue
                    yield None
                    texts[i] += outcome.text or ""
                    if outcome.reward is not None:
                        sums[i] = weight * outcome.reward + (sums[i] or 0.0)
                        own = {f"{name}.{part}": x for part, x in outcome.components.items()}
                        components[i] |= {name: outcome.reward, **own}
        for i in {*range(len(rows))} - failed:
            yield i, outcome_of(sums[i])._replace(components=components[i], text=texts[i])

    def lines(self) -> list[str]:
        lines = [line for source in self._sources for line in source.lines()]
        sums = " + ".join(f"{weight:g} {name}" for name, weight in self.weights.items())
        return [*dict.fromkeys(lines), f"reward: {sums}"]

    def close(self) -> None:
        for source in self._sources:
            source.close()


def short_names(names: Sequence[str]) -> list[str]:
    """Return each function or model, with its file if two are equal."""
    short = [name.rpartition(":")[2].rpartition("/")[2] for name in names]
    if len({*short}) < len(short):
        files = [Path(name.rpartition(":")[0]).stem for name in names]
        short = [f"{file}.{last}" for file, last in zip(files, short, strict=True)]
    if len({*short}) < len(short):
        raise InputError(f"--reward must name different functions, got {', '.join(names)}")
    return short


class MajorityVote(RewardSource):
    """Reward 1 for the most frequent answer, as text, to a prompt, else 0 (SRT, Shafayat et al.
    2025; TTRL, Zuo et al. 2025). `answer` returns that of a response; "" does not vote. A tie goes
    to the answer that was sampled first."""

    name = "majority vote"

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        answers = [self._answer(row["response"]) for row in rows]
        for start in range(0, len(rows), group):
            of_prompt = answers[start : start + group]
            most = Counter(filter(None, of_prompt)).most_common(1)  # of a tie, the first
            for i, answer in enumerate(of_prompt, start):
                yield i, Outcome(float([answer] == [x for x, _ in most]))

    def lines(self) -> list[str]:
        what = "1 for the answer that most responses to the prompt give"
        return [f"reward: {what}; evaluation has labels"]

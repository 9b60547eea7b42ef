"""Episodes with tools: prompts of a data set, and an environment of the user's for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import Message
from maxrl_fast.records import Prompts
from maxrl_fast.rewards import PROGRESS_INTERVAL, Outcome, Progress, failure, no_progress
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rewards.pool import RewardOutput, start_code
from maxrl_fast.tasks import Reply
from maxrl_fast.tasks.conversation import ToolCall
from maxrl_fast.tasks.dataset import DatasetTask, Kept
from maxrl_fast.tasks.sources import Line

OTHER_TEXT = "reset returned another text than at the start of the run for the same columns"


class ToolTask(DatasetTask):
    """Prompts of a data set, each answered with the tools of an environment, in workers, or `given`
    as a class of this process. `reset` is called once with each line, and its text is appended to
    the last message of the prompt: all episodes of a prompt must begin with the same text."""

    def __init__(
        self,
        name: str,
        seed: int,
        model: Path,
        rewards: Reward,
        given: type | None,
        *,
        needs_reward: bool = True,
        **options: Any,
    ):
        code = options["environment"], given, rewards, RewardOutput()
        self.workers = workers = start_code(*code, is_environment=True)
        self.output, self.max_turns = workers.output, options["max_turns"]
        self._numbers = count()  # of environments
        try:
            if needs_reward and not workers.signature["has_reward"]:
                raise InputError(
                    f"--environment {workers.name} needs a method get_reward(), or --reward "
                    "FILE:FUNCTION"
                )
            options |= {"tools": workers.signature["tools"], "needs_reward": False}
            super().__init__(name, seed, model, **options)
        except BaseException:
            workers.drop()
            raise
        # the environment, or the functions of --reward, score whole responses
        self.reward = self.answer_limit = None

    def describe(self) -> list[str]:
        workers, note = self.workers, self.conversation.note
        tools = ", ".join(x["function"]["name"] for x in workers.signature["tools"])
        how = f"with the tools {tools}, at most {self.max_turns} turns"
        told = f"environment {workers.name} {workers.place}, {how}"
        return [*super().describe(), told, *[note] * bool(note)]

    def _encoded(self, lines: list[Line]) -> Kept:
        found = Kept()
        for text, (place, columns) in zip(self._observe(lines), lines, strict=True):
            chat, said = columns["prompt"], text or ""
            chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
            marked = _appended(chat, self.conversation.as_text(said))
            tokens = self.encode_prompt(marked, place)
            if self.fits(tokens):
                line = ToolLine({**columns, "prompt": _appended(chat, said)})
                line.columns, line.text = columns, text
                found.append((tokens, line))
        return found

    def _observe(self, lines: list[Line]) -> list[str | None]:
        workers, numbers = self.workers, {next(self._numbers): line for line in lines}
        for number, (_, columns) in numbers.items():
            workers.request(number, (number, "probe", columns))
        found = dict[int, str | None]()
        while len(found) < len(lines):
            for number, [outcome] in workers.results(PROGRESS_INTERVAL):
                if outcome.kind:
                    workers.drop()
                    who, why = f"--environment {workers.name}", outcome.message
                    raise InputError(f"{who}, {numbers[number][0]}: reset fails: {why}")
                found[number] = outcome.text
        return [found[number] for number in numbers]

    def environments(
        self, prompts: Prompts, num_samples: int, beat: Progress = no_progress
    ) -> "ToolEpisodes":
        lines = [line for line in prompts.columns or () for _ in range(num_samples)]
        episodes = [Episode(next(self._numbers), s, line) for s, line in enumerate(lines)]
        return ToolEpisodes(self, episodes, beat)

    def close(self) -> None:
        self.workers.close()


class ToolLine(dict[str, Any]):
    """A line of the data as rewards see it, whose prompt has the text of `reset`."""

    columns: dict[str, Any]  # what `reset` gets
    text: str | None  # what it returned


def _appended(chat: Sequence[Message], text: str) -> list[Message]:
    return [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + text}]


@dataclass
class Episode:
    number: int  # of the environment
    sample: int
    line: Any  # a ToolLine
    word: str = ""  # the operation that it does
    turn: list[int] | None = None  # that waits for its reply
    calls: list[ToolCall] = field(default_factory=list)  # of the turn
    replies: list[str] = field(default_factory=list)  # to the first of them
    num_turns: int = 0
    errors: list[str] = field(default_factory=list)  # of tools
    outcome: Outcome | None = None  # once it has failed or ended


class ToolEpisodes:
    """The episodes of one call of generate."""

    def __init__(self, task: ToolTask, episodes: Sequence[Episode], beat: Progress):
        self._task, self._episodes, self._beat = task, episodes, beat
        self._by_number = {episode.number: episode for episode in episodes}
        self._ready, self._is_ending = list[Reply](), False
        for episode in episodes:
            self._request(episode, "start", episode.line.columns)
        self._receive(0.0)  # begin while the policy samples its first turns

    def submit(self, sample: int, turn: list[int]) -> None:
        """The last turn has no reply, but its calls are made."""
        episode = self._episodes[sample]
        episode.num_turns += 1
        episode.turn = turn if episode.num_turns < self._task.max_turns else None
        episode.calls, episode.replies = self._task.conversation.calls(turn), []
        if not episode.word:  # otherwise its environment is still being reset
            self._advance(episode)

    def replies(self, wait: bool) -> list[Reply]:
        self._receive(0.0)
        while wait and not self._ready and any(x.turn is not None for x in self._episodes):
            self._receive(PROGRESS_INTERVAL)
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> list[Outcome]:
        self._is_ending, found = True, list[Outcome]()
        for episode in self._episodes:
            if not episode.word:
                self._advance(episode)
        while any(episode.word for episode in self._episodes):
            self._receive(PROGRESS_INTERVAL)
        for episode in self._episodes:
            outcome = episode.outcome or Outcome(0.0)
            # a component of this name is the user's
            components = {"tool_errors": float(len(episode.errors)), **outcome.components}
            said = outcome.text or "".join(episode.errors[-1:])
            found.append(outcome._replace(components=components, text=said))
        return found

    def close(self) -> None:
        self._task.workers.drop()

    def _request(self, episode: Episode, word: str, value: Any) -> None:
        episode.word = word
        self._task.workers.request(episode.number, (episode.number, word, value))

    def _receive(self, seconds: float) -> None:
        self._beat()  # a call has its own time limit, or is made in this process
        for number, [outcome] in self._task.workers.results(seconds):
            self._beat()
            episode = self._by_number[number]
            word, episode.word = episode.word, ""
            if word == "end" or outcome.kind:
                episode.outcome = episode.outcome or outcome
            elif word == "start":
                if outcome.text != episode.line.text:
                    episode.outcome = failure("invalid", OTHER_TEXT)
            else:
                episode.replies.append(outcome.text or "")
                episode.errors += episode.replies[-1:] * bool(outcome.components)
            if word != "end":
                self._advance(episode)

    def _advance(self, episode: Episode) -> None:
        """Ask for the next call of an idle environment, answer its turn, or end it."""
        replies = episode.replies
        while len(replies) < len(episode.calls) and episode.outcome is None:
            call = episode.calls[len(replies)]
            if not call.error:
                self._request(episode, "call", [call.name, call.arguments])
                return
            replies.append(call.error)
            episode.errors.append(call.error)
        if episode.turn is not None:
            is_last = self._is_ending or episode.outcome is not None or not episode.calls
            chat = self._task.conversation
            tokens = [] if is_last else chat.reply(episode.calls, replies)
            self._ready.append(Reply(episode.sample, tokens, is_last))
            episode.turn = None
        if self._is_ending:
            self._request(episode, "end", None)

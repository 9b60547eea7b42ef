"""Episodes with tools: prompts of a data set, and an environment of the user's for each sample."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import Message
from maxrl_fast.records import Prompts
from maxrl_fast.rewards import PROGRESS_INTERVAL, Outcome, Progress, failure, no_progress
from maxrl_fast.rewards.pool import UserCode
from maxrl_fast.tasks.conversation import Conversation
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.episode import Reply
from maxrl_fast.tasks.jsonl import Line
from maxrl_fast.tasks.tool_calls import ToolCall

OTHER_TEXT = "reset returned another text than at the start of the run for the same columns"


class ToolTask(DatasetTask):
    """Prompts of a data set, each answered with the tools of an environment.

    `reset` is called once with each line, and its text is appended to the last message of the
    prompt: all episodes of a prompt must begin with the same text. `start` starts the workers;
    other arguments are as of DatasetTask.
    """

    def __init__(
        self,
        start: Callable[[], UserCode],
        name: str,
        seed: int,
        model: Path,
        *,
        needs_reward: bool = True,
        max_new_tokens: int | None = None,
        test_only: bool = False,
        **options: Any,
    ):
        self._workers = workers = start()
        self.output, self.max_turns = workers.output, options["max_turns"]
        self._numbers = itertools.count()  # of environments
        try:
            if needs_reward and not workers.signature["has_reward"]:
                raise InputError(
                    f"--environment {workers.name} needs a method get_reward(), or --reward "
                    "FILE:FUNCTION"
                )
            tools = workers.signature["tools"]
            options |= {"max_new_tokens": max_new_tokens, "test_only": test_only, "tools": tools}
            super().__init__(name, seed, model, needs_reward=False, **options)
        except BaseException:
            workers.drop()
            raise
        # the environment, or the functions of --reward, score whole responses
        self.reward = self.answer_limit = None

    def describe(self) -> list[str]:
        workers, note = self._workers, self.conversation.note
        tools = ", ".join(x["function"]["name"] for x in workers.signature["tools"])
        how = f"with the tools {tools}, at most {self.max_turns} turns"
        told = [f"environment {workers.name} {workers.place}, {how}"]
        return [*super().describe(), *told, *[note] * bool(note)]

    def _encoded(self, lines: list[Line]) -> list[tuple[list[int], dict[str, Any]]]:
        found = list[tuple[list[int], dict[str, Any]]]()
        for text, (place, columns) in zip(self._observe(lines), lines, strict=True):
            chat, said = _chat(columns["prompt"]), text or ""
            marked = _appended(chat, self.conversation.as_text(said))
            tokens = self.encode_prompt(marked, place)
            if self.fits(tokens):
                seen = {**columns, "prompt": _appended(chat, said)}
                found.append((tokens, ToolLine(seen, columns, text)))
        return found

    def _observe(self, lines: list[Line]) -> list[str | None]:
        """Return what `reset` says of each line."""
        numbers = {next(self._numbers): i for i in range(len(lines))}
        for number, i in numbers.items():
            self._workers.request(number, (number, "probe", lines[i][1]))
        found = dict[int, str | None]()
        while len(found) < len(lines):
            for number, [outcome] in self._workers.results(PROGRESS_INTERVAL):
                if outcome.kind:
                    self._workers.drop()
                    where = f"--environment {self._workers.name}, {lines[numbers[number]][0]}"
                    raise InputError(f"{where}: reset fails: {outcome.message}")
                found[number] = outcome.text
        return [found[number] for number in numbers]

    def environments(
        self, prompts: Prompts, num_samples: int, beat: Progress = no_progress
    ) -> "ToolEpisodes":
        episodes = []
        for s in range(len(prompts) * num_samples):
            line = (prompts.columns or ())[s // num_samples]
            assert isinstance(line, ToolLine)
            episodes.append(Episode(next(self._numbers), s, line.columns, line.text))
        return ToolEpisodes(self._workers, self.conversation, self.max_turns, episodes, beat)

    def close(self) -> None:
        """End the workers, which start again if they are needed."""
        self._workers.close()


class ToolLine(dict[str, Any]):
    """A line of the data as rewards see it, whose prompt has the text of `reset`; and what `reset`
    gets, and what it returned."""

    def __init__(self, seen: dict[str, Any], columns: dict[str, Any], text: str | None):
        super().__init__(seen)
        self.columns, self.text = columns, text


def _chat(prompt: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def _appended(chat: Sequence[Message], text: str) -> list[Message]:
    return [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + text}]


@dataclass
class Episode:
    """What is known of an environment and its conversation."""

    number: int  # of the environment
    sample: int
    columns: dict[str, Any]  # what `reset` gets
    text: str | None  # what it must return
    word: str = ""  # the operation that it does
    turn: list[int] | None = None  # that waits for its reply
    calls: list[ToolCall] = field(default_factory=list)  # of the turn
    replies: list[str] = field(default_factory=list)  # to the first of them
    num_turns: int = 0
    tool_errors: float = 0.0
    outcome: Outcome | None = None  # once it has failed or ended

    @property
    def has_calls(self) -> bool:
        return len(self.replies) < len(self.calls) and self.outcome is None


class ToolEpisodes:
    """The episodes of one call of generate, whose environments live in workers."""

    def __init__(
        self,
        workers: UserCode,
        chat: Conversation,
        max_turns: int,
        episodes: Sequence[Episode],
        beat: Progress,
    ):
        self._workers, self._chat, self._max_turns = workers, chat, max_turns
        self._episodes, self._beat = episodes, beat
        self._by_number = {episode.number: episode for episode in episodes}
        self._ready, self._is_ending = list[Reply](), False
        for episode in episodes:
            self._request(episode, "start", episode.columns)
        self._receive(0.0)  # begin while the policy samples its first turns

    def submit(self, sample: int, turn: list[int]) -> None:
        """The last turn has no reply, but its calls are made."""
        episode = self._episodes[sample]
        episode.num_turns += 1
        episode.turn = turn if episode.num_turns < self._max_turns else None
        episode.calls, episode.replies = self._chat.calls(turn), []
        if not episode.word:  # otherwise its environment is still being reset
            self._advance(episode)

    def replies(self, wait: bool) -> list[Reply]:
        self._receive(0.0)
        while wait and not self._ready and any(x.turn is not None for x in self._episodes):
            self._receive(PROGRESS_INTERVAL)
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> list[Outcome]:
        self._is_ending = True
        for episode in self._episodes:
            if not episode.word:
                self._advance(episode)
        while any(episode.word for episode in self._episodes):
            self._receive(PROGRESS_INTERVAL)
        return [self._outcome(x) for x in self._episodes]

    def close(self) -> None:
        self._workers.drop()

    def _outcome(self, episode: Episode) -> Outcome:
        outcome = episode.outcome or Outcome(0.0)
        # a component of this name is the user's
        return outcome._replace(
            components={"tool_errors": episode.tool_errors, **outcome.components}
        )

    def _request(self, episode: Episode, word: str, value: Any) -> None:
        episode.word = word
        self._workers.request(episode.number, (episode.number, word, value))

    def _receive(self, seconds: float) -> None:
        self._beat()  # a call has its own time limit, or is made in this process
        for number, [outcome] in self._workers.results(seconds):
            self._beat()
            episode = self._by_number[number]
            word, episode.word = episode.word, ""
            if word == "end" or outcome.kind:
                episode.outcome = episode.outcome or outcome
            elif word == "start":
                if outcome.text != episode.text:
                    episode.outcome = failure("invalid", OTHER_TEXT)
            else:
                episode.replies.append(outcome.text or "")
                episode.tool_errors += outcome.components.get("tool_errors", 0.0)
            if word != "end":
                self._advance(episode)

    def _advance(self, episode: Episode) -> None:
        """Ask for the next call of an idle environment, answer its turn, or end it."""
        while episode.has_calls:
            call = episode.calls[len(episode.replies)]
            if not call.error:
                self._request(episode, "call", [call.name, call.arguments])
                return
            episode.replies.append(call.error)
            episode.tool_errors += 1
        if episode.turn is not None:
            self._ready.append(self._reply(episode, episode.turn))
            episode.turn = None
        if self._is_ending:
            self._request(episode, "end", None)

    def _reply(self, episode: Episode, turn: list[int]) -> Reply:
        last = Reply(episode.sample, [], is_last=True)
        if self._is_ending or episode.outcome or not episode.calls:
            return last
        return Reply(
            episode.sample, self._chat.reply(episode.calls, episode.replies), is_last=False
        )

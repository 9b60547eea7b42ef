"""Conversations as the chat template of a checkpoint writes them.

No family of models is known here. A template renders a conversation whole, and the parts are found
in the text by their offsets, or beside words that stand for them. A part is encoded apart where a
token would reach over its border, as sampling never does.
"""

import contextlib
import json
import re
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn

from maxrl_fast.algorithms.options import Count, Limit
from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import REASONING, THINKING, ControlTokens, Message, Prompt, any_of

# of the learned call: words, which no template escapes, trims or divides
NAME, KEYS, VALUES = "qzname", ("qzkeya", "qzkeyb"), ("qzvala", "qzvalb")
ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
_BARE = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:|\b(None|True|False)\b')
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    error: str = ""  # why it cannot be read


@dataclass(frozen=True)
class CallForm:
    """How calls are written, in any white space: one of

        head {"name": "search", "arguments": {"x": 1}} tail      keys: of both
        head search ... {"x": 1} tail
        head search [opener KEY between VALUE closer] ... tail   parts: opener, between, closer

    Strings in objects have `quote`; where it is not JSON's, keys have none. Values of parts are
    JSON, but for `strings`, (tool, key).
    """

    head: str
    tail: str
    keys: tuple[str, str] | None = None
    quote: str = '"'
    parts: tuple[str, str, str] | None = None
    strings: frozenset[tuple[str, str]] = frozenset()

    def read(self, text: str) -> list[ToolCall]:
        text, found = _plain_json(text, self.quote), list[ToolCall]()
        at = _skip(text, 0, self.head, anywhere=True)
        while at is not None and (self.head.strip() or text[at:].startswith("{")):
            start = at
            try:
                name, arguments, at = self._read_one(text, start)
                if not (isinstance(name, str) and name and isinstance(arguments, dict)):
                    raise ValueError("no name, or no object of arguments")
                found.append(ToolCall(name, arguments))
            except (ValueError, RecursionError, AttributeError) as error:
                why = f"the call cannot be read ({error}): {text[start:].strip()[:200]}"
                found.append(ToolCall("", {}, why))
            # a list of calls has a comma between them
            after = _skip(text, at, ",") if self.keys else None
            if after is None and self.head.strip():
                after = _skip(text, at, self.head, anywhere=True)
            at = after
        return found

    def _read_one(self, text: str, at: int) -> tuple[Any, Any, int]:
        """Return name, arguments and end of the call whose head ends at `at`."""
        name: Any = ""
        if self.keys is None:
            if (word := re.compile(r"\s*([\w.:/-]+)").match(text, at)) is None:
                raise ValueError("no name")
            name, at = word[1], word.end()
        if self.parts is not None:
            arguments, at = self._read_parts(self.parts, name, text, at)
        else:
            # models write more between a name and its arguments than templates do
            start = text.find("{", at, at + 100)
            if start < 0 or (self.keys and text[at:start].strip()):
                raise ValueError("no object")
            arguments, at = json.JSONDecoder(strict=False).raw_decode(text, start)
            if self.keys:
                name, arguments = arguments.get(self.keys[0]), arguments.get(self.keys[1], {})
            if isinstance(arguments, str):  # some templates have them as text
                arguments = json.loads(arguments, strict=False)
        if self.keys and _skip(text, at, ",") is not None:
            return name, arguments, at
        end = _skip(text, at, self.tail)
        if end is None or not (self.tail or text[at:].isspace() or at == len(text)):
            raise ValueError("no end")
        return name, arguments, end

    def _read_parts(
        self, parts: tuple[str, str, str], name: str, text: str, at: int
    ) -> tuple[dict[str, Any], int]:
        words = [re.escape(part.strip()) for part in parts]
        part = re.compile(r"\s*{}(.*?){}(.*?){}".format(*words), re.DOTALL)
        # exactly the white space that the template puts around a value
        before, after = parts[1][len(parts[1].rstrip()) :], parts[2].partition(parts[2].strip())[0]
        arguments: dict[str, Any] = {}
        while match := part.match(text, at):
            key, value = match[1].strip(), match[2].removeprefix(before).removesuffix(after)
            arguments[key], at = value, match.end()
            if (name, key) not in self.strings:
                try:
                    arguments[key] = json.loads(value)
                except (ValueError, RecursionError):  # it may be text after all
                    continue
        return arguments, at


def learn(texts: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> CallForm | None:
    """Return the form of the call NAME(ARGUMENTS), which ends each text, if it is known."""
    words = NAME, KEYS[0], VALUES[0], KEYS[1], VALUES[1]
    if not texts or any(word not in text for word in words for text in texts):
        return None
    cuts = re.split("|".join(words), texts[0])  # around the words
    quotes = {cuts[2][i:] for i in range(len(cuts[2])) if cuts[3].startswith(cuts[2][i:])}
    for quote in ['"', *sorted(x for x in quotes if x.strip())]:
        plain = [_plain_json(text, quote) for text in texts]
        text, name_at = plain[0], plain[0].index(NAME)
        for start in (match.start() for match in re.finditer(r"\{", text)):
            try:
                value, end = json.JSONDecoder().raw_decode(text, start)
            except ValueError:
                continue
            names = [key for key, x in value.items() if x == NAME]
            objects = [key for key, x in value.items() if x in (ARGUMENTS, json.dumps(ARGUMENTS))]
            keys = (names[0], objects[0]) if names and objects else None
            if keys or (value == ARGUMENTS and name_at < start):
                head = _common_end(plain, len(text) - min(start, name_at))
                return CallForm(head, text[end:].strip(), keys, quote)
    opener, head = _common_end([cuts[1], cuts[3]]), _common_end(texts, len(texts[0]) - len(cuts[0]))
    closer = cuts[3].removesuffix(opener)
    if cuts[1] != opener or cuts[2] != cuts[4] or not all(map(str.strip, (opener, closer, head))):
        return None
    strings = frozenset(
        (tool["function"]["name"], key)
        for tool in tools
        for key, schema in tool["function"]["parameters"].get("properties", {}).items()
        if schema.get("type") in ("string", ["string"])
    )
    tail = cuts[5].lstrip().removeprefix(closer.strip()).strip()
    return CallForm(head, tail, parts=(opener, cuts[2], closer), strings=strings)


def _plain_json(text: str, quote: str) -> str:
    """Return text with JSON's quotes in place of others, and around keys that have none."""
    if quote == '"':
        return text

    def bare(found: re.Match[str]) -> str:
        return _OF_PYTHON[found[3]] if found[3] else f'{found[1]}"{found[2]}":'

    parts = enumerate(text.split(quote))
    return "".join(json.dumps(part) if i % 2 else _BARE.sub(bare, part) for i, part in parts)


def _common_end(texts: Sequence[str], rest: int = 0) -> str:
    """Return the end that texts have in common, each without its last `rest` characters."""
    ends = [text[: len(text) - rest] for text in texts]
    return ends[0][len(ends[0]) - common(*(text[::-1] for text in ends)) :]


def common(*parts: Sequence[Any]) -> int:
    """Return the length of the beginning that texts, or lists of tokens, have in common."""
    return sum(1 for _ in takewhile(lambda x: len({*x}) == 1, zip(*parts, strict=False)))


def _skip(text: str, at: int, wanted: str, anywhere: bool = False) -> int | None:
    """Return where `wanted` ends, in any white space, at `at` or `anywhere` after it, or None."""
    pattern = re.compile(r"\s*" + r"\s*".join(map(re.escape, wanted.split())))
    match = pattern.search(text, at) if anywhere else pattern.match(text, at)
    return None if match is None else match.end()


# a noncharacter, which no text should have: text on both sides of it is encoded separately
MARK = "\ufdd0"
WORD = "qzxvq"  # stands for a text: one word, which no template trims, escapes or divides
SECONDS = 60.0  # that a template may take
OWN = {"messages", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
_CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_ASKED = {"role": "user", "content": "Hi"}


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class TextOptions:
    """Prompts and responses of text."""

    prompt_suffix: str | None = None
    """Text added to prompts that are text. By default the papers' for gsm8k and math."""
    system_prompt: str | None = None
    """System message of chats that have none; "" is an empty one. By default the chat template's
    own, if any."""
    plain_prompts: bool = False
    """Questions of gsm8k, math and gym are prompts as they are, even where the tokenizer has a chat
    template."""
    max_prompt_tokens: Count = 1024
    """Longer prompts are left out."""
    allow_special_tokens: bool = False
    """Prompts may have the tokenizer's control tokens in their text, such as <|im_end|>."""
    chat_template: Path | None = None
    """File of a chat template in Jinja, which checkpoints have too. By default the tokenizer's
    own."""
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Limit("a JSON object", lambda x: isinstance(x, dict))
    ] = None
    """Arguments of the chat template as a JSON object, such as {"enable_thinking": false}."""
    template_date: Annotated[str | None, Limit("a day such as 2026-11-26", _is_day)] = None
    """What the clock of a chat template shows, if it has one, as YYYY-MM-DD. By default the day on
    which the run starts."""
    stop: Annotated[tuple[str, ...], Limit("a text of at least one character", bool)] = ()
    """Texts that end a response, besides the stop tokens; the text is part of it."""


class Conversation:
    """The conversations of a tokenizer. listed_stops: token ids that end a response, as the
    checkpoint's files list them; tools: JSON schemas."""

    def __init__(
        self,
        tokenizer: Any,
        listed_stops: Collection[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        options: TextOptions = TextOptions(),
    ):
        self.tokenizer, given = tokenizer, options.template_date
        own = Path(tokenizer.name_or_path)
        names = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
        self._file = options.chat_template or next(
            (own / x for x in names if (own / x).exists()), own
        )
        self._tools, self._arguments = [*tools] or None, options.chat_template_kwargs or {}
        self.note = ""  # what the template would do to earlier turns, which keep their tokens
        # the day that was given or that the template shows, YYYY-MM-DD
        day = date.fromisoformat(given) if given else date.today()
        self.clock = day.isoformat() if given else None
        self._template = self._with_day(day)
        self._control = ControlTokens(tokenizer, includes_thinking=True)
        self._chat_begin: int | None = None  # the first token of a chat
        if taken := self._arguments.keys() & {*OWN, *["tools"] * bool(tools)}:
            raise InputError(
                f"--chat-template-kwargs must not have {min(taken)}, which the run sets itself"
            )
        if self._arguments:
            self._check_arguments()
        end = None if self._template is None else self._turn_end({*listed_stops})
        self.stop_ids = tuple(sorted({*listed_stops, *([] if end is None else [end])}))
        if not self.stop_ids:
            raise InputError(
                f"{tokenizer.name_or_path} must name a stop token in its tokenizer, config.json or "
                "generation_config.json, got none"
            )
        eos = tokenizer.eos_token_id
        self._text_end: int = self.stop_ids[0] if eos is None else eos
        self.end: int = self._text_end if end is None else end  # of a demonstration
        self._stops = any_of({self.text([i], raw=True).strip() for i in self.stop_ids} - {""})
        # what the tokenizer puts before a text
        bare, whole = self.encode("a"), tokenizer("a")["input_ids"]
        starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        self._lead: list[int] = whole[: next(starts, 0)]
        self._has_space = self.text([*bare, *bare]) != "aa"
        if tools:
            self._learn_calls(tools)

    def encode(self, text: str) -> list[int]:
        """Return token ids without those that begin or end a text."""
        encode, parts = self.tokenizer, text.split(MARK)
        return [i for x in parts for i in encode(x, add_special_tokens=False)["input_ids"]]

    def text(self, tokens: Sequence[int], raw: bool = False) -> str:
        """`raw`: with special tokens."""
        # transformers 4 would write "[1 , 2]" as "[1, 2]"
        options = {"skip_special_tokens": not raw, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))

    def as_text(self, text: str) -> str:
        """Return text of messages, in which what looks like a control token is none."""
        return self._control.divide(text.replace(MARK, "\ufffd"), MARK)

    def prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of text, or of messages up to where the answer begins; a last
        message of the assistant is continued."""
        if isinstance(prompt, str):
            ids = self.encode(prompt)
            # text in a chat's format may begin with the token already, or as a chat without it does
            has_begun = ids[: len(self._lead)] == self._lead or ids[:1] == [self._chat_begin]
            return ids if has_begun else [*self._lead, *ids]
        _, begin, start = self._begin(prompt)
        text, asked = begin + start, prompt[-1]
        # jinja writes nothing for a misspelt name, and single braces as they stand
        if asked["role"] == "user" and asked["content"].strip() not in text:
            left_out = f"the last message, {asked['content']!r:.80}"
            raise self._error(f"leaves out {left_out}: is a name or a brace in it misspelt?")
        return self.encode(text)

    def demonstration(self, prompt: Prompt, response: str | Message) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt, and those to learn: what the template writes of the
        response, up to the token that ends a turn."""
        answer = response if isinstance(response, dict) else _said(response)
        if isinstance(prompt, str):
            before, rest, end = prompt, _in_tags(answer), self._text_end
        else:
            chat, begin, start = self._begin(prompt)
            before, rest, end = begin + start, self._rest(chat, begin, start, answer), self.end
            self._check_thoughts(begin, start + rest, start + _in_tags(answer))
        own, learned = self.encode(before), self.encode(before + rest)
        is_joined = learned[: len(own)] == own
        learned = learned[len(own) :] if is_joined else self.encode_within(rest)
        at = next((i for i, token in enumerate(learned) if token in self.stop_ids), None)
        return self.prompt(prompt), [*learned, end] if at is None else learned[: at + 1]

    def encode_within(self, text: str) -> list[int]:
        """Return the token ids of text that continues another: SentencePiece would put a space
        before it, but not after a line feed or a letter that no token joins with it."""
        for lead in ("\n", "a", "0") if self._has_space else ():
            own, both = self.encode(lead), self.encode(lead + text)
            if both[: len(own)] == own:
                return both[len(own) :]
        return self.encode(text)

    def _begin(self, prompt: Sequence[Message]) -> tuple[Sequence[Message], str, str]:
        """Return the messages before the answer, their text up to it, and what a last message of
        the assistant's says, which is continued as it is."""
        if prompt[-1]["role"] != "assistant":
            return prompt, self._render(prompt, begins=True), ""
        chat, start = prompt[:-1], _in_tags(prompt[-1])
        begin, frame = self._render(chat, begins=True), self._render([*chat, _said(WORD)])
        between = frame[common(begin, frame) :].partition(WORD)[0]
        written = re.split(r"\s*</think>|<think>", between)[0]
        if start and not start.startswith(written):
            raise self._error(
                f"writes {written!r} before an answer; content of a last message of the assistant "
                f"must continue {begin[-30:]!r}, got {start!r:.200}"
            )
        self._check_thoughts(begin, start, start)
        return chat, begin, start

    def _check_thoughts(self, begin: str, written: str, given: str) -> None:
        """Refuse thoughts beside those that the template opens or closes in the same turn."""
        found = re.search(r"<think>\s*(</think>)?\s*$", begin)
        turn = (found[0] if found else "") + written
        if any(x in given and turn.count(x) > given.count(x) for x in THINKING):
            raise self._error(
                f"writes {turn!r:.100}, with other thoughts than those given: {given!r:.100}"
            )

    def _rest(self, chat: Sequence[Message], begin: str, start: str, answer: Message) -> str:
        """Return what the template writes after `begin`; of an answer that continues `start`, the
        answer as it is and what follows one."""
        content, reasoning = answer["content"], answer.get(REASONING[0], "")
        frame = self._render([*chat, _said(WORD)])
        same, closing = common(begin, frame), frame.rpartition(WORD)[2]
        if start:
            return _in_tags(answer) + closing
        whole, end = self._render([*chat, answer]), THINKING[1]
        given = re.fullmatch(r"\s*(?:<think>)?(.*?)</think>(.*)", content, re.DOTALL)
        if given and not reasoning and whole[same:].count(end) > content.count(end):
            # the template writes a block of its own, for the thoughts of the content
            apart = _said(given[2].lstrip("\n"), **{REASONING[0]: given[1].strip()})
            filled = self._render([*chat, apart])
            whole = filled if _has(filled[same:], given[1] + end + given[2]) else whole
        if not _has(whole[common(begin, whole) :], reasoning):
            if end not in str(self._template):
                raise self._error("does not write reasoning_content; give it in the content")
            return self._rest(chat, begin, start, _said(_in_tags(answer)))
        if whole.startswith(begin) and _has(whole, content):
            return whole[len(begin) :]
        # the template drops what the prompt opens: the response is put where a word would stand
        opened = begin[same:].strip()
        if frame[same:].startswith(WORD) and not reasoning:
            if content.startswith(opened):
                return content.removeprefix(opened).lstrip("\n" * bool(opened)) + closing
            if opened == THINKING[0] and end in content:  # it closes what is open
                return content + closing
        raise self._error(
            f"writes {whole[max(0, same - 20) :]!r:.100} after a prompt that ends with "
            f"{begin[-30:]!r}, and a response must continue it; give it its reasoning"
        )

    def reply(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[int]:
        """Return the tokens between a sampled turn and the next: the replies to its calls."""
        made = [_call(i, call.name or "unknown", {}) for i, call in enumerate(calls)]
        made[-1]["function"]["arguments"] = {"x": WORD}
        replies = [_replied(call, self.as_text(x)) for call, x in zip(made, texts, strict=True)]
        text = self._render([_ASKED, _said("", tool_calls=made), *replies], begins=True)
        after = text.partition(WORD)[2]
        if (end := self._stops.search(after)) is None:
            names = self.text(self.stop_ids, raw=True)
            raise self._error(f"ends a call of a tool by none of {names}; --stop adds a stop token")
        # with the token before it, after which no tokenizer adds a space
        return self.encode(after[end.start() :])[1:]

    def calls(self, turn: Sequence[int]) -> list[ToolCall]:
        text = self.text(turn[:-1] if turn[-1] in self.stop_ids else turn, raw=True)
        is_reasoned = self._opens_thinking or text.lstrip().startswith(THINKING[0])
        if is_reasoned and THINKING[1] in text:
            text = text.partition(THINKING[1])[2]
        return self._form.read(text)[: None if self._takes_several else 1]

    def _learn_calls(self, tools: Sequence[dict[str, Any]]) -> None:
        """Learn how the template writes calls, and refuse one that cannot be read or replied to."""
        before, call = self._render([_ASKED], begins=True), _call(0, NAME, ARGUMENTS)
        self._opens_thinking, texts = before.rstrip().endswith(THINKING[0]), []
        for content in ("", WORD):
            text = self._render([_ASKED, _said(content, tool_calls=[call])])
            after = text.rpartition(WORD)[2] if WORD in text else text[common(before, text) :]
            if NAME in after:
                texts.append(self._stops.split(after)[0])
        form = learn(texts, tools)
        if form is None or form.read(texts[0]) != [ToolCall(NAME, ARGUMENTS)]:
            what = texts[0] if texts else "nothing"
            raise self._error(
                f"must write calls of tools in a form that can be read, for --environment, got "
                f"{what!r:.200} for one"
            )
        self._form, self._takes_several = form, True
        two = [ToolCall(tools[0]["function"]["name"], {})] * 2
        self.reply(two[:1], ["1"])
        try:
            self.reply(two, ["1", "2"])
        except InputError:  # Llama 3's template takes one call in a turn
            self._takes_several = False
        turn = _said("", tool_calls=[call], **{REASONING[0]: WORD})
        own = self._render([_ASKED, turn])
        later = self._render([_ASKED, turn, _replied(call, "1"), _said("2"), _ASKED], begins=True)
        if lost := self._stops.split(own[common(own, later) :])[0].strip():
            self.note = (
                "turns stay as they were sampled, where the chat template would later leave out "
                f"or rewrite {lost.replace(WORD, '...')[:30]!r}"
            )

    def _check_arguments(self) -> None:
        from jinja2 import Environment, TemplateSyntaxError, meta  # of transformers

        # transformers has the statement `generation`
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", self._template or "")
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except TemplateSyntaxError as error:
            raise self._error(f"cannot be parsed: {error}") from error
        if unread := self._arguments.keys() - meta.find_undeclared_variables(parsed):
            raise self._error(f"does not read {min(unread)!r:.80} of --chat-template-kwargs")

    def _turn_end(self, listed: set[int]) -> int | None:
        """Return the token that ends a turn: of the control tokens right after the assistant's
        text the first that is listed, or the first; where there is none, as in GLM's, the next
        message's first token. None: the template writes no such turn."""
        control = {i for i, text in self._control.texts.items() if text not in THINKING}
        names = {self.text([i], raw=True): i for i in control | listed}
        pattern, end = any_of(names), 0
        for asked in ([], [{**_ASKED, "content": NAME}]):
            try:
                text = self._render([_ASKED, _said(WORD), *asked])
            except InputError:  # which is said of the prompts and demonstrations
                return None
            self._chat_begin = next((i for i in self.encode(text)[:1] if i in control), None)
            after, found = text.rpartition(WORD)[2].partition(NAME)[0], list[int]()
            for match in pattern.finditer(after) if WORD in text else ():
                if found and match.start() > end:
                    break
                found, end = [*found, names[match[0]]], match.end()
            if found:
                return next((token for token in found if token in listed), found[0])
        return None

    def _with_day(self, day: date) -> str | None:
        """Return the template, with the day in place of its clock."""
        if self.tokenizer.chat_template is None:
            return None
        try:
            source: str = self.tokenizer.get_chat_template(tools=self._tools)
        except ValueError as error:  # several, without a default
            raise self._error(f"cannot be chosen: {error}") from error
        if _CLOCK.search(source):
            self.clock = day.isoformat()
        source = _CLOCK.sub(lambda found: json.dumps(day.strftime(found[2])), source)
        if "strftime_now(" in source:
            raise self._error("must give strftime_now its format as text, so that a run has a date")
        return source

    def _render(self, messages: Sequence[Message], *, begins: bool = False) -> str:
        """begins: up to where the assistant's answer begins."""
        if self._template is None:
            needs = "--environment needs one" if self._tools else "give prompts as text instead"
            who = self.tokenizer.name_or_path
            raise InputError(f"the tokenizer of {who} has no chat template; {needs}")
        chat = [dict(message) for message in messages]
        for message in chat:
            if message["role"] == "developer" and "developer" not in self._template:
                message["role"] = "system"
            if reasoning := message.get(REASONING[0]):
                message |= dict.fromkeys(REASONING, reasoning)
        how = {"chat_template": self._template, "tools": self._tools, "tokenize": False}
        how |= {"add_generation_prompt": begins, **self._arguments}
        apply = partial(self.tokenizer.apply_chat_template, **how)
        try:
            with _time_limit():
                try:
                    return str(apply(chat))
                except TypeError:  # some templates take the arguments of calls as text
                    return str(
                        apply(json.loads(json.dumps(chat), object_hook=_with_text_arguments))
                    )
        # errors of jinja and of the template itself; MemoryError has no text
        except Exception as error:
            cause = str(error) or type(error).__name__
            with_tools = " with tools" * bool(self._tools)
            raise self._error(f"rejects {[*messages]!r:.200}{with_tools}: {cause}") from error

    def _error(self, what: str) -> InputError:
        return InputError(f"the chat template in {self._file} {what}")


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Limit a template to SECONDS, on the main thread, where each is rendered first."""

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes longer than {SECONDS:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


def _said(content: str, **others: Any) -> Message:
    return {"role": "assistant", "content": content, **others}


def _call(i: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{i}", "type": "function", "function": function}


def _replied(call: Mapping[str, Any], text: str) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": text}


def _with_text_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    is_call = isinstance(fields.get("arguments"), dict)
    return {**fields, "arguments": json.dumps(fields["arguments"])} if is_call else fields


def _in_tags(message: Message) -> str:
    reasoning, content = message.get(REASONING[0], ""), message["content"]
    return f"{THINKING[0]}\n{reasoning}\n{THINKING[1]}\n\n{content}" if reasoning else content


def _has(text: str, part: str) -> bool:
    """Whether a text has a part, in any white space."""
    return "".join(part.split()) in "".join(text.split())

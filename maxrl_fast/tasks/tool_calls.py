"""How a chat template writes calls of tools, learned from what it writes of one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

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

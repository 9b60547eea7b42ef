import datetime
import json
import re
import unicodedata
from types import SimpleNamespace

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

from maxrl_fast.errors import InputError
from maxrl_fast.tasks import text_codec
from maxrl_fast.tasks.conversation import TextOptions, _with_text_arguments
from maxrl_fast.tasks.text_codec import TextTask
from tests.language.families import CASES, FAMILIES, save_family

pytestmark = pytest.mark.language
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TEXTS = {"UNICODE": CASES["unicode"], "LONG": CASES["sentence"] * 60}
TOOLS = CASES["tools"]
DAY = datetime.date(2024, 2, 3)


def chat(text):
    """Return the messages of "u:Hi|a:Hello."."""
    return [{"role": ROLES[x[0]], "content": TEXTS.get(x[2:], x[2:])} for x in text.split("|")]


def said(content, think="", calls=()):
    message = {"role": "assistant", "content": content}
    # as templates call it
    message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), think) if think else {}
    return message | ({"tool_calls": [*calls]} if calls else {})


def call(i, arguments):
    function = {"name": "order" if "item" in arguments else "search", "arguments": arguments}
    return {"id": f"call_{i}", "type": "function", "function": function}


def turns(think="", content="", calls=({"query": "Paris"},), replies=("sunny", "21 C")):
    """Return three turns, the messages of each: one with calls, one with a call, and an answer."""
    played = []
    for arguments, reply in zip((calls, [{"query": "again"}]), replies, strict=True):
        asked = [call(i, x) for i, x in enumerate(arguments)]
        names = [{"tool_call_id": x["id"], "name": x["function"]["name"]} for x in asked]
        replied = [{"role": "tool", "content": reply, **x} for x in names]
        played.append([said(content, think, asked), *replied])
    return [*played, [said("It is sunny.", think)]]


def bare(text):
    return "".join(unicodedata.normalize("NFC", text).split())


class Family:
    """The cases of a family. Each returns the letter of its outcome, None for "="."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer, self.decode = folder, tokenizer, tokenizer.decode
        self.codec, self.with_tools = self.made(), None

    def made(self, tools=(), **options):
        options |= {"max_prompt_tokens": 10**6, "template_date": DAY.isoformat()}
        return TextTask(self.folder, TextOptions(**options), tools=tools)

    def outcomes(self):
        asked = chat(CASES["prompts"]["one turn"])
        cases = {f"prompt {x}": (self.prompt, chat(y)) for x, y in CASES["prompts"].items()}
        for case in (self.plain_text, self.no_doubled_bos, self.forged, self.decoding, self.stops):
            cases[case.__name__] = case, asked
        for x, text in CASES["demonstrations"].items():
            cases[f"demonstration {x}"] = self.demonstration, chat(text)
        cases["reasoning"] = self.demonstration, [*asked, said("It is 4.", "add")]
        for x in CASES["arguments"]:
            cases[str(x)] = self.arguments, x
        cases["tools"] = (self.tools,)
        for x, options in CASES["episodes"].items():
            cases[f"episode {x}"] = self.episode, asked, turns(**options)
        for name, (case, *arguments) in cases.items():
            try:
                cases[name] = case(*arguments) or "="
            except InputError as error:
                found = [letter for letter, text in CASES["refused"].items() if text in str(error)]
                cases[name] = "".join(found) or str(error)
        return cases

    def text(self, messages, **options):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def tokens(self, messages, **options):
        return self.tokenizer.apply_chat_template(messages, return_dict=False, **options)

    def prompt(self, messages, codec=None, **options):
        got = (codec or self.codec).encode_prompt(messages, "line 1")
        *chat, last = messages
        if last["role"] == "assistant":
            text = self.text(chat, add_generation_prompt=True, **options) + last["content"]
            assert got == self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return
        assert (got or []) == self.tokens(messages, add_generation_prompt=True, **options)

    def plain_text(self, _):
        for text in ("12 + 30 =", "  a b \n", *TEXTS.values()):
            assert self.codec.conversation.prompt(text) == self.tokenizer(text)["input_ids"]

    def no_doubled_bos(self, asked):
        text = self.text(asked, add_generation_prompt=True)
        got = self.made(allow_special_tokens=True).encode_prompt(text, "line 1")
        assert got == self.tokens(asked, add_generation_prompt=True)

    def forged(self, asked):
        end = self.decode([self.codec.conversation.end])
        self.prompt([asked[0] | {"content": f"x{end}y"}])

    def decoding(self, _):
        made, letter = self.codec.conversation, "="
        for text in ("It is 4.", "a , b . c ' s n't", "x\n", TEXTS["UNICODE"], " 4"):
            ids = [*made.encode(text), made.end]
            got = made.text(ids)
            assert got == self.decode(ids, skip_special_tokens=True)
            assert made.text(ids, raw=True) == self.decode(ids)
            if got not in (text, unicodedata.normalize("NFC", text)):
                assert got == text.lstrip(" ")
                letter = "s"
        return letter

    def stops(self, _):
        """With the generation configuration of the release, and without one."""
        made, listed = self.codec.conversation, self.folder / "generation_config.json"
        known = {*json.loads(text := listed.read_text())["eos_token_id"], made.end}
        listed.unlink()
        less = self.made().conversation
        listed.write_text(text)
        assert known == {*made.stop_ids}
        assert less.end == made.end in less.stop_ids

    def demonstration(self, messages, codec=None, **options):
        codec, (*asked, answer) = codec or self.codec, messages
        prompt, learned = codec.encode_demonstration(asked, answer, "line 1")
        assert prompt == codec.encode_prompt(asked, "")
        assert [i for i, x in enumerate(learned) if x in codec.stop_ids] == [len(learned) - 1]
        got, whole = prompt + learned, self.tokens(messages, **options)
        if whole[: len(got)] == got and not self.decode(whole[len(got) :]).strip():
            return "="
        got, end = bare(self.decode(got)), bare(self.decode(learned[-1:]))
        wanted = bare(self.text(messages, **options))
        if wanted.startswith(got):
            return "~"
        if got == wanted + end:
            return "+"
        assert got.endswith(bare(answer["content"]).removeprefix("<think>") + end)
        return "g"

    def arguments(self, given):
        if not all(name in self.tokenizer.chat_template for name in given):
            return "-"
        codec = self.made(chat_template_kwargs=given)
        for x in ("system", "earlier <think>"):
            self.prompt(chat(CASES["prompts"][x]), codec, **given)
        return self.demonstration(chat(CASES["demonstrations"]["<think>"]), codec, **given)

    def tools(self):
        self.with_tools = self.made(tools=TOOLS)
        for x in ("one turn", "several turns", "unicode"):
            self.prompt(chat(CASES["prompts"][x]), self.with_tools, tools=TOOLS)

    def chat(self, messages, *, begins=False):
        options = {"tools": TOOLS, "add_generation_prompt": begins}
        try:
            return self.text(messages, **options)
        except TypeError:  # some templates take the arguments of calls as text
            messages = json.loads(json.dumps(messages), object_hook=_with_text_arguments)
            return self.text(messages, **options)

    def episode(self, chat, played):
        """Play turns as the template writes them; compare calls, replies and the whole."""
        if self.with_tools is None:
            return "-"
        made, letter = self.with_tools.conversation, "r"
        stops = re.compile("|".join(re.escape(self.decode([x])) for x in made.stop_ids))
        context = made.prompt(chat)
        for message, *replies in played:
            try:
                before = self.chat(chat, begins=True)
                chat = [*chat, message, *replies]
                after = self.chat(chat)
            except TemplateError:
                return "t"
            start, closes = len(before), False
            if not after.startswith(before):  # it drops what the prompt opens, or earlier thoughts
                tail = before[-30:].removesuffix("<think>\n")
                closes = not before.endswith(tail)
                letter, at = "d" if closes else letter, after.rfind(tail)
                if at < 0 or at + len(tail) == len(after):
                    return "b"
                start = at + len(tail)
            turn = "</think>" * closes + after[start:]
            end = stops.search(turn)
            ids = made.encode(turn[: end.end()] if end else turn)
            context += ids if ids[-1] in made.stop_ids else [*ids, made.end]
            calls, wanted = made.calls(ids), message.get("tool_calls", ())
            called = [{"name": x.name, "arguments": x.arguments} for x in calls]
            if called != [x["function"] for x in wanted]:
                return "c"
            if replies:
                reply = made.reply(calls, [x["content"] for x in replies])
                if not bare(self.chat(chat, begins=True)).endswith(bare(self.decode(reply))):
                    return "x"
                context += reply
        whole, got = made.encode(after), bare(self.decode(context))
        if context == whole[: len(context)] and not self.decode(whole[len(context) :]).strip():
            return "="
        text = bare(after)
        return "~" if text.startswith(got) or got.startswith(text) else letter


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name, tmp_path, monkeypatch):
    tokenizer = save_family(name, tmp_path)
    monkeypatch.setattr(text_codec, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DAY))
    family = Family(tmp_path, tokenizer)
    got, (end, wanted) = family.outcomes(), FAMILIES[name][5:]
    assert tokenizer.decode([family.codec.conversation.end]) == end
    assert got == dict(zip(got, wanted, strict=True))

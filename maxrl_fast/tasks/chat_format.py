"""Messages with tool calls to tokens and back, by the package `renderers`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import ControlTokens, Message

# a noncharacter, which no text should have: text on both sides of it is encoded separately
MARK = "\ufdd0"
EXTRA = "pip install 'maxrl_fast[episodes]', on Python 3.11 or newer"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Any
    id: str
    error: str = ""  # why it cannot be read


class MarkedTokenizer:
    """A tokenizer for renderers that encodes the text between two marks separately."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("no offsets")  # renderers then encode without them

    def encode(self, text: str, **options: Any) -> list[int]:
        parts = filter(None, text.split(MARK))
        return [i for part in parts for i in self._tokenizer.encode(part, **options)]


class ChatFormat:
    """The tokens of a model's chats with tools.

    The renderer is the first of the package whose prompt equals the tokenizer's own chat template
    on the sample chats, which reads back a call of the first tool, and which extends the sampled
    tokens of that call. `who` names the model.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: list[dict[str, Any]],
        samples: Sequence[Sequence[Message]],
        who: str,
    ):
        self._tools, self._control = tools, ControlTokens(tokenizer, includes_thinking=True)
        if tokenizer.chat_template is None:
            raise InputError(f"--environment needs a chat template, and {who} has none")
        try:
            from renderers import config_from_name, create_renderer
            from renderers.base import MODEL_RENDERER_MAP
        except (ImportError, SyntaxError) as error:
            raise InputError(
                f"--environment needs the package renderers: {EXTRA} ({error})"
            ) from error
        wanted = [_template_ids(tokenizer, chat, tools, who) for chat in samples]
        names = dict.fromkeys(MODEL_RENDERER_MAP.values())
        nearest = 0, f"its chat template has the tokens of none of the {len(names)} formats"
        for name in names:
            # openai-harmony would download its vocabulary
            if name == "gpt-oss" and "<|channel|>" not in tokenizer.get_vocab():
                continue
            try:
                self._renderer = create_renderer(MarkedTokenizer(tokenizer), config_from_name(name))
                prompts = [self.prompt(chat) for chat in samples]
            # of a tokenizer without its control tokens, or messages that it does not know
            except Exception:
                continue
            if prompts != wanted:
                continue
            lacks = self._rehearse(samples[0], prompts[0])
            if not lacks:
                self.name, self.stop_ids = name, tuple(self._renderer.get_stop_token_ids())
                return
            nearest = max(nearest, (1, f"the format {name} {lacks}"))
        raise InputError(
            f"--environment needs a chat format that the package renderers can extend, but of "
            f"{who} {nearest[1]}"
        )

    def _rehearse(self, chat: Sequence[Message], prompt: list[int]) -> str:
        """Read and extend a call of the first tool; return what is wrong, or ""."""
        name, arguments = self._tools[0]["function"]["name"], {"x": 1}
        function = {"name": name, "arguments": arguments}
        call = {"id": "call_0", "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        tokens = self._renderer.render([*chat, turn], tools=self._tools).token_ids
        if tokens[: len(prompt)] != prompt:
            return "begins a turn otherwise than its prompt ends"
        stops = self._renderer.get_stop_token_ids()
        end = next((i for i in range(len(prompt), len(tokens)) if tokens[i] in stops), None)
        if end is None:
            return "does not end a turn with a stop token"
        sampled = tokens[len(prompt) : end + 1]
        calls = self.calls(prompt, sampled)
        if [(one.name, one.arguments, one.error) for one in calls] != [(name, arguments, "")]:
            return "does not read back the call of a tool"
        if self.extend(prompt, sampled, calls, ["1"]) is None:
            return (
                "cannot extend a sampled turn (bridge_to_next_turn gives None, as where a template "
                "drops earlier reasoning)"
            )
        return ""

    def as_text(self, text: str) -> str:
        """Return text of an environment for messages: what is written like a control token in it is
        encoded as text.
        """
        return self._control.divide(text.replace(MARK, "\ufffd"), MARK)

    def prompt(self, chat: Sequence[Message]) -> list[int]:
        rendered = self._renderer.render([*chat], tools=self._tools, add_generation_prompt=True)
        return [*rendered.token_ids]

    def calls(self, context: list[int], turn: list[int]) -> list[ToolCall]:
        """Return the tool calls in a turn that was sampled after `context`."""
        try:
            parsed = self._renderer.parse_response(turn, tools=self._tools, prompt_ids=context)
        except Exception as error:  # of tokens that nobody wrote, such as JSON nested too deeply
            return [ToolCall("", {}, "call_0", f"the turn cannot be read: {type(error).__name__}")]
        found = []
        for i, one in enumerate(parsed.tool_calls):
            name, status = one.name or "", one.status.value
            is_read = one.name and status in ("ok", "unknown_tool")
            problem = "" if is_read else f"the call cannot be read ({status}): {one.raw[:200]}"
            arguments = {} if one.arguments is None else one.arguments
            found.append(ToolCall(name, arguments, one.id or f"call_{i}", problem))
        return found

    def extend(
        self, context: list[int], turn: list[int], calls: Sequence[ToolCall], texts: Sequence[str]
    ) -> list[int] | None:
        """Return the tokens between a turn and the next one, with the reply to each of its calls;
        None if the format cannot continue this turn.
        """
        messages = [
            {
                "role": "tool",
                "name": call.name or "unknown",
                "tool_call_id": call.id,
                "content": self.as_text(text),
            }
            for call, text in zip(calls, texts, strict=True)
        ]
        bridged = self._renderer.bridge_to_next_turn(context, turn, messages, tools=self._tools)
        known = [*context, *turn]
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return list(bridged.token_ids[len(known) :]) or None


def _template_ids(
    tokenizer: Any, chat: Sequence[Message], tools: list[dict[str, Any]], who: str
) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(
            [*chat], tools=tools, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # of jinja and of the template itself
        raise InputError(
            f"the chat template of {who} rejects {json.dumps(chat)[:200]} with tools: {error}"
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids

"""Tokenizers and chat templates of checkpoint directories.

A chat template is code of the checkpoint. transformers runs it in Jinja's sandbox, without files
and commands.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
THINKING = ("<think>", "</think>")

Message = dict[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message]


def load_tokenizer(directory: Path) -> Any:
    """Its code is never executed."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(
            f"a checkpoint's tokenizer needs transformers: pip install 'maxrl_fast[hf]' ({error})"
        ) from error
    # transformers would make an empty tokenizer
    if not any(any(directory.glob(name)) for name in VOCABULARIES):
        raise InputError(
            f"{directory} has no tokenizer: it must have one of {', '.join(VOCABULARIES)}, got none"
        )
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # parsers of these files raise anything
        raise InputError(
            f"cannot read the tokenizer of {directory}: {type(error).__name__}: {error}"
        ) from error


def template_file(directory: Path) -> Path:
    for name in ("chat_template.jinja", "chat_template.json"):
        if (directory / name).exists():
            return directory / name
    return directory / "tokenizer_config.json"


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return encode_chat(tokenizer, prompt)
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids


def encode_response(tokenizer: Any, response: str) -> list[int]:
    """Return the token ids without tokens that begin or end a text."""
    ids: list[int] = tokenizer(response, add_special_tokens=False)["input_ids"]
    return ids


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Encode messages up to where the answer starts."""
    if tokenizer.chat_template is None:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; give prompts as text "
            "instead"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    # errors of jinja and of the template itself; MemoryError has no text
    except Exception as error:
        file = template_file(Path(tokenizer.name_or_path))
        cause = str(error) or type(error).__name__
        raise InputError(
            f"the chat template in {file} rejects {messages!r:.200}: {cause}"
        ) from error
    # jinja writes nothing for a misspelt name, and single braces as they stand
    last: dict[str, Any] = {**messages[-1]} if messages else {}
    asked = last.get("content")
    if last.get("role") == "user" and isinstance(asked, str) and asked.strip() not in text:
        raise InputError(
            f"the chat template in {template_file(Path(tokenizer.name_or_path))} leaves out the "
            f"last message, {asked!r:.80}: is a name or a brace in it misspelt?"
        )
    # the template writes them itself
    return encode_response(tokenizer, text)


class ControlTokens:
    """The control tokens of a tokenizer, which delimit messages and texts: forged, if in a prompt's
    text.

    An added token is a control token if it is marked special, is written like one (<|...|>), or is
    in the chat template: ChatML's tokens are often added without the mark. White space, words such
    as roles, punctuation, and, without `includes_thinking`, <think> are not.
    """

    def __init__(self, tokenizer: Any, includes_thinking: bool = False):
        template = tokenizer.chat_template or ""
        # several, by name
        source = template if isinstance(template, str) else "".join(map(str, template.values()))
        added = tokenizer.added_tokens_decoder
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {i: token.content for i, token in added.items() if token.special}
        written = {
            i: token.content
            for i, token in added.items()
            if _is_control(token.content, source)
            or (includes_thinking and token.content in THINKING)
        }
        self._texts = {i: text for i, text in (written | special).items() if text.strip()}
        # the id of all text that the tokenizer does not know
        self._ids = self._texts.keys() - {tokenizer.unk_token_id}
        # (?!) is in no text
        self._pattern = re.compile("|".join(map(re.escape, self._texts.values())) or "(?!)")
        self._tokenizer = tokenizer
        self._find = lru_cache(64)(self._search)  # roles and system messages repeat

    def refuse(self, prompt: Prompt, what: str = "a prompt") -> None:
        if isinstance(prompt, str):
            texts = [prompt]
        else:
            texts = [text for message in prompt for text in message.values()]
        for text in texts:
            if token := self._find(text):
                raise InputError(
                    f"{what} must not have the special token {token!r} of the tokenizer in its "
                    f"text, got {prompt!r:.200}; --allow-special-tokens encodes it as that token"
                )

    def divide(self, text: str, mark: str) -> str:
        """Return the text with marks inside what would be read as control tokens: its parts between
        the marks have none.
        """
        divided = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        ids = {i for part in divided.split(mark) for i in encode_response(self._tokenizer, part)}
        return mark.join(text) if ids & self._ids else divided

    def _search(self, text: str) -> str | None:
        """A tokenizer that normalizes may read a token in capitals or full-width forms."""
        if match := self._pattern.search(text):
            return match[0]
        forged = self._ids.intersection(encode_response(self._tokenizer, text))
        return self._texts[min(forged)] if forged else None


def _is_control(token: str, template: str) -> bool:
    # a word, or no letters
    if token in THINKING or re.fullmatch(r"[\w\s]+|[\W\d_]+", token):
        return False
    # U+FF5C: DeepSeek's bar
    return (
        token in template or re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", token, re.DOTALL) is not None
    )


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES if (directory / name).exists()}

"""Tokenizers and chat templates of checkpoints. A template is code, which transformers runs in
Jinja's sandbox, without files and commands."""

import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import check_regular

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
FILES = (
    *VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
THINKING = ("<think>", "</think>")
REASONING = ("reasoning_content", "reasoning", "thinking")  # as messages and templates call it

# {"role": ..., "content": ...}, of the assistant perhaps with reasoning_content, or tool_calls
Message = dict[str, Any]
Prompt = str | Sequence[Message]


def load_tokenizer(directory: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(
            f"a checkpoint's tokenizer needs transformers: pip install transformers ({error})"
        ) from error
    # transformers would make an empty tokenizer
    if not any(any(directory.glob(name)) for name in VOCABULARIES):
        raise InputError(
            f"{directory} has no tokenizer: it must have one of {', '.join(VOCABULARIES)}, got none"
        )
    for path in (path for name in FILES for path in directory.glob(name)):
        check_regular(path)
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # parsers of these files raise anything
        raise InputError(f"cannot read the tokenizer of {directory}: {error!r:.300}") from error


class ControlTokens:
    """The tokens of a tokenizer that delimit messages and texts: forged, if in a prompt's text. An
    added token is one if it is marked special, is written like one (<|...|>), or is in the chat
    template: ChatML's are often added without the mark. White space, words such as roles,
    punctuation, and, without `includes_thinking`, <think> are not."""

    def __init__(self, tokenizer: Any, includes_thinking: bool = False):
        template = tokenizer.chat_template or ""
        # several, by name
        source = template if isinstance(template, str) else "".join(map(str, template.values()))
        texts = {
            i: token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special
            or _is_control(token.content, source)
            or (includes_thinking and token.content in THINKING)
        }
        texts |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.texts = {i: text for i, text in texts.items() if text.strip()}
        # the id of all text that the tokenizer does not know
        self._ids = self.texts.keys() - {tokenizer.unk_token_id}
        self._pattern = any_of(self.texts.values())
        self._tokenizer = tokenizer
        self._find = lru_cache(64)(self._search)  # roles and system messages repeat

    def refuse(self, prompt: Prompt, what: str = "a prompt") -> None:
        if isinstance(prompt, str):
            texts = [prompt]
        else:
            texts = [x for message in prompt for x in message.values() if isinstance(x, str)]
        for text in texts:
            if token := self._find(text):
                raise InputError(
                    f"{what} must not have the special token {token!r} of the tokenizer in its "
                    f"text, got {prompt!r:.200}; --allow-special-tokens encodes it as that token"
                )

    def divide(self, text: str, mark: str) -> str:
        """Put marks inside what would be read as control tokens: the parts between have none."""
        divided = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        ids = {i for part in divided.split(mark) for i in self._encode(part)}
        return mark.join(text) if ids & self._ids else divided

    def _search(self, text: str) -> str | None:
        """A tokenizer that normalizes may read a token in capitals or full-width forms."""
        if match := self._pattern.search(text):
            return match[0]
        forged = self._ids.intersection(self._encode(text))
        return self.texts[min(forged)] if forged else None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the longest of some texts; of none, what is in no text."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _is_control(token: str, template: str) -> bool:
    # a word, or no letters
    if token in THINKING or re.fullmatch(r"[\w\s]+|[\W\d_]+", token):
        return False
    # U+FF5C: DeepSeek's bar
    return (
        token in template or re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", token, re.DOTALL) is not None
    )


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    found = {path for pattern in FILES for path in directory.glob(pattern)}
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(found)}


def saved_files(tokenizer: Any, directory: Path, template: str | None) -> dict[str, bytes]:
    """Return the files of a directory, and what transformers saves beside them. template: in place
    of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = tokenizer_files(Path(folder)) | tokenizer_files(directory)
    if template is not None:
        files.pop("chat_template.json", None)
        files["chat_template.jinja"] = template.encode()
    return files

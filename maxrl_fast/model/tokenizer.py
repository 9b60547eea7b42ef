"""Tokenizers and chat templates of checkpoint directories. transformers is imported only when one is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.files.untrusted import TOKENIZER_BYTES, check_regular

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json"),
)


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of a checkpoint directory, a transformers.PreTrainedTokenizerBase. Its code is never executed.

    Raises:
        InputError: if transformers is not installed, or it cannot read a tokenizer from the directory.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(f"{directory} needs transformers for its tokenizer: pip install 'maxrl_fast[hf]' ({error})") from error
    _check_files(directory)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # parsers of these files raise anything
        raise InputError(f"cannot read the tokenizer of {directory}: {type(error).__name__}: {error}") from error


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Encode messages {"role": ..., "content": ...} with the tokenizer's chat template, up to where the answer starts.

    Raises:
        InputError: if the tokenizer has no template, or the template rejects the messages.
    """
    if tokenizer.chat_template is None:
        raise InputError(f"the tokenizer of {tokenizer.name_or_path} has no chat template; give prompts as text instead")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # errors of jinja and of the template itself
        raise InputError(f"the chat template of {tokenizer.name_or_path} rejects {messages!r:.200}: {error}") from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them itself
    return ids


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the tokenizer's files by name, for checkpoints of a policy that started from this directory."""
    _check_files(directory)
    return {name: (directory / name).read_bytes() for name in FILES if (directory / name).exists()}


def _check_files(directory: Path) -> None:
    """Raise InputError for files that would block or never end, such as pipes and devices."""
    for name in (*FILES, "config.json", "generation_config.json"):
        if (directory / name).exists():
            check_regular(directory / name, TOKENIZER_BYTES)

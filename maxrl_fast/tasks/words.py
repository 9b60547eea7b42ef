"""Tokenizers with one token per word."""

from collections.abc import Sequence
from typing import Any


def decode_words(words: Sequence[str], tokens: Sequence[int]) -> str:
    return " ".join(
        words[token] if token < len(words) else f"<reserved_{token}>" for token in tokens
    )


def word_tokenizer_files(words: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """Return the JSON files, by name, of a Hugging Face tokenizer with one token per word; it
    ignores spaces, and decodes without them. The first words are <pad>, <bos>, <eos> and <unk>; ids
    from len(words) on are reserved."""
    all_words = [*words, *(f"<reserved_{i}>" for i in range(len(words), vocab_size))]
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    how = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
    # Every word is an added token: transformers 5 loads the tokenizer of a qwen2 checkpoint as a
    # byte-level one, which ignores words.
    added = [
        {"id": i, "content": word, "special": word in special.values(), **how}
        for i, word in enumerate(all_words)
    ]
    off = ("add_prefix_space", "trim_offsets", "use_regex")
    byte_level: dict[str, Any] = {"type": "ByteLevel"} | dict.fromkeys(off, False)
    vocabulary = {word: i for i, word in enumerate(all_words)}
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"},
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 10**9,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config | special}

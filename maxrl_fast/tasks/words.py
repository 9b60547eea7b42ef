"""Tokenizers with one token a word."""

from collections.abc import Sequence
from typing import Any


def decode_words(words: Sequence[str], tokens: Sequence[int]) -> str:
    """Token ids as words with spaces between."""
    return " ".join(words[token] if token < len(words) else f"<reserved_{token}>" for token in tokens)


def word_tokenizer_files(words: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """The JSON files of a Hugging Face tokenizer, by file name: one token a word, spaces ignored.

    Every word is an added token, since transformers 5 reads a qwen2 checkpoint's tokenizer as Qwen2's, whatever its
    class, and so with a byte-level model in which a word-level vocabulary would mean nothing. It decodes without spaces.

    Args:
        words: by token id; they begin with <pad>, <bos>, <eos> and <unk>.
        vocab_size: ids from len(words) on are reserved.
    """
    all_words = [*words, *(f"<reserved_{i}>" for i in range(len(words), vocab_size))]
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    added = [
        {"id": i, "content": word, "special": word in special.values(), "lstrip": True, "rstrip": True}
        | {"single_word": False, "normalized": False}
        for i, word in enumerate(all_words)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {word: i for i, word in enumerate(all_words)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"},
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 10**9, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config | special}

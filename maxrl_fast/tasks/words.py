"""Tokenizers with one token per word."""

from collections.abc import Sequence
from typing import Any


def decode_words(words: Sequence[str], tokens: Sequence[int]) -> str:
    return " ".join(
        words[token] if token < len(words) else f"<reserved_{token}>" for token in tokens
    )


def word_tokenizer_files(words: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """Return the JSON files of a Hugging Face tokenizer, by file name, with one token per word; it
    ignores spaces, and decodes without them. Every word is an added token, because transformers 5
    loads the tokenizer of a qwen2 checkpoint as a byte-level one, which ignores words. The first
    are <pad>, <bos>, <eos> and <unk>; ids from len(words) on are reserved."""
    all_words = [*words, *(f"<reserved_{i}>" for i in range(len(words), vocab_size))]
    special = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    added = [
        {
            "id": i,
            "content": word,
            "special": word in special.values(),
            "lstrip": True,
            "rstrip": True,
        }
        | {"single_word": False, "normalized": False}
        for i, word in enumerate(all_words)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
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
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 10**9,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config | special}

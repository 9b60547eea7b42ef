"""Diversity of the correct responses to a prompt: 1 - mean pairwise cosine similarity of their
vectors.

The vectors are embeddings of the text by a local model or, without a model, counts of token
n-grams.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import pack
from maxrl_fast.rewards.models import longest_text, read_model
from maxrl_fast.runtime.files import read_json

LONGEST_GRAM = 3
EMBEDDED = 32  # texts per batch


class Diversity(Protocol):
    """A measure of diversity. `name` says what the vectors are."""

    name: str

    def __call__(self, responses: Sequence[Sequence[int]], texts: Sequence[str]) -> float:
        """Return 1 - mean pairwise cosine of at least two responses to one prompt, given as tokens
        (not empty) and as text.
        """


def one_minus_cosine(total: Tensor, num_vectors: int) -> float:
    """Return 1 - mean pairwise cosine of m > 1 unit vectors u_i from their sum [d]: |sum u_i|^2 = m
    + 2 sum_{i<j} u_i . u_j.
    """
    square = float(total.double().square().sum())
    return max(0.0, 1 - (square - num_vectors) / (num_vectors * (num_vectors - 1)))


class NGramDiversity:
    """A response's vector holds the counts of its token 1-, 2- and 3-grams, with the stop token."""

    name = f"counts of token n-grams, n = 1 to {LONGEST_GRAM}"

    def __call__(self, responses: Sequence[Sequence[int]], texts: Sequence[str]) -> float:
        tokens, cu_seqlens = pack(responses)
        sequence = torch.repeat_interleave(cu_seqlens.diff())
        base, grams, found = int(tokens.max()) + 2, torch.zeros_like(tokens), []
        for n in range(min(LONGEST_GRAM, len(tokens))):
            # of n + 1 tokens from each place on: a number in this base, without the digit 0; three
            # digits of up to 2^21 fit into an int64
            grams = grams[: len(tokens) - n] * base + tokens[n:] + 1
            is_within = sequence[: len(grams)] == sequence[n:]
            found.append(torch.stack([sequence[n:], grams], 1)[is_within])
        sequences, grams = torch.cat(found).unbind(1)
        _, numbers = torch.unique(grams, return_inverse=True)
        # One entry for each response and each gram in it: its count, divided by the norm of the
        # response's vector.
        width = int(numbers.max()) + 1
        entries, counts = torch.unique(sequences * width + numbers, return_counts=True)
        sequence, gram, count = entries // width, entries % width, counts.double()
        none = torch.zeros(len(responses), dtype=torch.float64)
        norms = none.index_add_(0, sequence, count.square()).sqrt()
        total = torch.zeros(width, dtype=torch.float64).index_add_(0, gram, count / norms[sequence])
        return one_minus_cosine(total, len(responses))


def pooling_of(directory: Path) -> str:
    """Return of which tokens the last hidden states make a vector, by the file of
    sentence-transformers: lasttoken (Qwen3-Embedding), cls_token or mean_tokens, as without it."""
    file = directory / "1_Pooling" / "config.json"
    modes = read_json(file) if file.exists() else {"pooling_mode_mean_tokens": True}
    for mode in ("lasttoken", "cls_token", "mean_tokens"):
        if modes.get(f"pooling_mode_{mode}") is True:
            return mode
    raise InputError(f"{file} must have the pooling lasttoken, cls_token or mean_tokens")


class EmbeddingDiversity:
    """A text's vector is of a local model's last hidden states."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.name = f"embeddings by {directory}"
        if not directory.is_dir():
            raise InputError(f"--embeddings must be the directory of a model, got {directory}")
        what = f"the model of --embeddings {directory}"
        self._pooling = pooling_of(directory)
        self._tokenizer, model, _ = read_model(directory, "AutoModel", what, torch.float32)
        self._model = model.to(device)
        self._device = device
        self._longest = longest_text(self._tokenizer, model)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise InputError(
                f"the tokenizer of --embeddings {directory} must have a padding token or an "
                "end-of-text token"
            )

    def __call__(self, responses: Sequence[Sequence[int]], texts: Sequence[str]) -> float:
        distinct = sorted(set(texts))
        number = {text: i for i, text in enumerate(distinct)}
        vectors = torch.cat(
            [self.embed(distinct[i : i + EMBEDDED]) for i in range(0, len(distinct), EMBEDDED)]
        )
        units = torch.nn.functional.normalize(vectors.double(), dim=1)
        return one_minus_cosine(units[[number[text] for text in texts]].sum(0), len(texts))

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return vectors [len(texts), d], float32 on the CPU."""
        batch = self._tokenizer(
            # An empty text would have no tokens and no mean.
            [text or " " for text in texts],
            padding=True,
            truncation=True,
            max_length=self._longest,
            return_tensors="pt",
        ).to(self._device)
        hidden = self._model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        mask = batch["attention_mask"]  # [texts, T], padded on either side
        weights = mask / mask.sum(1, keepdim=True).clamp_min(1)
        if self._pooling != "mean_tokens":
            place = mask.argmax(1) if self._pooling == "cls_token" else mask.cumsum(1).argmax(1)
            weights = torch.nn.functional.one_hot(place, mask.shape[1])
        vectors: Tensor = (hidden * weights[..., None]).sum(1)
        return vectors.cpu()

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
from maxrl_fast.records import Rollouts, padded_slots
from maxrl_fast.rewards.models import longest_text, read_model

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
        sequences, grams = self._grams(Rollouts.given(responses))
        # One entry for each response and each gram in it: its count, divided by the norm of the
        # response's vector.
        width = int(grams.max()) + 1
        entries, counts = torch.unique(sequences * width + grams, return_counts=True)
        sequence, gram, count = entries // width, entries % width, counts.double()
        norms = (
            torch.zeros(len(responses), dtype=torch.float64)
            .index_add_(0, sequence, count.square())
            .sqrt()
        )
        total = torch.zeros(width, dtype=torch.float64).index_add_(0, gram, count / norms[sequence])
        return one_minus_cosine(total, len(responses))

    @staticmethod
    def _grams(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Return each gram's sequence [M], and a number [M] that only equal grams share."""
        padded, lengths = rollouts.padded_tokens(-1), rollouts.lengths  # [S, L]
        present = torch.zeros(padded.numel(), dtype=torch.bool)
        present[padded_slots(lengths, padded.shape[1])] = True
        present = present.view(padded.shape)
        vocabulary = int(padded.max()) + 1
        of_length, found, offset = padded, [], 0
        sequences = []
        for n in range(1, min(LONGEST_GRAM, padded.shape[1]) + 1):
            if n > 1:  # combine the gram that is one shorter with the next token
                of_length = of_length[:, :-1] * vocabulary + padded[:, n - 1 :]
            where = present[:, n - 1 :]
            sequence, _ = where.nonzero(as_tuple=True)
            distinct, numbers = torch.unique(of_length[where], return_inverse=True)
            # small numbers, so that the products do not overflow
            renumbered = torch.zeros_like(of_length)
            renumbered[where] = numbers
            of_length = renumbered
            found.append(numbers + offset)
            sequences.append(sequence)
            offset += len(distinct)
        return torch.cat(sequences), torch.cat(found)


class EmbeddingDiversity:
    """A text's vector is the mean over its tokens of a local model's last hidden states."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.name = f"embeddings by {directory}"
        if not directory.is_dir():
            raise InputError(f"--embeddings must be the directory of a model, got {directory}")
        what = f"the model of --embeddings {directory}"
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
        mask = batch["attention_mask"][..., None].float()
        mean: Tensor = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        return mean.cpu()

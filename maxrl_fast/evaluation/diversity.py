"""How different the correct responses to a prompt are: 1 - mean pairwise cosine of vectors that stand for them.

The vectors are embeddings of the text by a local model, or without one the counts of a response's token n-grams.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.records import Rollouts, padded_slots

LONGEST_GRAM = 3
EMBEDDED = 32  # texts at a time


class Diversity(Protocol):
    """What stands for responses."""

    name: str

    def __call__(self, responses: Sequence[Sequence[int]], texts: Sequence[str]) -> float:
        """1 - mean pairwise cosine of two or more responses to one prompt, given as tokens, at least one each, and as text."""


def one_minus_cosine(total: Tensor, num_vectors: int) -> float:
    """1 - mean cosine of pairs of m >= 2 unit vectors u_i, from their sum [d]: |sum u_i|^2 = m + 2 sum_{i<j} u_i . u_j."""
    square = float(total.double().square().sum())
    return max(0.0, 1 - (square - num_vectors) / (num_vectors * (num_vectors - 1)))


class NGramDiversity:
    """By counts of all token 1-, 2- and 3-grams, the stop token included, in one vector a response."""

    name = f"counts of token n-grams, n = 1 to {LONGEST_GRAM}"

    def __call__(self, responses: Sequence[Sequence[int]], texts: Sequence[str]) -> float:
        sequences, grams = self._grams(Rollouts.given(responses))
        # One row for each response and gram in it, by response: its count, over the length of the response's vector.
        width = int(grams.max()) + 1
        entries, counts = torch.unique(sequences * width + grams, return_counts=True)
        sequence, gram, count = entries // width, entries % width, counts.double()
        norms = torch.zeros(len(responses), dtype=torch.float64).index_add_(0, sequence, count.square()).sqrt()
        total = torch.zeros(width, dtype=torch.float64).index_add_(0, gram, count / norms[sequence])
        return one_minus_cosine(total, len(responses))

    @staticmethod
    def _grams(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Each gram of each length: the sequence it is in [M], and a number [M] that equal grams share, and no others."""
        padded, lengths = rollouts.padded_tokens(-1), rollouts.lengths  # [S, L]
        present = torch.zeros(padded.numel(), dtype=torch.bool)
        present[padded_slots(lengths, padded.shape[1])] = True
        present = present.view(padded.shape)
        vocabulary = int(padded.max()) + 1
        of_length, found, offset = padded, [], 0
        sequences = []
        for n in range(1, min(LONGEST_GRAM, padded.shape[1]) + 1):
            if n > 1:  # the gram one shorter, and the next token
                of_length = of_length[:, :-1] * vocabulary + padded[:, n - 1 :]
            where = present[:, n - 1 :]
            sequence, _ = where.nonzero(as_tuple=True)
            distinct, numbers = torch.unique(of_length[where], return_inverse=True)
            renumbered = torch.zeros_like(of_length)  # so that products stay small
            renumbered[where] = numbers
            of_length = renumbered
            found.append(numbers + offset)
            sequences.append(sequence)
            offset += len(distinct)
        return torch.cat(sequences), torch.cat(found)


class EmbeddingDiversity:
    """By a local model's last hidden states, their mean over the tokens of a text.

    Nothing is downloaded, no code of the directory is run, and weights are read from safetensors alone.

    Raises:
        InputError: where transformers is missing, or cannot read the directory.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.name = f"embeddings by {directory}"
        if not directory.is_dir():
            raise InputError(f"--embeddings must be the directory of a model, got {directory}")
        self._tokenizer, self._device = load_tokenizer(directory), device
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise InputError(
                f"the tokenizer of --embeddings {directory} must have a token to pad with, or one that ends a text"
            )
        from transformers import AutoModel  # which load_tokenizer has found

        try:
            model = AutoModel.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
            )
        except Exception as error:  # transformers raises whatever it meets
            raise InputError(f"cannot read the model of --embeddings {directory}: {type(error).__name__}: {error}") from error
        self._model: Any = model.to(device).eval()
        longest = model.config.to_dict().get("max_position_embeddings") or 2**31
        self._longest = min(int(longest), int(min(self._tokenizer.model_max_length, 2**31)))

    def __call__(self, responses: Sequence[Sequence[int]], texts: Sequence[str]) -> float:
        distinct = sorted(set(texts))
        number = {text: i for i, text in enumerate(distinct)}
        vectors = torch.cat([self.embed(distinct[i : i + EMBEDDED]) for i in range(0, len(distinct), EMBEDDED)])
        units = torch.nn.functional.normalize(vectors.double(), dim=1)
        return one_minus_cosine(units[[number[text] for text in texts]].sum(0), len(texts))

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors [len(texts), d] float32 on the CPU."""
        batch = self._tokenizer(
            # A text without a token has no mean.
            [text or " " for text in texts],
            padding=True,
            truncation=True,
            max_length=self._longest,
            return_tensors="pt",
        ).to(self._device)
        hidden = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        mean: Tensor = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        return mean.cpu()

"""S_div of PACS (Table 3): 1 minus the mean pairwise cosine similarity of the embeddings of a
problem's correct responses, averaged over the problems that have at least two: minutes on a CPU.

It reads the samples of an evaluation, and embeds them by a local model (the paper's is
Qwen3-Embedding-0.6B). The vector of a text is made of the last hidden states as the model's file
1_Pooling/config.json says. Nothing is downloaded, and no code of the model's folder is run.

    python -m maxrl_fast.evaluate RUN --out evaluations/pacs
    python examples/papers/diversity.py evaluations/pacs DIR
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

POOLINGS = ("lasttoken", "cls_token", "mean_tokens")
BATCH = 32  # texts


def one_minus_cosine(vectors: Tensor) -> float:
    """Return 1 - mean pairwise cosine of m > 1 vectors [m, d]. For unit vectors u_i,
    |sum u_i|^2 = m + 2 sum_{i<j} u_i . u_j."""
    num = len(vectors)
    total = torch.nn.functional.normalize(vectors.double(), dim=1).sum(0)
    return 1 - (float(total.square().sum()) - num) / (num * (num - 1))


def pooling_of(directory: Path) -> str:
    file = directory / "1_Pooling" / "config.json"
    modes = json.loads(file.read_text()) if file.exists() else {"pooling_mode_mean_tokens": True}
    found = [mode for mode in POOLINGS if modes.get(f"pooling_mode_{mode}") is True]
    if not found:
        raise SystemExit(f"error: {file} must have one of the poolings {', '.join(POOLINGS)}")
    return found[0]


class Embedder:
    """Embeds texts by a model of transformers in a local directory."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.pooling = pooling_of(directory)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.model: Any = AutoModel.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        positions = self.model.config.to_dict().get("max_position_embeddings") or 2**31
        self.longest = min(positions, self.tokenizer.model_max_length)

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return vectors [len(texts), d]."""
        batch = self.tokenizer(
            # An empty text would have no tokens and no mean.
            [text or " " for text in texts],
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
        )
        mask = batch["attention_mask"]  # [texts, T], padded on either side
        hidden = self.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        weights = mask / mask.sum(1, keepdim=True).clamp_min(1)
        if self.pooling != "mean_tokens":
            place = mask.argmax(1) if self.pooling == "cls_token" else mask.cumsum(1).argmax(1)
            weights = torch.nn.functional.one_hot(place, mask.shape[1])
        vectors: Tensor = (hidden * weights[..., None]).sum(1)
        return vectors


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("evaluation", type=Path, help="folder of a finished evaluation")
    parser.add_argument("model", type=Path, help="directory of the embedding model")
    options = parser.parse_args(arguments)
    correct: dict[int, list[str]] = defaultdict(list)
    with open(options.evaluation / "samples.jsonl") as file:
        for record in map(json.loads, file):
            if (record["reward"] or 0) > 0.5:
                correct[record["id"]].append(record["response"])
    embedder, values = Embedder(options.model), []
    for texts in correct.values():
        if len(texts) > 1:
            parts = [embedder.embed(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
            values.append(one_minus_cosine(torch.cat(parts)))
    if not values:
        raise SystemExit("error: no problem has two correct responses")
    print(f"S_div {sum(values) / len(values):.4f} over {len(values)} problems")


if __name__ == "__main__":
    main()

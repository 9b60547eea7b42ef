"""Rewards by a reward model, a sequence classifier in a Hugging Face directory: `--reward hf:DIR`. It runs in the trainer."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.model.huggingface_checkpoint import Quiet
from maxrl_fast.model.prompt_process import PromptEncoder
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.rewards.pool import Failure, Scores
from maxrl_fast.rewards.weighted import RewardSource

CLASSIFIER = "hf:"
BATCH = 16  # texts


class Classifier(RewardSource):
    """Scores a response by the logit of a classifier with one label, or the probability of the second of two labels.

    Its text is the conversation that the chat template writes, or the prompt and the response where there is no template.
    Nothing is downloaded, no code in the directory is run, and weights are read from safetensors only.

    Args:
        name: hf:DIR.

    Raises:
        InputError: if transformers is missing or cannot read the directory, or the model has more than two labels.
    """

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self._device = name, device
        directory = Path(name.removeprefix(CLASSIFIER))
        if not directory.is_dir():
            raise InputError(f"--reward {CLASSIFIER}DIR must name the directory of a model, got {directory}")
        PromptEncoder(directory)  # loads the tokenizer within limits, and so shows that loading it here ends
        self._tokenizer = load_tokenizer(directory)
        from transformers import AutoModelForSequenceClassification  # load_tokenizer has checked that it is installed

        try:
            with Quiet():
                model, loaded = AutoModelForSequenceClassification.from_pretrained(
                    directory,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype=dtype,
                    output_loading_info=True,
                )
        except Exception as error:  # transformers raises many kinds of errors
            raise InputError(f"cannot read the classifier of --reward {name}: {type(error).__name__}: {error}") from error
        if missing := sorted(loaded["missing_keys"]):  # transformers would draw them at random
            raise InputError(f"--reward {name} must be a sequence classifier, but it has no weights {missing[0]}")
        if model.config.num_labels not in (1, 2):
            raise InputError(f"--reward {name} must have one label, or two, got {model.config.num_labels}")
        self._model: Any = model.to(device).eval()
        # A decoder reads its score at the last token that is not padding, so padding must be a token that ends no text.
        pad = self._tokenizer.pad_token_id
        self._can_pad = pad is not None and pad != self._tokenizer.eos_token_id
        self._model.config.pad_token_id = pad if self._can_pad else None
        self._tokenizer.padding_side = "right"
        longest = model.config.to_dict().get("max_position_embeddings") or 2**31
        self._longest = min(int(longest), int(min(self._tokenizer.model_max_length, 2**31)))

    @torch.no_grad()
    def score(
        self,
        rows: Sequence[dict[str, Any]],
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> Scores:
        """Return the scores of rows. Texts that are longer than the model takes are failures."""
        encoded = [self._encode(row) for row in rows]
        rewards, failures = [0.0] * len(rows), list[Failure]()
        for i, tokens in enumerate(encoded):
            if not 0 < len(tokens) <= self._longest:
                message = f"the reward model takes 1 to {self._longest} tokens, got {len(tokens)}"
                failures.append(Failure(i, "invalid", message))
        failed = {failure.index for failure in failures}
        order = sorted(set(range(len(rows))) - failed, key=lambda i: len(encoded[i]))
        size = BATCH if self._can_pad else 1
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            on_progress()
            for i, reward in zip(batch, self._forward([encoded[i] for i in batch]), strict=True):
                rewards[i] = reward
                if not math.isfinite(reward):
                    failures.append(Failure(i, "invalid", f"the reward model must give a finite number, got {reward}"))
        return Scores(rewards, sorted(failures, key=lambda failure: failure.index), 0, [{} for _ in rows])

    def _encode(self, row: dict[str, Any]) -> list[int]:
        prompt, response, tokenizer = row["prompt"], row["response"], self._tokenizer
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], tokenize=False)
        else:
            text = "\n\n".join(message["content"] for message in messages) + response
        tokens: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        return tokens

    def _forward(self, batch: list[list[int]]) -> list[float]:
        padded = self._tokenizer.pad({"input_ids": batch}, return_tensors="pt") if self._can_pad else None
        if padded is None:
            tokens = torch.tensor(batch)
            padded = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs = {key: padded[key].to(self._device) for key in ("input_ids", "attention_mask")}
        logits = self._model(**inputs).logits.float().cpu()
        values: list[float] = (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, 1]).tolist()
        return values

    def lines(self) -> list[str]:
        """Return what scores, for the start of a run."""
        labels = "the logit of its label" if self._model.config.num_labels == 1 else "the probability of its second label"
        return [f"reward {self.name}: {type(self._model).__name__} on {self._device.type}, {labels}"]

    def faster(self, factor: float) -> str:
        """Return "": no option makes it faster."""
        return ""

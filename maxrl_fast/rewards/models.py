"""Reward models, in the trainer."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from maxrl_fast.errors import InputError
from maxrl_fast.model.policy import quiet
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.rewards import Outcomes, RewardSource, Rows, failure, outcome_of
from maxrl_fast.runtime.loading import CLASSIFIER

BATCH = 16  # texts


class Classifier(RewardSource):
    """Scores responses by the logit of a classifier with one label, or the probability of the
    second of two, after the chat template if there is one. `name` is hf:DIR."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self._device = name, device
        directory = Path(name.removeprefix(CLASSIFIER))
        if not directory.is_dir():
            raise InputError(
                f"--reward {CLASSIFIER}DIR must name the directory of a model, got {directory}"
            )
        self._tokenizer = load_tokenizer(directory)
        import transformers  # load_tokenizer has checked that it is installed

        # nothing is downloaded, no code in the directory is run
        options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        try:
            with quiet():
                model, loaded = load(directory, output_loading_info=True, dtype=dtype, **options)
        except Exception as error:  # transformers raises many kinds of errors
            cause = f"{type(error).__name__}: {error}"
            raise InputError(f"cannot read the classifier of --reward {name}: {cause}") from error
        wanted, labels = f"--reward {name} must", model.config.num_labels
        if missing := sorted(loaded["missing_keys"]):  # transformers would draw them at random
            raise InputError(f"{wanted} be a sequence classifier, but has no weights {missing[0]}")
        if labels not in (1, 2):
            raise InputError(f"{wanted} have one label, or two, got {labels}")
        self._model = model.eval().to(device)
        positions = model.config.to_dict().get("max_position_embeddings") or 2**31
        self._longest = int(min(positions, self._tokenizer.model_max_length, 2**31))
        # a decoder reads its score at the last token that is not padding
        pad = self._tokenizer.pad_token_id
        self._pad = None if pad == self._tokenizer.eos_token_id else pad
        self._model.config.pad_token_id = self._pad

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        encoded, size = [*map(self._encode, rows)], 1 if self._pad is None else BATCH
        order = sorted(range(len(rows)), key=lambda i: len(encoded[i]))
        for i in [i for i in order if not 0 < len(encoded[i]) <= self._longest]:
            order.remove(i)
            message = f"the reward model takes 1 to {self._longest} tokens, got {len(encoded[i])}"
            yield i, failure("invalid", message)
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            yield None
            rewards = self._forward([encoded[i] for i in batch])
            yield from zip(batch, map(outcome_of, rewards), strict=True)

    def _encode(self, row: dict[str, Any]) -> list[int]:
        prompt, response, tokenizer = row["prompt"], row["response"], self._tokenizer
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=False
            )
        else:
            text = "\n\n".join(message["content"] for message in messages) + response
        encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template)
        return [*encoded["input_ids"]]

    @torch.no_grad()
    def _forward(self, batch: list[list[int]]) -> list[float]:
        parts = [torch.tensor(tokens, device=self._device) for tokens in batch]
        ids = pad_sequence(parts, batch_first=True, padding_value=self._pad or 0)
        mask = pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
        logits = self._model(input_ids=ids, attention_mask=mask).logits.float().cpu()
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, 1]
        return [*map(float, scores)]

    def lines(self) -> list[str]:
        is_one, where = self._model.config.num_labels == 1, self._device.type
        score = "the logit of its label" if is_one else "the probability of its second label"
        return [f"reward {self.name}: {type(self._model).__name__} on {where}, {score}"]

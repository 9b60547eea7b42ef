"""Models that score responses: a judge behind an HTTP server, and a reward model in the trainer."""

import hashlib
import json
import os
import re
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, get_ident
from typing import Any
from urllib.parse import urlsplit

import torch

from maxrl_fast.errors import InputError, StorageError
from maxrl_fast.model.huggingface_checkpoint import Quiet
from maxrl_fast.model.tokenizer import load_tokenizer
from maxrl_fast.rewards import (
    PROGRESS_INTERVAL,
    Progress,
    RewardSource,
    Rows,
    Scores,
    no_progress,
    power_of_two,
)
from maxrl_fast.rewards.function import result_of
from maxrl_fast.runtime.http import SHOWN, RequestError, request_json

CLASSIFIER, BATCH = "hf:", 16  # texts
JUDGE = "openai:"
# as in "Score: 8/10", "8" or "1e-3"; not the 8 of "8,5" or the 1 of "1,000"
SCORE = r"(?i)(?:score\W*?|^\s*)([-+]?\d*\.?\d+(?:e[-+]?\d+)?)(?![.,_]?\d)"
TRIES = 4  # of a request
PAUSE, MOST_PAUSE = 0.5, 30.0  # seconds after the first try, doubled after each other; the longest
REPLY_BYTES = 1 << 20


class Judge(RewardSource):
    """Asks a model for the score of each response. The same question is asked once, in this run and
    in later ones.

    Args:
        name: openai:URL/MODEL; the URL ends with /v1, or before the last slash. template: the
        question, with {prompt}, {response} and other columns in braces; braces around anything else
        are text. pattern: regular expression; the first group of its last match in a reply is the
        score. time_limit: seconds of a request. concurrency: requests at the same time. rate:
        requests in a second; 0: no limit. key: sent as a bearer token. cache: folder of replies.

    Raises:
        InputError: if one of these cannot be used.
    """

    def __init__(
        self,
        name: str,
        template: str,
        *,
        pattern: str,
        time_limit: float,
        concurrency: int,
        rate: float = 0.0,
        key: str | None = None,
        cache: Path,
    ) -> None:
        self.name, self._template, self._cache = name, template, cache
        self._url, self._model = _parse_name(name)
        self._time_limit, self._concurrency, self._rate = time_limit, concurrency, rate
        if "{response}" not in template:
            raise InputError("--judge-template must be a file with {response} in its text")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"--judge-score must be a regular expression, got {pattern!r}: {error}"
            ) from error
        if self._pattern.groups < 1:
            raise InputError(f"--judge-score must have a group around the score, got {pattern!r}")
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            # http.client's message would show it
            raise InputError("the key of the judge must be printable ASCII")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._lock, self._next = Lock(), 0.0  # when the next request may start

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Return the scores of rows. Requests that fail after all tries, and replies without a
        score, are failures.

        Raises:
            StorageError: if a reply cannot be kept.
        """
        asked: dict[str, list[int]] = {}  # rows by question
        for i, row in enumerate(rows):
            asked.setdefault(self._question(row), []).append(i)
        waiting, outcomes, stop = (
            deque(asked),
            SimpleQueue[tuple[str, dict[str, Any] | Exception]](),
            Event(),
        )

        def answer() -> None:
            with suppress(IndexError):  # another thread has taken the last question
                while not stop.is_set():
                    question = waiting.popleft()
                    try:
                        outcomes.put((question, self._answer(question, stop)))
                    except RequestError as error:
                        outcomes.put(
                            (question, {"kind": error.kind, "message": f"the judge {error}"})
                        )
                    except Exception as error:  # raised below
                        outcomes.put((question, error))

        for _ in range(min(self._concurrency, len(asked))):
            Thread(target=answer, daemon=True).start()
        scores = Scores.of_rows(len(rows))
        try:
            while not scores.is_done(max_failures):
                on_progress()
                with suppress(Empty):
                    question, result = outcomes.get(timeout=PROGRESS_INTERVAL)
                    if isinstance(result, Exception):
                        raise result
                    for i in asked[question]:
                        scores.add(range(i, i + 1), [result])
        finally:
            stop.set()
        return scores

    def _question(self, row: dict[str, Any]) -> str:
        """Return the template with the row's columns, in one pass: braces in a response are
        text.
        """
        return re.sub(
            r"\{(\w+)\}",
            lambda name: _text(row[name[1]]) if name[1] in row else name[0],
            self._template,
        )

    def _answer(self, question: str, stop: Event) -> dict[str, Any]:
        """Return the result for a question, from the cache or the server. Replies without a score
        are not kept.

        Raises:
            RequestError: if the judge gives no reply.
        """
        identity = hashlib.sha256(
            json.dumps([self._url, self._model, question]).encode()
        ).hexdigest()
        path = self._cache / identity[:2] / f"{identity}.txt"
        try:
            if path.exists():
                return self._parse(path.read_bytes().decode("utf-8", "surrogatepass"))
            reply = self._ask(question, stop)
            result = self._parse(reply)
            if "reward" in result:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(f".{os.getpid()}-{get_ident()}")
                # JSON may hold half of a surrogate pair
                temporary.write_bytes(reply.encode("utf-8", "surrogatepass"))
                temporary.rename(path)
        except OSError as error:
            raise StorageError(f"cannot use the judge's cache {self._cache}: {error}") from error
        return result

    def _parse(self, reply: str) -> dict[str, Any]:
        found = [*self._pattern.finditer(reply)]
        with suppress(ValueError, TypeError):  # the group has no number, or has not matched
            if found:
                return result_of(float(found[-1][1]))
        message = "the judge's reply must have a score as --judge-score finds it, got "
        return {"kind": "invalid", "message": f"{message}{reply[-SHOWN:]!r}"}

    def _ask(self, question: str, stop: Event) -> str:
        """Return the reply to a question, after several tries if need be."""
        messages = [{"role": "user", "content": question}]
        body = {"model": self._model, "messages": messages, "temperature": 0}
        for i in range(TRIES):
            self._wait_for_turn(stop)
            try:
                return request_json(
                    f"{self._url}/chat/completions",
                    _reply_of,
                    body,
                    seconds=self._time_limit,
                    most_bytes=REPLY_BYTES,
                    headers=self._headers,
                )
            except RequestError as error:
                if error.pause is None:
                    raise
                failure = error
            if i < TRIES - 1:
                stop.wait(min(max(PAUSE * 2**i, failure.pause or 0.0), MOST_PAUSE))
            if stop.is_set():
                break
        raise RequestError(failure.kind, f"{failure} (after {i + 1} tries)")

    def _wait_for_turn(self, stop: Event) -> None:
        if self._rate:
            with self._lock:
                start = max(time.monotonic(), self._next)
                self._next = start + 1 / self._rate
            stop.wait(start - time.monotonic())

    def lines(self) -> list[str]:
        rate = f", at most {self._rate:g} a second" if self._rate else ""
        how = f"up to {self._concurrency} requests at a time{rate}"
        return [
            f"reward {self.name}: {self._model} at {self._url}, {how}; replies are kept in "
            f"{self._cache}"
        ]

    def faster(self, factor: float) -> str:
        return (
            "a higher --judge-rate"
            if self._rate
            else f"--reward-concurrency {power_of_two(self._concurrency * factor)}"
        )


def _parse_name(name: str) -> tuple[str, str]:
    """Return the URL and the model of openai:URL/MODEL, where a model may have slashes after a URL
    that ends with /v1.
    """
    place = name.removeprefix(JUDGE)
    url, end, model = place.partition("/v1/")
    url, model = (
        (url + "/v1", model) if end else (place.rpartition("/")[0], place.rpartition("/")[2])
    )
    parts = urlsplit(url)
    try:
        is_url = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:  # the port is not a number
        is_url = False
    if not is_url or not model or "@" in parts.netloc or parts.query or parts.fragment:
        raise InputError(
            f"--reward must be {JUDGE}URL/MODEL, such as {JUDGE}http://localhost:8000/v1/MODEL, "
            f"got {name}"
        )
    return url, model


def _text(value: Any) -> str:
    """Return a column as text; chat messages one after another."""
    if isinstance(value, list) and all(
        isinstance(x, dict) and {"role", "content"} <= x.keys() for x in value
    ):
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in value)
    return value if isinstance(value, str) else json.dumps(value)


def _reply_of(answer: Any) -> str:
    """Return the text of a chat completion; raise TypeError if it has none."""
    reply = answer["choices"][0]["message"]["content"]
    if not isinstance(reply, str):
        raise TypeError
    return reply


def default_cache() -> Path:
    """Return the folder of replies: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maxrl_fast" / "judge"


def read_model(
    directory: Path, kind: str, what: str, dtype: torch.dtype
) -> tuple[Any, Any, list[str]]:
    """Return the tokenizer and the model in a directory, and the names of weights that it lacks.

    Nothing is downloaded, no code in the directory is run, and weights are read from safetensors
    only.

    Args:
        kind: name of a class of transformers, such as "AutoModel".
        what: the model, for error messages.

    Raises:
        InputError: if transformers is missing or cannot read the directory.
    """
    tokenizer = load_tokenizer(directory)
    import transformers  # load_tokenizer has checked that it is installed

    options = {
        "local_files_only": True,
        "trust_remote_code": False,
        "use_safetensors": True,
        "dtype": dtype,
    }
    try:
        with Quiet():
            model, loaded = getattr(transformers, kind).from_pretrained(
                directory, output_loading_info=True, **options
            )
    except Exception as error:  # transformers raises many kinds of errors
        raise InputError(f"cannot read {what}: {type(error).__name__}: {error}") from error
    return tokenizer, model.eval(), sorted(loaded["missing_keys"])


def longest_text(tokenizer: Any, model: Any) -> int:
    """Return the most tokens that a model takes."""
    positions = model.config.to_dict().get("max_position_embeddings") or 2**31
    return int(min(positions, tokenizer.model_max_length, 2**31))


class Classifier(RewardSource):
    """Scores a response by the logit of a classifier with one label, or the probability of the
    second of two labels.

    Its text is the conversation that the chat template writes, or the prompt and the response where
    there is no template.

    Args:
        name: hf:DIR.

    Raises:
        InputError: if transformers is missing or cannot read the directory, or the model has more
        than two labels.
    """

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self._device = name, device
        directory = Path(name.removeprefix(CLASSIFIER))
        if not directory.is_dir():
            raise InputError(
                f"--reward {CLASSIFIER}DIR must name the directory of a model, got {directory}"
            )
        what = f"the classifier of --reward {name}"
        self._tokenizer, model, missing = read_model(
            directory, "AutoModelForSequenceClassification", what, dtype
        )
        if missing:  # transformers would draw them at random
            raise InputError(
                f"--reward {name} must be a sequence classifier, but it has no weights {missing[0]}"
            )
        if model.config.num_labels not in (1, 2):
            raise InputError(
                f"--reward {name} must have one label, or two, got {model.config.num_labels}"
            )
        self._model, self._longest = model.to(device), longest_text(self._tokenizer, model)
        # A decoder reads its score at the last token that is not padding, so padding must be a
        # token that ends no text.
        pad = self._tokenizer.pad_token_id
        self._can_pad = pad is not None and pad != self._tokenizer.eos_token_id
        self._model.config.pad_token_id = pad if self._can_pad else None
        self._tokenizer.padding_side = "right"

    @torch.no_grad()
    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Return the scores of rows. Texts that are longer than the model takes are failures."""
        encoded, scores = [self._encode(row) for row in rows], Scores.of_rows(len(rows))
        for i, tokens in enumerate(encoded):
            if not 0 < len(tokens) <= self._longest:
                message = f"the reward model takes 1 to {self._longest} tokens, got {len(tokens)}"
                scores.add(range(i, i + 1), [{"kind": "invalid", "message": message}])
        fitting = [i for i, tokens in enumerate(encoded) if 0 < len(tokens) <= self._longest]
        order = sorted(fitting, key=lambda i: len(encoded[i]))
        size = BATCH if self._can_pad else 1
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            on_progress()
            for i, reward in zip(batch, self._forward([encoded[i] for i in batch]), strict=True):
                scores.add(range(i, i + 1), [result_of(reward)])
        return scores

    def _encode(self, row: dict[str, Any]) -> list[int]:
        prompt, response, tokenizer = row["prompt"], row["response"], self._tokenizer
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=False
            )
        else:
            text = "\n\n".join(message["content"] for message in messages) + response
        tokens: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)[
            "input_ids"
        ]
        return tokens

    def _forward(self, batch: list[list[int]]) -> list[float]:
        padded = (
            self._tokenizer.pad({"input_ids": batch}, return_tensors="pt")
            if self._can_pad
            else None
        )
        if padded is None:
            tokens = torch.tensor(batch)
            padded = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs = {key: padded[key].to(self._device) for key in ("input_ids", "attention_mask")}
        logits = self._model(**inputs).logits.float().cpu()
        values: list[float] = (
            logits[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, 1]
        ).tolist()
        return values

    def lines(self) -> list[str]:
        labels = (
            "the logit of its label"
            if self._model.config.num_labels == 1
            else "the probability of its second label"
        )
        return [
            f"reward {self.name}: {type(self._model).__name__} on {self._device.type}, {labels}"
        ]

"""The options of tasks whose prompts are text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxrl_fast.algorithms.options import Count


@dataclass(frozen=True)
class TextOptions:
    """Prompts and responses of text."""

    prompt_suffix: str | None = None
    """Text added to prompts that are text. By default the papers' for gsm8k and math."""
    system_prompt: str | None = None
    """System message of chats that have none; "" is an empty one. By default the chat template's
    own, if any."""
    plain_prompts: bool = False
    """Questions of gsm8k, math and gym are prompts as they are, even where the tokenizer has a chat
    template."""
    max_prompt_tokens: Count = 1024
    """Longer prompts are left out."""
    allow_special_tokens: bool = False
    """Prompts may have the tokenizer's control tokens in their text, such as <|im_end|>."""
    chat_template: Path | None = None
    """File of a chat template in Jinja, which checkpoints have too. By default the tokenizer's
    own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template as a JSON object, such as {"enable_thinking": false}."""
    template_date: str | None = None
    """What the clock of a chat template shows, if it has one, as YYYY-MM-DD. By default the day on
    which the run starts."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the stop tokens; the text is part of it."""


@dataclass(frozen=True)
class DatasetOptions(TextOptions):
    """Prompts of files or the Hugging Face hub."""

    data: tuple[Path, ...] = ()
    """JSON Lines or Parquet files of prompts: text, or chat messages; the other keys are arguments
    of the reward function. NAME=3 repeats every line three times per epoch."""
    hub: tuple[str, ...] = ()
    """Data sets of the hub, as NAME[:CONFIG][@SPLIT][=INT], by their split train; =3 as of a file.
    By default the task's."""
    test_data: tuple[Path, ...] = ()
    """Held-out prompts; each file is a separate set. Without them and --test-hub: the test splits
    of --hub, or else a tenth of the training prompts."""
    test_hub: tuple[str, ...] = ()
    """Held-out sets of the hub, by their split test, or by a name: aime24, aime25, beyond_aime,
    amc23, minerva, olympiad, math500, gsm8k, gsm8k_platinum, gpqa_diamond. =INT, also of a
    file: its samples per prompt. By default the task's."""
    allow_overlap: bool = False
    """Train on prompts that are held out too, by their tokens."""
    where: tuple[str, ...] = ()
    """Train only on the lines with this value in a column, as NAME=VALUE, or one of these."""
    prompt_key: str | None = None
    """Key of the prompt in a line. By default prompt; question for gsm8k and code, problem for
    math."""
    answer_key: str | None = None
    """Key of the right answer in a line, or a path of keys such as reward_model.ground_truth. By
    default answer; input_output for code."""
    sft_data: Path | None = None
    """JSON Lines or Parquet file of demonstrations: each line has a prompt, as in --data, and a
    response; or messages, of which the last is the assistant's."""
    environment: str | None = None
    """Class FILE:CLASS of environments with tools, as TRL's environment_factory takes it, for
    episodes of several turns (docs/episodes.md)."""
    max_turns: Count = 8
    """Most turns of an episode; --max-new-tokens limits all of its tokens."""

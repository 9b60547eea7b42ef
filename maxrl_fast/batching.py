"""From rollouts to packed micro-batches in which every prompt stands once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.model.attention import SharedPromptLayout
from maxrl_fast.records import Prompts, Rollouts, cumulative


@dataclass(frozen=True)
class Batch:
    """The stream a model reads and the targets it is judged on.

    The stream is all prompts, then all responses without their last token, which predicts nothing. A response's first
    token is predicted by its prompt's last position, every other by the token before it.
    """

    tokens: Tensor  # [U] int64
    positions: Tensor  # [U] int64
    layout: SharedPromptLayout
    rows: Tensor  # [R] int64, the stream positions that predict something: each prompt's last, every response token
    target_rows: Tensor  # [T] int64, which of `rows` predicts each target
    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64, of the targets
    advantages: Tensor  # [S] float32
    old_logprobs: Tensor  # [T] float32
    sequences: Tensor  # [S] int64, each response's index in the rollouts


def gather_sequences(cu_seqlens: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Packed positions [T'] of the chosen sequences, end to end, and their own cu_seqlens."""
    lengths = cu_seqlens.diff()[sequences]
    chosen = cumulative(lengths)
    shift = torch.repeat_interleave(cu_seqlens[:-1][sequences] - chosen[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift, chosen


def pack_batch(prompts: Prompts, rollouts: Rollouts, advantages: Tensor, sequences: Tensor) -> Batch:
    """The chosen rollouts, `sequences` [S] in ascending order, of len(rollouts) / len(prompts) to a prompt."""
    num_rollouts = len(rollouts.lengths) // len(prompts)
    groups, group = torch.unique(sequences // num_rollouts, return_inverse=True)
    prompt_index, prompt_cu = gather_sequences(prompts.cu_seqlens, groups)
    target_index, target_cu = gather_sequences(rollouts.cu_seqlens, sequences)
    prompt_lengths, lengths = prompt_cu.diff(), target_cu.diff()
    targets = rollouts.tokens[target_index]

    is_last = torch.zeros_like(targets, dtype=torch.bool)
    is_last[target_cu[1:] - 1] = True
    place = torch.arange(len(targets), device=targets.device) - torch.repeat_interleave(target_cu[:-1], lengths)
    # Target t of a sequence follows stream token t - 1 of its response; the rows are G prompt ends, then those tokens.
    input_start = len(groups) + target_cu[:-1] - torch.arange(len(lengths), device=targets.device)
    target_rows = torch.where(
        place == 0, torch.repeat_interleave(group, lengths), torch.repeat_interleave(input_start, lengths) + place - 1
    )
    num_prompt_tokens, num_response_tokens = len(prompt_index), int((~is_last).sum())
    prompt_positions = torch.arange(num_prompt_tokens, device=targets.device) - torch.repeat_interleave(
        prompt_cu[:-1], prompt_lengths
    )
    response_positions = (torch.repeat_interleave(prompt_lengths[group], lengths) + place)[~is_last]
    return Batch(
        tokens=torch.cat([prompts.tokens[prompt_index], targets[~is_last]]),
        positions=torch.cat([prompt_positions, response_positions]),
        layout=SharedPromptLayout.build(prompt_lengths, lengths - 1, group),
        rows=torch.cat([prompt_cu[1:] - 1, torch.arange(num_response_tokens, device=targets.device) + num_prompt_tokens]),
        target_rows=target_rows,
        targets=targets,
        cu_seqlens=target_cu,
        advantages=advantages[sequences],
        old_logprobs=rollouts.logprobs[target_index],
        sequences=sequences,
    )


def micro_batches(
    prompts: Prompts, rollouts: Rollouts, advantages: Tensor, sequences: Tensor, token_budget: int
) -> Iterator[Batch]:
    """The chosen sequences as batches of at most `token_budget` stream tokens, or of one response that alone has more."""
    num_rollouts = len(rollouts.lengths) // len(prompts)
    prompt_lengths, lengths = prompts.lengths.tolist(), rollouts.lengths.tolist()
    chosen: list[int] = []
    tokens, group = 0, -1
    for sequence in sequences.tolist():
        prompt = sequence // num_rollouts
        cost = lengths[sequence] - 1 + (prompt_lengths[prompt] if prompt != group else 0)
        if chosen and tokens + cost > token_budget:
            yield pack_batch(prompts, rollouts, advantages, torch.tensor(chosen, device=sequences.device))
            chosen, tokens = [], 0
            cost = lengths[sequence] - 1 + prompt_lengths[prompt]
        chosen.append(sequence)
        tokens, group = tokens + cost, prompt
    if chosen:
        yield pack_batch(prompts, rollouts, advantages, torch.tensor(chosen, device=sequences.device))

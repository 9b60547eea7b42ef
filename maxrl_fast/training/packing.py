"""From rollouts to packed micro-batches in which a prompt stands once for all its responses.

All indices are worked out on the host, where the lengths are brought once a step; only the finished ones go to the device.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from maxrl_fast.model.attention import SharedPromptLayout
from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.records import Prompts, Rollouts, cumulative, ranges


@dataclass(frozen=True)
class MicroBatch:
    """The stream a model reads and the targets it is judged on.

    The stream is prompts, each followed at the end of the stream by its responses without their last token, which predicts
    nothing; where sharing would not pay, a prompt and its response stand together in the first part. A response's first
    token is predicted by its prompt's last position, every other by the token before it.
    """

    tokens: Tensor  # [U] int64
    positions: Tensor  # [U] int64
    layout: SharedPromptLayout
    rows: Tensor  # [R] int64, the stream positions that predict something
    target_rows: Tensor  # [T] int64, which of `rows` predicts each target
    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64, of the targets
    advantages: Tensor  # [S] float32
    old_logprobs: Tensor  # [T] float32
    importance_weights: Tensor | None  # [T] float32
    target_index: Tensor  # [T] int64, each target's index in the rollouts' tokens


_FLOPS_PER_ELEMENT = {"cpu": 20, "cuda": 300}  # products a machine does in the time in which it moves one number


def merge_cost(config: DecoderConfig, device: torch.device) -> float:
    """What merging costs a response's token, in passes of a token through the model, forward and backward.

    Counted: about 12 numbers moved for every number of a query (the second call's query, output and gradients, the merge of
    outputs and the sum of gradients), against 6 operations for every weight of a layer.
    """
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    return 12 * heads * _FLOPS_PER_ELEMENT.get(device.type, 20) / (6 * weights)


@dataclass(frozen=True)
class Packer:
    """Packs micro-batches of a step's rollouts.

    Args:
        advantages: [S] of all rollouts.
        merge_cost: of `merge_cost`; 0: every prompt is shared that more than one response has.
    """

    prompts: Prompts
    rollouts: Rollouts
    advantages: Tensor
    merge_cost: float = 0.0

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self.rollouts.lengths) // len(self.prompts)

    @cached_property
    def _cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Of prompts and responses, on the host."""
        return self.prompts.cu_seqlens.cpu(), self.rollouts.cu_seqlens.cpu()

    @cached_property
    def _tokens(self) -> Tensor:
        """Of all prompts, then of all responses."""
        return torch.cat([self.prompts.tokens, self.rollouts.tokens])

    def pack(self, sequences: Tensor) -> MicroBatch:
        """The chosen rollouts, `sequences` [S] in ascending order, on the host."""
        device = self.rollouts.tokens.device
        prompt_cu, response_cu = self._cu_seqlens
        groups, group = torch.unique(sequences // self.num_rollouts, return_inverse=True)
        prompt_lengths, lengths = prompt_cu.diff()[groups], response_cu.diff()[sequences]
        inputs = (lengths - 1).clamp_min(0)  # [S] tokens of each response that the model reads
        is_whole = self._is_cheaper_whole(prompt_lengths, inputs, group)[group]  # [S]

        # The first part's runs: a whole sequence each, or a prompt for all responses that share it.
        is_first = torch.ones_like(group, dtype=torch.bool)
        is_first[1:] = group[1:] != group[:-1]
        starts_run = is_whole | is_first
        run = starts_run.cumsum(0) - 1  # [S] that each response is in or answers
        beside = torch.where(is_whole, inputs, 0)[starts_run]  # response tokens in each run
        run_lengths = prompt_lengths[group][starts_run] + beside
        shared = inputs[~is_whole]

        # The stream in pieces: of each run the prompt and the response beside it, then the responses that share.
        response_starts = len(self.prompts.tokens) + response_cu[:-1][sequences]
        prompt_starts, prompt_ends = prompt_cu[:-1][groups][group], prompt_lengths[group]

        def pieces(of_prompts: Tensor, of_responses: Tensor) -> Tensor:
            return torch.cat([torch.stack([of_prompts, of_responses], 1)[starts_run].flatten(), of_responses[~is_whole]])

        piece_lengths = torch.cat([torch.stack([prompt_ends[starts_run], beside], 1).flatten(), shared])
        index = ranges(pieces(prompt_starts, response_starts), piece_lengths)
        positions = ranges(pieces(torch.zeros_like(group), prompt_ends), piece_lengths)

        # Target t of a response follows its token t - 1, the first one its prompt's last.
        run_starts = cumulative(run_lengths)
        input_starts = run_starts[run] + prompt_ends
        input_starts[~is_whole] = run_starts[-1] + cumulative(shared)[:-1]
        predicted_from = ranges(input_starts - 1, lengths)
        target_cu = cumulative(lengths)
        begins = target_cu[:-1][lengths > 0]
        predicted_from[begins] = (run_starts[run] + prompt_ends - 1)[lengths > 0]
        predicts = torch.zeros(len(index), dtype=torch.bool)
        predicts[predicted_from] = True
        target_index = ranges(response_cu[:-1][sequences], lengths).to(device)
        importance = self.rollouts.importance_weights
        return MicroBatch(
            tokens=self._tokens[index.to(device)],
            positions=positions.to(device),
            layout=SharedPromptLayout.build(run_lengths, shared, run[~is_whole], device),
            rows=predicts.nonzero()[:, 0].to(device),
            target_rows=(predicts.cumsum(0) - 1)[predicted_from].to(device),
            targets=self.rollouts.tokens[target_index],
            cu_seqlens=target_cu.to(device),
            advantages=self.advantages[sequences.to(device)],
            old_logprobs=self.rollouts.logprobs[target_index],
            importance_weights=None if importance is None else importance[target_index],
            target_index=target_index,
        )

    def _is_cheaper_whole(self, prompt_lengths: Tensor, inputs: Tensor, group: Tensor) -> Tensor:
        """Whether a group's prompt [G] had better be read again with each response than merged into their attention."""
        num_responses, num_inputs = (
            torch.zeros_like(prompt_lengths).index_add(0, group, x) for x in (torch.ones_like(group), inputs)
        )
        return (num_responses - 1) * prompt_lengths <= self.merge_cost * num_inputs

    def split(self, sequences: Tensor, token_budget: int) -> list[Tensor]:
        """The chosen sequences, ascending, as micro-batches of at most `token_budget` tokens, or of one response with more.

        Prompts count once; those that are cheaper repeated come on top, a fraction of merge_cost of the tokens at most.
        """
        prompt_lengths, lengths = (cu_seqlens.diff().tolist() for cu_seqlens in self._cu_seqlens)
        parts: list[list[int]] = []
        tokens, group = 0, -1
        for sequence in sequences.tolist():
            prompt = sequence // self.num_rollouts
            cost = max(lengths[sequence] - 1, 0)
            tokens += cost + (prompt_lengths[prompt] if prompt != group else 0)
            if not parts or tokens > token_budget:
                parts.append([])
                tokens = cost + prompt_lengths[prompt]
            parts[-1].append(sequence)
            group = prompt
        return [torch.tensor(part) for part in parts]

    def shortest(self, sequences: Tensor) -> Tensor:
        """Of the chosen sequences the one [1] with the fewest tokens, its prompt's included."""
        prompt_lengths, lengths = (cu_seqlens.diff() for cu_seqlens in self._cu_seqlens)
        tokens = prompt_lengths[sequences // self.num_rollouts] + lengths[sequences]
        return sequences[tokens.argmin()].view(1)

    def share(self, sequences: Tensor, num_ranks: int) -> list[Tensor]:
        """The chosen sequences dealt out to ranks, group by group, so that all have about as many tokens to compute."""
        prompt_lengths, lengths = (cu_seqlens.diff() for cu_seqlens in self._cu_seqlens)
        groups, group = torch.unique(sequences // self.num_rollouts, return_inverse=True)
        tokens = prompt_lengths[groups].index_add(0, group, lengths[sequences])
        loads = [(0, rank) for rank in range(num_ranks)]  # a heap: the least loaded comes first
        rank_of = torch.zeros_like(groups)
        for g in tokens.argsort(descending=True, stable=True).tolist():
            load, rank = heapq.heappop(loads)
            rank_of[g] = rank
            heapq.heappush(loads, (load + int(tokens[g]), rank))
        return [sequences[rank_of[group] == rank] for rank in range(num_ranks)]

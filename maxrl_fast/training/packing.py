"""Packs rollouts into micro-batches in which each prompt appears once for all its responses.

Indices are computed on the host, which reads the lengths once per update. The finished indices go
to the device in one asynchronous copy.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from maxrl_fast.model.attention import SharedPromptLayout
from maxrl_fast.model.attention_kernel import has_kernel
from maxrl_fast.model.policy_model import PolicySizes
from maxrl_fast.records import Prompts, Rollouts, cumulative, gather_sequences, ranges
from maxrl_fast.runtime.device import to_device, to_host


@dataclass(frozen=True)
class MicroBatch:
    """The packed tokens that the model reads, and the targets of its predictions.

    Prompts come first, then their responses. A response's last token is left out because it
    predicts nothing. Where sharing a prompt would cost more than repeating it, prompt and response
    stand together in the first part. A response's first token is predicted at the prompt's last
    position, every other token at the token before it.
    """

    tokens: Tensor  # [U] int64
    positions: Tensor  # [U] int64
    layout: SharedPromptLayout
    rows: Tensor  # [R] int64, positions that predict a target
    target_rows: Tensor  # [T] int64, which of `rows` predicts each target
    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64, of the targets
    advantages: Tensor  # [S] float32
    old_logprobs: Tensor  # [T] float32
    importance_weights: Tensor | None  # [T] float32, a factor of each token's advantage
    target_index: Tensor  # [T] int64, index of each target among the rollouts' tokens

    def by_token(self, per_sequence: Tensor) -> Tensor:
        """Repeat one number per sequence [S] for each of its targets [T]."""
        return torch.repeat_interleave(
            per_sequence, self.cu_seqlens.diff(), output_size=len(self.targets)
        )


# multiply-adds in the time it takes to move one number
_FLOPS_PER_ELEMENT = {"cpu": 20, "cuda": 300}


def merge_cost(config: PolicySizes, device: torch.device) -> float:
    """Return the cost of merging two attention calls per response token, relative to the cost of a
    token's forward and backward pass.

    About 12 numbers are moved for every number of a query (query, output and gradients of the
    second call, the merge of the outputs, the sum of the gradients), against 6 operations for every
    weight of a layer. The cost is 0 if one kernel attends to prompt and response together.
    """
    if has_kernel(device, torch.float32, config.head_dim):  # or bfloat16
        return 0.0
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    return 12 * heads * _FLOPS_PER_ELEMENT.get(device.type, 20) / (6 * weights)


@dataclass(frozen=True)
class Packer:
    """Packs micro-batches of a step's rollouts, which have `advantages` [S]."""

    prompts: Prompts
    rollouts: Rollouts
    advantages: Tensor
    merge_cost: float = 0.0

    @property
    def num_rollouts(self) -> int:
        return len(self.rollouts) // len(self.prompts)

    @cached_property
    def _on_host(self) -> list[Tensor]:
        """cu_seqlens of prompts and of responses, and advantages, read once."""
        return to_host(self.prompts.cu_seqlens, self.rollouts.cu_seqlens, self.advantages)

    @property
    def _cu_seqlens(self) -> list[Tensor]:
        return self._on_host[:2]

    @property
    def lengths(self) -> Tensor:
        """Response lengths, [S] on the host."""
        return self._on_host[1].diff()

    @property
    def host_advantages(self) -> Tensor:
        """Advantages, [S] on the host."""
        return self._on_host[2]

    @cached_property
    def _tokens(self) -> Tensor:
        return torch.cat([self.prompts.tokens, self.rollouts.tokens])

    def pack(self, sequences: Tensor) -> MicroBatch:
        """Pack the chosen rollouts into a micro-batch; `sequences` [S] are ascending, on the host.

        Prompts abc and de; responses uvw and x to abc, yz to de. Only abc is shared:

            index         0  1  2 | 3  4  5 | 6  7
            tokens        a  b  c | d  e  y | u  v     w, x and z predict nothing
            positions     0  1  2 | 0  1  2 | 3  4     v attends to a, b, c and u
            targets       u  v  w  x  y  z             packed by response, cu_seqlens 0 3 4 6
            read at       2  6  7  2  4  5             the index that predicts each target
            rows          2  4  5  6  7                those positions, each once
            target_rows   0  3  4  0  1  2             rows[target_rows] is "read at"
        """
        prompt_cu, response_cu = self._cu_seqlens
        # [G'], [S] into groups
        groups, group = torch.unique(sequences // self.num_rollouts, return_inverse=True)
        # [G'], [S]
        prompt_lengths, lengths = prompt_cu.diff()[groups], response_cu.diff()[sequences]
        inputs = (lengths - 1).clamp_min(0)  # [S] tokens of each response that the model reads
        is_whole = self._is_cheaper_whole(prompt_lengths, inputs, group)[group]  # [S]

        # The first part consists of runs. A run is a whole sequence, or a prompt that several
        # responses share.
        is_first = torch.ones_like(group, dtype=torch.bool)
        is_first[1:] = group[1:] != group[:-1]
        starts_run = is_whole | is_first
        # [S] the run with the response's prompt, and with the response if it is whole
        run = starts_run.cumsum(0) - 1
        beside = torch.where(is_whole, inputs, 0)[starts_run]  # response tokens in each run
        run_lengths = prompt_lengths[group][starts_run] + beside
        shared = inputs[~is_whole]

        # Pieces of the stream: each run's prompt and the response in it, then the responses that
        # share a prompt.
        # [S] in self._tokens
        response_starts = len(self.prompts.tokens) + response_cu[:-1][sequences]
        # [S], [S]
        prompt_starts, prompt_ends = prompt_cu[:-1][groups][group], prompt_lengths[group]

        def pieces(of_prompts: Tensor, of_responses: Tensor) -> Tensor:
            return torch.cat(
                [
                    torch.stack([of_prompts, of_responses], 1)[starts_run].flatten(),
                    of_responses[~is_whole],
                ]
            )

        piece_lengths = torch.cat(
            [torch.stack([prompt_ends[starts_run], beside], 1).flatten(), shared]
        )
        index = ranges(pieces(prompt_starts, response_starts), piece_lengths)  # [U] in self._tokens
        positions = ranges(pieces(torch.zeros_like(group), prompt_ends), piece_lengths)

        # Token t - 1 of a response predicts its token t; the last token of the prompt predicts its
        # first token.
        run_starts = cumulative(run_lengths)
        input_starts = run_starts[run] + prompt_ends
        input_starts[~is_whole] = run_starts[-1] + cumulative(shared)[:-1]
        predicted_from = ranges(input_starts - 1, lengths)  # [T] in the stream
        target_cu = cumulative(lengths)
        begins = target_cu[:-1][lengths > 0]
        predicted_from[begins] = (run_starts[run] + prompt_ends - 1)[lengths > 0]
        predicts = torch.zeros(len(index), dtype=torch.bool)
        predicts[predicted_from] = True
        device = self.rollouts.tokens.device
        index, positions, rows, target_rows, target_cu, target_index, sequences = to_device(
            device,
            *(
                index,
                positions,
                predicts.nonzero()[:, 0],
                (predicts.cumsum(0) - 1)[predicted_from],
                target_cu,
            ),
            *(ranges(response_cu[:-1][sequences], lengths), sequences),
        )
        rollouts = self.rollouts
        importance = rollouts.importance_weights
        return MicroBatch(
            tokens=self._tokens[index],
            positions=positions,
            layout=SharedPromptLayout(run_lengths, shared, run[~is_whole], device),
            rows=rows,
            target_rows=target_rows,
            targets=self.rollouts.tokens[target_index],
            cu_seqlens=target_cu,
            advantages=self.advantages[sequences],
            old_logprobs=self.rollouts.logprobs[target_index],
            importance_weights=None if importance is None else importance[target_index],
            target_index=target_index,
        )

    def _is_cheaper_whole(self, prompt_lengths: Tensor, inputs: Tensor, group: Tensor) -> Tensor:
        """Return the groups [G] in which repeating the prompt is cheaper than sharing it."""
        num_responses, num_inputs = (
            torch.zeros_like(prompt_lengths).index_add(0, group, x)
            for x in (torch.ones_like(group), inputs)
        )
        return (num_responses - 1) * prompt_lengths <= self.merge_cost * num_inputs

    def positions(self, sequences: Tensor) -> Tensor:
        """Return the packed positions of the chosen rollouts' tokens, on the rollouts' device."""
        (positions,) = to_device(
            self.rollouts.tokens.device, gather_sequences(self._cu_seqlens[1], sequences)[0]
        )
        return positions

    def split(self, sequences: Tensor, token_budget: int) -> list[Tensor]:
        """Split ascending sequences into micro-batches of at most `token_budget` tokens, or of one
        longer response.

        Each prompt counts once, although `pack` repeats some; this adds at most the fraction
        merge_cost of the tokens.
        """
        prompt_lengths, lengths = (cu_seqlens.diff().tolist() for cu_seqlens in self._cu_seqlens)
        num_rollouts = self.num_rollouts
        parts: list[list[int]] = []
        tokens, group = 0, -1
        for sequence in sequences.tolist():
            prompt = sequence // num_rollouts
            cost = max(lengths[sequence] - 1, 0)
            tokens += cost + (prompt_lengths[prompt] if prompt != group else 0)
            if not parts or tokens > token_budget:
                parts.append([])
                tokens = cost + prompt_lengths[prompt]
            parts[-1].append(sequence)
            group = prompt
        return [torch.tensor(part) for part in parts]

    def shortest(self, sequences: Tensor) -> Tensor:
        """Return the chosen sequence [1] with the fewest tokens, its prompt included."""
        prompt_lengths, lengths = (cu_seqlens.diff() for cu_seqlens in self._cu_seqlens)
        tokens = prompt_lengths[sequences // self.num_rollouts] + lengths[sequences]
        return sequences[tokens.argmin()].view(1)

    def share(self, sequences: Tensor, num_ranks: int) -> list[Tensor]:
        """Divide sequences among the ranks by whole groups of about equal numbers of tokens."""
        prompt_lengths, lengths = (cu_seqlens.diff() for cu_seqlens in self._cu_seqlens)
        # [G'], [S] into groups
        groups, group = torch.unique(sequences // self.num_rollouts, return_inverse=True)
        # [G'] of each group
        tokens = prompt_lengths[groups].index_add(0, group, lengths[sequences])
        # a heap; the least loaded rank comes first
        loads = [(0, rank) for rank in range(num_ranks)]
        rank_of = torch.zeros_like(groups)
        for g in tokens.argsort(descending=True, stable=True).tolist():
            load, rank = heapq.heappop(loads)
            rank_of[g] = rank
            heapq.heappush(loads, (load + int(tokens[g]), rank))
        return [sequences[rank_of[group] == rank] for rank in range(num_ranks)]

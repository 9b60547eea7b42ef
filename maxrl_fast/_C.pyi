"""The compiled kernels: csrc/bindings/. Addresses are integers; only maxrl_fast.ops calls these."""

cuda: bool
FIELDS: dict[str, tuple[str, ...]]  # of the records that Python names too: Loss, LossTerms, LossSums, PacsMetrics
MAX_LOG_RATIO: float

# The instruction sets that the CPU's kernels can use here, the widest first, and a limit to one of them for this process. For
# tests: no kernel may run meanwhile, and bfloat16 decoding names its own.
def instruction_sets() -> list[str]: ...
def limit_instructions(name: str) -> None: ...

class Formula:
    def __init__(self, *, kind: str, centred: bool, scale: str, eps: float, ddof: int) -> None: ...

class Groups:
    def __init__(self, *, num_groups: int, group_size: int, num_rewards: int, offsets: int, order: int, valid: int) -> None: ...
    def distinct_sizes(self) -> list[int]: ...

def group_advantage_cpu(
    *,
    dtype: str,
    rewards: int,
    groups: Groups,
    tables: int,
    table_starts: int,
    largest_table: int,
    formula: Formula,
    advantages: int,
    num_threads: int,
) -> int: ...
def group_advantage_cuda(
    *,
    dtype: str,
    rewards: int,
    groups: Groups,
    tables: int,
    table_starts: int,
    largest_table: int,
    formula: Formula,
    advantages: int,
    stream: int,
) -> None: ...

LOSS_WORKSPACE: int  # this and the next only with CUDA kernels
PACS_WORKSPACE: int
MAX_TOP_TOKENS: int

class LossTerms:
    def __init__(
        self,
        *,
        loss: str,
        clip_low: float,
        clip_high: float,
        dual_clip: float,
        kl: str,
        kl_coef: float,
        entropy_coef: float,
        options: list[float],
    ) -> None: ...

class Matrix:
    def __init__(self, data: int, stride: int) -> None: ...

class Tokens:
    def __init__(self, *, num_tokens: int, vocab_size: int, targets: int, temperatures: int, temperature: float) -> None: ...

class RowStatistics:
    def __init__(
        self,
        *,
        top_k: int,
        min_p: float,
        logprobs: int,
        entropy: int,
        top_tokens: int,
        top_logprobs: int,
        log_mass: int,
    ) -> None: ...

class Sequences:
    def __init__(
        self,
        *,
        num_sequences: int,
        cu_seqlens: int,
        advantages: int,
        advantages_per_token: bool,
        importance_weights: int,
        importance_per_token: bool,
        old_logprobs: int,
        ref_logprobs: int,
        sequence_log_ratio: int,
        token_statistics: int,
        top_tokens: int,
        spread: int,
        mask: int,
        sequence_tokens: int,
        denominator: int,
    ) -> None: ...

# Each has a twin ending in _cuda with `stream` instead of num_threads, which returns nothing.
def token_loss_cpu(
    *,
    dtype: str,
    logits: Matrix,
    tokens: Tokens,
    sequences: Sequences,
    terms: LossTerms,
    gradient: Matrix,
    sums: int,
    num_threads: int,
) -> int: ...
def token_logprobs_cpu(*, dtype: str, logits: Matrix, tokens: Tokens, logprobs: int, entropy: int, num_threads: int) -> int: ...
def token_logprobs_backward_cpu(
    *, dtype: str, logits: Matrix, tokens: Tokens, grad_logprobs: int, grad_entropy: int, gradient: Matrix, num_threads: int
) -> None: ...
def row_statistics_cpu(*, dtype: str, logits: Matrix, tokens: Tokens, statistics: RowStatistics, num_threads: int) -> int: ...
def scale_cuda(*, dtype: str, matrix: Matrix, num_rows: int, row_size: int, scale: int, stream: int) -> None: ...
def decode_attention_cuda(
    *,
    dtype: str,
    num_rows: int,
    limit: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q: int,
    k: int,
    v: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    k_cache: int,
    v_cache: int,
    lengths: int,
    prompt_out: int,
    prompt_lse: int,
    lse_row_stride: int,
    lse_head_stride: int,
    num_splits: int,
    partial: int,
    out: int,
    stream: int,
) -> None: ...
def decode_sample_cuda(
    *,
    dtype: str,
    num_rows: int,
    vocab_size: int,
    limit: int,
    logits: int,
    samples_per_logits: int,
    rows: int,
    temperature: float,
    keys: int,
    stops: int,
    last: int,
    length: int,
    done: int,
    tokens: int,
    logprobs: int,
    stream: int,
) -> None: ...

# The parts of a layer, csrc/layer.h. Heads: address, row stride, number. Tables: cos, sin, positions, number of positions.
def add_rms_norm_cuda(
    *, dtype: str, num_rows: int, size: int, eps: float, x: int, delta: int, weight: int, sum: int, normed: int, stream: int
) -> None: ...
def add_rms_norm_backward_cuda(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    eps: float,
    sum: int,
    weight: int,
    grad_sum: int,
    grad_normed: int,
    grad_x: int,
    num_partials: int,
    grad_weight: int,
    stream: int,
) -> None: ...
def rotate_heads_cuda(
    *,
    dtype: str,
    num_rows: int,
    head_dim: int,
    eps: float,
    direction: float,
    q: tuple[int, int, int],
    k: tuple[int, int, int],
    v: tuple[int, int, int],
    q_norm: int,
    k_norm: int,
    to: tuple[int, int, int],
    tables: tuple[int, int, int, int],
    stream: int,
) -> None: ...
def rotate_heads_backward_cuda(
    *,
    dtype: str,
    num_rows: int,
    head_dim: int,
    eps: float,
    q: tuple[int, int, int],
    k: tuple[int, int, int],
    q_norm: int,
    k_norm: int,
    to: tuple[int, int],
    grad: tuple[int, int],
    tables: tuple[int, int, int, int],
    num_partials: int,
    grad_norm: int,
    stream: int,
) -> None: ...
def swiglu_cuda(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    gate: int,
    up: int,
    gate_stride: int,
    up_stride: int,
    out: int,
    stream: int,
) -> None: ...
def swiglu_backward_cuda(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    gate: int,
    up: int,
    gate_stride: int,
    up_stride: int,
    grad: int,
    grad_gate: int,
    grad_up: int,
    stream: int,
) -> None: ...
def add_rms_norm_cpu(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    eps: float,
    x: int,
    delta: int,
    weight: int,
    sum: int,
    normed: int,
    num_threads: int,
) -> None: ...
def add_rms_norm_backward_cpu(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    eps: float,
    sum: int,
    weight: int,
    grad_sum: int,
    grad_normed: int,
    grad_x: int,
    num_partials: int,
    grad_weight: int,
    num_threads: int,
) -> None: ...
def rotate_heads_cpu(
    *,
    dtype: str,
    num_rows: int,
    head_dim: int,
    eps: float,
    direction: float,
    q: tuple[int, int, int],
    k: tuple[int, int, int],
    v: tuple[int, int, int],
    q_norm: int,
    k_norm: int,
    to: tuple[int, int, int],
    tables: tuple[int, int, int, int],
    to_strides: list[int] = ...,  # of the results' rows; 0: contiguous
    num_threads: int,
) -> None: ...
def rotate_heads_backward_cpu(
    *,
    dtype: str,
    num_rows: int,
    head_dim: int,
    eps: float,
    q: tuple[int, int, int],
    k: tuple[int, int, int],
    v: tuple[int, int, int],
    q_norm: int,
    k_norm: int,
    to: list[int],
    grad: tuple[int, int],
    tables: tuple[int, int, int, int],
    num_partials: int,
    grad_norm: int,
    to_strides: list[int],  # of the results' rows; 0: contiguous
    num_threads: int,
) -> None: ...
def swiglu_cpu(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    gate: int,
    up: int,
    gate_stride: int,
    up_stride: int,
    out: int,
    num_threads: int,
) -> None: ...
def swiglu_backward_cpu(
    *,
    dtype: str,
    num_rows: int,
    size: int,
    gate: int,
    up: int,
    gate_stride: int,
    up_stride: int,
    grad: int,
    grad_gate: int,
    grad_up: int,
    grad_stride: int = ...,
    num_threads: int,
) -> None: ...
def chosen_rows_backward_cpu(
    *, dtype: str, num_rows: int, num_chosen: int, size: int, rows: int, grad: int, to: int, num_threads: int
) -> None: ...

class Pacs:
    def __init__(
        self,
        *,
        num_rollouts: int,
        num_groups: int,
        group_size: int,
        offsets: int,
        proxies: int,
        labels: int,
        denominators: int,
        denominator: float,
        score: str,
        balanced: bool,
        loss: int,
        metrics: int,
        cross_entropy: int,
        gradient: int,
    ) -> None: ...

class LogRatio:
    def __init__(self, *, num_tokens: int, num_sequences: int, cu_seqlens: int, mask: int, beta: float) -> None: ...

def pacs_loss_cpu(*, dtype: str, pacs: Pacs, num_threads: int) -> int: ...
def log_ratio_reward_cpu(
    *, dtype: str, sequences: LogRatio, logprobs: int, ref_logprobs: int, proxies: int, num_threads: int
) -> None: ...
def log_ratio_reward_backward_cpu(
    *, dtype: str, sequences: LogRatio, grad_proxies: int, gradient: int, num_threads: int
) -> None: ...

class LayerWeights:
    def __init__(
        self,
        *,
        input_norm: int,
        q: int,
        k: int,
        v: int,
        q_bias: int,
        k_bias: int,
        v_bias: int,
        q_norm: int,
        k_norm: int,
        o: int,
        post_norm: int,
        gate: int,
        up: int,
        down: int,
    ) -> None: ...

def bfloat16_arithmetics() -> list[str]: ...
def fastest_for_bfloat16() -> str: ...
def packed_product_cpu(*, arithmetic: str, m: int, n: int, k: int, a: int, b: int, c: int) -> None: ...

class CpuDecoder:
    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
        norm_eps: float,
        arithmetic: str,
        positions: int,
        cos: int,
        sin: int,
    ) -> None: ...
    def load(self, *, embedding: int, norm: int, head: int, layers: list[LayerWeights], num_threads: int) -> None: ...
    def cache_bytes(self, length: int) -> int: ...

class SamplingOptions:
    def __init__(self, *, temperature: float, top_k: int, top_p: float, min_p: float, stop_ids: list[int]) -> None: ...

class GenerationStatistics:
    prefill_seconds: float
    decode_seconds: float
    steps: int
    decoded_tokens: int
    prompt_tokens: int
    peak_cache_bytes: int

class CpuGeneration:
    def __init__(
        self,
        *,
        decoder: CpuDecoder,
        num_prompts: int,
        num_samples: int,
        max_new_tokens: int,
        num_slots: int,
        tokens: int,
        cu_seqlens: int,
        keys: int,
        sampling: SamplingOptions,
        responses: int,
        logprobs: int,
        lengths: int,
        truncated: int,
        num_threads: int,
    ) -> None: ...
    def run(self, seconds: float) -> bool: ...
    @property
    def statistics(self) -> GenerationStatistics: ...

class SharedPromptStream:
    def __init__(
        self, *, num_tokens: int, num_sequences: int, num_responses: int, lengths: int, response_lengths: int, answers: int
    ) -> None: ...

def shared_prompt_attention_cpu(
    *,
    dtype: str,
    stream: SharedPromptStream,
    heads: int,
    key_heads: int,
    head_dim: int,
    q: int,
    k: int,
    v: int,
    o: int,
    lse: int,
    num_threads: int,
) -> None: ...
def shared_prompt_attention_backward_cpu(
    *,
    dtype: str,
    stream: SharedPromptStream,
    heads: int,
    key_heads: int,
    head_dim: int,
    q: int,
    k: int,
    v: int,
    o: int,
    lse: int,
    grad: int,
    grad_q: int,
    grad_k: int,
    grad_v: int,
    num_threads: int,
) -> None: ...

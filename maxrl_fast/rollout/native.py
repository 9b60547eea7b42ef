"""The C++ decoder of csrc/cpu/, and which of our own engines samples."""

from dataclasses import replace
from typing import Any

import torch

from maxrl_fast import _C
from maxrl_fast.model.decoder import Decoder, rotary_table
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops.dispatch import KernelLaunch, pack
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import NativeEngine, RolloutRequest, RolloutStatistics, Turns, finished
from maxrl_fast.rollout.device_decoder import DeviceEngine

CPU = torch.device("cpu")
RUN_SECONDS = 0.2  # how long C++ runs before Python handles signals
REPLY_SECONDS = 0.005  # how long it runs before Python looks for replies that are due
# The weights of a layer by their names in csrc/.
_LAYER = {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
}
_LAYER |= {x: f"self_attn.{x}_proj.weight" for x in "qkvo"}
_LAYER |= {f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_LAYER |= {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


class CpuEngine(NativeEngine):
    """The C++ decoder, with a packed copy of the weights. A sample is bitwise identical for any
    batch, number of slots and threads. With bfloat16 `arithmetic`, matrices, keys, values, and the
    rows they are multiplied with are rounded to it; sums, the residual stream, norms, softmax and
    sampling are float32."""

    def __init__(
        self, model: PolicyModel, dtype: torch.dtype, arithmetic: str | None = None, **limits: Any
    ):
        super().__init__(model, dtype, **limits)
        # float32 on a CPU without instructions for bfloat16
        fastest = _C.fastest_for_bfloat16() if dtype == torch.bfloat16 else "float32"
        self.arithmetic, config = arithmetic or fastest, model.config
        positions = config.max_position_embeddings
        tables, call = rotary_table(config, torch.arange(positions)), KernelLaunch(CPU)
        options = {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocab": config.vocab_size,
            "norm_eps": config.rms_norm_eps,
            "arithmetic": self.arithmetic,
            "positions": positions,
            **dict(zip(("cos", "sin"), map(call.keep, tables), strict=True)),  # [P, 1, D/2], copied
        }
        self._decoder = _C.CpuDecoder(pack("DecoderOptions", options))
        self.load_weights(model)

    def load_weights(self, model: PolicyModel) -> None:
        if replace(model.config, dtype=self.config.dtype) != self.config:
            raise ValueError(
                f"the policy must have the decoder's sizes, {self.config}, got {model.config}"
            )
        weights = {
            name: weight.detach().to(CPU, torch.float32).contiguous()
            for name, weight in model.weights()
        }
        call, layers = KernelLaunch(CPU), range(self.config.num_hidden_layers)

        def at(name: str) -> int:
            # families differ in biases and norms of q, k and v
            return call.keep(weights[name]) if name in weights else 0

        embedding = at("model.embed_tokens.weight")
        of_model = {
            "embedding": embedding,
            "norm": at("model.norm.weight"),
            "head": embedding if self.config.tie_word_embeddings else at("lm_head.weight"),
            "num_threads": torch.get_num_threads(),
        }
        of_layers = (
            {own: at(f"model.layers.{i}.{name}") for own, name in _LAYER.items()} for i in layers
        )
        packed_layers = [pack("LayerWeights", fields) for fields in of_layers]
        self._decoder.load(pack("DecoderWeights", of_model), packed_layers)

    def describe(self) -> str:
        most = f"of at most {self.cache_bytes / 1e9:.3g} GB"
        return f"native (C++, {self.arithmetic}, key/value cache {most})"

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        size = self._decoder.cache_bytes
        return size(prompt_length), size(max_new_tokens)

    def sleep(self) -> None:
        """Forget kept prompts; other caches exist only while samples are decoded."""
        self._decoder.forget()

    def serve(self, request: RolloutRequest, prompt: int, own: int) -> Rollouts:
        prompts, num_samples, sampling = request.prompts, request.num_samples, request.sampling
        max_kept = self.cache_bytes // 4 if request.keeps_prompts else 0
        budget = self.cache_bytes - max(max_kept, self._decoder.kept_bytes)
        # Active samples belong to at most slots / num_samples whole prompts and parts of two more.
        fitting = int((budget - 2 * prompt) / (own + prompt / num_samples))
        num_slots = min(max(1, fitting), self.max_batch)
        shape = (request.num_sequences, sampling.max_new_tokens)
        tokens, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        lengths = torch.zeros(shape[0], dtype=torch.int64)
        truncated = torch.zeros(shape[0], dtype=torch.bool)
        given = prompts.tokens, prompts.cu_seqlens, request.keys()
        prompt_tokens, cu_seqlens, keys = (x.contiguous() for x in given)
        # keeps the tensors until this function returns, because the generation has their addresses
        call = KernelLaunch(CPU)
        job = {
            "num_prompts": len(prompts),
            "num_samples": num_samples,
            "max_new_tokens": sampling.max_new_tokens,
            "num_slots": num_slots,
            "max_kept_bytes": max_kept,
            "max_turns": 0 if request.environments is None else sampling.max_turns,
            "tokens": call.address("tokens", prompt_tokens, torch.int64, (len(prompt_tokens),)),
            "cu_seqlens": call.address("cu_seqlens", cu_seqlens, torch.int64, (len(prompts) + 1,)),
            "keys": call.address("keys", keys, torch.int64, shape[:1]),
            **{x: getattr(sampling, x) for x in ("temperature", "top_k", "top_p", "min_p")},
            "responses": call.keep(tokens),
            "logprobs": call.keep(logprobs),
            "lengths": call.keep(lengths),
            "truncated": call.keep(truncated),
            "num_threads": torch.get_num_threads(),
        }
        generation = _C.CpuGeneration(
            self._decoder, pack("GenerationJob", job), list(sampling.stop_ids)
        )
        turns: Turns | None = None
        if request.environments is None:
            while not generation.run(RUN_SECONDS):
                request.beat()
        else:
            turns = episodes = Turns(request, self.config.vocab_size)

            def sample_on() -> tuple[list[tuple[int, list[int]]], bool]:
                is_done = generation.run(REPLY_SECONDS if episodes.waiting else RUN_SECONDS)
                ends = generation.take_turns()
                ended = [(s, tokens[s, episodes.lengths[s] : lengths[s]].tolist()) for s in ends]
                return ended, not (is_done or generation.all_wait)

            turns.play(sample_on, generation.feed)
        done = generation.statistics
        names = "prefill_seconds", "decode_seconds", "steps", "peak_cache_bytes", "decoded_rows"
        self.statistics = RolloutStatistics(*(done[name] for name in names))
        return finished(turns, tokens, logprobs, lengths, truncated)


def native_engine(
    model: PolicyModel, dtype: torch.dtype, in_cpp: bool | None = None, **limits: Any
) -> NativeEngine:
    """Return the engine that samples from a policy, with its weights. in_cpp: use the C++ decoder,
    which policies of ours have; None: on every CPU. limits: NativeEngine's others."""
    is_cpu = model.lm_head.weight.device.type == "cpu"
    in_cpp = isinstance(model, Decoder) and (is_cpu if in_cpp is None else in_cpp)
    return (CpuEngine if in_cpp else DeviceEngine)(model, dtype, **limits)

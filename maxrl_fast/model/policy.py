"""The policy that a configuration asks for: a new decoder or a checkpoint."""

import torch

from maxrl_fast.config.options import Config, ModelOptions
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import memory_bytes
from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.tasks import Task


def build_policy(config: Config, task: Task, saved: DecoderConfig | None = None) -> Decoder:
    """The policy on the CPU, in float32, with adapters where asked.

    Args:
        saved: sizes of the policy of a run that goes on, whose weights are still to be put in.

    Raises:
        InputError: where a checkpoint cannot be read or does not fit the task.
    """
    model, options = _base(config, task) if saved is None else Decoder.empty(saved), config.model
    if options.lora_rank:
        add_adapters(model, options.lora_rank, options.lora_alpha, options.lora_targets, config.run.seed)
    model.checkpoint_activations = config.optimizer.checkpoint_activations
    if config.run.compile:
        model.compile_layers()
    return model


def _base(config: Config, task: Task) -> Decoder:
    options = config.model
    assert config.rollout.max_new_tokens is not None
    longest = task.prompt_length + config.rollout.max_new_tokens
    if options.model is None:
        model = Decoder(_new_sizes(options, task.vocab_size, max(512, longest)))
        model.initialise(config.run.seed)
        return model
    model = load_checkpoint(options.model)
    if model.config.vocab_size != task.vocab_size:
        raise InputError(
            f"task {config.task.task} needs a vocabulary of {task.vocab_size}, {options.model} has {model.config.vocab_size}"
        )
    if model.config.max_position_embeddings < longest:
        raise InputError(
            f"prompts of {task.prompt_length} and responses of {config.rollout.max_new_tokens} tokens need {longest} "
            f"positions, {options.model} has {model.config.max_position_embeddings}"
        )
    return model


def _new_sizes(options: ModelOptions, vocab_size: int, positions: int) -> DecoderConfig:
    """Those of a new decoder; InputError where no machine, or not this one, can hold it."""
    try:
        sizes = DecoderConfig(
            vocab_size=vocab_size,
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            head_dim=options.hidden_size // options.heads,
            max_position_embeddings=positions,
            rope_theta=options.rope_theta,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    wanted, memory = 4 * Decoder.count(sizes), memory_bytes(torch.device("cpu"))
    if wanted > memory:
        raise InputError(
            f"a new policy of these sizes has {wanted / 1e9:,.0f} GB of weights, this machine {memory / 1e9:,.0f} GB"
        )
    return sizes

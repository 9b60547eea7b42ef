import pytest
import torch
from transformers import AutoModelForCausalLM

from maxrl_fast.model.linear import add_adapters
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout.device_decoder import DeviceEngine
from maxrl_fast.training.learner import make_optimizer
from tests.batches import make_prompts, one_batch
from tests.models import adapted, response_logits, save_checkpoint, tiny_decoder
from tests.tables import refused

BATCH = one_batch(
    make_prompts([[5, 6, 7, 8], [9, 1]]), Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8]])
)


def test_new_adapters_do_not_change_outputs_and_only_they_are_trained():
    model = tiny_decoder()
    logits = response_logits(model, BATCH, torch.float32)
    add_adapters(model, 3, 6.0, "q_proj, down_proj", seed=0)
    assert torch.equal(response_logits(model, BATCH, torch.float32), logits)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {".".join(name.split(".")[-2:]) for name in trained} == {
        *"q_proj.lora_a q_proj.lora_b down_proj.lora_a down_proj.lora_b".split()
    }
    groups = make_optimizer(model, beta2=0.99, weight_decay=0.01).param_groups
    optimized = sum(p.numel() for group in groups for p in group["params"])
    assert optimized == 2 * (3 * (32 + 32) + 3 * (48 + 32))


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "qwen3"}, {"model_type": "llama", "tie_word_embeddings": False}]
)
def test_merged_weights_give_the_same_outputs(tmp_path, changes):
    model, plain = adapted(tiny_decoder(**changes)), tiny_decoder(**changes)
    name, v = "model.layers.1.self_attn.v_proj.weight", model.model.layers[1].self_attn.v_proj
    logits = response_logits(model, BATCH, torch.float32)
    assert (logits - response_logits(plain, BATCH, torch.float32)).abs().max() > 0.5
    by_name = dict(model.weights())
    expected = plain.state_dict()[name] + 2.0 * (v.lora_b @ v.lora_a)
    torch.testing.assert_close(by_name[name], expected.detach())
    plain.load_state_dict(by_name, strict=False)
    actual = response_logits(plain, BATCH, torch.float32)
    torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-4)

    save_checkpoint(tmp_path / "merged", model.config, model.weights(), {}, (2,))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(theirs.state_dict()[name], by_name[name])
    decoder = DeviceEngine(model, torch.float32)
    torch.testing.assert_close(dict(decoder.model.named_parameters())[name], by_name[name])


def test_adapter_gradients_follow_from_the_merged_matrix():
    """dA = s B^T dW and dB = s dW A^T."""
    model, plain = adapted(tiny_decoder(), "q_proj"), tiny_decoder()
    plain.load_state_dict(dict(model.weights()), strict=False)
    for m in (model, plain):
        response_logits(m, BATCH, torch.float32).log_softmax(-1)[:, 3].sum().backward()
    for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
        q, by_matrix = layer.self_attn.q_proj, other.self_attn.q_proj.weight.grad
        assert by_matrix.abs().max() > 0.1
        expected = 2.0 * q.lora_b.T @ by_matrix, 2.0 * by_matrix @ q.lora_a.T
        for actual, wanted in zip((q.lora_a.grad, q.lora_b.grad), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4)
        assert q.weight.grad is None


def test_the_reference_shares_frozen_weights():
    model = adapted(tiny_decoder())
    reference = model.copied().requires_grad_(False)
    assert reference.model.embed_tokens.weight is model.model.embed_tokens.weight
    own, copied = (x.model.layers[0].mlp.up_proj.lora_a for x in (model, reference))
    assert copied is not own
    assert own.requires_grad
    assert not any(p.requires_grad for p in reference.parameters())
    logits = (response_logits(x, BATCH, torch.float32) for x in (model, reference))
    assert torch.equal(*logits)


def test_unknown_targets_are_refused():
    with refused(r"lora_targets must be among .*q_proj.*, got 'qkv_proj'"):
        add_adapters(tiny_decoder(), 3, 6.0, "q_proj,qkv_proj", seed=0)
    with refused(r"got 'lm_head'"):
        add_adapters(tiny_decoder(), 3, 6.0, "lm_head", seed=0)

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import maxrl_fast
from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.rollout import NativeEngine, RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.rollout.vllm import VllmEngine
from maxrl_fast.tasks.conversation import TextOptions
from maxrl_fast.tasks.text_codec import TextTask, prompts_of
from maxrl_fast.training.passes import run_batch
from tests.batches import one_batch
from tests.language.families import CASES, MADE, SMOLLM2

pytestmark = pytest.mark.language
ROLLOUTS, NEW_TOKENS, LR = 4, 12, 1e-5
HALF = torch.bfloat16
ODD = "def odd(prompt, response, **columns): return float(len(response) % 2)"
FILES = ("model.safetensors", "state/state-00000-00000.safetensors")
OPTIONS = CASES["run"] | {"rollouts": ROLLOUTS, "lr": LR, "threads": torch.get_num_threads()}
OPTIONS |= {"data": MADE / "train.jsonl", "test_data": MADE / "test.jsonl", "model": SMOLLM2}


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module")
def policy():
    return load_checkpoint(SMOLLM2)


@pytest.fixture(scope="module")
def peer():
    return load(SMOLLM2)


@pytest.fixture(scope="module")
def codec():
    return TextTask(SMOLLM2, TextOptions())


def sampled(policy, codec, count, samples, temperature=1.0, dtype=torch.float32):
    chats = [json.loads(line)["prompt"] for line in (MADE / "test.jsonl").open()][:count]
    prompts = prompts_of(
        [codec.encode_prompt(chat, "") for chat in chats], range(count), [{}] * count
    )
    sampling = Sampling(temperature, NEW_TOKENS, codec.stop_ids)
    engine = native_engine(policy, dtype)
    return prompts, engine.generate(RolloutRequest(prompts, samples, sampling, 1, 0))


def texts(prompts, rollouts):
    responses = rollouts.tokens.split(rollouts.lengths.tolist())
    asked = prompts.tokens.split(prompts.lengths.tolist())
    return [(asked[i * len(asked) // len(responses)], x) for i, x in enumerate(responses)]


def logprobs(policy, prompts, rollouts, dtype=torch.float32):
    batch = one_batch(prompts, rollouts)
    with torch.no_grad():
        hidden, scaling = run_batch(policy, batch, dtype), policy.scaling(1.0)
        return linear_token_logprobs(hidden, policy.output_matrix, batch.targets, **scaling)[0]


def peers_logprobs(model, prompts, rollouts):
    found = []
    for prompt, response in texts(prompts, rollouts):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits.float(), -1).gather(-1, response[:, None])[:, 0])
    return torch.cat(found)


def check_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_logprobs_of_trainer_engine_and_transformers(policy, peer, codec):
    """In bfloat16 ours are about as exact as those of transformers; the engine computes in float32
    where the CPU has no bfloat16.
    """
    step = sampled(policy, codec, 3, 2)
    theirs = peers_logprobs(peer, *step)
    for ours in (step[1].logprobs, logprobs(policy, *step)):
        check_equal(ours, theirs)
    step = sampled(policy, codec, 3, 2, dtype=HALF)
    exact = peers_logprobs(peer, *step)
    allowed = 1.5 * (peers_logprobs(load(SMOLLM2, HALF), *step) - exact).abs().mean()
    assert 0.005 < allowed < 0.1
    for ours in (step[1].logprobs, logprobs(policy, *step, HALF)):
        assert (ours - exact).abs().mean() < allowed


def test_greedy_answers_are_those_of_transformers(policy, peer, codec):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    for prompt, answer in texts(*sampled(policy, codec, 50, 1, 0.0)):
        made = peer.generate(prompt[None], eos_token_id=[*codec.stop_ids], **options)
        assert answer.tolist() == made[0, len(prompt) :].tolist()


def run_with(engine, folder, **options):
    seen, generate = [], engine.generate
    (folder / "reward.py").write_text(ODD)
    OPTIONS["reward"] = f"{folder / 'reward.py'}:odd"

    def watched(self, request):
        seen.append((request.prompts, generate(self, request)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "generate", watched)
        run = maxrl_fast.run(OPTIONS, out=folder / "run", **options)
    step, *_ = (x for x in seen if len(x[1]) == 4 * ROLLOUTS)
    return run, *step


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    return run_with(NativeEngine, tmp_path_factory.mktemp("runs"), steps=2)


def test_an_update_is_that_of_transformers_gradients(two_steps, peer):
    run, prompts, rollouts = two_steps
    rewards = [len(run.task.decode(x.tolist())) % 2.0 for _, x in texts(prompts, rollouts)]
    rewards = torch.tensor(rewards).view(-1, ROLLOUTS)
    mean = rewards.mean(1, keepdim=True)
    advantages = ((rewards - mean) / mean.clamp_min(1e-9)).flatten()
    assert advantages.count_nonzero() > ROLLOUTS
    # transformers gives this token, <|im_end|>, no gradient as an input
    peer.get_input_embeddings().padding_idx = None
    terms = peers_logprobs(peer, prompts, rollouts) * advantages.repeat_interleave(rollouts.lengths)
    (-terms.mean()).backward()
    gradients = {name: p.grad for name, p in peer.named_parameters()}
    norm = float(torch.stack([x.double().norm() for x in gradients.values()]).norm())
    assert run.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    new, state = (load_file(run.out / "checkpoints/step-000001" / x) for x in FILES)
    old = peer.state_dict()
    for name, gradient in gradients.items():
        gradient = gradient * (0.1 / norm)  # --clip-grad
        assert (state[f"optimizer.exp_avg.{name}"] / 0.1 - gradient).norm() < 2e-3 * gradient.norm()
        decayed = old[name] * (1 - LR * 0.01 * (gradient.ndim > 1))
        wanted = decayed - LR * gradient / (gradient.abs() + 1e-8)  # AdamW's first step
        assert (new[name] - wanted).abs().mean() < 0.01 * LR


def check_saved(run, prompts, rollouts):
    with torch.no_grad():
        theirs = peers_logprobs(load(run.out / "latest"), prompts, rollouts)
    ours = logprobs(run.policy, prompts, rollouts)
    check_equal(ours, theirs)
    assert (ours - rollouts.logprobs).abs().max() > 1e-3


def test_transformers_loads_a_checkpoint(two_steps, codec):
    run, *step = two_steps
    saved = AutoTokenizer.from_pretrained(run.out / "latest")
    assert saved.chat_template == codec.tokenizer.chat_template
    check_saved(run, *step)


def test_lora_is_merged_into_the_checkpoint(two_steps, tmp_path):
    run = maxrl_fast.run(OPTIONS, steps=1, out=tmp_path, lora_rank=4, lr=1e-3)
    check_saved(run, *two_steps[1:])


def vllms_logprobs(folder, dtype, *step):
    import vllm

    options = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**28}
    model, pairs = vllm.LLM(str(folder), dtype=dtype, **options), texts(*step)
    whole = [{"prompt_token_ids": torch.cat(pair).tolist()} for pair in pairs]
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    made, found = model.generate(whole, sampling, use_tqdm=False), []
    for one, (_, response) in zip(made, pairs, strict=True):
        rows = one.prompt_logprobs[-len(response) :]
        found += [row[i].logprob for row, i in zip(rows, response.tolist(), strict=True)]
    return found


@pytest.mark.vllm
def test_vllm_samples_for_a_run_and_loads_its_checkpoint(policy, tmp_path):
    run, *step = run_with(VllmEngine, tmp_path, steps=1, rollout="vllm", kv_cache_gb=0.5)
    before, after = logprobs(policy, *step), logprobs(run.policy, *step)
    check_equal(step[1].logprobs, before)
    assert (after - before).abs().max() > 1e-3
    errors = {}
    for dtype in ("float32", "bfloat16"):
        # a process can have only one engine
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(vllms_logprobs, run.out / "latest", dtype, *step)
            errors[dtype] = (torch.tensor(found.result(timeout=600)) - after).abs()
    assert errors["float32"].max() <= 1e-4
    own = (logprobs(run.policy, *step, HALF) - after).abs()
    assert errors["bfloat16"].mean() < 1.5 * own.mean()  # both round every layer

import re
import subprocess
import sys
import time
from itertools import chain
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.tiny import tiny_session
from maxrl_fast import Session, group_advantage, run
from maxrl_fast.errors import InputError, NonFiniteError, StorageError
from maxrl_fast.model.policy import load_policy
from maxrl_fast.runtime.files import verify_checksums
from tests.runs import ROOT
from tests.tables import refused
from tests.tasks.test_dataset import save_byte_level_policy

PROMPTS = [f"after {letter}" for letter in "abcd"]
BY_VERBS = """
import sys
from maxrl_fast import Session, group_advantage
from maxrl_fast.training.learner import LearningRate

run, steps, warmup, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
session = Session.from_run(f"{run}/checkpoints/step-000000", threads=1)
config, task = session.config, session.task
rate = LearningRate(config.optimizer.lr, steps, warmup)
first = config.warm_start.sft_steps * config.warm_start.sft_batch
for step in range(1, steps + 1):
    G, N = config.sampling.prompts, config.sampling.rollouts
    samples = session.sample(task.prompts("train", first + (step - 1) * G, G), n=N)
    rewards = task.score(samples.prompts, samples.rollouts).view(G, N)
    session.forward_backward(samples, group_advantage(rewards, "maxpo", k=2))
    session.optim_step(lr=rate.at(step))
session.save(out)
"""


def state(folder):
    place = "latest/state" if (folder / "latest").exists() else "state"  # of a run
    files = (load_file(path) for path in sorted(folder.glob(f"{place}/*")))
    return [(name, x) for file in files for name, x in file.items()]


def assert_equal_states(one, two):
    pairs = zip(state(one), state(two), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert state(one)


def test_a_loop_of_verbs_has_the_weights_of_the_command(maze_run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-", str(maze_run), "6", "0", str(tmp_path / "out")])
    exec(BY_VERBS, {})
    assert_equal_states(tmp_path / "out", maze_run)


FAILING = (
    "import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('of the loop')\nfor step"
)


@pytest.mark.slow
@pytest.mark.parametrize("is_failing", [False, True])
def test_two_ranks_with_sharded_weights_and_a_reference(shared_run, tmp_path, is_failing):
    from tests.distributed.test_torchrun import finished, torchrun

    program = BY_VERBS.replace("for step", FAILING, 1) if is_failing else BY_VERBS
    (tmp_path / "loop.py").write_text(program)
    run, out = shared_run("ranks"), tmp_path / "out"
    process = torchrun(2, str(tmp_path / "loop.py"), str(run), "3", "1", str(out))
    output = finished(process, 300)
    assert bool(process.returncode) == ("of the loop" in output) == is_failing, output
    if not is_failing:
        assert_equal_states(out, run)


def step(session, **sampling):
    samples = session.sample(PROMPTS, n=4, max_new_tokens=3, **sampling)
    rewards = [[float(len(text)) for text in texts] for texts in samples.texts]
    session.forward_backward(samples, group_advantage(rewards, "grpo"), loss="ppo")
    return session.optim_step()


def test_what_was_saved_goes_on_bitwise(tmp_path):
    session = tiny_session(threads=1)
    step(session)
    session.save(tmp_path / "saved")
    again = Session.from_run(tmp_path / "saved")
    for name, one in (("one", session), ("two", again)):
        assert step(one).grad_norm > 0
        one.save(tmp_path / name)
    assert_equal_states(tmp_path / "one", tmp_path / "two")
    again.save(tmp_path / "saved")  # replaces it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "saved", "two"]
    assert_equal_states(tmp_path / "saved", tmp_path / "two")
    sizes = {"task": "dataset", "vocab_size": 41, "prompt_length": 2, "max_new_tokens": 3}
    policy = load_policy(tmp_path / "saved", **sizes)  # a Hugging Face folder
    weights = dict(session.learner.model.weights())
    assert all(torch.equal(x, weights[name]) for name, x in policy.weights())


def test_samples_their_log_probs_and_given_texts(tmp_path):
    session = Session(save_byte_level_policy(tmp_path), threads=1, lora_rank=2)
    messages = [{"role": "user", "content": "be"}]
    samples = session.sample(["ab", messages], n=3, max_new_tokens=5)
    assert [len(x) for x in samples.texts] == [3, 3]
    assert samples.truncated.shape == (2, 3)
    lists = session.forward(samples).logprobs, samples.logprobs, samples.tokens
    for now, then, tokens in zip(*map(chain.from_iterable, lists), strict=True):
        assert len(now) == len(tokens)
        np.testing.assert_allclose(now, then, atol=2e-5)
    session.forward_backward(samples, torch.ones(2, 3))
    session.sample(["ab"])  # before the step
    session.optim_step(lr=0.1)
    again = session.sample(["ab", messages], n=3, max_new_tokens=5)
    for now, then in zip(session.forward(again).logprobs, again.logprobs, strict=True):
        np.testing.assert_allclose(np.concatenate(now), np.concatenate(then), atol=2e-5)
    given = session.encode(["ab"], [["one", "two"]])
    assert given.texts == [["one", "two"]]
    one, two = (session.sample(["ab"], temperature=0) for _ in range(2))
    assert one.texts == two.texts


def test_an_interrupt_discards_the_gradients():
    session = tiny_session(threads=1)
    samples = session.sample(PROMPTS, n=4, max_new_tokens=3)

    def interrupted(t):
        if len(t.logprobs) > 15:  # when the loss is checked, it has fewer tokens
            raise KeyboardInterrupt
        return -t.advantages * t.logprobs

    session.forward_backward(samples, torch.ones(4, 4))
    with pytest.raises(KeyboardInterrupt):
        session.forward_backward(samples, torch.ones(4, 4), loss=interrupted)
    with pytest.raises(InputError, match="needs a forward_backward"):
        session.optim_step()


@pytest.fixture(scope="module")
def tiny():
    session = tiny_session(threads=1)
    return session, session.sample(PROMPTS, n=2, max_new_tokens=3)


ROWS = [[1.0, 0]] * 4
WRONG = {  # what is called, with what values, and what is said
    "prompts": (lambda s, x, y: s.sample(y), [None, "a", [], [3], [[]], ["\ud800"]], "prompts"),
    "unknown": (lambda s, x, y: s.sample(y), [["a", "?"]], r"prompts\[1\] must be text that the"),
    "responses": (lambda s, x, y: s.encode(["a"], y), [3, [], [3], [[]], [[3]]], "responses must"),
    "number": (lambda s, x, y: s.encode(["a"], y), [[["b"], ["c"]]], "as many to each of 1"),
    "long": (lambda s, x, y: s.encode(["a"], y), [[["b" * 512]]], "from 1 to 512 tokens, got"),
    "n": (lambda s, x, y: s.sample(["a"], y), [0, -1, 1.5, True], "^n must be"),
    "heat": (lambda s, x, y: s.sample(["a"], temperature=y), [-1, float("nan")], "temperature"),
    "limit": (lambda s, x, y: s.sample(["a"], max_new_tokens=y), [0, 1.5, 600], "max_new_tokens"),
    "samples": (lambda s, x, y: s.forward_backward(y, ROWS), [None, []], "samples must have resp"),
    "none": (lambda s, x, y: s.forward_backward(s.encode(y), [[]]), [["a"]], "samples must have"),
    "advantages": (
        lambda s, x, y: s.forward_backward(x, y),
        [None, 3, "", [], [[]], ROWS[:3], torch.full((4, 2), torch.inf)],
        "advantages must be finite",
    ),
    "loss": (lambda s, x, y: s.forward_backward(x, ROWS, y), [3, "po", []], "loss must be"),
    "lr": (lambda s, x, y: s.optim_step(y), [-1, float("nan"), "x"], "^lr must be"),
    "folder": (lambda s, x, y: Session.from_run(y), ["", "docs"], "folder must be of a run with"),
    "rate": (lambda s, x, y: tiny_session(lr=y), [0, -1, float("nan")], "^lr must be"),
    "steps": (lambda s, x, y: tiny_session(steps=y), [3], "unknown option steps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(tiny, name, tmp_path, monkeypatch):
    session, samples = tiny
    monkeypatch.chdir(tmp_path)
    session.forward_backward(samples, ROWS)

    def kept():
        return session.learner.accumulated, session._draws, session._settings

    before, (call, values, said) = kept(), WRONG[name]
    for wrong in values:
        with pytest.raises(InputError, match=said):
            call(session, samples, wrong)
        assert kept() == before
    assert not [*tmp_path.iterdir()]
    session.learner.accumulated = []


def test_ratios_of_given_texts_and_after_a_step_that_fails(tiny):
    session, samples = tiny
    session.forward_backward(session.encode(["a", "b"], [["c"], ["d"]]), [[1.0], [2.0]])
    found, usual = session.optim_step(lr=0), session.learner.settings
    assert (found.ratio, found.num_targets) == (pytest.approx(1), 4)  # a mean
    session.forward_backward(samples, [[0.0, 0]] * 4)
    assert session.optim_step(lr=0).ratio == 1
    session.forward_backward(samples, [[3e38, -3e38]] * 4, "reinforce")
    with pytest.raises(NonFiniteError):
        session.optim_step()
    with refused("samples must have the temperature"):
        session.forward_backward(session.sample(PROMPTS, 2, temperature=0), ROWS)
    session.forward_backward(samples, [[0.0, 0]] * 4)  # not with the failed call's loss
    assert session.learner.settings is usual


def test_a_save_keeps_the_last_good_folder(tmp_path, monkeypatch):
    session, out = tiny_session(threads=1), tmp_path / "out"
    session.save(out)
    weight = session.learner.model.lm_head.weight.data
    weight += 1
    monkeypatch.setattr("maxrl_fast.job.checkpoints.write_policy", Mock(side_effect=OSError))
    with pytest.raises(StorageError):
        session.save(out)
    again = Session.from_run(out, threads=1)
    assert torch.equal(again.learner.model.lm_head.weight + 1, weight)
    monkeypatch.undo()
    weight += torch.nan
    with pytest.raises(NonFiniteError):
        session.save(out)
    monkeypatch.setattr("ctypes.CDLL", Mock(return_value=None))  # without the kernel's exchange
    again.save(out)
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    (out / "card.md").touch()
    with refused(f"one of save, got {out}, which has card.md: move it away"):
        again.save(out)


def test_a_save_over_something_else_is_refused(tmp_path, maze_run):
    session, base = tiny_session(threads=1), tmp_path / "base"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").touch()
    others = tmp_path / "folder", tmp_path / "folder" / "notes", maze_run, maze_run / "latest"
    for out in others:
        with refused(r"out must be a new folder or one of save, got .*, which has .*: move it"):
            session.save(out)
    session.save(base)
    for own in ({"lora_rank": 2}, {"reference": base, "kl_coef": 0.1}):
        with refused("out must not be the model that from_run will read"):
            Session(base, threads=1, **own).save(base)
    Session(base, threads=1).save(base)
    Session(base, threads=1).save(tmp_path / "mine")
    with refused("folder of a run, got .*mine, which Session.save wrote; --model .*mine starts"):
        data = [{"prompt": f"after {letter}"} for letter in "abcdefghijklmnopqrst"]
        run(resume=tmp_path / "mine", data=data, reward=lambda prompt, response: 1)


SAVING = """
import sys
from examples.tiny import tiny_session
session = tiny_session(threads=1)
while True:
    session.learner.model.lm_head.weight.data += 1
    session.save(sys.argv[1])
    print("saved", flush=True)
"""


@pytest.mark.slow
def test_a_kill_leaves_a_whole_save(tmp_path):
    out = tmp_path / "out"
    for milliseconds in (0, 3, 9, 17, 30):
        command = [sys.executable, "-c", SAVING, str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert [process.stdout.readline() for _ in range(2)] == [b"saved\n"] * 2
            time.sleep(milliseconds / 1000)
            process.kill()
        verify_checksums(out)
        tiny_session(threads=1).save(out)
        assert [x.name for x in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["text", "lora"])
def test_a_run_goes_on_as_a_session(shared_run, name):
    session = Session.from_run(run := shared_run(name), threads=1)
    saved = load_file(run / "latest" / "model.safetensors")
    assert all(torch.allclose(x, saved[y], atol=1e-6) for y, x in session.learner.model.weights())
    assert session.config.sampling.rollouts == 4
    assert "checkpoints" not in session.config.model.model


@pytest.mark.slow
def test_the_loops_of_the_page_learn():
    text = (ROOT / "docs" / "session.md").read_text()
    first, carried, best, game = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = [dict[str, object]() for _ in range(3)]
    for code, own in zip((first, best, game), names, strict=True):
        assert code.count("\n") < 60
        exec(code, own)
    assert carried.count("\n") < 30  # tests/training/test_stopping.py runs it
    assert sum(map(sum, names[0]["rewards"])) / 128 > 0.5  # 0.02 at the start
    assert sum(map(sum, names[1]["scores"])) / 128 > -8  # -24 at the start
    assert sum(x.isdigit() for x in names[2]["digits"]) > 50  # of 64, 16 by chance
    assert any(names[2]["found"])

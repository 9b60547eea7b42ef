import contextlib

import pyarrow
import pyarrow.parquet
import pytest

from maxrl_fast.config.options import Reward
from maxrl_fast.job.build_parts import build_task
from maxrl_fast.rewards.verifiers import boxed
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.dataset_specs import gsm8k_answer, look_up, math_answer
from maxrl_fast.tasks.scorer import Scorer
from tests.tables import refused, table
from tests.tasks.test_dataset import responses, written

GSM8K = [
    {"question": f"Tom has {n} apples and buys 1,000.", "answer": f"{n} + 1000\n#### {1000 + n:,}"}
    for n in range(40)
]


@pytest.mark.parametrize(
    ("text", "content"),
    table(r"""
    so \boxed{5} apples | 5
    first \boxed{4}, no: \boxed{ \frac{1}{2} }. | \frac{1}{2}
    \boxed{\{1, 2\}} | \{1, 2\}
    \boxed{x \} y} | x \} y
    \boxed{3} then \boxed{4 |
    no box, {5} |
    \boxed{\ |
    so $\boxed 5$. | 5
    \[\boxed \frac{1}{2}\] | \frac{1}{2}
    so \fbox{5}. | 5
    \boxed{5} of \fbox{6} | 5
    \boxedx{5} |
    """),
)
def test_the_last_box_is_the_answer(text, content):
    assert boxed(text) == content


def test_the_correct_answer_is_found_in_each_line():
    assert gsm8k_answer({"answer": "2 * 600\n#### 1,200"}, None) == "1200"
    assert gsm8k_answer({"gold": 72}, "gold") == "72"
    assert math_answer({"answer": "\\pi", "solution": "\\boxed{3}"}, None) == "\\pi"
    assert math_answer({"solution": "as \\boxed{3}, so \\boxed{4}"}, None) == "4"
    assert math_answer({"reward_model": {"ground_truth": "5"}}, "reward_model.ground_truth") == "5"
    numbers = {"answer": 1e-05}, {"answer": 1e16}, {"answer": 72.0}, {"answer": 2.5e-7}
    texts = ["0.00001", "10000000000000000", "72", "0.00000025"]
    assert [math_answer(line, None) for line in numbers] == texts
    assert look_up({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    for line in ({"answer": ""}, {"answer": True}, {"answer": [1]}):
        with refused("each line must have an answer in 'answer'"):
            math_answer(line, None)
    with refused("must have its answer in"):
        math_answer({"solution": "it is 4"}, None)


def task_of(name, path, policy, **options):
    return build_task(name, {"data": (path,), **options}, 0, policy)


def prompt_of(task, index=0):
    return task.tokenizer.decode(task.prompts("train", index, 1).tokens)


def test_prompts_equal_the_papers(tmp_path, policy):
    path = written(tmp_path / "gsm8k.jsonl", GSM8K)
    text = prompt_of(task_of("gsm8k", path, policy))
    assert text.startswith("<|im_start|>user\nTom has ")
    suffix = " Let's think step by step and output the final answer within \\boxed{}."
    assert text.endswith(f" and buys 1,000.{suffix}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_of(task_of("gsm8k", path, policy, plain_prompts=True)).endswith(f"1,000.{suffix}")
    options = {"prompt_key": "question", "prompt_suffix": " Answer:", "plain_prompts": True}
    assert prompt_of(task_of("math", path, policy, **options)).endswith("1,000. Answer:")
    math = [{"problem": f"{n}?", "answer": f"{n}"} for n in range(40)]
    text = prompt_of(task_of("math", written(tmp_path / "math.jsonl", math), policy))
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert text.endswith(f"?{suffix}<|im_end|>\n<|im_start|>assistant\n")


def test_a_line_without_an_answer_is_left_out_and_named(tmp_path, policy):
    lines = [{"problem": f"{n}?", "solution": f"\\boxed {n}."} for n in range(40)]
    lines[7]["solution"] = "it is 7"
    task = task_of("math", written(tmp_path / "math.jsonl", lines), policy)
    assert task.num_train_prompts + task.num_test_prompts == 39
    (told,) = (x for x in task.describe() if x.startswith("1 without an answer left out, such as"))
    assert "math.jsonl, line 8: a solution must have its answer in \\boxed{}" in told
    path = written(tmp_path / "none.jsonl", [{"problem": "1?", "solution": "1"}] * 9)
    with refused("line 9: a solution must have its answer"):
        task_of("math", path, policy)


def test_parquet_and_json_lines_give_the_same_prompts(tmp_path, policy):
    """The rows have verl's format: chat messages, and the answer in a struct."""
    asked = [[{"role": "user", "content": f"{n}?"}] for n in range(40)]
    rows = [{"prompt": x, "reward_model": {"ground_truth": f"{n}"}} for n, x in enumerate(asked)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    files = tmp_path / "verl.parquet", written(tmp_path / "verl.jsonl", rows)
    options = {"prompt_key": "prompt", "answer_key": "reward_model.ground_truth"}
    one, other = (task_of("math", file, policy, **options) for file in files)
    assert one.fingerprint == other.fingerprint
    assert one.prompts("train", 0, 5).columns == other.prompts("train", 0, 5).columns
    assert "\\boxed" not in prompt_of(one)  # the suffix is not added to messages


DEFAULTS = Reward(reward_workers=1)


@contextlib.contextmanager
def scored(task, count, texts, options=DEFAULTS):
    with contextlib.closing(Scorer.of(options, task)) as scorer:
        prompts = task.prompts("train", 0, count)
        yield scorer, scorer.score(prompts, responses(task, texts)).tolist()


def test_missing_and_long_answers_are_wrong_and_counted_once(tmp_path, policy):
    task = task_of("gsm8k", written(tmp_path / "gsm8k.jsonl", GSM8K), policy)
    answers = [line["answer"] for line in task.prompts("train", 0, 2).columns]
    texts = [f"\\boxed{{{answers[0]}}}", "no box", "\\boxed{nonsense \\frac}"]
    texts += [f"\\boxed{{{answers[1]}.0}}", f"\\boxed{{{'9' * 300}}}", "\\boxed{7"]
    with scored(task, 2, texts) as (scorer, rewards):
        assert rewards == [1, 0, 0, 1, 0, 0]
        assert scorer.failures(Ranks(), "now")[1] == ""
        rates = {"answers_missing": 2 / 6, "answers_too_long": 1 / 6, "answers_timed_out": 0}
        assert scorer.pop_metrics().over(Ranks()) == rates
        assert scorer.pop_metrics().over(Ranks()) == {}

    # this power takes minutes
    texts = ["\\boxed{(x+1)^{3000}+y}", *["no box"] * 15]
    with scored(task, 1, texts, Reward(reward_seconds=1.0, reward_workers=1)) as (scorer, rewards):
        assert set(rewards) == {0}
        assert scorer.failures(Ranks(), "now")[0]["timeout"] == 0
        assert scorer.pop_metrics().over(Ranks())["answers_timed_out"] == 1 / 16

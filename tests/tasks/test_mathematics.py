"""GSM8K and MATH: the papers' prompts, correct answers, boxed answers, and rewards by math-verify
in the pool.
"""

import contextlib
import json

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from maxrl_fast import train
from maxrl_fast.config.options import RewardOptions, TaskOptions
from maxrl_fast.job.build_task import build_scorer, build_task
from maxrl_fast.records import Rollouts
from maxrl_fast.rewards.verifiers import boxed, mathematics
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import jsonl
from maxrl_fast.tasks.dataset_specs import gsm8k_answer, look_up, math_answer
from maxrl_fast.tasks.scorer import MetricAccumulator
from tests.hub import use_hub
from tests.tables import refused, table
from tests.tasks.test_dataset import written

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
    \boxed{\text{a}{b}} and more} | \text{a}{b}
    \boxed{\boxed{3}} | \boxed{3}
    \boxed{3} then \boxed{4 |
    no box, {5} |
    \boxed{} |
    \boxed{\ |
    so $\boxed 5$. | 5
    so \boxed 5. | 5
    \boxed -3 is it | -3
    \[\boxed \frac{1}{2}\] | \frac{1}{2}
    so \boxed {5}. | 5
    so \fbox{5}. | 5
    \boxed{5} of \fbox{6} | 5
    \boxed{5} is \boxed. | 5
    \boxed{5} as \boxed says | 5
    \boxedx{5} |
    """),
)
def test_the_last_box_is_the_answer(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("\\boxed{72}", "72", 1.0),
        ("\\boxed{72.0}", "72", 1.0),
        ("\\boxed{\\$1,072}", "1072", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1.0),
        ("\\boxed{73}", "72", 0.0),
        ("72", "72", 0.0),
        ("\\boxed{72} \\boxed{71}", "72", 0.0),
        ("\\boxed{-\\frac{1}{2}}", "\\frac{1}{2}", 0.0),
        ("\\boxed{}", "72", 0.0),
        ("\\boxed{nonsense \\frac}", "72", 0.0),
    ],
)
def test_mathematically_equal_answers_are_correct(response, answer, reward):
    assert mathematics("a prompt", response, answer, difficulty=3) == reward


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
    for line in ({}, {"answer": ""}, {"answer": True}, {"answer": [1]}):
        with refused("each line must have an answer in 'answer'"):
            math_answer(line, None)
    with refused(r"\(--answer-key\); it has the keys 'question', 'solution'"):
        math_answer({"question": "1?", "solution": "1"}, "answer")
    with refused(r"each line must have an answer in 'a\.b', got None"):
        math_answer({"a": {}}, "a.b")
    with refused("must have its answer in"):
        math_answer({"solution": "it is 4"}, None)


def task_of(name, path, policy, **options):
    return build_task(TaskOptions(task=name, data=path, **options), 0, policy)


def prompt_of(task, index=0):
    return task.tokenizer.decode(task.prompts("train", index, 1).tokens)


def test_prompts_equal_the_papers(tmp_path, policy):
    path = written(tmp_path / "gsm8k.jsonl", GSM8K)
    text = prompt_of(task_of("gsm8k", path, policy))
    assert text.startswith("<|im_start|>user\nTom has ")
    suffix = " Let's think step by step and output the final answer within \\boxed{}."
    assert text.endswith(f" and buys 1,000.{suffix}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_of(task_of("gsm8k", path, policy, plain_prompts=True)).endswith(f"1,000.{suffix}")
    task = task_of(
        "math", path, policy, prompt_key="question", prompt_suffix=" Answer:", plain_prompts=True
    )
    assert prompt_of(task).endswith("1,000. Answer:")
    math = written(
        tmp_path / "math.jsonl", [{"problem": f"{n}?", "answer": f"{n}"} for n in range(40)]
    )
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompt_of(task_of("math", math, policy)).endswith(
        f"?{suffix}<|im_end|>\n<|im_start|>assistant\n"
    )
    answers = {
        line["answer"] for line in task_of("gsm8k", path, policy).prompts("train", 0, 30).columns
    }
    assert answers <= {str(1000 + n) for n in range(40)}


def test_a_line_without_an_answer_is_left_out_and_named(tmp_path, policy):
    lines = [{"problem": f"{n}?", "solution": f"\\boxed {n}."} for n in range(40)]
    lines[7]["solution"] = "it is 7"
    task = task_of("math", written(tmp_path / "math.jsonl", lines), policy)
    assert task.num_train_prompts + task.num_test_prompts == 39
    assert ", 1 without an answer left out, such as" in task.name
    assert "math.jsonl, line 8: a solution must have its answer in \\boxed{}" in task.name
    path = written(tmp_path / "none.jsonl", [{"problem": "1?", "solution": "1"}] * 9)
    with refused("line 9: a solution must have its answer"):
        task_of("math", path, policy)


def test_parquet_and_json_lines_give_the_same_prompts(tmp_path, policy):
    """The rows have verl's format: chat messages, and the answer in a struct."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "reward_model": {"ground_truth": f"{n}", "style": "rule"},
        }
        for n in range(40)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    path = written(tmp_path / "verl.jsonl", rows)
    options = {"prompt_key": "prompt", "answer_key": "reward_model.ground_truth"}
    one, other = (
        task_of("math", file, policy, **options) for file in (tmp_path / "verl.parquet", path)
    )
    assert one.fingerprint == other.fingerprint
    assert one.prompts("train", 0, 5).columns == other.prompts("train", 0, 5).columns
    assert prompt_of(one) == prompt_of(other)
    assert "\\boxed" not in prompt_of(one)  # the suffix is not added to messages


def test_invalid_rows_are_refused_with_their_number(tmp_path):
    path = tmp_path / "bad.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "1"}, {"prompt": None}]), path
    )
    with refused("bad.parquet, row 2: prompt must be text or a list of messages, got None"):
        jsonl.read_lines(path, "prompt")


def test_files_that_are_not_parquet_are_refused(tmp_path):
    path = tmp_path / "bad.parquet"
    for content in (b"", b"PAR1 and nothing more PAR1"):
        path.write_bytes(content)
        with refused(r"bad.parquet must be a Parquet file: "):
            jsonl.read_lines(path, "prompt")


DEFAULTS = RewardOptions()


@contextlib.contextmanager
def scored(task, count, texts, options=DEFAULTS):
    """Give the scorer, and its rewards of responses to the first prompts."""
    with contextlib.closing(build_scorer(options, task)) as scorer:
        given = Rollouts.given([task.conversation.demonstration("", text)[1] for text in texts])
        yield scorer, scorer.score(task.prompts("train", 0, count), given).tolist()


def test_missing_and_long_answers_are_wrong_and_counted(tmp_path, policy):
    task = task_of("gsm8k", written(tmp_path / "gsm8k.jsonl", GSM8K), policy)
    answers = [line["answer"] for line in task.prompts("train", 0, 2).columns]
    texts = [f"\\boxed{{{answers[0]}}}", "no box", "\\boxed{1}"]
    texts += [f"\\boxed{{{answers[1]}.0}}", f"\\boxed{{{'9' * 300}}}", "\\boxed{7"]
    with scored(task, 2, texts) as (scorer, rewards):
        assert rewards == [1, 0, 0, 1, 0, 0]
        assert scorer.failures(Ranks(), "now")[1] == ""
        rates = {"answers_missing": 2 / 6, "answers_too_long": 1 / 6, "answers_timed_out": 0}
        assert scorer.pop_metrics().over(Ranks()) == rates
        assert scorer.pop_metrics().over(Ranks()) == {}


def test_responses_without_a_box_count_as_scored(tmp_path, policy):
    task = task_of("gsm8k", written(tmp_path / "gsm8k.jsonl", GSM8K), policy)
    # this power takes minutes
    texts = ["\\boxed{(x+1)^{3000}+y}", *["no box"] * 15]
    with scored(task, 1, texts, RewardOptions(reward_seconds=1.0)) as (scorer, rewards):
        assert set(rewards) == {0}
        assert scorer.failures(Ranks(), "now")[0]["timeout"] == 0
        assert scorer.pop_metrics().over(Ranks())["answers_timed_out"] == 1 / 16


def test_a_users_own_function_sees_every_response(tmp_path, policy):
    function = "def length(prompt, response, **line):\n    return float(len(response))\n"
    (tmp_path / "own.py").write_text(function)
    reward = f"{tmp_path}/own.py:length"
    options = TaskOptions(task="gsm8k", data=written(tmp_path / "gsm8k.jsonl", GSM8K))
    task = build_task(options, 0, policy, RewardOptions(reward=(reward,)))
    texts = ["no box", "\\boxed{1}", "x" * 300]
    with scored(task, 1, texts, RewardOptions(reward=(reward,))) as (scorer, rewards):
        assert rewards == [6, 9, 300]
        assert scorer.pop_metrics().over(Ranks()) == {}


def test_each_step_counts_only_its_own_answers(tmp_path, policy):
    """A step does not count the answers of the evaluation before it, nor greedy responses. An
    evaluation counts its own.
    """
    data = written(tmp_path / "gsm8k.jsonl", GSM8K)
    sizes = (
        "--prompts 2 --rollouts 4 --steps 2 --eval-every 1 --max-new-tokens 4 --eval-samples 8 "
        "--threads 1 --objective self"
    )
    flags = [
        *sizes.split(),
        *f"--task gsm8k --data {data} --model {policy} --dtype float32".split(),
    ]
    scored = []
    over = MetricAccumulator.over

    def counted(self, ranks):
        scored.append(self._counts["answers_missing"])
        return over(self, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricAccumulator, "over", counted)
        assert train.main([*flags, "--out", str(tmp_path / "run")]) == 0
    held_out = task_of("gsm8k", data, policy).num_test_prompts
    assert scored == [8 * held_out, 8, 8 * held_out, 8, 8 * held_out]
    for log in ("metrics", "eval"):
        records = [
            json.loads(line)
            for line in (tmp_path / "run" / f"{log}.jsonl").read_text().splitlines()
        ]
        assert all(record["answers_missing"] == 1 for record in records)  # the policy is untrained


def test_a_function_can_be_the_task(tmp_path, policy, capsys, monkeypatch):
    (tmp_path / "reward.py").write_text(
        "def score(prompt, response, answer):\n    return float(len(response)) + 0.25\n"
    )
    written(tmp_path / "data.jsonl", [{"prompt": f"{n}", "answer": "1"} for n in range(40)])
    monkeypatch.chdir(tmp_path)
    sizes = (
        "--prompts 4 --rollouts 4 --k 2 --steps 1 --max-new-tokens 4 --eval-samples 2 --threads 1 "
        "--reward-workers 1"
    )
    flags = (
        f"--task reward.py:score --data data.jsonl --reward-threshold 2 {sizes} --model {policy}"
    ).split()
    assert train.main([*flags, "--out", "run"]) == 0
    (record,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (record["reward_mean"] * 16) % 1 == 0
    assert (
        json.loads((tmp_path / "run" / "config.json").read_text())["task"]
        == f"{tmp_path}/reward.py:score"
    )
    assert train.main(["--task", "reward.py:score", "--model", str(policy), "--out", "other"]) == 2
    assert "--task reward.py:score needs --data FILE or --hub NAME" in capsys.readouterr().err


def test_invalid_task_options_are_refused(tmp_path, capsys):
    for flags, message in table("""
        --task gsm8 | package.module:CLASS or FILE.py:FUNCTION, got 'gsm8'; did you mean 'gsm8k'?
        --task gsm8k | --task gsm8k needs --model DIR, whose tokenizer reads text
        --task math --data x --hub y | --task math takes --data or --hub, got both
        --task gym:gcd | --task gym:gcd needs --model DIR
        --task gym:gcd --gym-config [1] | --gym-config must be a JSON object
        --data x.jsonl | --data is not used by task maze
        --task chain --gym-config {} | --gym-config is not used by task chain
        --task gym:gcd --hub me/mine | --hub is not used by task gym:gcd
        --task dataset --answer-key gold | --answer-key is not used by task dataset
        --task reward.py:score --reward a:b | --reward is not used by task reward.py:score
        """):
        assert train.main([*flags.split(), "--out", str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Make a hub of this process's own that does not answer, and an empty cache of data sets, which
    is returned.
    """
    use_hub("http://127.0.0.1:9", tmp_path / "models", monkeypatch)  # nobody listens at this port
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data")
    return tmp_path / "data"


def test_an_unreachable_hub_is_reported_without_retries(policy, offline, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub.utils._http.time, "sleep", lambda seconds: pytest.fail("it retries")
    )
    with refused(
        r"cannot load train data of openai/gsm8k:main from the hub: it cannot be reached "
        r"\(http://127.0.0.1:9: Connect.*\), and the cache has no copy; --data FILE reads a local "
        r"copy"
    ):
        build_task(TaskOptions(task="gsm8k"), 0, policy)


def cached(folder, split, records):
    """Write a data set into its folder in the cache of `datasets`, as if it had been downloaded."""
    folder = folder / "main" / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    name = folder.parents[2].name.partition("___")[2]
    features = datasets.Dataset.from_list(records).features
    writer = datasets.arrow_writer.ArrowWriter(
        path=str(folder / f"{name}-{split}.arrow"), features=features
    )
    for record in records:
        writer.write(record)
    count, size = writer.finalize()
    splits = {
        split: {"name": split, "num_bytes": size, "num_examples": count, "dataset_name": name}
    }
    info = {
        "builder_name": name,
        "dataset_name": name,
        "config_name": "main",
        "version": "0.0.0",
        "splits": splits,
    }
    datasets.DatasetInfo(features=features, **info).write_to_directory(str(folder))


def test_data_sets_in_the_cache_need_no_hub(policy, offline):
    cached(offline / "openai___gsm8k", "train", GSM8K[:30])
    cached(offline / "madrylab___gsm8k-platinum", "test", GSM8K[30:])
    assert (
        build_task(TaskOptions(task="gsm8k"), 0, policy).name
        == "openai/gsm8k:main: 30 prompts and 10 held out"
    )


def test_data_sets_are_loaded_from_the_hub(policy, monkeypatch):
    monkeypatch.setattr(jsonl, "why_unreachable", lambda: "")
    asked = []

    def given(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(GSM8K[:30] if split == "train" else GSM8K[30:])

    monkeypatch.setattr(datasets, "load_dataset", given)
    task = build_task(TaskOptions(task="gsm8k"), 0, policy)
    assert asked == [("openai/gsm8k", "main", "train"), ("madrylab/gsm8k-platinum", "main", "test")]
    assert task.name == "openai/gsm8k:main: 30 prompts and 10 held out"
    own = build_task(TaskOptions(task="gsm8k", hub="me/mine"), 0, policy)
    assert asked[2:] == [("me/mine", None, "train")]
    assert own.num_test_prompts < 10  # held out from the training lines

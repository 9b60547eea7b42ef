import json
from pathlib import Path

import datasets
import pytest

from maxrl_fast import evaluate, train
from maxrl_fast.job.build_parts import build_task
from maxrl_fast.report.page import read_folder
from tests.tables import refused
from tests.tasks.test_dataset import save_byte_level_policy, texts_of, written

EXAMPLES = Path(__file__).parents[2] / "examples"
GPQA = {"Correct Answer": "red", **{f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}}
SPLITS = {  # the values of a row, by its keys on the hub's cards, and the number of rows
    "POLARIS-Project/Polaris-Dataset-53K/data/train": ("problem answer", "P? 2", 50),
    "math-ai/aime25/data/test": ("problem answer", "A? 70", 3),
    "HuggingFaceH4/aime_2024/data/train": ("problem answer", "B? 204", 2),
    "ByteDance-Seed/BeyondAIME/data/test": ("problem answer", "C? 5", 2),
    "HuggingFaceH4/MATH-500/data/test": ("problem answer", "D? \\frac12", 5),
    "math-ai/minervamath/data/test": ("question answer", "E? 4.5e33", 2),
    "math-ai/olympiadbench/data/test": ("question final_answer", "F? 25", 2),
    "Idavidrein/gpqa/gpqa_diamond/train": ("Question", "G?", 4),
    "me/mine/data/train": ("problem answer", "H? 1", 40),
    "me/mine/data/test": ("problem answer", "I? 1", 6),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_byte_level_policy(tmp_path_factory.mktemp("model"), positions=1024)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets` reads folders of the names of data sets in the working directory."""
    for path, (keys, values, count) in SPLITS.items():
        file = tmp_path / f"{path}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        first, *answer = values.split()
        row = dict(zip(keys.split()[1:], answer, strict=True)) | (GPQA if "gpqa" in path else {})
        rows = [{keys.split()[0]: f"{i} {first}", **row} for i in range(count)]
        datasets.Dataset.from_list(rows).to_parquet(file)
    card = "---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond/train-*\n---\n"
    (tmp_path / "Idavidrein/gpqa/README.md").write_text(card)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def task_of(policy, **options):
    return build_task("math", options, 0, policy)


def prompts(task, split):
    batch = task.prompts(split, 0, task.held_out.get(split, task.num_train_prompts))
    return batch.ids.tolist(), texts_of(task, batch), [line["answer"] for line in batch.columns]


def test_known_sets_have_their_keys_and_answers(policy, hub):
    sets = ("aime24", "olympiad=7", "gpqa_diamond", "me/mine@train")
    own = {"hub": ("me/mine=3", "aime25@test"), "test_hub": sets}
    task = task_of(policy, allow_overlap=True, **own)
    sizes = {"aime24": 2, "olympiad": 2, "gpqa_diamond": 4, "me-mine@train": 40}
    assert task.held_out == sizes
    assert task.set_samples == {"olympiad": 7}
    assert task.num_train_prompts == 3 * 40 + 3
    assert task_of(policy, **own).num_train_prompts == 3  # but for prompts of me/mine
    ids, texts, answers = prompts(task, "olympiad")
    assert (ids, answers) == ([2, 3], ["25", "25"])
    assert "0 F?\nPlease reason" in texts[0]
    ids, texts, answers = prompts(task, "gpqa_diamond")
    assert ids == [4, 5, 6, 7]
    assert f"\n{answers[0]}) red\n" in texts[0]


def test_the_test_split_of_a_set_is_held_out(policy, hub, tmp_path):
    task = task_of(policy, hub=("me/mine",))
    assert task.describe()[0] == "me/mine: 40 prompts and 6 held out"
    assert task.held_out == {"test": 6}
    lines = [{"problem": f"{i}?", "answer": "1"} for i in range(30)]
    (tmp_path / "sums").mkdir()
    data = written(tmp_path / "sums" / "test.jsonl", lines)
    both = task_of(policy, hub=("me/mine",), data=(data,), test_data=(data,), test_hub=("aime25",))
    assert both.describe()[0].startswith(
        "test.jsonl, me/mine: 40 prompts and 33 held out (30 of sums-test, "
    )
    with refused("held-out sets must have different names, got aime25, aime25"):
        task_of(policy, hub=("me/mine",), test_hub=("aime25", "aime25"))
    with refused(r"math-ai/aime25 has no split other, but test \(NAME@SPLIT\)"):
        task_of(policy, hub=("me/mine",), test_hub=("aime25@other",))


def test_a_held_out_file_with_the_name_of_a_split_has_that_of_its_folder(policy, tmp_path):
    data, other, held = (
        written(tmp_path / f"{x}.jsonl", [{"problem": f"{x}{i}?", "answer": x} for i in range(2)])
        for x in ("some", "other", "train")
    )
    task = task_of(policy, data=(data,), test_data=(other, held))
    assert task.held_out == {"other": 2, (name := f"{tmp_path.name}-train"): 2}
    assert [prompts(task, x)[2] for x in ("train", name)] == [["some"] * 2, ["train"] * 2]
    batch = task.prompts("test", 0, 4)
    assert [x["answer"] for x in batch.columns] == ["other"] * 2 + ["train"] * 2


def test_where_filters_the_training_sets_that_have_the_column(policy, hub, tmp_path):
    levels = [1, "Level 1", True, None, 1.5] * 30
    lines = [{"problem": f"{i}?", "answer": "1", "x": {"level": x}} for i, x in enumerate(levels)]
    sets = {"data": (written(tmp_path / "some.jsonl", lines),), "hub": ("me/mine=3",)}
    task = task_of(policy, where=("x.level=1", "x.level=Level 1"), test_hub=("aime25",), **sets)
    shown = "some.jsonl (60 of 150 lines with x.level=1 or x.level=Level 1), me/mine"
    assert task.describe()[0] == f"{shown}: 180 prompts and 3 held out"
    split = task_of(policy, data=sets["data"], where=("x.level=true", "answer=1"))
    assert {x["x"]["level"] for x in split.prompts("train", 0, 30).columns} == {True}
    assert split.num_train_prompts + split.num_test_prompts == 30
    with refused("level=1 must name a column of a training set"):
        task_of(policy, where=("level=1",), **sets)


def test_a_row_without_the_columns_of_its_set_is_refused_by_its_place(policy, hub, tmp_path):
    file = tmp_path / "Idavidrein/gpqa/gpqa_diamond/train-00000-of-00001.parquet"
    datasets.Dataset.from_list([GPQA]).to_parquet(file)
    with refused("gpqa:gpqa_diamond, train row 1: it must have text at 'Question', got None; it h"):
        task_of(policy, hub=("me/mine",), test_hub=("gpqa_diamond",))


def test_a_recipe_trains_on_all_of_its_data_and_evaluates_on_its_papers_sets(policy, hub, tmp_path):
    flags = f"--config {EXAMPLES}/polaris_qwen3.toml --model {policy} --rollout native --steps 1"
    flags += " --prompts 2 --rollouts 2 --max-new-tokens 4 --eval-samples 2 --eval-prompts 5"
    flags += " --reward-workers 1 --device cpu --threads 1 --dtype float32 --out run"
    assert train.main(flags.split()) == 0
    sets = {"aime24": 2, "aime25": 3, "beyond_aime": 2, "math500": 5, "minerva": 2}
    record, rates = (
        json.loads((tmp_path / f"run/{x}.jsonl").read_text().splitlines()[-1])
        for x in ("eval", "pass_rates")
    )
    assert record["num_prompts"] == 14
    assert {name: record[f"{name}/num_prompts"] for name in sets} == sets
    assert rates["ids"] == [*range(14)]
    shown = read_folder(tmp_path / "run", "run").sets
    assert {name: len(x) for name, x in shown.items()} == dict.fromkeys(sets, 2)
    more = "run --test-hub aime24=3 minerva --samples 2 --bootstrap 20 --threads 1 --dtype float32"
    assert evaluate.main(f"{more} --reward-workers 1 --device cpu --out out".split()) == 0
    for name, samples in {"aime24": 3, "minerva": 2}.items():
        result = json.loads((tmp_path / "out" / name / "eval.json").read_text())
        assert (result["num_prompts"], result["num_samples"]) == (2, samples)
        assert result["pass_at_k"]["1"]["mean"] == record[f"{name}/pass_at_k"]["1"]

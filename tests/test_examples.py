import ast
import dataclasses
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.config.read import parse
from maxrl_fast.job.build_parts import build_run_task
from tests.tasks.test_dataset import save_byte_level_policy, written

EXAMPLES = Path(__file__).parent.parent / "examples"


SCRIPTS = [
    path
    for path in sorted(EXAMPLES.rglob("*.py"))
    if re.search('__name__ == "__main__"|parse_args', path.read_text())
]
BENCHMARKS = [
    path
    for path in sorted(EXAMPLES.parent.glob("bench/*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
# which scripts import
NO_SCRIPTS = {"maze_progress.py", "partial_credit.py", "runner.py", "trl_pacs.py"}
NO_SCRIPTS |= {"chain.py", "guess.py", "tiny.py"}
# which --rollout, --task, --environment, --loss and --reward load
NO_SCRIPTS |= {
    *"naive_engine.py sort_task.py calculator_environment.py custom_loss.py judge.py".split(),
    "word_problems.py",
}


@pytest.mark.parametrize("path", [*SCRIPTS, *BENCHMARKS], ids=lambda path: path.stem)
def test_every_script_says_what_it_does_and_how_long_it_takes(path, tmp_path, monkeypatch, capsys):
    """--help does no work: nothing is written, and a folder whose name is an option is not made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    first = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0]
    assert printed.startswith("usage:") or first in printed
    assert re.search(r"\b(seconds|minutes?|hours)\b", printed)
    assert not list(tmp_path.iterdir())


def test_every_example_is_a_script_or_is_loaded_by_one():
    names, scripts = ({path.name for path in x} for x in (EXAMPLES.rglob("*.py"), SCRIPTS))
    assert names - scripts == NO_SCRIPTS


def lines_of(capsys, monkeypatch, script, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    capsys.readouterr()
    monkeypatch.syspath_prepend(EXAMPLES)
    codes = [0]
    monkeypatch.setattr(sys, "exit", codes.append)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert not any(codes)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_advantages(capsys, monkeypatch):
    lines = lines_of(capsys, monkeypatch, "advantages.py")
    second = "0.20 0.20 0.20 -1.00 0.20 0.20"
    assert lines[0] == f"RLOO -0.20 -0.20 1.00 -0.20 -0.20 -0.20 {second}".split()
    assert lines[2] == f"MaxRL -1.00 -1.00 5.00 -1.00 -1.00 -1.00 {second}".split()


@pytest.mark.slow
def test_token_loss(capsys, monkeypatch):
    lines = lines_of(capsys, monkeypatch, "token_loss.py")
    assert [words[0] for words in lines] == ["MaxRL", "PACS"]
    assert min(float(words[5]) for words in lines) > 0.5  # from 1/64


@pytest.mark.slow
def test_grpo_loop(tmp_path, capsys, monkeypatch):
    rates = [float(words[4].rstrip(",")) for words in lines_of(capsys, monkeypatch, "grpo_loop.py")]
    assert len(rates) == 4
    assert rates[0] < 0.1
    assert rates[-1] > 0.6
    own = "--steps 1 --estimator maxrl --rollouts 2 --model".split()
    own.append(save_byte_level_policy(tmp_path))
    [words] = lines_of(capsys, monkeypatch, "grpo_loop.py", *own)[:1]
    assert words[:4] == "step 0: mean reward".split()


def test_word_problems_have_answers_and_hold_out_numbers():
    file = runpy.run_path(str(EXAMPLES / "language/word_problems.py"))
    numbers = {"train": set(), "test": set()}
    for split, seen in numbers.items():
        for line in file["problems"](split, 400):
            question = line["prompt"][-1]["content"]
            a, b = map(int, re.findall(r"\d+", question))
            answers = {"+": a + b, "lost": a - b, "*": a * b, "boxes": a * b}
            kind = next(word for word in answers if word in question)
            assert line["answer"] == str(answers[kind])
            seen.add((kind, a, b))
    assert not numbers["train"] & numbers["test"]
    assert file["number"]("", "2 * 9 is 18.", answer="18") == 1
    assert file["number"]("", "18 is 2 * 9", answer="18") == file["number"]("", "?", "18") == 0


GSM8K, PROBLEM = {"question": "1+1?", "answer": "#### 2"}, {"problem": "1+1?", "answer": "2"}
MATH = {"problem": "1+1?", "solution": "\\boxed{2}", "level": "Level 1"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    objective: str
    prompts: int
    rollouts: int
    line: dict[str, str]  # in the data set's form
    prompt: str | None = None  # as its paper sends it, with ? for the question
    clip_grad: str = "1.0"  # of the authors' scripts, or ours


RECIPES = {
    "gsm8k_smollm2.toml": Recipe("maxrl", 256, 128, GSM8K),
    "polaris_qwen3.toml": Recipe(
        *("maxrl", 256, 16, PROBLEM),
        clip_grad="0.3",  # run_qwen3_training.sh
        # MaxRL, E.3.1: the system message of its example, the suffix of its text
        prompt="system\nPlease reason step by step and put the final answer in \\boxed{}.\n"
        "user\n?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ),
    "deepscaler_pacs.toml": Recipe(
        *("pacs", 1024, 8, PROBLEM),
        # PACS, C.1
        prompt="system\nYou are a helpful assistant.\n"
        "user\n? Please reason step by step, and put your final answer within \\boxed{}.",
    ),
    "math_maxpo.toml": Recipe("maxpo", 1024, 8, MATH),
    "llama_maxpo.toml": Recipe("maxpo", 1024, 8, MATH),
    "distill_qwen3.toml": Recipe("distill", 64, 4, GSM8K),
    "qwen3_lora_24gb.toml": Recipe("maxrl", 32, 16, GSM8K),
    "gemma3_1b.toml": Recipe("maxrl", 64, 16, GSM8K),
}


def test_every_config_of_the_examples_is_tested():
    assert {file.name for file in EXAMPLES.glob("*.toml")} == {"maze.toml", *RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_papers_settings(name, tmp_path, capsys):
    recipe, policy = RECIPES[name], save_byte_level_policy(tmp_path, positions=2**17)
    folders = ["--model", str(policy)]
    if recipe.objective == "distill":
        folders += ["--reference", str(policy)]
    question = next(iter(recipe.line))
    lines = [{**recipe.line, question: f"{i} {recipe.line[question]}"} for i in range(60)]
    data = written(tmp_path / "data.jsonl", lines)
    text = (EXAMPLES / name).read_text()
    own = re.sub("(?m)^((test_)?hub|eval_prompts) = .*\n", "", text)
    (tmp_path / name).write_text(f"data = '{data}'\n{own}")
    config = ["--config", str(tmp_path / name)]
    assert train.main([*config, *folders, "--dry-run", "8x80"]) == 0
    rows = capsys.readouterr().out.splitlines()
    options = {key.strip(): value for key, _, value in (row.partition(" = ") for row in rows)}
    assert (options["objective"], options["rollout"]) == (recipe.objective, "vllm")
    assert (options["prompts"], options["rollouts"]) == (str(recipe.prompts), str(recipe.rollouts))
    assert options["clip_grad"] == recipe.clip_grad
    if recipe.prompt is not None:
        task = build_run_task(parse([*config, *folders]))
        sent = task.decode(task.prompts("train", 0, 1).tokens.tolist())
        assert re.sub(r"\d+ 1\+1\?", "?", sent) == f"{recipe.prompt}\nassistant\n"


@pytest.mark.slow
def test_gym_tiny(tmp_path, capsys, monkeypatch):
    short = "--sft-steps 3 --steps 2 --eval-prompts 8 --eval-samples 2 --threads 1".split()
    lines = lines_of(capsys, monkeypatch, "gym_tiny.py", tmp_path / "out", *short)
    assert "spell_backward" in " ".join(lines[0])
    assert sum(words[:4] == "'Spell this word backward".split() for words in lines) == 4

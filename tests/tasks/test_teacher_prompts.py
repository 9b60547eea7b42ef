import pytest

from maxrl_fast.errors import InputError
from maxrl_fast.job.build_parts import build_task
from maxrl_fast.training.answers import TeacherPrompts
from tests.tasks.test_dataset import texts_of, written

LINES = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "word": "apple"} for i in range(40)]


@pytest.fixture
def task(tmp_path, policy):
    data = written(tmp_path / "data.jsonl", LINES)
    return build_task("dataset", {"data": (data,)}, 0, policy, needs_reward=False)


def test_the_teacher_reads_the_answer_or_what_a_function_returns(tmp_path, task):
    prompts = task.prompts("train", 3, 5)
    code = "def f(prompt, word, **others):\n    return f'{word}: {prompt}'\n"
    (tmp_path / "teacher.py").write_text(code)
    made = TeacherPrompts(task, f"{tmp_path}/teacher.py:f", 100)
    wanted = [f"apple: {line['prompt']}" for line in prompts.columns]
    read = made([*range(3, 8)])
    assert texts_of(task, read) == wanted
    assert read.ids.tolist() == [3, 4, 5, 6, 7]
    made.check()
    with pytest.raises(InputError, match="1 to 4 tokens, which leave room for the response"):
        TeacherPrompts(task, f"{tmp_path}/teacher.py:f", 4).check()


def test_a_function_that_fails_is_named(tmp_path, task):
    (tmp_path / "teacher.py").write_text("def f(**columns):\n    return 1 / 0\n")
    with pytest.raises(InputError, match=r"fails for prompt 0: ZeroDivisionError: .* line 2\)"):
        TeacherPrompts(task, f"{tmp_path}/teacher.py:f", 100).check()
    with pytest.raises(InputError, match="answer"):
        TeacherPrompts(task, "answer", 100).check()  # only the reward reads these lines

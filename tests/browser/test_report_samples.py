"""The prompts and samples of the report's page in a real browser."""

import re

import pytest

from tests.browser.made_up import HOSTILE, MAZE, MAZE_PROMPT, write_lines, write_run
from tests.browser.on_page import move_to
from tests.runs import read

pytestmark = pytest.mark.browser


def test_prompts_are_gained_and_lost_and_sorted(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    counts = [x["num_correct"] for x in read(tmp_path / "one" / "pass_rates.jsonl")]
    prompts = page.locator("#prompts")
    prompts.locator("table").wait_for()
    changes = {i: (counts[-1][i] - counts[0][i]) / 8 for i in range(30)}
    gained, lost = sum(c > 0 for c in changes.values()), sum(c < 0 for c in changes.values())
    assert f"30 prompts: {gained} gained, {lost} lost," in prompts.locator(".summary").inner_text()

    def shown():
        script = "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        rows = prompts.locator("tbody tr").evaluate_all(script)
        return [(int(row[0]), *(float(x.replace("−", "-")) for x in row[1:4])) for row in rows]

    expected = sorted(changes, key=lambda i: (-changes[i], i))[:20]
    rates = {i: (counts[0][i] / 8, counts[-1][i] / 8, changes[i]) for i in changes}
    assert shown() == [(i, *(pytest.approx(rate, abs=1e-3) for rate in rates[i])) for i in expected]
    excerpts = prompts.locator(".excerpt").all_inner_texts()
    for (i, *_), text in zip(shown(), excerpts, strict=True):
        wanted = f"held out {i} </script>" if 13 <= i < 29 else ""
        assert text == "not kept" if i == 29 else text.startswith(wanted)
    for column, place, sign in (("before", 1, -1), ("before", 1, 1), ("prompt", 0, 1)):
        prompts.get_by_role("button", name=column).click()
        values = [sign * row[place] for row in shown()]
        assert values == sorted(values)
    prompts.locator("select[name=show]").select_option("lost")
    assert all(row[3] < 0 for row in shown())
    assert len(shown()) == min(20, lost)
    prompts.locator("select[name=show]").select_option("all")
    options = prompts.locator("select[name=after] option").all_inner_texts()
    # of another seed, prompt 3 is another prompt
    assert options == ["one, step 0", "one, step 10", "one, step 30"]
    prompts.locator("select[name=after]").select_option(label="one, step 10")
    for i, _, after, _ in shown():
        assert after == pytest.approx(counts[1][i] / 8, abs=1e-3)


def test_samples_are_by_prompt_with_two_runs_side_by_side(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    samples = page.locator("#samples")
    samples.locator(".sample").first.wait_for()
    total = samples.locator(".count")
    assert total.inner_text() == "13 prompts, 52 of 52 samples"
    assert samples.locator(".sample").count() == 5
    first = samples.locator('.sample[data-id="1"]')
    assert first.locator(".column > header").all_inner_texts() == [
        "one\nmean reward 1 over 2 samples",
        "two\nmean reward 1 over 2 samples",
    ]
    assert first.locator(".column").first.locator("summary").all_inner_texts() == [
        "step 10 · mean reward 1 over 1 sample",
        "step 20 · mean reward 1 over 1 sample",
    ]
    assert first.locator(".response pre").all_inner_texts() == ["response 1"] * 4
    samples.get_by_role("button", name="Next").click()
    assert samples.locator(".place").inner_text() == "page 2 of 3"

    for choice, number in (("right", 20), ("wrong", 28), ("unscored", 4), ("all", 52)):
        samples.locator("select[name=outcome]").select_option(choice)
        assert f"{number} of 52 samples" in total.inner_text()
    samples.locator("select[name=beside]").select_option("")
    samples.locator("select[name=run]").select_option(label="two")
    samples.locator("select[name=step]").select_option(label="20")
    assert total.inner_text() == "13 prompts, 13 of 26 samples"
    samples.locator("select[name=step]").select_option("slider")
    move_to(page, 14)
    summaries = samples.locator(".column summary").all_inner_texts()
    assert {text.split(" · ")[0] for text in summaries} == {"step 10"}
    samples.locator("input[name=text]").fill("RESPONSE 11")
    assert samples.locator(".response pre").all_inner_texts() == ["response 11"]
    samples.locator("input[name=text]").fill("nowhere")
    assert samples.locator(".sample").count() == 0


def test_mazes_are_drawn_with_the_path_of_the_response(show, tmp_path):
    write_run(tmp_path / "run")
    paths = ("DOWN DOWN RIGHT RIGHT DONE", "DOWN LEFT UP", "RIGHT RIGHT RIGHT", "DOWN GRID_END")
    paths += (HOSTILE,)
    common = {"step": 1, "id": 0, "prompt": MAZE_PROMPT, "reward": 0.0, "truncated": False}
    common["tokens"] = 5
    broken = MAZE_PROMPT.replace("PATH WALL NEWLINE", "PATH NEWLINE", 1)
    odd = [common | {"id": 1, "prompt": broken, "response": "UP"}]
    lines = [*(common | {"response": path} for path in paths), *odd]
    write_lines(tmp_path / "run" / "samples.jsonl", lines)
    page = show(tmp_path / "run")
    maze = page.locator('#samples .sample[data-id="0"]')
    maze.get_by_role("button", name="Show 1 more").click()
    script = "nodes => nodes.map(node => node.getAttribute('aria-label'))"
    assert maze.locator(".response .maze").evaluate_all(script) == [
        "path of 4 moves",
        "path of 1 move, then into a wall",
        "path of 2 moves, then into a wall",
        "path of 1 move, then GRID_END",
        f"path of 0 moves, then {HOSTILE.split(' ')[0]}",
    ]
    walls = maze.locator(".prompt .walls").get_attribute("d")
    cells = {(int(y), int(x)) for x, y in re.findall(r"M(\d+),(\d+)", walls)}
    assert cells == {(y, x) for y in range(5) for x in range(5) if MAZE[y][x] == "W"}
    solved = maze.locator(".response").first
    walk = "1.5,1.5 1.5,2.5 1.5,3.5 2.5,3.5 3.5,3.5"
    assert solved.locator(".walk").get_attribute("points") == walk
    assert solved.locator(".hit").count() == 0
    assert maze.locator(".response .hit").count() == 2
    other = page.locator('#samples .sample[data-id="1"]')
    assert other.locator(".maze").count() == 0
    assert other.locator(".prompt pre").inner_text() == broken


def test_long_texts_fold_and_hostile_texts_stay_text(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    samples = page.locator("#samples")
    prompt = samples.locator(".sample").first.locator(".prompt")
    assert prompt.locator("pre").inner_text().count("\n") == 11
    prompt.get_by_role("button").click()
    assert prompt.locator("pre").inner_text().count("\n") == 399
    samples.locator("input[name=text]").fill("needle")
    assert samples.locator(".response").count() == 4
    shown = samples.locator(".response pre").first
    assert shown.evaluate("node => node.children.length") == 0
    code = "(node, i) => node.textContent.charCodeAt(i)"
    text = f"needle {HOSTILE}"
    assert [shown.evaluate(code, i) for i in range(len(text))] == [*map(ord, text)]
    assert page.evaluate("window.broken") is None
    assert page.locator("script").count() == 3
    assert page.locator("img, iframe, object, main script").count() == 0


def test_episodes_are_shown_turn_by_turn(show, tmp_path):
    """What an environment inserted is marked, and no text becomes markup; a response of one turn
    with the same characters is shown unchanged.
    """
    write_run(tmp_path / "one")
    line = {"step": 1, "prompt": "question", "reward": 1.0, "truncated": False, "tokens": 4}
    text = f"first {HOSTILE}⟦answer <b>{HOSTILE}⟧second"
    long = "x" * 2000 + "⟦" + "y" * 2000 + "⟧z"
    lines = [
        line | {"id": 1, "response": text, "turns": 2},
        line | {"id": 1, "response": "one ⟦turn⟧"},
        line | {"id": 1, "response": long, "turns": 2},
    ]
    write_lines(tmp_path / "one" / "samples.jsonl", lines)
    page = show(tmp_path / "one")
    samples = page.locator("#samples")
    responses = samples.locator(".response")
    responses.first.wait_for()
    marks = samples.locator(".response mark")
    assert marks.count() == 1
    shown = HOSTILE.replace("\ud800", "\ufffd")
    assert marks.first.text_content().startswith(f"answer <b>{shown[:20]}")
    episode = responses.nth(0).locator("pre").text_content()
    assert episode.startswith("first </script>")
    assert episode.endswith("second")
    assert "⟦" not in episode
    assert "4 tokens · 2 turns" in responses.nth(0).inner_text()
    assert responses.nth(1).locator("pre").text_content() == "one ⟦turn⟧"
    assert "turns" not in responses.nth(1).locator("p").inner_text()
    responses.nth(2).get_by_role("button").click()
    assert responses.nth(2).locator("mark").text_content() == "y" * 2000
    assert page.evaluate("window.broken") is None

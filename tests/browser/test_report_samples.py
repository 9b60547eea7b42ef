import pytest

from tests.browser.made_up import HOSTILE, write_lines, write_run
from tests.browser.on_page import move_to

pytestmark = pytest.mark.browser


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
    samples.locator("select[name=right]").select_option("")
    samples.locator("select[name=left]").select_option(label="two")
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


def test_long_texts_scroll_and_hostile_texts_stay_text(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    samples = page.locator("#samples")
    prompt = samples.locator(".sample").first.locator(".prompt pre")
    assert prompt.inner_text().count("\n") == 399
    assert prompt.evaluate("node => node.scrollHeight > 2 * node.clientHeight")
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
    with the same characters is shown unchanged."""
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
    assert marks.count() == 2
    shown = HOSTILE.replace("\ud800", "\ufffd")
    assert marks.first.text_content().startswith(f"answer <b>{shown[:20]}")
    episode = responses.nth(0).locator("pre").text_content()
    assert episode.startswith("first </script>")
    assert episode.endswith("second")
    assert "⟦" not in episode
    assert "4 tokens · 2 turns" in responses.nth(0).inner_text()
    assert responses.nth(1).locator("pre").text_content() == "one ⟦turn⟧"
    assert "turns" not in responses.nth(1).locator("p").inner_text()
    assert responses.nth(2).locator("mark").text_content() == "y" * 2000
    assert page.evaluate("window.broken") is None

"""The page of `python -m maxrl_fast.report` in a real browser: it draws and shows the contents of
the files.

The tests need `playwright` and a Chromium: $CHROMIUM, one on the PATH, or Playwright's own."""

import statistics

import pytest

from tests.browser.made_up import HOSTILE, KEYS, write_lines, write_run

pytestmark = pytest.mark.browser


def move_to(page, step):
    page.locator("#step").evaluate(
        "(slider, step) => { slider.value = step; slider.dispatchEvent(new Event('input')); }", step
    )


def card(page, key):
    return page.locator(f'article[data-key="{key}"]')


def chart_of(parent, place):
    return parent.locator(f"{place} .chart")


def drawn(chart, run, kind="line", role=""):
    """Return the points that the chart has for a run: x and one y, or two for a band; a y of None
    is a gap."""
    traces = chart.evaluate(
        """node => node.chart.series.map((series, i) => [series, node.chart.data[i]])
            .slice(1).map(([series, ys]) =>
            [series.run, series.type, series.role || '', [...node.chart.data[0].keys()]
                .filter(j => ys[j] !== undefined)
                .map(j => [node.chart.data[0][j], ys[j]])])"""
    )
    wanted = [run, kind, role]
    return [[*map(tuple, points)] for *own, points in traces if own == wanted]


def runs_drawn(page, place):
    code = "nodes => nodes.flatMap(node => node.chart.series.slice(1).map(series => series.run))"
    return {*page.locator(f"{place} .chart").evaluate_all(code)}


def test_values_at_the_step_equal_the_file(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    for step in (30, 1, 21):
        move_to(page, step)
        assert page.locator("#step-number").input_value() == str(step)
        for key in KEYS:
            for i, records in enumerate(two.values()):
                readout = card(page, key).locator(f'.readout [data-run="{i}"]')
                # a shorter run keeps its last value
                expected = records[min(step, len(records)) - 1][key]
                assert float(readout.get_attribute("data-value")) == expected
                text, _, note = readout.inner_text().partition("step")
                assert float(text) == pytest.approx(expected, rel=1e-3)
                assert note.strip() == ("20" if step > len(records) else "")
    page.locator("#step-number").fill("13")
    page.locator("#step-number").press("Enter")
    shown = card(page, "loss").locator('.readout [data-run="0"]').get_attribute("data-value")
    assert shown == str(two["one"][12]["loss"])
    assert page.locator("#step").input_value() == "13"


def test_seeds_of_one_configuration_are_their_mean_with_its_standard_error(show, tmp_path):
    steps = enumerate((30, 30, 20))
    records = [write_run(tmp_path / f"seed-{i}", seed=i, steps=n) for i, n in steps]
    write_run(tmp_path / "other", seed=0, objective="rloo", k=None)
    page = show(*[tmp_path / f"seed-{i}" for i in range(3)], tmp_path / "other")
    assert page.locator(".chip").all_inner_texts() == ["maxpo, 3 seeds", "other"]
    page.locator("select[name=smoothing]").select_option("0")
    chart = chart_of(card(page, "loss"), "")
    assert runs_drawn(page, '#curves [data-key="loss"]') == {0, 3}
    means, errors = [], []
    for step in range(30):
        # the shorter run keeps its last value
        values = [run[min(step, len(run) - 1)]["loss"] for run in records]
        means.append(statistics.mean(values))
        errors.append(statistics.stdev(values) / 3**0.5)
    (line,), bounds = drawn(chart, 0), drawn(chart, 0, "band")
    assert [x for x, _ in line] == list(range(1, 31))
    assert [y for _, y in line] == pytest.approx(means)
    for bound, sign in zip(bounds, (1, -1), strict=True):
        wanted = [m + sign * e for m, e in zip(means, errors, strict=True)]
        assert [y for _, y in bound] == pytest.approx(wanted)
    assert "steps 20 to 30" in page.locator("#coverage table").inner_text()
    page.get_by_role("button", name="Each seed").click()
    assert page.locator(".chip").all_inner_texts() == ["seed-0", "seed-1", "seed-2", "other"]
    assert runs_drawn(page, '#curves [data-key="loss"]') == {0, 1, 2, 3}
    page.get_by_role("button", name="Mean of seeds").click()
    page.locator(".chip").first.click()
    assert runs_drawn(page, '#curves [data-key="loss"]') == {3}


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

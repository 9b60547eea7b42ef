"""The page of `python -m maxrl_fast.report` in a real browser: it draws and shows the contents of
the files.

The tests need `playwright` and a Chromium: $CHROMIUM, one on the PATH, or Playwright's own."""

import statistics

import pytest

from tests.browser.made_up import KEYS, write_run
from tests.browser.on_page import card, chart_of, drawn, move_to, runs_drawn

pytestmark = pytest.mark.browser


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

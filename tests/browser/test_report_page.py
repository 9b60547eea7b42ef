"""The page of `python -m maxrl_fast.report` in a real browser: it draws and shows the contents of
the files.

The tests need `playwright` and a Chromium: $CHROMIUM, one on the PATH, or Playwright's own. Into a
folder REPORT_SCREENSHOTS screenshots of the page are saved.
"""

import os
import re
import statistics
from pathlib import Path

import pytest

from tests.browser.made_up import KEYS, write_lines, write_run
from tests.browser.on_page import card, chart_of, drawn, is_inked, move_to, runs_drawn

pytestmark = pytest.mark.browser
COLOR = "node => getComputedStyle(node).backgroundColor"


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


def test_gaps_smoothing_and_the_line_of_4000_steps(show, tmp_path):
    write_run(tmp_path / "run")
    values = [0.5 + 0.3 * ((step * 7919) % 101) / 101 for step in range(4000)]
    values[1234], values[77] = 9.0, None
    lines = [{"step": step, "reward_mean": value} for step, value in enumerate(values)]
    lines[77]["reward_mean"] = float("nan")
    write_lines(tmp_path / "run" / "metrics.jsonl", lines)
    page = show(tmp_path / "run")
    chart = chart_of(card(page, "reward_mean"), "")
    assert page.locator("select[name=smoothing]").input_value() == "100"  # on at first
    (raw,), (smooth,) = drawn(chart, 0, role="raw"), drawn(chart, 0, role="smooth")
    assert raw == list(enumerate(values))
    assert smooth[77] == (77, None)
    assert smooth[5][1] == pytest.approx(sum(values[:6]) / 6)
    assert smooth[3999][1] == pytest.approx(sum(values[3900:]) / 100)
    page.locator("select[name=smoothing]").select_option("0")
    chart = chart_of(card(page, "reward_mean"), "")
    assert drawn(chart, 0) == [raw]
    assert drawn(chart, 0, role="smooth") == []
    color = page.locator(".chip.run-0 .swatch").evaluate(COLOR)
    assert is_inked(chart, 1234, 9, color)  # a single step of 4,000 in 300 pixels
    for step in (1234, 77, 3999):  # the readout has all steps
        move_to(page, step)
        shown = card(page, "reward_mean").locator(".readout [data-run]").get_attribute("data-value")
        assert (None if shown == "–" else float(shown)) == values[step]


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


CLIPPED = """() => [...document.querySelectorAll('body *')].filter(node => {
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    const isCut = style.overflowX !== 'visible' && node.scrollWidth > node.clientWidth + 1;
    return box.width > 1 && !node.closest('.hidden') && (isCut || box.right > innerWidth + 1);
}).map(node => `${node.tagName}.${node.className.baseVal ?? node.className}: ` +
    node.textContent.slice(0, 60))"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 380)])
def test_the_page_fits_the_window_in_both_color_schemes(show, tmp_path, two, scheme, width):
    """The button changes the scheme."""
    long = "a-run-with-a-long-name-of-which-every-letter-is-shown-20261121-192256"
    path = "/a/long/path/to/a/file/of/prompts/" * 3 + "train.jsonl"
    write_run(tmp_path / long, steps=12, task="gsm8k", data=path)
    page = show(tmp_path / "one", tmp_path / "two", tmp_path / long, color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.locator("#samples .sample").first.wait_for()
    page.wait_for_timeout(300)  # until the charts are drawn for this width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 1400:
        assert page.evaluate(CLIPPED) == []
    cells = page.locator("#coverage tbody th, #runs tbody th")
    names = cells.evaluate_all("cells => cells.map(cell => cell.offsetWidth)")
    assert min(names) >= 100  # not a letter a line
    assert page.locator(".chart:not([aria-label]), button:not([aria-label]):empty").count() == 0
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(full_page=True, path=Path(folder, f"report-{scheme}-{width}.png"))
    page.locator("select[name=smoothing]").select_option("0")
    chart, colors = chart_of(card(page, "loss"), ""), []
    (points,) = drawn(chart, 0)
    for is_light in (scheme == "light", scheme != "light"):
        page.wait_for_timeout(100)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 450) == is_light
        colors.append(page.locator(".chip.run-0 .swatch").evaluate(COLOR))
        assert is_inked(chart, *points[8], colors[-1])
        page.locator("#theme").click()
    assert colors[0] != colors[1]

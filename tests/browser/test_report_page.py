"""The page of `python -m maxrl_fast.report` in a real browser: it draws and shows the contents of the files.

The tests need the `playwright` package and a Chromium: $CHROMIUM, one on the PATH, or Playwright's own. If REPORT_SCREENSHOTS
names a folder, screenshots of the page are saved there.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from maxrl_fast.report import main
from tests.browser.made_up import HOSTILE, KEYS, write_evaluation, write_run

pytestmark = pytest.mark.browser

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-quic"),
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # imported here, so that the tests can be collected without it

    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def show(tmp_path, browser):
    """Open the page of some runs. After the test, fail if the browser sent a message or a request for another file."""
    complaints, requests, contexts = [], [], []

    def open_page(*runs, **options):
        out = tmp_path / "report.html"
        assert main([*map(str, runs), "--out", str(out)]) == 0
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(out.as_uri())
        return page

    yield open_page
    own = (tmp_path / "report.html").as_uri()
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.partition("#")[0] for url in requests} == {own}


@pytest.fixture
def two(tmp_path):
    return {
        "one": write_run(tmp_path / "one", seed=1),
        "two": write_run(tmp_path / "two", seed=2, steps=20, objective="rloo", k=None),
    }


def move_to(page, step):
    page.locator("#step").evaluate("(slider, step) => { slider.value = step; slider.dispatchEvent(new Event('input')); }", step)


def card(page, key):
    return page.locator(f'article[data-key="{key}"]')


def axis(chart, name):
    """Return the map from pixels to numbers, read from the labels of the ticks and not from the drawing code."""
    ticks = chart.locator(f".tick.{name}").evaluate_all(
        "ticks => ticks.map(tick => [tick.getAttribute('transform').match(/[-0-9.]+/g).map(Number), tick.textContent])"
    )
    place = {"x": 0, "y": 1}[name]
    points = [(pixels[place], number(text)) for pixels, text in ticks]
    (p0, v0), (p1, v1) = points[0], points[-1]
    assert p0 != p1
    for pixel, value in points:
        assert value == pytest.approx(v0 + (pixel - p0) / (p1 - p0) * (v1 - v0), abs=1e-3 * abs(v1 - v0))
    return lambda pixel: v0 + (pixel - p0) / (p1 - p0) * (v1 - v0)


def number(text):
    units = {"k": 1e3, "M": 1e6}
    return float(text.replace(",", "").rstrip("kM")) * units.get(text[-1], 1)


def drawn(chart, run, kind="line"):
    """Return the points of each piece of a run's path, in pixels."""
    path = chart.locator(f"path.{kind}.run-{run}").get_attribute("d")
    return [
        [tuple(map(float, point.split(","))) for point in re.sub("h0|Z", "", piece).split("L")]
        for piece in path.split("M")
        if piece
    ]


def test_values_at_the_step_equal_the_file(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    for step in (30, 1, 7, 20, 21):
        move_to(page, step)
        assert page.locator("#step-number").input_value() == str(step)
        for key in KEYS:
            for i, records in enumerate(two.values()):
                shown = card(page, key).locator(f'.readout [data-run="{i}"]').get_attribute("data-value")
                expected = {record["step"]: record[key] for record in records}.get(step)
                assert (None if shown == "–" else float(shown)) == expected
                text = card(page, key).locator(f'.readout [data-run="{i}"]').inner_text()
                assert text == "–" if expected is None else float(text) == pytest.approx(expected, rel=1e-3)
    page.locator("#step-number").fill("13")
    page.locator("#step-number").press("Enter")
    assert card(page, "loss").locator('.readout [data-run="0"]').get_attribute("data-value") == str(two["one"][12]["loss"])
    assert page.locator("#step").input_value() == "13"


def test_lines_and_cursor_match_the_axes(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    move_to(page, 17)
    for key in KEYS:
        chart = card(page, key).locator("svg")
        to_step, to_value = axis(chart, "x"), axis(chart, "y")
        assert to_step(float(chart.locator(".cursor").get_attribute("x1"))) == pytest.approx(17, abs=0.05)
        for i, records in enumerate(two.values()):
            (points,) = drawn(chart, i)
            assert [to_step(x) for x, _ in points] == pytest.approx([record["step"] for record in records], abs=0.05)
            assert [to_value(y) for _, y in points] == pytest.approx([record[key] for record in records], abs=2e-3)


def test_gaps_thinning_and_smoothing(show, tmp_path):
    write_run(tmp_path / "run")
    values = [0.5 + 0.3 * ((step * 7919) % 101) / 101 for step in range(4000)]
    values[1234], values[77] = 9.0, None
    lines = [{"step": step, "reward_mean": float("nan") if value is None else value} for step, value in enumerate(values)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = show(tmp_path / "run")
    chart = card(page, "reward_mean").locator("svg")
    pieces = drawn(chart, 0)
    assert len(pieces) == 2
    to_step, to_value = axis(chart, "x"), axis(chart, "y")
    assert to_step(pieces[0][-1][0]) == pytest.approx(76, abs=5)
    points = [point for piece in pieces for point in piece]
    assert len(points) < 2500  # not all points are drawn,
    highest = min(points, key=lambda point: point[1])  # but extreme points are kept,
    assert (to_step(highest[0]), to_value(highest[1])) == (pytest.approx(1234, abs=5), pytest.approx(9, abs=0.05))
    for step in (1234, 77, 3999):  # and the readout has all of them
        move_to(page, step)
        shown = card(page, "reward_mean").locator(".readout [data-run]").get_attribute("data-value")
        assert (None if shown == "–" else float(shown)) == values[step]
    page.select_option("#smoothing", "100")
    chart = card(page, "reward_mean").locator("svg")
    smooth = [point for piece in drawn(chart, 0, "line.smooth") for point in piece]
    expected = sum(values[3900:]) / 100
    assert axis(chart, "y")(smooth[-1][1]) == pytest.approx(expected, abs=0.01)
    move_to(page, 1234)
    assert card(page, "reward_mean").locator(".readout [data-run]").get_attribute("data-value") == "9"


def test_hovering_shows_all_digits_and_a_click_moves_the_step(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    chart = card(page, "entropy").locator("svg")
    chart.scroll_into_view_if_needed()
    box, (points,) = chart.bounding_box(), drawn(chart, 0)
    page.mouse.move(box["x"] + points[10][0], box["y"] + points[10][1])
    tooltip = page.locator("#tooltip")
    assert tooltip.locator("strong").inner_text() == "step 11"
    assert [float(text) for text in tooltip.locator("b").all_inner_texts()] == [
        records[10]["entropy"] for records in two.values()
    ]
    page.mouse.click(box["x"] + points[10][0], box["y"] + points[10][1])
    assert page.locator("#step").input_value() == "11"
    page.mouse.move(2, 2)
    assert tooltip.is_hidden()


def test_runs_and_curves_can_be_hidden(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    assert card(page, "loss").locator("path.line").count() == 2
    page.get_by_role("button", name="two").first.click()
    for panel in ("#curves", "#coverage", "#weights", "#norms", "#timings"):
        assert page.locator(f'{panel} [data-run="1"]').count() == 0
        assert page.locator(f'{panel} [data-run="0"]').count() > 0
    page.get_by_role("button", name="two").first.click()
    assert card(page, "loss").locator("path.line").count() == 2
    page.locator("details.chooser summary").click()
    page.get_by_label("loss", exact=True).uncheck()
    page.get_by_label("eval pass@8").check()
    assert card(page, "loss").count() == 0
    assert card(page, "eval pass@8").locator("path.line").count() == 2
    card(page, "entropy").get_by_role("button", name="log").click()
    assert card(page, "entropy").get_by_role("button", name="log").get_attribute("aria-pressed") == "true"


def test_coverage_weights_norms_timings_and_warnings(show, tmp_path, two):
    evaluation = write_evaluation(tmp_path / "evaluation")
    page = show(tmp_path / "one", tmp_path / "two", tmp_path / "evaluation")
    records = [json.loads(line) for line in (tmp_path / "one" / "eval.jsonl").open()]
    coverage = page.locator("#coverage")
    to_value = axis(coverage.locator("svg"), "y")
    for role, record in (("line.first", records[0]), ("line:not(.first)", records[-1])):
        (points,) = drawn(coverage.locator("svg"), 0, role)
        assert [to_value(y) for _, y in points] == pytest.approx(list(record["pass_at_k"].values()), abs=3e-3)
        xs = [x for x, _ in points]
        assert xs == pytest.approx([xs[0] + i * (xs[-1] - xs[0]) / 3 for i in range(4)], abs=0.02)  # powers of two
    (band,) = drawn(coverage.locator("svg"), 2, "band")
    bounds = [*(row["low"] for row in evaluation["coverage"].values())]
    bounds += [*(row["high"] for row in evaluation["coverage"].values())][::-1]
    assert [to_value(y) for _, y in band] == pytest.approx(bounds, abs=3e-3)
    coverage.get_by_role("button", name="At the step").click()
    move_to(page, 12)
    (points,) = drawn(coverage.locator("svg"), 0)
    to_value = axis(coverage.locator("svg"), "y")
    assert [to_value(y) for _, y in points] == pytest.approx(list(records[1]["pass_at_k"].values()), abs=3e-3)

    assert page.locator("#weights path.line").count() == 3  # the two objectives, and 1/p
    norms = page.locator("#norms")
    assert len(drawn(norms.locator("svg"), 0, "dots")) == 6
    norms.get_by_role("button", name="At the step").click()
    (diagnosed,) = [
        record for record in map(json.loads, (tmp_path / "one" / "diagnostics.jsonl").open()) if record["step"] == 10
    ]
    points = [point for piece in drawn(norms.locator("svg"), 0, "dots") for point in piece]
    to_rate, to_norm = axis(norms.locator("svg"), "x"), axis(norms.locator("svg"), "y")
    assert [to_rate(x) for x, _ in points] == pytest.approx(diagnosed["pass_rate"], abs=3e-3)
    assert [to_norm(y) for _, y in points] == pytest.approx(diagnosed["grad_norm"], abs=5e-3)
    bars = {run: page.locator(f'#timings rect[data-run="{run}"]') for run in (0, 2)}
    widths = [float(bar.get_attribute("width")) for bar in bars[0].all()]
    assert widths[1] / widths[0] == pytest.approx(37.75 / 12.25, rel=1e-3)
    assert "12.3 s · 25%" in page.locator("#timings svg").inner_html()
    assert bars[2].count() == 1
    assert page.locator("#warnings li").count() == 2


def test_samples_are_filtered_and_paged(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    samples = page.locator("#samples")
    assert samples.locator(".count").inner_text() == "52 of 52"
    assert samples.locator(".sample").count() == 10
    seen = 10
    while samples.get_by_role("button", name="Next").is_enabled():
        samples.get_by_role("button", name="Next").click()
        seen += samples.locator(".sample").count()
    assert seen == 52
    assert samples.locator(".place").inner_text() == "page 6 of 6"

    for choice, count in (("right", 20), ("wrong", 28), ("unscored", 4), ("truncated", 4), ("all", 52)):
        samples.locator("select[name=outcome]").select_option(choice)
        assert samples.locator(".count").inner_text() == f"{count} of 52"
        assert samples.locator(".place").inner_text().startswith("page 1 ")
    samples.locator("select[name=run]").select_option(label="two")
    samples.locator("select[name=step]").select_option(label="20")
    assert samples.locator(".count").inner_text() == "13 of 52"
    samples.locator("select[name=step]").select_option("slider")
    move_to(page, 14)
    assert {text.split(" · ")[1] for text in samples.locator(".facts").all_inner_texts()} == {"step 10"}
    samples.locator("input[name=text]").fill("RESPONSE 11")
    assert samples.locator(".response pre").all_inner_texts() == ["response 11"]
    samples.locator("input[name=text]").fill("nowhere")
    assert samples.locator(".sample").count() == 0


def test_long_texts_fold_and_hostile_texts_stay_text(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    samples = page.locator("#samples")
    prompt = samples.locator(".sample").first.locator(".prompt")
    assert prompt.locator("pre").inner_text().count("\n") == 11
    prompt.get_by_role("button").click()
    assert prompt.locator("pre").inner_text().count("\n") == 399
    prompt.get_by_role("button").click()
    assert prompt.locator("pre").inner_text().count("\n") == 11
    samples.locator("input[name=text]").fill("needle")
    assert samples.locator(".sample").count() == 4
    shown = samples.locator(".response pre").first
    assert shown.evaluate("node => node.children.length") == 0
    codes = shown.evaluate("node => [...Array(node.textContent.length).keys()].map(i => node.textContent.charCodeAt(i))")
    assert codes == [ord(character) for character in f"needle {HOSTILE}"]
    assert page.evaluate("window.broken") is None
    assert page.locator("script").count() == 2
    assert page.locator("img, iframe, object, main script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 380])
def test_the_page_fits_the_window_in_both_color_schemes(show, tmp_path, two, scheme, width):
    page = show(tmp_path / "one", tmp_path / "two", color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(300)  # until the charts are drawn for this width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg.chart").first.bounding_box()["width"] <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (lightness > 200) if scheme == "light" else (lightness < 60)
    unnamed = page.locator("svg.chart:not([aria-label]), button:not([aria-label]):empty").count()
    assert unnamed == 0
    overlaps = page.locator("svg.chart").evaluate_all(
        """charts => charts.flatMap(chart => ['x', 'y'].flatMap(name => {
            const boxes = [...chart.querySelectorAll(`.tick.${name} text`)].map(text => text.getBoundingClientRect());
            return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
                a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
        })).length"""
    )
    assert overlaps == 0
    picture = page.screenshot(full_page=True)
    assert len(picture) > 50_000
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"report-{scheme}-{width}.png").write_bytes(picture)


def test_a_run_of_one_step_and_an_evaluation_without_runs(show, tmp_path):
    write_run(tmp_path / "short", steps=1)
    page = show(tmp_path / "short")
    assert page.locator("#curves path.line").count() > 0
    write_evaluation(tmp_path / "evaluation")
    page = show(tmp_path / "evaluation")
    assert page.locator("#step, #curves, #weights").count() == 0
    assert page.locator("#coverage path.line").count() == 1
    assert page.locator("#samples .sample").count() == 1

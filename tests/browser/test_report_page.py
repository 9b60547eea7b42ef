"""The page of `python -m maxrl_fast.report` in a real browser: it draws and shows the contents of the files.

The tests need the `playwright` package and a Chromium: $CHROMIUM, one on the PATH, or Playwright's own. If REPORT_SCREENSHOTS
names a folder, screenshots of the page are saved there.
"""

import json
import os
import re
import shutil
import statistics
from pathlib import Path

import pytest

from maxrl_fast.report import main
from tests.browser.made_up import HOSTILE, KEYS, MAZE, MAZE_PROMPT, write_evaluation, write_lines, write_run

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


def chart_of(parent, place):
    return parent.locator(f"{place} .chart")


def drawn(chart, run, kind="line", role=""):
    """Return the points that the chart has for a run: x and one y, or two for a band; a y of None is a gap."""
    traces = chart.evaluate(
        """node => node.chart.series.map((series, i) => [series, node.chart.data[i]]).slice(1).map(([series, ys]) =>
            [series.run, series.type, series.role || '', [...node.chart.data[0].keys()].filter(j => ys[j] !== undefined)
                .map(j => [node.chart.data[0][j], ys[j]])])"""
    )
    found = [points for own, type_, own_role, points in traces if (own, type_, own_role) == (run, kind, role)]
    return [[tuple(point) for point in points] for points in found]


def runs_drawn(page, place):
    """Return the runs that have a line in the charts of a place."""
    charts = page.locator(f"{place} .chart")
    return set(charts.evaluate_all("nodes => nodes.flatMap(node => node.chart.series.slice(1).map(series => series.run))"))


def is_inked(chart, x, y, color):
    """Return whether the canvas has the color where the axes, read from the ends of the scales, place a point."""
    return chart.evaluate(
        """(node, [x, y, color]) => {
            const { bbox, ctx, scales } = node.chart;
            const part = (scale, value) => (value - scale.min) / (scale.max - scale.min);
            const left = Math.round(bbox.left + part(scales.x, x) * bbox.width);
            const top = Math.round(bbox.top + (1 - part(scales.y, y)) * bbox.height);
            const copy = new OffscreenCanvas(5, 5).getContext('2d', { willReadFrequently: true });
            copy.drawImage(ctx.canvas, 2 - left, 2 - top);
            const { data } = copy.getImageData(0, 0, 5, 5);
            const wanted = color.match(/[0-9]+/g).map(Number);
            const isLike = i => data[i + 3] > 200 && wanted.every((c, j) => Math.abs(data[i + j] - c) < 60);
            return [...Array(25).keys()].some(i => isLike(4 * i));
        }""",
        [x, y, color],
    )


def move_over(page, chart, part):
    """Move the mouse to this part of the width of a chart's plotting area, and return the place."""
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    place = box["x"] + part * box["width"], box["y"] + box["height"] / 2
    page.mouse.move(place[0] - 3, place[1])
    page.mouse.move(*place)
    return place


def test_values_at_the_step_equal_the_file(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    for step in (30, 1, 7, 20, 21):
        move_to(page, step)
        assert page.locator("#step-number").input_value() == str(step)
        for key in KEYS:
            for i, records in enumerate(two.values()):
                shown = card(page, key).locator(f'.readout [data-run="{i}"]').get_attribute("data-value")
                expected = records[min(step, len(records)) - 1][key]  # a shorter run keeps its last value
                assert float(shown) == expected
                text, _, note = card(page, key).locator(f'.readout [data-run="{i}"]').inner_text().partition("step")
                assert float(text) == pytest.approx(expected, rel=1e-3)
                assert note.strip() == ("20" if step > len(records) else "")
    page.locator("#step-number").fill("13")
    page.locator("#step-number").press("Enter")
    assert card(page, "loss").locator('.readout [data-run="0"]').get_attribute("data-value") == str(two["one"][12]["loss"])
    assert page.locator("#step").input_value() == "13"


def test_lines_and_the_mark_of_the_step_are_where_the_axes_place_them(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    move_to(page, 17)
    page.locator("select[name=smoothing]").select_option("0")
    colors = [page.locator(f".chip.run-{i} .swatch").evaluate("node => getComputedStyle(node).backgroundColor") for i in (0, 1)]
    for key in KEYS:
        chart = chart_of(card(page, key), "")
        mark, box = chart.locator(".step-mark").bounding_box(), chart.locator(".u-over").bounding_box()
        assert (mark["x"] - box["x"]) / box["width"] == pytest.approx(17 / 30, abs=0.01)
        for i, records in enumerate(two.values()):
            (points,) = drawn(chart, i)
            assert points == [(record["step"], record[key]) for record in records]
        assert is_inked(chart, *points[8], colors[1])
        assert not is_inked(chart, points[8][0], points[8][1] + 0.2, colors[1])


def test_gaps_smoothing_and_the_line_of_4000_steps(show, tmp_path):
    write_run(tmp_path / "run")
    values = [0.5 + 0.3 * ((step * 7919) % 101) / 101 for step in range(4000)]
    values[1234], values[77] = 9.0, None
    lines = [{"step": step, "reward_mean": float("nan") if value is None else value} for step, value in enumerate(values)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    color = page.locator(".chip.run-0 .swatch").evaluate("node => getComputedStyle(node).backgroundColor")
    assert is_inked(chart, 1234, 9, color)  # a single step of 4,000 in 300 pixels
    for step in (1234, 77, 3999):  # the readout has all steps
        move_to(page, step)
        shown = card(page, "reward_mean").locator(".readout [data-run]").get_attribute("data-value")
        assert (None if shown == "–" else float(shown)) == values[step]


def test_hovering_shows_all_digits_and_a_click_moves_the_step(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    place = move_over(page, chart_of(card(page, "entropy"), ""), 11 / 30)
    tooltip = page.locator("#tooltip")
    tooltip.locator("strong").wait_for()
    assert tooltip.locator("strong").inner_text() == "step 11"
    assert [float(text) for text in tooltip.locator("b").all_inner_texts()] == [
        records[10]["entropy"] for records in two.values()
    ]
    page.mouse.click(*place)
    assert page.locator("#step").input_value() == "11"
    page.mouse.move(2, 2)
    tooltip.wait_for(state="hidden")


def test_dragging_zooms_all_curves_and_a_double_click_zooms_out(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    scale = "node => [node.chart.scales.x.min, node.chart.scales.x.max]"
    chart, other = (chart_of(card(page, key), "") for key in ("entropy", "loss"))
    whole = chart.evaluate(scale)
    assert (whole, other.evaluate(scale)) == ([0, 30], [0, 30])
    move_over(page, chart, 0.2)
    page.mouse.down()
    end = move_over(page, chart, 0.6)
    page.mouse.up()
    page.wait_for_timeout(100)
    for zoomed in (chart, other):
        assert zoomed.evaluate(scale) == pytest.approx([6, 18], abs=0.3)
    assert page.locator("#step").input_value() == "30"  # the drag was no click
    page.mouse.dblclick(*end)
    page.wait_for_timeout(100)
    assert (chart.evaluate(scale), other.evaluate(scale)) == (whole, whole)


def test_runs_and_curves_can_be_hidden(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    panels = ("#curves", "#coverage", "#weights", "#norms")
    assert all({0, 1} <= runs_drawn(page, panel) for panel in panels)
    page.get_by_role("button", name="two").first.click()
    assert all(1 not in runs_drawn(page, panel) and 0 in runs_drawn(page, panel) for panel in panels)
    assert page.locator('#timings [data-run="1"], #rewards [data-run="1"]').count() == 0
    page.get_by_role("button", name="two").first.click()
    assert {0, 1} <= runs_drawn(page, '#curves [data-key="loss"]')
    page.locator("details.chooser summary").click()
    page.get_by_label("loss", exact=True).uncheck()
    page.get_by_label("eval pass@8").check()
    assert card(page, "loss").count() == 0
    assert runs_drawn(page, '#curves [data-key="eval pass@8"]') == {0, 1}
    card(page, "entropy").get_by_role("button", name="log").click()
    assert card(page, "entropy").get_by_role("button", name="log").get_attribute("aria-pressed") == "true"
    assert chart_of(card(page, "entropy"), "").evaluate("node => node.chart.scales.y.distr") == 3


def test_coverage_weights_norms_timings_and_warnings(show, tmp_path, two):
    evaluation = write_evaluation(tmp_path / "evaluation")
    page = show(tmp_path / "one", tmp_path / "two", tmp_path / "evaluation")
    records = [json.loads(line) for line in (tmp_path / "one" / "eval.jsonl").open()]
    coverage = page.locator("#coverage")
    chart = chart_of(page, "#coverage")
    points_of = lambda record: [(int(k), rate) for k, rate in record["pass_at_k"].items()]  # noqa: E731
    assert drawn(chart, 0, role="first") == [points_of(records[0])]
    assert drawn(chart, 0) == [points_of(records[-1])]
    rows = evaluation["coverage"].items()
    assert drawn(chart, 2, "band") == [[(int(k), row[side]) for k, row in rows] for side in ("high", "low")]
    coverage.get_by_role("button", name="At the step").click()
    move_to(page, 12)
    assert drawn(chart, 0) == [points_of(records[1])]

    assert runs_drawn(page, "#weights") == {0, 1, "none"}  # the two objectives, and 1/p
    norms = page.locator("#norms")
    norms.get_by_role("button", name="At the step").click()
    (diagnosed,) = [
        record for record in map(json.loads, (tmp_path / "one" / "diagnostics.jsonl").open()) if record["step"] == 10
    ]
    assert drawn(chart_of(page, "#norms"), 0) == [list(zip(diagnosed["pass_rate"], diagnosed["grad_norm"], strict=True))]
    assert "one: 3 prompts at step 10" in norms.locator(".caption").inner_text()
    move_over(page, chart_of(page, "#norms"), 0.25)
    bars = {run: page.locator(f'#timings .bar[data-run="{run}"]') for run in (0, 2)}
    widths = [bar.bounding_box()["width"] for bar in bars[0].all()]
    assert widths[1] / widths[0] == pytest.approx(37.75 / 12.25, rel=0.01)
    assert "12.3 s · 25%" in page.locator("#timings").inner_text()
    assert bars[2].count() == 1
    assert page.locator("#warnings li").count() == 2


def test_seeds_of_one_configuration_are_their_mean_with_its_standard_error(show, tmp_path):
    records = [write_run(tmp_path / f"seed-{i}", seed=i, steps=steps) for i, steps in enumerate((30, 30, 20))]
    write_run(tmp_path / "other", seed=0, objective="rloo", k=None)
    page = show(*[tmp_path / f"seed-{i}" for i in range(3)], tmp_path / "other")
    assert page.locator(".chip").all_inner_texts() == ["maxpo, 3 seeds", "other"]
    page.locator("select[name=smoothing]").select_option("0")
    chart = chart_of(card(page, "loss"), "")
    assert runs_drawn(page, '#curves [data-key="loss"]') == {0, 3}
    means, errors = [], []
    for step in range(30):
        values = [run[min(step, len(run) - 1)]["loss"] for run in records]  # the shorter run keeps its last value
        means.append(statistics.mean(values))
        errors.append(statistics.stdev(values) / 3**0.5)
    (line,), (high, low) = drawn(chart, 0), drawn(chart, 0, "band")
    assert [x for x, _ in line] == list(range(1, 31))
    assert [y for _, y in line] == pytest.approx(means)
    assert [y for _, y in high] == pytest.approx([m + e for m, e in zip(means, errors, strict=True)])
    assert [y for _, y in low] == pytest.approx([m - e for m, e in zip(means, errors, strict=True)])
    evaluations = [[json.loads(text) for text in (tmp_path / f"seed-{i}" / "eval.jsonl").open()] for i in range(3)]
    ends = [run[-1]["pass_at_k"]["1"] for run in evaluations]
    assert drawn(chart_of(page, "#coverage"), 0)[0][0] == (1, pytest.approx(statistics.mean(ends)))
    assert "steps 20 to 30" in page.locator("#coverage table").inner_text()

    page.get_by_role("button", name="Each seed").click()
    assert page.locator(".chip").all_inner_texts() == ["seed-0", "seed-1", "seed-2", "other"]
    assert runs_drawn(page, '#curves [data-key="loss"]') == {0, 1, 2, 3}
    page.get_by_role("button", name="Mean of seeds").click()
    page.locator(".chip").first.click()
    assert runs_drawn(page, '#curves [data-key="loss"]') == {3}


def test_prompts_are_gained_and_lost_and_sorted(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    counts = [json.loads(line)["num_correct"] for line in (tmp_path / "one" / "pass_rates.jsonl").open()]
    prompts = page.locator("#prompts")
    prompts.locator("table").wait_for()
    changes = {i: (counts[-1][i] - counts[0][i]) / 8 for i in range(30)}
    gained, lost = sum(c > 0 for c in changes.values()), sum(c < 0 for c in changes.values())
    assert f"30 prompts: {gained} gained, {lost} lost," in prompts.locator(".summary").inner_text()

    def shown():
        rows = prompts.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        )
        return [(int(row[0]), *(float(cell.replace("−", "-")) for cell in row[1:4])) for row in rows]

    expected = sorted(changes, key=lambda i: (-changes[i], i))[:20]
    rates = {i: (counts[0][i] / 8, counts[-1][i] / 8, changes[i]) for i in changes}
    assert shown() == [(i, *(pytest.approx(rate, abs=1e-3) for rate in rates[i])) for i in expected]
    texts = dict(zip([row[0] for row in shown()], prompts.locator(".excerpt").all_inner_texts(), strict=True))
    assert all(text.startswith(f"held out {i} </script>" if 13 <= i < 29 else "") for i, text in texts.items())
    assert texts.get(29, "not kept") == "not kept"
    for column, order in (("before", [-1, 1]), ("prompt", [1, -1])):
        for sign in order:
            prompts.get_by_role("button", name=column).click()
            place = {"prompt": 0, "before": 1}[column]
            values = [sign * row[place] for row in shown()]
            assert values == sorted(values)
    prompts.locator("select[name=show]").select_option("lost")
    assert all(row[3] < 0 for row in shown())
    assert len(shown()) == min(20, lost)
    prompts.locator("select[name=show]").select_option("all")
    options = prompts.locator("select[name=after] option").all_inner_texts()
    assert options == ["one, step 0", "one, step 10", "one, step 30"]  # of another seed, prompt 3 is another prompt
    prompts.locator("select[name=after]").select_option(label="one, step 10")
    assert {row[0]: row[2] for row in shown()} == {row[0]: pytest.approx(counts[1][row[0]] / 8, abs=1e-3) for row in shown()}


def test_rewards_are_a_histogram_with_components(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    rewards = page.locator("#rewards")
    rewards.locator(".bar").first.wait_for()
    assert rewards.locator(".stage").all_inner_texts() == ["0", "1"]
    assert rewards.locator(".amount").first.inner_text() == "58.3% · 14"  # 26 samples, of which 2 have no reward
    assert "one: mean 0.4167 of 24 samples, 2 without a value" in rewards.locator(".caption").inner_text()
    rewards.get_by_role("button", name="Training rollouts").click()
    rollouts = [json.loads(line) for line in (tmp_path / "one" / "rollouts.jsonl").open()]
    rewards.locator("select[name=quantity]").select_option("right")
    values = [rollout["components"]["right"] for rollout in rollouts]
    assert rewards.locator(".stage").all_inner_texts() == ["0", "0.2500", "1"]
    shares = [float(bar.get_attribute("data-value")) for bar in rewards.locator('.bar[data-run="0"]').all()]
    assert shares == [pytest.approx(values.count(value) / 24) for value in (0, 0.25, 1)]
    rewards.get_by_role("button", name="At the step").click()
    move_to(page, 5)
    assert "of 12 samples" in rewards.locator(".caption").inner_text()


def test_samples_are_by_prompt_with_two_runs_side_by_side(show, tmp_path, two):
    page = show(tmp_path / "one", tmp_path / "two")
    samples = page.locator("#samples")
    samples.locator(".sample").first.wait_for()
    total = samples.locator(".count")
    assert total.inner_text() == "13 prompts, 52 of 52 samples"
    assert samples.locator(".sample").count() == 5
    first = samples.locator('.sample[data-id="1"]')
    assert first.locator(".column > header").all_inner_texts() == [
        "one\nmean reward 1 of 2 samples",
        "two\nmean reward 1 of 2 samples",
    ]
    assert first.locator(".column").first.locator("summary").all_inner_texts() == [
        "step 10 · mean reward 1 of 1 sample",
        "step 20 · mean reward 1 of 1 sample",
    ]
    assert first.locator(".response pre").all_inner_texts() == ["response 1"] * 4
    samples.get_by_role("button", name="Next").click()
    assert samples.locator(".place").inner_text() == "page 2 of 3"

    for choice, number in (("right", 20), ("wrong", 28), ("unscored", 4), ("truncated", 4), ("all", 52)):
        samples.locator("select[name=outcome]").select_option(choice)
        assert f"{number} of 52 samples" in total.inner_text()
    samples.locator("select[name=beside]").select_option("")
    samples.locator("select[name=run]").select_option(label="two")
    samples.locator("select[name=step]").select_option(label="20")
    assert total.inner_text() == "13 prompts, 13 of 26 samples"
    samples.locator("select[name=step]").select_option("slider")
    move_to(page, 14)
    assert all(text.startswith("step 10 ") for text in samples.locator(".column summary").all_inner_texts())
    samples.locator("input[name=text]").fill("RESPONSE 11")
    assert samples.locator(".response pre").all_inner_texts() == ["response 11"]
    samples.locator("input[name=text]").fill("nowhere")
    assert samples.locator(".sample").count() == 0


def test_training_rollouts_are_shown_by_prompt_over_time(show, tmp_path, two):
    page = show(tmp_path / "one")
    samples = page.locator("#samples")
    samples.get_by_role("button", name="Training rollouts").click()
    assert samples.locator(".count").inner_text() == "2 prompts, 24 of 24 samples"
    own = [json.loads(line) for line in (tmp_path / "one" / "rollouts.jsonl").open()]
    prompt = samples.locator('.sample[data-id="101"]')
    kept = [rollout for rollout in own if rollout["id"] == 101]
    steps = [statistics.mean(rollout["reward"] for rollout in kept if rollout["step"] == step) for step in (1, 9)]
    texts = prompt.locator(".column summary").all_inner_texts()
    assert [text.split(" · ")[0] for text in texts] == ["step 1", "step 9"]
    assert [float(text.split()[5]) for text in texts] == [pytest.approx(mean, abs=1e-3) for mean in steps]
    assert prompt.locator(".response").count() == 8  # four of each step
    prompt.get_by_role("button", name="Show 2 more").first.click()
    assert prompt.locator(".response").count() == 10
    facts = prompt.locator(".response .facts").first.inner_text()
    assert re.fullmatch(r"5 tokens · advantage -?[\d.e-]+ · right [\d.]+ · short –", facts)
    assert prompt.locator("header .facts").first.inner_text().startswith("answer answer 101 </script>")
    prompt.locator("header summary", has_text="columns").click()
    assert json.loads(prompt.locator("header pre").inner_text())["level"] == 101


def test_mazes_are_drawn_with_the_path_of_the_response(show, tmp_path):
    write_run(tmp_path / "run")
    paths = ("DOWN DOWN RIGHT RIGHT DONE", "DOWN LEFT UP", "RIGHT RIGHT RIGHT", "DOWN GRID_END", HOSTILE)
    common = {"step": 1, "id": 0, "prompt": MAZE_PROMPT, "reward": 0.0, "truncated": False, "tokens": 5}
    broken = MAZE_PROMPT.replace("PATH WALL NEWLINE", "PATH NEWLINE", 1)
    odd = [common | {"id": 1, "prompt": broken, "response": "UP"}]
    write_lines(tmp_path / "run" / "samples.jsonl", [*(common | {"response": path} for path in paths), *odd])
    page = show(tmp_path / "run")
    maze = page.locator('#samples .sample[data-id="0"]')
    maze.get_by_role("button", name="Show 1 more").click()
    assert maze.locator(".response .maze").evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))") == [
        "path of 4 moves",
        "path of 1 move, then into a wall",
        "path of 2 moves, then into a wall",
        "path of 1 move, then GRID_END",
        f"path of 0 moves, then {HOSTILE.split(' ')[0]}",
    ]
    walls = maze.locator(".prompt .walls").get_attribute("d")
    cells = {(int(y), int(x)) for x, y in re.findall(r"M(\d+),(\d+)", walls)}
    assert cells == {(y, x) for y, row in enumerate(MAZE) for x, cell in enumerate(row) if cell == "W"}
    solved = maze.locator(".response").first
    assert solved.locator(".walk").get_attribute("points") == "1.5,1.5 1.5,2.5 1.5,3.5 2.5,3.5 3.5,3.5"
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
    prompt.get_by_role("button").click()
    assert prompt.locator("pre").inner_text().count("\n") == 11
    samples.locator("input[name=text]").fill("needle")
    assert samples.locator(".response").count() == 4
    shown = samples.locator(".response pre").first
    assert shown.evaluate("node => node.children.length") == 0
    codes = shown.evaluate("node => [...Array(node.textContent.length).keys()].map(i => node.textContent.charCodeAt(i))")
    assert codes == [ord(character) for character in f"needle {HOSTILE}"]
    assert page.evaluate("window.broken") is None
    assert page.locator("script").count() == 3
    assert page.locator("img, iframe, object, main script").count() == 0


def test_samples_that_the_page_has_not_are_counted(show, tmp_path, monkeypatch):
    monkeypatch.setattr("maxrl_fast.report.samples.SAMPLE_BYTES", 5_000)
    write_run(tmp_path / "run")
    page = show(tmp_path / "run")
    page.locator("#samples .sample").first.wait_for()
    assert re.fullmatch(
        r"\d+ prompts?, (\d+) of 26 samples; this page has \1 of them", page.locator("#samples .count").inner_text()
    )


CLIPPED = """() => [...document.querySelectorAll('body *')].filter(node => {
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    const isCut = style.overflowX !== 'visible' && node.scrollWidth > node.clientWidth + 1;
    return box.width > 1 && !node.closest('.hidden') && (isCut || box.right > innerWidth + 1);
}).map(node => `${node.tagName}.${node.className.baseVal ?? node.className}: ${node.textContent.slice(0, 60)}`)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 800, 380])
def test_the_page_fits_the_window_in_both_color_schemes(show, tmp_path, two, scheme, width):
    long = "a-run-with-a-long-name-of-which-every-letter-is-shown-20261121-192256"
    write_run(tmp_path / long, steps=12, task="gsm8k", data="/a/long/path/to/a/file/of/prompts/" * 3 + "train.jsonl")
    passes = {str(2**i): 0.5 + i / 30 for i in range(11)}
    write_lines(tmp_path / long / "eval.jsonl", [{"step": step, "pass_at_k": passes} for step in (0, 12)])
    page = show(tmp_path / "one", tmp_path / "two", tmp_path / long, color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.locator("#samples .sample").first.wait_for()
    page.wait_for_timeout(300)  # until the charts are drawn for this width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 1400:
        assert page.evaluate(CLIPPED) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (lightness > 200) if scheme == "light" else (lightness < 60)
    unnamed = page.locator(".chart:not([aria-label]), button:not([aria-label]):empty").count()
    assert unnamed == 0
    picture = page.screenshot(full_page=True)
    assert len(picture) > 50_000
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"report-{scheme}-{width}.png").write_bytes(picture)


def test_the_button_changes_the_color_scheme_of_page_and_charts(show, tmp_path, two):
    page = show(tmp_path / "one", color_scheme="dark")
    swatch = page.locator(".chip.run-0 .swatch")
    page.locator("select[name=smoothing]").select_option("0")
    chart = chart_of(card(page, "loss"), "")
    (points,) = drawn(chart, 0)
    colors = []
    for name, is_light in (("☀ Light", False), ("☾ Dark", True), ("☀ Light", False)):
        page.wait_for_timeout(100)
        assert page.locator("#theme").inner_text() == name
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 450) == is_light
        colors.append(swatch.evaluate("node => getComputedStyle(node).backgroundColor"))
        assert is_inked(chart, *points[8], colors[-1])
        page.locator("#theme").click()
    assert colors[0] == colors[2] != colors[1]


def test_a_run_of_one_step_and_an_evaluation_without_runs(show, tmp_path):
    write_run(tmp_path / "short", steps=1)
    page = show(tmp_path / "short")
    assert runs_drawn(page, "#curves") == {0}
    write_evaluation(tmp_path / "evaluation")
    page = show(tmp_path / "evaluation")
    page.locator("#samples .sample").wait_for()
    assert page.locator("#step, #curves, #weights").count() == 0
    assert len(drawn(chart_of(page, "#coverage"), 0)) == 1
    assert page.locator("#samples .response").count() == 1


def test_a_run_without_evaluations_and_samples(show, tmp_path):
    write_run(tmp_path / "run")
    for name in ("eval.jsonl", "samples.jsonl", "rollouts.jsonl", "pass_rates.jsonl", "diagnostics.jsonl"):
        (tmp_path / "run" / name).unlink()
    page = show(tmp_path / "run")
    assert page.locator("section h2").all_inner_texts() == ["Runs", "Curves", "Weight by pass rate", "Time", "Warnings"]

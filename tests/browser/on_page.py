"""What the charts of a page have drawn, and what a reader does with them."""


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
    is a gap.
    """
    traces = chart.evaluate(
        """node => node.chart.series.map((series, i) => [series, node.chart.data[i]])
            .slice(1).map(([series, ys]) =>
            [series.run, series.type, series.role || '', [...node.chart.data[0].keys()]
                .filter(j => ys[j] !== undefined)
                .map(j => [node.chart.data[0][j], ys[j]])])"""
    )
    found = [
        points
        for own, type_, own_role, points in traces
        if (own, type_, own_role) == (run, kind, role)
    ]
    return [[tuple(point) for point in points] for points in found]


def runs_drawn(page, place):
    charts = page.locator(f"{place} .chart")
    return set(
        charts.evaluate_all(
            "nodes => nodes.flatMap(node => node.chart.series.slice(1).map(series => series.run))"
        )
    )


def is_inked(chart, x, y, color):
    """Return whether the canvas has the color where the axes, read from the ends of the scales,
    place a point.
    """
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
            const isLike = i => data[i + 3] > 200 &&
                wanted.every((c, j) => Math.abs(data[i + j] - c) < 60);
            return [...Array(25).keys()].some(i => isLike(4 * i));
        }""",
        [x, y, color],
    )

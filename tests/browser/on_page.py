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
    is a gap."""
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

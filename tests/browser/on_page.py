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
    wanted = [run, kind, role]
    return [[*map(tuple, points)] for *own, points in traces if own == wanted]


def runs_drawn(page, place):
    code = "nodes => nodes.flatMap(node => node.chart.series.slice(1).map(series => series.run))"
    return {*page.locator(f"{place} .chart").evaluate_all(code)}

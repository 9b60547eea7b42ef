// Charts: what the page's panels want to show, drawn by uPlot.

const charts = new Map(); // host -> uPlot
const colours = new Map(); // CSS variable -> colour of the present theme
const observer = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (contentRect.width > 0) charts.get(target)?.setSize({ width: contentRect.width, height: charts.get(target).height });
  }
});

/** Returns the colour of a CSS variable as the page's theme has it. */
function colour(variable) {
  if (!colours.has(variable)) {
    const probe = el('i', { class: 'probe' });
    document.body.append(probe);
    probe.style.color = `var(--${variable})`;
    colours.set(variable, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(variable);
}

const runColour = (run) => colour(variableOf(run));

function redrawCharts() {
  colours.clear();
  for (const chart of charts.values()) chart.redraw(false);
}

/**
 * Draws a chart into `host`, in place of the one that is there.
 * spec: label, height, x and y ({kind: linear|log|binary, low, high, title, ticks, isWhole}; without low and high, y fits what is shown),
 * marks, cursor (an x, or null), sync (charts with the same key share zoom and pointer),
 * find(x, y, {px, py, toX, toY}) -> {title, rows: [{run, name, text}]} or null; choose(x) is called on a click.
 * Marks: {type: line|dots|band, run, xs, ys, highs, role}. In lines null is a gap.
 * Returns {moveCursor}.
 */
function drawChart(host, spec) {
  clearChart(host);
  for (const old of charts.keys()) if (!old.isConnected) clearChart(old);
  const { data, series, bands } = tracesOf(spec);
  const mark = el('div', { class: 'step-mark' });
  const place = (chart) => {
    const x = spec.cursor === null || spec.cursor === undefined ? NaN : chart.valToPos(spec.cursor, 'x');
    mark.hidden = !(x >= -1 && x <= chart.over.clientWidth + 1);
    mark.style.left = `${x}px`;
  };
  const chart = new uPlot({
    width: host.clientWidth || 300, height: spec.height, padding: [10, 14, 0, 0], series, bands, legend: { show: false },
    scales: { x: { ...scaleOf(spec.x), range: (chart, low, high) => [low, high] }, y: scaleOf(spec.y) },
    axes: [axisOf(spec.x, 'x'), axisOf(spec.y, 'y')],
    cursor: { y: false, drag: { x: true, y: false }, points: { show: false }, ...(spec.sync ? { sync: { key: spec.sync } } : {}) },
    hooks: { draw: [place], setCursor: [(chart) => point(chart, spec)] },
  }, data, host);
  chart.root.classList.add('chart');
  chart.root.setAttribute('role', 'img');
  chart.root.setAttribute('aria-label', spec.label);
  chart.root.chart = chart; // for the tests
  chart.over.append(mark);
  chart.over.addEventListener('mouseleave', hideTooltip);
  if (spec.choose) chart.over.addEventListener('click', (event) => spec.choose(chart.posToVal(event.offsetX, 'x'))); // uPlot withholds the click of a drag
  charts.set(host, chart);
  observer.observe(host);
  return {
    moveCursor(x) {
      spec.cursor = x;
      place(chart);
    },
  };
}

function clearChart(host) {
  charts.get(host)?.destroy();
  charts.delete(host);
  observer.unobserve(host);
}

/** Returns the marks as uPlot wants them: columns over one list of x, series, and bands between two of them. */
function tracesOf(spec) {
  const tables = [];
  const series = [{}];
  const bands = [];
  const clean = (ys) => (spec.y.kind === 'linear' ? ys : ys.map((y) => (y > 0 ? y : null))); // a logarithmic axis has no place for 0
  for (const { type, run, xs, ys, highs, role = '' } of spec.marks.filter((mark) => mark.xs.length)) {
    const stroke = () => runColour(run);
    tables.push(type === 'band' ? [xs, clean(highs), clean(ys)] : [xs, clean(ys)]);
    if (type === 'band') {
      bands.push({ series: [series.length, series.length + 1], fill: () => faded(runColour(run), 0.16) });
      series.push({ run, type, width: 0, points: { show: false } }, { run, type, width: 0, points: { show: false } });
      continue;
    }
    const look = { raw: { width: 1, alpha: 0.32 }, first: { dash: [2, 5] }, reference: { dash: [6, 5] } }[role] ?? {};
    const points = type === 'dots' ? { show: true, size: 6, space: 0, stroke, fill: stroke } : { show: false };
    series.push({ run, type, role, stroke, width: 1.75, ...look, points, ...(type === 'dots' ? { paths: () => null } : {}) });
  }
  return { data: withEnds(tables.length ? uPlot.join(tables) : [[]], spec.x), series, bands };
}

/** Returns the columns with the ends of the axis among their x: a double click returns to the range of the data. */
function withEnds(columns, { low, high }) {
  const [xs] = columns;
  const before = xs.length && xs[0] <= low ? [] : [low];
  const after = xs.length && xs[xs.length - 1] >= high ? [] : [high];
  return columns.map((column, i) => (i ? [before.map(() => undefined), column, after.map(() => undefined)] : [before, column, after]).flat());
}

function scaleOf({ kind, low, high }) {
  const fixed = low === undefined ? (chart, least, most) => (least === null ? [0, 1] : niceRange(least, most)) : [low, high];
  return { time: false, distr: kind === 'linear' ? 1 : 3, log: kind === 'binary' ? 2 : 10, range: fixed };
}

const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));

function axisOf({ kind, title, ticks, isWhole }, scale) {
  const isX = scale === 'x';
  const font = '11.5px system-ui, sans-serif';
  const line = (variable) => ({ stroke: () => colour(variable), width: 1 });
  return {
    scale, font, labelFont: font, label: title, labelSize: title ? 20 : 0, stroke: () => colour('muted'), gap: isX ? 4 : 6,
    size: isX ? 28 : (chart, values) => 14 + 6.6 * Math.max(2, ...(values ?? []).map((value) => String(value).length)),
    space: isX ? 64 : 34, ...(isWhole ? { incrs: WHOLE } : {}), ...(ticks ? { splits: () => ticks, filter: (chart, splits) => splits } : {}),
    values: (chart, splits) => splits.map(tickLabel),
    grid: isX ? { show: false } : line('grid'), ticks: isX ? { ...line('line'), size: 4 } : { show: false }, border: { show: isX, ...line('line') },
  };
}

/** Shows the values under the pointer. Only the chart that has the pointer gets a mouse event. */
function point(chart, spec) {
  const { left, top, event } = chart.cursor;
  if (!spec.find || !chart.over.matches(':hover')) return;
  const found = left < 0 || !event ? null : spec.find(chart.posToVal(left, 'x'), chart.posToVal(top, 'y'),
    { px: left, py: top, toX: (x) => chart.valToPos(x, 'x'), toY: (y) => chart.valToPos(y, 'y') });
  if (found) showTooltip(event, found);
  else hideTooltip();
}

const faded = (rgb, alpha) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);

/** Returns the range of an axis for finite numbers: from 0 if they come close to it, else with a margin. */
function niceRange(low, high) {
  if (low > high) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : low > 0 ? [0, low * 1.25] : [low * 1.25, 0];
  const margin = (high - low) * 0.06;
  const from = low >= 0 && low < high * 0.6 ? 0 : low - margin;
  const to = high <= 0 && high > low * 0.6 ? 0 : high + margin;
  return [from, to];
}

function tickLabel(value) {
  if (value === null) return ''; // of a logarithmic axis
  const isTiny = value !== 0 && Math.abs(value) < 1e-3;
  return isTiny ? Number(value.toPrecision(6)).toExponential() : value.toLocaleString('en', { maximumSignificantDigits: 6 });
}

// One chart: axes, marks, a cursor and a tooltip. The caller defines the marks and the tooltip's content.

/**
 * Draws a chart into `host`, and draws it again whenever the width of `host` changes.
 * spec: label, height, x and y ({kind, low, high, title, whole, ticks}), marks, cursor (an x, or null),
 * find(x, y, {px, py, toX, toY}) -> {x, y, title, rows: [{run, name, text}]} or null; choose(x) is called on a click.
 * Marks: {type: 'line'|'dots'|'band', run, xs, ys, highs, role}.
 * Returns {moveCursor}.
 */
function drawChart(host, spec) {
  const state = { cursor: spec.cursor ?? null, line: null, toX: null };
  const draw = () => {
    const width = host.clientWidth;
    if (width) host.replaceChildren(build(spec, width, state));
  };
  draw();
  observeWidth(host, draw);
  return {
    moveCursor(x) {
      state.cursor = x;
      if (state.line) placeCursor(state);
    },
  };
}

const widthListeners = new WeakMap();
const widthObserver = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const listener = widthListeners.get(target);
    if (listener && listener.width !== contentRect.width) {
      listener.width = contentRect.width;
      listener.draw();
    }
  }
});

function observeWidth(host, draw) {
  widthListeners.set(host, { draw, width: host.clientWidth });
  widthObserver.observe(host);
}

function build(spec, width, state) {
  const height = spec.height;
  const { x, y } = spec;
  const yTicks = axisTicks(y, Math.max(2, Math.round(height / 42)));
  const left = 12 + Math.max(...yTicks.map(({ label }) => label.length), 2) * 6.8 + (y.title ? 16 : 0);
  const box = { left, right: width - 14, top: 8, bottom: height - (x.title ? 40 : 24) };
  const toX = makeScale(x.kind, x.low, x.high, box.left, box.right);
  const toY = makeScale(y.kind, y.low, y.high, box.bottom, box.top);
  const clip = `clip-${(build.count = (build.count ?? 0) + 1)}`;
  const root = svg(
    'svg',
    { class: 'chart', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': spec.label },
    svg('clipPath', { id: clip }, svg('rect', { x: box.left - 4, y: box.top - 4, width: Math.max(0, box.right - box.left + 8), height: box.bottom - box.top + 8 })),
    yTicks.map(({ value, label }) =>
      svg('g', { class: 'tick y', transform: `translate(0,${toY(value).toFixed(2)})` },
        svg('line', { x1: box.left, x2: box.right }), svg('text', { x: box.left - 7, dy: '0.35em', 'text-anchor': 'end' }, label)),
    ),
    axisTicks(x, Math.max(2, Math.round((box.right - box.left) / 72))).map(({ value, label }) =>
      svg('g', { class: 'tick x', transform: `translate(${toX(value).toFixed(2)},0)` },
        svg('line', { y1: box.bottom, y2: box.bottom + 4 }),
        svg('text', { y: box.bottom + 17, 'text-anchor': 'middle' }, label)),
    ),
    svg('line', { class: 'axis', x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    x.title ? svg('text', { class: 'axis-title', x: (box.left + box.right) / 2, y: height - 5, 'text-anchor': 'middle' }, x.title) : null,
    y.title ? svg('text', { class: 'axis-title', transform: `translate(12,${(box.top + box.bottom) / 2}) rotate(-90)`, 'text-anchor': 'middle' }, y.title) : null,
  );
  const marks = svg('g', { 'clip-path': `url(#${clip})` }, spec.marks.map((mark) => drawMark(mark, toX, toY, spec, box)));
  state.toX = toX;
  state.line = svg('line', { class: 'cursor', y1: box.top, y2: box.bottom });
  const halo = svg('circle', { class: 'halo', r: 4.5, visibility: 'hidden' });
  root.append(state.line, marks, halo);
  placeCursor(state);
  if (spec.find) listen(root, spec, { toX, toY, box, halo });
  return root;
}

function placeCursor({ line, toX, cursor }) {
  line.setAttribute('visibility', cursor === null ? 'hidden' : 'visible');
  if (cursor !== null) for (const end of ['x1', 'x2']) line.setAttribute(end, toX(cursor).toFixed(2));
}

function axisTicks(axis, wanted) {
  if (axis.ticks) {
    const every = Math.max(1, Math.ceil(axis.ticks.length / wanted));
    return axis.ticks.filter((_, i) => i % every === 0).map((value) => ({ value, label: tickLabel(value, 1) }));
  }
  if (axis.kind === 'linear') {
    const { ticks, gap } = niceTicks(axis.low, axis.high, wanted, axis.whole);
    return ticks.map((value) => ({ value, label: tickLabel(value, gap) }));
  }
  return decadeTicks(axis.low, axis.high, wanted).map((value) => ({ value, label: tickLabel(value, value) }));
}

function drawMark(mark, toX, toY, spec, box) {
  // A logarithmic axis cannot show values up to 0: they are gaps, like missing numbers.
  const holds = (value) => value !== null && (spec.y.kind === 'linear' || value > 0);
  const common = { class: `${mark.type} ${mark.role ?? ''} run-${mark.run}`, 'data-run': mark.run };
  const width = Math.round(box.right - box.left);
  if (mark.type === 'line') return svg('path', { ...common, d: linePath(mark.xs, mark.ys, toX, toY, width, holds) });
  if (mark.type === 'dots') {
    const dots = mark.xs.map((x, i) => (holds(mark.ys[i]) ? `M${toX(x).toFixed(2)},${toY(mark.ys[i]).toFixed(2)}h0` : ''));
    return svg('path', { ...common, d: dots.join('') });
  }
  const there = mark.xs.map((_, i) => i).filter((i) => holds(mark.ys[i]) && holds(mark.highs[i]));
  const point = (values) => (i) => `${toX(mark.xs[i]).toFixed(2)},${toY(values[i]).toFixed(2)}`;
  const outline = [...there.map(point(mark.ys)), ...there.reverse().map(point(mark.highs))];
  return svg('path', { ...common, d: outline.length ? `M${outline.join('L')}Z` : '' });
}

function listen(root, spec, { toX, toY, box, halo }) {
  const at = (event) => {
    const bounds = root.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  };
  const isInside = (px) => px >= box.left - 8 && px <= box.right + 8;
  root.addEventListener('pointermove', (event) => {
    const [px, py] = at(event);
    const found = isInside(px) ? spec.find(toX.invert(px), toY.invert(py), { px, py, toX, toY }) : null;
    if (!found) return hide();
    const hasPlace = found.y !== null && found.y !== undefined;
    halo.setAttribute('visibility', hasPlace ? 'visible' : 'hidden');
    if (hasPlace) {
      halo.setAttribute('cx', toX(found.x));
      halo.setAttribute('cy', toY(found.y));
    }
    showTooltip(event, found);
  });
  const hide = () => {
    halo.setAttribute('visibility', 'hidden');
    hideTooltip();
  };
  root.addEventListener('pointerleave', hide);
  root.addEventListener('pointercancel', hide);
  if (spec.choose) root.addEventListener('click', (event) => isInside(at(event)[0]) && spec.choose(toX.invert(at(event)[0])));
}

function showTooltip(event, { title, rows }) {
  const tooltip = document.getElementById('tooltip');
  tooltip.replaceChildren(
    el('strong', {}, title),
    ...rows.map(({ run, name, text }) =>
      el('div', { class: run === undefined ? '' : `run-${run}` }, el('i', { class: 'swatch' }), el('span', {}, name), el('b', {}, text)),
    ),
  );
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const room = document.documentElement.clientWidth;
  const right = event.clientX + 16 + width < room;
  const x = right ? event.clientX + 16 : Math.max(4, event.clientX - width - 16);
  const y = Math.max(4, Math.min(event.clientY - height / 2, window.innerHeight - height - 4));
  tooltip.style.transform = `translate(${Math.min(x, Math.max(4, room - width - 4))}px, ${y}px)`;
}

function hideTooltip() {
  document.getElementById('tooltip').hidden = true;
}

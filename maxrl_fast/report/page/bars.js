// Horizontal bars: seconds by stage, and histograms.

/** Returns a chart of rows {label, bars: [{run, value, text}]}; the longest bar has the whole width. */
function drawBars(label, rows) {
  const most = Math.max(1e-12, ...rows.flatMap(({ bars }) => bars.map(({ value }) => value)));
  return el('div', { class: 'bars', role: 'img', 'aria-label': label }, rows.map(({ label, bars }) => [
    el('span', { class: 'stage' }, label),
    el('div', {}, bars.map(({ run, value, text }) => {
      const bar = el('i', { class: 'bar', run: run.index, 'data-run': run.index, 'data-value': value, title: `${run.name}, ${label}: ${exact(value)}` });
      bar.style.width = `${(100 * value) / most}%`;
      return el('div', { class: 'bar-line' }, el('div', { class: 'track' }, bar), el('span', { class: 'amount' }, text));
    })),
  ]));
}

const BINS = 10;

/** Returns the bins of some numbers: each number if they are few, else ten intervals of equal length. */
function binsOf(numbers) {
  const distinct = ascending(numbers);
  if (distinct.length <= BINS) return distinct.map((value) => ({ label: short(value), holds: (x) => x === value }));
  const [low, high] = extent(numbers);
  const edge = (i) => low + ((high - low) * i) / BINS;
  return [...Array(BINS).keys()].map((i) => ({
    label: `${short(edge(i))} to ${short(edge(i + 1))}`,
    holds: (x) => Math.min(BINS - 1, Math.floor(((x - low) / (high - low)) * BINS)) === i,
  }));
}

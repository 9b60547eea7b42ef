// The other panels: runs, coverage, weights, gradient norms, timings, warnings.

/** Returns the label of a run: its colour and name. */
function runLabel(run, ...more) {
  return el('span', { class: `run-name run-${run.index}` }, el('i', { class: 'swatch' }), el('span', {}, run.name), ...more);
}

function table(headers, rows, attributes = {}) {
  return el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': attributes.label },
    el('table', { class: attributes.class }, el('thead', {}, el('tr', {}, headers.map((header) => el('th', { scope: 'col' }, header)))), el('tbody', {}, rows)));
}

/** Returns a group of buttons of which exactly one is pressed. */
function segmented(label, choices, current, choose) {
  const buttons = choices.map(([value, text]) =>
    el('button', { 'aria-pressed': String(value === current), 'data-choice': value, onclick: () => {
      buttons.forEach((button) => button.setAttribute('aria-pressed', String(button.dataset.choice === value)));
      choose(value);
    } }, text));
  return el('div', { class: 'segmented', role: 'group', 'aria-label': label }, buttons);
}

const empty = (text) => el('p', { class: 'empty' }, text);

function makeRuns(body, app) {
  const { key_options: keys, differing } = app.data;
  const shown = [...keys, ...differing];
  const written = (value) => (value === null || value === undefined || value === '' ? '–' : String(value));
  const varies = new Set(shown.filter((key) => new Set(app.runs.filter((run) => run.kind === app.runs[0].kind).map((run) => written(run.options[key]))).size > 1));
  const names = { k: 'k', rollouts: 'N (rollouts)', prompts: 'G (prompts)' };
  const rows = app.runs.map((run) =>
    el('tr', {}, el('th', { scope: 'row' }, runLabel(run)), el('td', {}, progressOf(run)),
      shown.map((key) => el('td', { class: varies.has(key) ? 'differs' : null }, key === 'model' && run.kind === 'run' && run.options.model === null ? 'new' : written(run.options[key])))));
  body.append(table(['run', 'progress', ...shown.map((key) => names[key] ?? key)], rows, { class: 'runs', label: 'Runs and their options' }));
  if (varies.size) body.append(el('p', { class: 'caption' }, 'Bold: options that differ between the runs.'));
  const notes = app.runs.flatMap((run) => run.notes.map((note) => el('li', {}, runLabel(run), ' ', note)));
  if (notes.length) body.append(el('ul', { class: 'notes' }, notes));
  return {};
}

function progressOf(run) {
  if (run.kind === 'evaluation') return 'evaluation';
  const last = run.steps[run.steps.length - 1].toLocaleString('en');
  return typeof run.options.steps === 'number' ? `${last} of ${run.options.steps.toLocaleString('en')} steps` : `${last} steps`;
}

function makeCoverage(body, app) {
  let mode = 'ends';
  const host = el('div', { class: 'plot' });
  const numbers = el('div', {});
  body.append(segmented('Evaluations', [['ends', 'First and last'], ['step', 'At the step']], mode, (value) => {
    mode = value;
    render();
  }), host, numbers);

  function chosen() {
    const shown = [];
    for (const run of app.visible()) {
      const { coverage } = run;
      if (!coverage.length) continue;
      const until = coverage.filter(({ step }) => step === null || step <= app.step);
      const picked = mode === 'step' ? until.slice(-1) : coverage.length > 1 ? [coverage[0], coverage[coverage.length - 1]] : coverage;
      picked.forEach((evaluation, i) => shown.push({ run, evaluation, role: i === 0 && picked.length > 1 ? 'first' : '' }));
    }
    return shown;
  }

  function render() {
    const shown = chosen();
    const ks = [...new Set(shown.flatMap(({ evaluation }) => evaluation.rows.map(([k]) => k)))].sort((a, b) => a - b);
    if (!shown.length) {
      host.replaceChildren();
      observeWidth(host, () => {});
      numbers.replaceChildren(empty('The visible runs have no evaluation up to this step.'));
      return;
    }
    const marks = shown.flatMap(({ run, evaluation: { rows }, role }) => {
      const column = (i) => rows.map((row) => row[i]);
      const line = { run: run.index, role, xs: column(0), ys: column(1) };
      return [{ ...line, type: 'band', ys: column(2), highs: column(3) }, { ...line, type: 'line' }, { ...line, type: 'dots' }];
    });
    const values = shown.flatMap(({ evaluation }) => evaluation.rows.flatMap((row) => row.slice(1))).filter((value) => value !== null);
    const [, high] = niceRange(0, Math.max(...values, 0));
    drawChart(host, {
      label: 'pass@k by k', height: 300, marks,
      x: { kind: 'binary', low: ks[0], high: Math.max(ks[ks.length - 1], ks[0] * 2), title: 'k, samples per prompt', ticks: ks },
      y: { kind: 'linear', low: Math.min(0, ...values), high: Math.min(high, Math.max(1, ...values)), title: 'pass@k' },
      find: (x) => {
        const k = ks[nearest(ks.map(Math.log2), Math.log2(x))];
        const rows = shown.flatMap(({ run, evaluation }) => {
          const row = evaluation.rows.find((row) => row[0] === k);
          if (!row) return [];
          const interval = row[2] === null ? '' : `  [${short(row[2])}, ${short(row[3])}]`;
          return [{ run: run.index, name: `${run.name}${whenOf(evaluation)}`, text: exact(row[1]) + interval }];
        });
        return { x: k, y: null, title: `pass@${k}`, rows };
      },
    });
    numbers.replaceChildren(table(['run', 'evaluation', ...ks.map((k) => `pass@${k}`)], shown.map(({ run, evaluation, role }) =>
      el('tr', {}, el('th', { scope: 'row' }, runLabel(run)), el('td', { class: role }, whenOf(evaluation).replace(', ', '') || '–'),
        ks.map((k) => {
          const row = evaluation.rows.find((row) => row[0] === k) ?? [k, null, null, null];
          const interval = row[2] === null ? '' : ` ${row[2].toFixed(3)}–${row[3]?.toFixed(3)}`;
          return el('td', { class: 'number', title: exact(row[1]) }, row[1] === null ? '–' : row[1].toFixed(3), el('small', {}, interval));
        }))), { class: 'numbers', label: 'pass@k as numbers' }));
  }
  return { render, moveStep: () => mode === 'step' && render() };
}

const whenOf = ({ step }) => (step === null ? '' : `, step ${step.toLocaleString('en')}`);

function makeWeights(body, app) {
  const host = el('div', { class: 'plot' });
  const reasons = el('ul', { class: 'reasons' });
  const rates = app.data.pass_rates;
  body.append(host, el('p', { class: 'caption' }, 'Dashed: 1/p, the weight of maximum likelihood. The weights are exact for each run’s N and k.'), reasons);
  function render() {
    const runs = app.visible().filter((run) => run.kind === 'run');
    const known = runs.filter((run) => run.weight.values);
    const lines = known.map((run) => ({ type: 'line', run: run.index, xs: rates, ys: run.weight.values }));
    const likelihood = rates.map((p) => 1 / p);
    const most = Math.max(1, ...known.flatMap((run) => run.weight.values));
    drawChart(host, {
      label: 'Weight of a prompt’s gradient by its pass rate', height: 300,
      marks: [{ type: 'line', run: 'none', role: 'reference', xs: rates, ys: likelihood }, ...lines],
      x: { kind: 'log', low: rates[0], high: 1, title: 'pass rate p' },
      y: { kind: 'log', low: 0.01, high: 3 * most, title: 'W_N(p)' },
      find: (x) => {
        const i = nearest(rates, x);
        const rows = known.map((run) => ({ run: run.index, name: run.name, text: short(run.weight.values[i]) }));
        return { x: rates[i], y: null, title: `p = ${short(rates[i])}`, rows: [...rows, { run: 'none', name: '1/p', text: short(likelihood[i]) }] };
      },
    });
    reasons.replaceChildren(...runs.filter((run) => !run.weight.values).map((run) => el('li', {}, runLabel(run), ` no weight: ${run.weight.reason}`)));
  }
  return { render };
}

const MOST_DRAWN = 20000; // points drawn per run; the pointer finds all points

function makeNorms(body, app) {
  let mode = 'all';
  const host = el('div', { class: 'plot' });
  const caption = el('p', { class: 'caption' });
  body.append(segmented('Steps', [['all', 'All steps'], ['step', 'At the step']], mode, (value) => {
    mode = value;
    render();
  }), host, caption);

  function render() {
    const sets = app.visible().filter((run) => run.points.step.length).map((run) => ({ run, ...chosenPoints(run) }));
    const points = sets.flatMap(({ run, indices }) => indices.map((i) => run.points.grad_norm[i]));
    let most = 0;
    for (const norm of points) if (norm > most) most = norm;
    const marks = sets.flatMap(({ run, indices }) => {
      const every = Math.ceil(indices.length / MOST_DRAWN) || 1;
      const drawn = indices.filter((_, i) => i % every === 0);
      const means = meansByRate(run.points, indices);
      return [
        { type: 'dots', role: 'faint', run: run.index, xs: drawn.map((i) => run.points.pass_rate[i]), ys: drawn.map((i) => run.points.grad_norm[i]) },
        { type: 'line', run: run.index, xs: means.map(([rate]) => rate), ys: means.map(([, mean]) => mean) },
      ];
    });
    drawChart(host, {
      label: 'Gradient norm of each prompt by its pass rate', height: 300, marks,
      x: { kind: 'linear', low: 0, high: 1, title: 'pass rate of the prompt' },
      y: { kind: 'linear', low: 0, high: niceRange(0, most)[1], title: 'gradient norm' },
      find: (x, y, pointer) => findPoint(sets, pointer),
    });
    const when = sets.map(({ run, step, indices }) => `${run.name}: ${indices.length.toLocaleString('en')} prompts${step === null ? '' : ` at step ${step}`}`);
    caption.textContent = when.length ? `Line: mean by pass rate. ${when.join('; ')}.` : 'The visible runs have no diagnosed prompts.';
  }

  /** Returns the points of all diagnosed steps, or those of the last diagnosed step up to the slider. */
  function chosenPoints(run) {
    const steps = run.points.step;
    const all = steps.map((_, i) => i);
    if (mode === 'all') return { indices: all, step: null };
    const step = steps.reduce((last, step) => (step <= app.step && step > last ? step : last), -1);
    return { indices: all.filter((i) => steps[i] === step), step: step < 0 ? null : step };
  }
  return { render, moveStep: () => mode === 'step' && render() };
}

/** Returns the mean norm at each pass rate, or in 20 bins if there are many rates. */
function meansByRate({ pass_rate: rates, grad_norm: norms }, indices) {
  const isMany = new Set(indices.map((i) => rates[i])).size > 65;
  const sums = new Map();
  for (const i of indices) {
    const at = isMany ? (Math.min(19, Math.floor(rates[i] * 20)) + 0.5) / 20 : rates[i];
    const [sum, count] = sums.get(at) ?? [0, 0];
    sums.set(at, [sum + norms[i], count + 1]);
  }
  return [...sums].map(([rate, [sum, count]]) => [rate, sum / count]).sort((a, b) => a[0] - b[0]);
}

function findPoint(sets, { px, py, toX, toY }) {
  let best = null;
  let least = 24 ** 2; // pixels
  for (const { run, indices } of sets) {
    for (const i of indices) {
      const distance = (toX(run.points.pass_rate[i]) - px) ** 2 + (toY(run.points.grad_norm[i]) - py) ** 2;
      if (distance < least) [best, least] = [{ run, i }, distance];
    }
  }
  if (!best) return null;
  const { run, i } = best;
  const [step, id, rate, norm] = ['step', 'id', 'pass_rate', 'grad_norm'].map((key) => run.points[key][i]);
  const row = (name, value) => ({ run: run.index, name, text: exact(value) });
  return { x: rate, y: norm, title: `${run.name}, step ${step}${id === null ? '' : `, prompt ${id}`}`, rows: [row('pass rate', rate), row('gradient norm', norm)] };
}

function makeTimings(body, app) {
  const host = el('div', { class: 'plot' });
  const caption = el('p', { class: 'caption' });
  body.append(host, caption);
  function render() {
    const runs = app.visible().filter((run) => Object.keys(run.seconds).length);
    const draw = () => host.clientWidth && host.replaceChildren(drawBars(runs, host.clientWidth));
    draw();
    observeWidth(host, draw);
    const partial = runs.filter((run) => run.seconds_from === 'metrics.jsonl').map((run) => run.name);
    const totals = runs.map((run) => `${run.name} ${short(totalOf(run))} s`);
    caption.textContent = !runs.length ? 'The visible runs have no timings.' :
      `Total: ${totals.join('; ')}.${partial.length ? ` Sums of metrics.jsonl only, because timings.json is missing: ${partial.join(', ')}.` : ''}`;
  }
  return { render };
}

const totalOf = (run) => Object.values(run.seconds).reduce((sum, value) => sum + value, 0);

function drawBars(runs, width) {
  const stages = [...new Set(runs.flatMap((run) => Object.keys(run.seconds)))];
  const cut = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);
  const left = 14 + Math.max(0, ...stages.map((stage) => cut(stage).length)) * 6.6;
  const most = Math.max(...runs.flatMap((run) => Object.values(run.seconds)), 1e-9);
  const room = Math.max(20, width - left - 110);
  const [bar, gap] = [14, 12];
  const rows = [];
  let y = 4;
  for (const stage of stages) {
    const own = runs.filter((run) => stage in run.seconds);
    rows.push(svg('text', { class: 'stage', x: left - 10, y: y + (own.length * (bar + 4) - 4) / 2, dy: '0.35em', 'text-anchor': 'end' }, cut(stage)));
    for (const run of own) {
      const seconds = run.seconds[stage];
      const length = Math.max(1, (seconds / most) * room);
      const share = totalOf(run) ? Math.round((100 * seconds) / totalOf(run)) : 0;
      rows.push(
        svg('rect', { class: `bar run-${run.index}`, 'data-run': run.index, x: left, y, width: length, height: bar, rx: 2 }, svg('title', {}, `${run.name}, ${stage}: ${exact(seconds)} s`)),
        svg('text', { class: 'amount', x: left + length + 7, y: y + bar / 2, dy: '0.35em' }, `${seconds < 1e4 ? seconds.toFixed(1) : short(Math.round(seconds))} s · ${share}%`));
      y += bar + 4;
    }
    y += gap;
  }
  return svg('svg', { class: 'chart', width, height: y, viewBox: `0 0 ${width} ${y}`, role: 'img', 'aria-label': 'Seconds by stage' }, rows);
}

function makeWarnings(body, app) {
  const host = el('div', {});
  body.append(host);
  function render() {
    const found = app.visible().flatMap((run) => run.warnings.map((warning) => ({ run, ...warning })));
    found.sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
    host.replaceChildren(found.length ? el('ul', { class: 'warnings' }, found.map(({ run, step, kind, message }) =>
      el('li', {}, el('span', { class: 'number' }, `step ${exact(step)}`), runLabel(run), el('code', {}, kind), el('p', {}, message)))) : empty('No warnings.'));
  }
  return { render };
}

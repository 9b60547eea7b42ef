// The other panels: runs, coverage, weights, gradient norms, timings, warnings.

function makeRuns(body, app) {
  const { key_options: keys, differing } = app.data;
  const written = (run, key) => {
    const value = run.options[key];
    if (key === 'model' && run.kind === 'run' && value === null) return 'new';
    return value === null || value === undefined || value === '' ? '–' : String(value);
  };
  const names = { rollouts: 'N (rollouts)', prompts: 'G (prompts)' };
  const shown = [...keys, ...differing];
  const varies = shown.filter((key) => new Set(app.runs.filter((run) => run.kind === app.runs[0].kind).map((run) => written(run, key))).size > 1);
  const same = shown.filter((key) => !varies.includes(key) && written(app.runs[0], key) !== '–');
  const rows = app.runs.map((run) =>
    el('tr', {}, el('th', { scope: 'row' }, runLabel(run)), el('td', {}, progressOf(run)), varies.map((key) => el('td', {}, written(run, key)))));
  body.append(table(['run', 'progress', ...varies.map((key) => names[key] ?? key)], rows, { class: 'runs', label: 'Runs and their options' }));
  if (same.length) {
    body.append(el('dl', { class: 'same' }, el('dt', {}, app.runs.length > 1 ? 'The same in all:' : 'Options:'),
      same.map((key) => el('dd', {}, `${names[key] ?? key} `, el('b', {}, written(app.runs[0], key))))));
  }
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
  const state = { mode: 'ends', set: '' }; // '': the mean over the held-out sets, or the only one
  const sets = [...new Set(app.runs.flatMap((run) => Object.keys(run.sets)))];
  const host = el('div', { class: 'plot' });
  const numbers = el('div', {});
  const ofSet = (run) => (state.set ? run.sets[state.set] ?? [] : run.coverage);
  body.append(controlsOf(state, () => [
    app.hasSteps && [segmented, 'mode', 'Evaluations', [['ends', 'First and last'], ['step', 'At the step']]],
    sets.length && [select, 'set', 'held-out set', [['', 'mean over sets'], ...sets.map((name) => [name, name])]],
  ], render), host, numbers);

  function chosen() {
    return app.lines().flatMap((line) => {
      const picked = line.runs.map(ofSet).filter((coverage) => coverage.length).map((coverage) => {
        const until = coverage.filter(({ step }) => step === null || step <= app.step);
        return state.mode === 'step' ? until.slice(-1) : coverage.length > 1 ? [coverage[0], coverage[coverage.length - 1]] : coverage;
      });
      const places = [...Array(Math.max(0, ...picked.map((evaluations) => evaluations.length))).keys()];
      return places.map((i) => ({
        run: line, role: i === 0 && places.length > 1 ? 'first' : '', evaluation: mergedEvaluation(picked.map((evaluations) => evaluations[i]).filter(Boolean)),
      }));
    });
  }

  function render() {
    const shown = chosen();
    const ks = [...new Set(shown.flatMap(({ evaluation }) => evaluation.rows.map(([k]) => k)))].sort((a, b) => a - b);
    if (!shown.length) {
      clearChart(host);
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
      label: `${score} by k`, height: 300, marks,
      x: { kind: 'binary', low: ks[0], high: Math.max(ks[ks.length - 1], ks[0] * 2), title: 'k, samples per prompt', ticks: ks.filter((_, i) => i % Math.ceil(ks.length / 12) === 0) },
      y: { kind: 'linear', low: Math.min(0, ...values), high: Math.min(high, Math.max(1, ...values)), title: score },
      find: (x) => {
        const k = ks[nearest(ks.map(Math.log2), Math.log2(x))];
        const rows = shown.flatMap(({ run, evaluation }) => {
          const row = evaluation.rows.find((row) => row[0] === k);
          if (!row) return [];
          const interval = row[2] === null ? '' : `  [${short(row[2])}, ${short(row[3])}]`;
          return [{ run: run.index, name: `${run.name}${whenOf(evaluation)}`, text: exact(row[1]) + interval }];
        });
        return { title: scoreName(k), rows };
      },
    });
    numbers.replaceChildren(table(['run', 'evaluation', ...ks.map(scoreName)], shown.map(({ run, evaluation, role }) =>
      el('tr', {}, el('th', { scope: 'row' }, runLabel(run)), el('td', { class: role }, whenOf(evaluation).replace(', ', '') || '–'),
        ks.map((k) => {
          const row = evaluation.rows.find((row) => row[0] === k) ?? [k, null, null, null];
          const interval = row[2] === null ? '' : ` ${row[2].toFixed(3)}–${row[3]?.toFixed(3)}`;
          return el('td', { class: 'number', title: exact(row[1]) }, row[1] === null ? '–' : row[1].toFixed(3), el('small', {}, interval));
        }))), { class: 'numbers', label: `${score} as numbers` }));
  }
  return { render, moveStep: () => state.mode === 'step' && render() };
}

/** Returns one evaluation as it is; those of several seeds as their mean, with a standard error to each side. */
function mergedEvaluation(evaluations) {
  if (evaluations.length === 1) return evaluations[0];
  const ks = [...new Set(evaluations.flatMap(({ rows }) => rows.map(([k]) => k)))].sort((a, b) => a - b);
  const rows = ks.map((k) => {
    const { mean, error } = meanAndError(evaluations.map(({ rows }) => rows.find((row) => row[0] === k)?.[1] ?? null));
    return [k, mean, error === null ? null : mean - error, error === null ? null : mean + error];
  });
  const [from, to] = extent(evaluations.map(({ step }) => step));
  return { step: from === to ? from : null, when: from < to ? `, steps ${count(from)} to ${count(to)}` : undefined, rows };
}

const whenOf = ({ step, when }) => when ?? (step === null ? '' : `, step ${step.toLocaleString('en')}`);

function makeWeights(body, app) {
  const host = el('div', { class: 'plot' });
  const reasons = el('ul', { class: 'reasons' });
  const rates = app.data.pass_rates;
  body.append(host, el('p', { class: 'caption' }, 'Dashed: 1/p, the weight of maximum likelihood. The weights are exact for each run’s N and k.'), reasons);
  function render() {
    const runs = app.lines().filter((line) => line.kind === 'run').map((line) => ({ ...line, weight: line.runs[0].weight }));
    const known = runs.filter((run) => run.weight.values);
    const lines = known.map((run) => ({ type: 'line', run: run.index, xs: rates, ys: run.weight.values }));
    const likelihood = rates.map((p) => 1 / p);
    const most = Math.max(1, ...known.flatMap((run) => run.weight.values));
    drawChart(host, {
      label: 'Weight of a prompt’s gradient by its pass rate', height: 300,
      marks: [{ type: 'line', run: 'muted', role: 'reference', xs: rates, ys: likelihood }, ...lines],
      x: { kind: 'log', low: rates[0], high: 1, title: 'pass rate p' },
      y: { kind: 'log', low: 0.01, high: 3 * most, title: 'W_N(p)' },
      find: (x) => {
        const i = nearest(rates, x);
        const rows = known.map((run) => ({ run: run.index, name: run.name, text: short(run.weight.values[i]) }));
        return { title: `p = ${short(rates[i])}`, rows: [...rows, { run: 'muted', name: '1/p', text: short(likelihood[i]) }] };
      },
    });
    reasons.replaceChildren(...runs.filter((run) => !run.weight.values).map((run) => el('li', {}, runLabel(run), ` no weight: ${run.weight.reason}`)));
  }
  return { render };
}

const MOST_DRAWN = 20000; // points drawn per run; the pointer finds all points

function makeNorms(body, app) {
  const state = { mode: 'all' };
  const host = el('div', { class: 'plot' });
  const caption = el('p', { class: 'caption' });
  body.append(controlsOf(state, () => [[segmented, 'mode', 'Steps', STEPS]], render), host, caption);

  function render() {
    const sets = app.lines().map((line) => ({ line, points: line.runs.flatMap(chosenPoints) })).filter(({ points }) => points.length);
    const [, most] = extent(sets.flatMap(({ points }) => points.map(({ norm }) => norm)));
    const marks = sets.flatMap(({ line, points }) => {
      const every = Math.ceil(points.length / MOST_DRAWN);
      const drawn = points.filter((_, i) => i % every === 0);
      const means = meansByRate(points);
      return [
        { type: 'scatter', run: line.index, xs: drawn.map(({ rate }) => rate), ys: drawn.map(({ norm }) => norm) },
        { type: 'line', run: line.index, xs: means.map(([rate]) => rate), ys: means.map(([, mean]) => mean) },
      ];
    });
    drawChart(host, {
      label: 'Gradient norm of each prompt by its pass rate', height: 300, marks,
      x: { kind: 'linear', low: 0, high: 1, title: 'pass rate of the prompt' },
      y: { kind: 'linear', low: 0, high: niceRange(0, Math.max(0, most))[1], title: 'gradient norm' },
      find: (x, y, pointer) => findPoint(sets, pointer),
    });
    const when = sets.map(({ line, points }) => `${line.name}: ${plural(points.length, 'prompt')}${state.mode === 'all' ? '' : ` at step ${points[0].step}`}`);
    caption.textContent = when.length ? `Line: mean by pass rate. ${when.join('; ')}.` : 'The visible runs have no diagnosed prompts.';
  }

  function chosenPoints(run) {
    const { step: steps, id, pass_rate: rates, grad_norm: norms } = run.points;
    const points = steps.map((step, i) => ({ run, step, id: id[i], rate: rates[i], norm: norms[i] }));
    return state.mode === 'all' ? points : atStep(points, app.step);
  }
  return { render, moveStep: () => state.mode === 'step' && render() };
}

/** Returns the mean norm at each pass rate, or in 20 bins if there are many rates. */
function meansByRate(points) {
  const isMany = new Set(points.map(({ rate }) => rate)).size > 65;
  const sums = new Map();
  for (const { rate, norm } of points) {
    const at = isMany ? (Math.min(19, Math.floor(rate * 20)) + 0.5) / 20 : rate;
    const [sum, number] = sums.get(at) ?? [0, 0];
    sums.set(at, [sum + norm, number + 1]);
  }
  return [...sums].map(([rate, [sum, number]]) => [rate, sum / number]).sort((a, b) => a[0] - b[0]);
}

function findPoint(sets, { px, py, toX, toY }) {
  let best = null;
  let least = 24 ** 2; // pixels
  for (const { points } of sets) {
    for (const point of points) {
      const distance = (toX(point.rate) - px) ** 2 + (toY(point.norm) - py) ** 2;
      if (distance < least) [best, least] = [point, distance];
    }
  }
  if (!best) return null;
  const { run, step, id, rate, norm } = best;
  const row = (name, value) => ({ run: run.index, name, text: exact(value) });
  return { title: `${run.name}, step ${step}${id === null ? '' : `, prompt ${id}`}`, rows: [row('pass rate', rate), row('gradient norm', norm)] };
}

function makeTimings(body, app) {
  const host = el('div', {});
  const caption = el('p', { class: 'caption' });
  body.append(host, caption);
  function render() {
    const lines = app.lines().map((line) => ({ ...line, runs: line.runs.filter((run) => Object.keys(run.seconds).length) })).filter(({ runs }) => runs.length);
    const mean = (line, stage) => meanOf(line.runs.map((run) => run.seconds[stage] ?? 0));
    const stages = [...new Set(lines.flatMap(({ runs }) => runs.flatMap((run) => Object.keys(run.seconds))))];
    const total = new Map(lines.map((line) => [line, stages.reduce((sum, stage) => sum + mean(line, stage), 0)]));
    host.replaceChildren(drawBars('Seconds by stage', stages.map((stage) => ({
      label: stage,
      bars: lines.filter(({ runs }) => runs.some((run) => stage in run.seconds)).map((line) => {
        const seconds = mean(line, stage);
        const share = total.get(line) ? Math.round((100 * seconds) / total.get(line)) : 0;
        return { run: line, value: seconds, text: `${seconds < 1e4 ? seconds.toFixed(1) : short(Math.round(seconds))} s · ${share}%` };
      }),
    }))));
    const partial = lines.flatMap(({ runs }) => runs.filter((run) => run.seconds_from === 'metrics.jsonl').map((run) => run.name));
    const totals = lines.map((line) => `${line.name} ${short(total.get(line))} s`);
    caption.textContent = !lines.length ? 'The visible runs have no timings.' :
      `Total: ${totals.join('; ')}.${partial.length ? ` Sums of metrics.jsonl only, because timings.json is missing: ${partial.join(', ')}.` : ''}`;
  }
  return { render };
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

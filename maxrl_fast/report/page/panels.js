// The other panels: runs, coverage, weights, gradient norms, warnings.

function makeRuns(body, app) {
  const { key_options: keys, differing } = app.data;
  const names = { rollouts: 'N (rollouts)', prompts: 'G (prompts)' };
  const nameOf = (key) => names[key] ?? key;
  const written = ({ kind, options }, key) => String(options[key] ?? (key === 'model' && kind === 'run' ? 'new' : '')) || '–';
  const shown = [...keys, ...differing];
  const [first] = app.runs;
  const varies = shown.filter((key) => unique(app.runs.filter(({ kind }) => kind === first.kind).map((run) => written(run, key))).length > 1);
  const same = shown.filter((key) => !varies.includes(key) && written(first, key) !== '–');
  const rows = app.runs.map((run) =>
    el('tr', {}, el('th', { scope: 'row' }, runLabel(run)), el('td', {}, progressOf(run)), varies.map((key) => el('td', {}, written(run, key)))));
  const notes = app.runs.flatMap((run) => run.notes.map((note) => el('li', {}, runLabel(run), ' ', note)));
  body.append(table(['run', 'progress', ...varies.map(nameOf)], rows, { class: 'runs', label: 'Runs and their options' }));
  if (same.length) {
    body.append(el('dl', { class: 'same' }, el('dt', {}, app.runs.length > 1 ? 'The same in all:' : 'Options:'),
      same.map((key) => el('dd', {}, `${nameOf(key)} `, el('b', {}, written(first, key))))));
  }
  if (notes.length) body.append(el('ul', { class: 'notes' }, notes));
  return {};
}

function progressOf({ kind, steps, options }) {
  if (kind === 'evaluation') return 'evaluation';
  return `${count(steps.at(-1))}${typeof options.steps === 'number' ? ` of ${count(options.steps)}` : ''} steps`;
}

function makeCoverage(body, app) {
  const state = { mode: 'ends', set: '' }; // '': the mean over the held-out sets, or the only one
  const sets = unique(app.runs.flatMap((run) => Object.keys(run.sets)));
  const host = el('div', { class: 'plot' });
  const numbers = el('div');
  body.append(controlsOf(state, () => [
    app.hasSteps && [segmented, 'mode', 'Evaluations', [['ends', 'First and last'], ['step', 'At the step']]],
    sets.length && [select, 'set', 'held-out set', [['', 'mean over sets'], ...sets.map((name) => [name, name])]],
  ], render), host, numbers);

  function evaluationsOf(run) {
    const all = state.set ? run.sets[state.set] ?? [] : run.coverage;
    if (state.mode === 'step') return all.filter(({ step }) => step === null || step <= app.step).slice(-1);
    return all.length > 1 ? [all[0], all.at(-1)] : all;
  }

  function chosen() {
    return app.lines().flatMap((line) => {
      const found = line.runs.map(evaluationsOf);
      const [first, last] = [0, 1].map((i) => found.map((own) => own[i]).filter(Boolean));
      return [[first, last.length && 'first'], [last, '']].filter(([own]) => own.length)
        .map(([own, role]) => ({ run: line, role: role || '', ...mergedEvaluation(own) }));
    });
  }

  function render() {
    const shown = chosen();
    const ks = ascending(shown.flatMap(({ rows }) => rows.map(([k]) => k)));
    if (!shown.length) {
      clearChart(host);
      numbers.replaceChildren(empty('The visible runs have no evaluation up to this step.'));
      return;
    }
    const marks = shown.flatMap(({ run, rows, role }) => {
      const column = (i) => rows.map((row) => row[i]);
      const line = { run: run.index, role, xs: column(0), ys: column(1) };
      return [{ ...line, type: 'band', ys: column(2), highs: column(3) }, { ...line, type: 'line' }, { ...line, type: 'dots' }];
    });
    const values = shown.flatMap(({ rows }) => rows.flatMap((row) => row.slice(1))).filter((value) => value !== null);
    const [, high] = niceRange(0, Math.max(...values, 0));
    drawChart(host, {
      label: `${score} by k`, height: 300, marks,
      x: { kind: 'binary', low: ks[0], high: Math.max(ks.at(-1), ks[0] * 2), title: 'k, samples per prompt', ticks: ks.filter((_, i) => i % Math.ceil(ks.length / 12) === 0) },
      y: { kind: 'linear', low: Math.min(0, ...values), high: Math.min(high, Math.max(1, ...values)), title: score },
      find: (x) => {
        const k = ks[nearest(ks.map(Math.log2), Math.log2(x))];
        const found = shown.map((own) => ({ ...own, row: own.rows.find((row) => row[0] === k) })).filter(({ row }) => row);
        return { title: scoreName(k), rows: found.map(({ run, when, row: [, value, low, high] }) => (
          { run: run.index, name: run.name + when, text: exact(value) + (low === null ? '' : `  [${short(low)}, ${short(high)}]`) })) };
      },
    });
    numbers.replaceChildren(table(['run', 'evaluation', ...ks.map(scoreName)], shown.map(({ run, when, rows, role }) =>
      el('tr', {}, el('th', { scope: 'row' }, runLabel(run)), el('td', { class: role }, when.replace(', ', '') || '–'),
        ks.map((k) => {
          const [, value, low, high] = rows.find((row) => row[0] === k) ?? [k, null, null, null];
          return el('td', { class: 'number', title: exact(value) }, value === null ? '–' : value.toFixed(3), el('small', {}, low === null ? '' : ` ${low.toFixed(3)}–${high.toFixed(3)}`));
        }))), { class: 'numbers', label: `${score} as numbers` }));
  }
  return { render, moveStep: () => state.mode === 'step' && render() };
}

/** Returns one evaluation as it is; those of several seeds as their mean, with a standard error to each side. */
function mergedEvaluation(evaluations) {
  if (evaluations.length === 1) return { rows: evaluations[0].rows, when: whenOf(evaluations[0]) };
  const rows = ascending(evaluations.flatMap(({ rows }) => rows.map(([k]) => k))).map((k) => {
    const { mean, error } = meanAndError(evaluations.map(({ rows }) => rows.find((row) => row[0] === k)?.[1] ?? null));
    return error === null ? [k, mean, null, null] : [k, mean, mean - error, mean + error];
  });
  const [from, to] = extent(evaluations.map(({ step }) => step));
  return { rows, when: from < to ? `, steps ${count(from)} to ${count(to)}` : whenOf(evaluations[0]) };
}

const whenOf = ({ step }) => (step === null ? '' : `, step ${count(step)}`);

function makeWeights(body, app) {
  const host = el('div', { class: 'plot' });
  const reasons = el('ul', { class: 'reasons' });
  const rates = app.data.pass_rates;
  const likelihood = rates.map((p) => 1 / p);
  body.append(host, el('p', { class: 'caption' }, 'Dashed: 1/p, the weight of maximum likelihood. The weights are exact for each run’s N and k.'), reasons);
  function render() {
    const lines = app.lines().filter(({ kind }) => kind === 'run').map(({ index, name, runs }) => ({ index, name, ...runs[0].weight }));
    const known = lines.filter(({ values }) => values);
    drawChart(host, {
      label: 'Weight of a prompt’s gradient by its pass rate', height: 300,
      marks: [{ type: 'line', run: 'muted', role: 'reference', xs: rates, ys: likelihood }, ...known.map(({ index, values }) => ({ type: 'line', run: index, xs: rates, ys: values }))],
      x: { kind: 'log', low: rates[0], high: 1, title: 'pass rate p' },
      y: { kind: 'log', low: 0.01, high: 3 * Math.max(1, ...known.flatMap(({ values }) => values)), title: 'W_N(p)' },
      find: (x) => {
        const i = nearest(rates, x);
        const rows = [...known, { index: 'muted', name: '1/p', values: likelihood }];
        return { title: `p = ${short(rates[i])}`, rows: rows.map(({ index, name, values }) => ({ run: index, name, text: short(values[i]) })) };
      },
    });
    reasons.replaceChildren(...lines.filter(({ values }) => !values).map((line) => el('li', {}, runLabel(line), ` no weight: ${line.reason}`)));
  }
  return { render };
}

function makeWarnings(body, app) {
  function render() {
    const found = app.visible().flatMap((run) => run.warnings.map((warning) => ({ run, ...warning }))).sort((a, b) => a.step - b.step);
    body.replaceChildren(found.length ? el('ul', { class: 'warnings' }, found.map(({ run, step, kind, message }) =>
      el('li', {}, el('span', { class: 'number' }, `step ${exact(step)}`), runLabel(run), el('code', {}, kind), el('p', {}, message)))) : empty('No warnings.'));
  }
  return { render };
}

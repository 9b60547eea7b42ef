// Curves by step: a chart for every chosen metric of metrics.jsonl and eval.jsonl, with one line per run.

const EVALUATED = 'eval ';
const DEFAULT_CURVES = [
  'reward_mean', 'frac_prompts_solved', 'frac_groups_zero_variance', `${EVALUATED}pass@1`, `${EVALUATED}mean reward`, 'entropy', 'response_length_mean', 'truncated',
  'grad_norm', 'loss', 'kl', 'logprob_diff', 'tokens_per_second', 'carried', 'rounds_mean', 'given_up',
];
const MEANINGS = {
  reward_mean: 'mean reward of the rollouts',
  frac_prompts_solved: 'fraction of prompts with at least one correct rollout',
  frac_groups_zero_variance: 'fraction of prompts whose advantages are all 0',
  entropy: 'nats per token, at the sampling temperature',
  response_length_mean: 'tokens, including the stop token',
  truncated: 'fraction of responses cut off at the length limit',
  grad_norm: 'gradient norm before clipping',
  ratio: 'mean probability ratio to the sampling policy',
  ratio_clamped: 'fraction of tokens with an extreme probability ratio, which was clamped',
  clipped_low: 'fraction of tokens clipped at the lower bound',
  clipped_high: 'fraction of tokens clipped at the upper bound',
  kl: 'KL divergence from the reference policy, nats per token',
  logprob_diff: 'difference of rollout and training log-probs, nats',
  importance_weight: 'mean importance weight of a sampled token',
  importance_bounded: 'fraction of importance weights that were capped or set to 0',
  importance_sample_size: 'effective sample size of the importance weights, of 1',
  frac_sequences_masked: 'fraction of responses left out as too far from the policy',
  carried: 'prompts that stay for the next step',
  rounds_mean: 'mean number of rounds of the prompts that end',
  given_up: 'prompts that end without a success',
  tokens_per_second: 'sampled tokens per second of rollout and training',
};

const WINDOWS = [0, 5, 10, 25, 50, 100];

/** Returns the smoothing at the start: about a fiftieth of the longest run, never off. */
const usualWindow = (runs) => WINDOWS.find((window) => window && window >= Math.max(...runs.map((run) => run.steps.length), 0) / 50) ?? 100;

function makeCurves(body, app) {
  const keys = unique(app.runs.flatMap((run) => [...run.curves.keys()]));
  const isIdle = (key) => key === 'kl' && app.runs.every((run) => (run.curves.get(key)?.ys ?? []).every((value) => !value));
  const chosen = new Set(DEFAULT_CURVES.filter((key) => keys.includes(key) && !isIdle(key)));
  if (!chosen.size) keys.slice(0, 6).forEach((key) => chosen.add(key));
  const number = el('span', {});
  const grid = el('div', { class: 'cards' });
  const choice = el('fieldset', { class: 'choices', 'aria-label': 'Metrics to draw' }, keys.map((key) =>
    el('label', {}, el('input', { type: 'checkbox', value: key, checked: chosen.has(key), onchange: ({ target }) => choose(key, target.checked) }), key),
  ));
  let cards = [];

  function choose(key, isChosen) {
    if (isChosen) chosen.add(key);
    else chosen.delete(key);
    render();
  }

  function render() {
    number.textContent = `${chosen.size} of ${keys.length}`;
    const order = [...DEFAULT_CURVES.filter((key) => chosen.has(key)), ...keys.filter((key) => chosen.has(key) && !DEFAULT_CURVES.includes(key))];
    cards = order.map((key) => makeCard(key, app));
    grid.replaceChildren(...cards.map(({ node }) => node));
    cards.forEach((card) => card.draw());
  }

  const smoothing = controlsOf(app, () => [[select, 'smoothing', 'smoothing', WINDOWS.map((window) => [window, window ? `mean of ${window} steps` : 'off'])]], render);
  body.append(el('div', { class: 'controls' }, el('details', { class: 'chooser' }, el('summary', {}, 'Metrics ', number), choice),
    smoothing, el('span', { class: 'hint' }, 'Drag in a curve to zoom, double-click to zoom out.')), grid);
  return { render, moveStep: () => cards.forEach((card) => card.moveStep()) };
}

function makeCard(key, app) {
  const lines = app.lines().filter((line) => line.has(key));
  const host = el('div', { class: 'plot' });
  const readout = el('p', { class: 'readout', 'aria-label': `${key} at the step` });
  const meaning = MEANINGS[key] ?? (key.startsWith(EVALUATED) ? 'on held-out prompts' : '');
  const node = el('article', { class: 'card', 'data-key': key },
    el('h3', {}, key), el('p', { class: 'meaning' }, meaning), readout, host);
  const curves = lines.map((line) => ({ line, curve: line.curve(key), smooth: line.curve(key, app.smoothing) }));
  let chart = null;

  const moveStep = () => {
    readout.replaceChildren(...curves.map(({ line, curve }) => {
      const { step, value } = valueAt(curve, app.step);
      const isOld = step !== app.step && !curve.sparse;
      return el('span', { run: line.index, 'data-run': line.index, 'data-value': exact(value), title: `${line.name}, step ${step}: ${exact(value)}` },
        swatch(), short(value), isOld ? el('small', {}, `step ${count(step)}`) : null);
    }));
    chart?.moveCursor(app.step);
  };
  const draw = () => {
    chart = drawChart(host, curveSpec(key, curves, app));
    moveStep();
  };
  return { node, draw, moveStep };
}

function curveSpec(key, curves, app) {
  const marks = [];
  for (const { line, curve, smooth } of curves) {
    const { xs, ys } = curve;
    if (smooth.low) marks.push({ type: 'band', run: line.index, xs: smooth.xs, ys: smooth.low, highs: smooth.high });
    if (smooth !== curve && app.smoothing > 1 && !curve.sparse) {
      marks.push({ type: 'line', role: 'raw', run: line.index, xs, ys }, { type: 'line', role: 'smooth', run: line.index, xs: smooth.xs, ys: smooth.ys });
      continue;
    }
    marks.push({ type: 'line', run: line.index, xs, ys });
    if (ys.length <= 40) marks.push({ type: 'dots', run: line.index, xs, ys });
  }
  return {
    label: `${key} by step of ${curves.map(({ line }) => line.name).join(', ') || 'no run'}`,
    height: 190, sync: 'step', x: { kind: 'linear', isWhole: true, ...app.steps }, y: { kind: 'linear' }, marks, cursor: app.step,
    choose: (x) => app.setStep(x),
    find: (x) => findStep(curves, x),
  };
}

/** Returns the step nearest to the pointer, and every line's value there with all its digits. */
function findStep(curves, x) {
  let step = null;
  for (const { curve: { xs } } of curves) {
    const i = nearest(xs, x);
    if (i >= 0 && (step === null || Math.abs(xs[i] - x) < Math.abs(step - x))) step = xs[i];
  }
  if (step === null) return null;
  const rows = [];
  for (const { line, curve } of curves) {
    const i = lastUpTo(curve.xs, step);
    if (i < 0 || curve.xs[i] !== step) continue;
    const error = curve.low && curve.low[i] !== null ? ` ± ${short(curve.ys[i] - curve.low[i])}` : '';
    rows.push({ run: line.index, name: line.name, text: exact(curve.ys[i]) + error });
  }
  return { title: `step ${count(step)}`, rows };
}

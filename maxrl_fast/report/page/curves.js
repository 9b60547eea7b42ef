// Curves by step: a chart for every chosen metric of metrics.jsonl and eval.jsonl, with one line per run.

const EVALUATED = 'eval ';
const DEFAULT_CURVES = [
  'reward_mean', 'frac_prompts_solved', 'frac_groups_zero_variance', `${EVALUATED}pass@1`, 'entropy', 'response_length_mean', 'truncated',
  'grad_norm', 'loss', 'kl', 'logprob_diff', 'tokens_per_second',
];
const MEANINGS = {
  reward_mean: 'mean reward of the rollouts',
  pass_at_1: 'fraction of correct rollouts',
  frac_prompts_solved: 'fraction of prompts with at least one correct rollout',
  frac_groups_zero_variance: 'fraction of prompts whose advantages are all 0',
  entropy: 'nats per token, at the sampling temperature',
  response_length_mean: 'tokens, including the stop token',
  truncated: 'fraction of responses cut off at the length limit',
  loss: 'loss of the whole batch',
  grad_norm: 'gradient norm before clipping',
  moment_variance: 'proxy for the variance of the gradient',
  ratio: 'mean probability ratio to the sampling policy',
  ratio_clamped: 'fraction of tokens with an extreme probability ratio, which was clamped',
  clipped_low: 'fraction of tokens clipped at the lower bound',
  clipped_high: 'fraction of tokens clipped at the upper bound',
  kl: 'KL divergence from the reference policy, nats per token',
  logprob_diff: 'difference of rollout and training log-probs, nats',
  importance_weight: 'mean importance weight of a sampled token',
  lr: 'learning rate',
  num_sequences_trained: 'rollouts used in the update',
  num_tokens: 'sampled response tokens',
  tokens_per_second: 'sampled tokens per second of rollout and training',
  rollout_seconds: 'seconds of rollout',
  train_seconds: 'seconds of computing advantages and updates',
};

/** Returns every curve of a run: key -> {xs, ys}. */
function curvesOf(run) {
  const curves = new Map();
  for (const [key, ys] of Object.entries(run.metrics)) curves.set(key, { xs: run.steps, ys });
  if (run.kind !== 'run') return curves;
  const ks = [...new Set(run.coverage.flatMap(({ rows }) => rows.map(([k]) => k)))].sort((a, b) => a - b);
  for (const k of ks) {
    const points = run.coverage.filter(({ rows }) => rows.some((row) => row[0] === k));
    curves.set(`${EVALUATED}pass@${k}`, { xs: points.map(({ step }) => step), ys: points.map(({ rows }) => rows.find((row) => row[0] === k)[1]), sparse: true });
  }
  for (const [key, ys] of Object.entries(run.eval_metrics)) curves.set(`${EVALUATED}${key}`, { xs: run.eval_steps, ys, sparse: true });
  return curves;
}

/** Returns a curve's value at a step: for training metrics at exactly that step, for evaluations the last one up to it. */
function valueAt({ xs, ys, sparse }, step) {
  const i = lastUpTo(xs, step);
  return i >= 0 && (sparse || xs[i] === step) ? ys[i] : null;
}

function makeCurves(body, app) {
  const keys = [...new Set(app.runs.flatMap((run) => [...run.curves.keys()]))];
  const isIdle = (key) => key === 'kl' && app.runs.every((run) => (run.curves.get(key)?.ys ?? []).every((value) => !value));
  const chosen = new Set(DEFAULT_CURVES.filter((key) => keys.includes(key) && !isIdle(key)));
  if (!chosen.size) keys.slice(0, 6).forEach((key) => chosen.add(key));
  const logs = new Set();
  const count = el('span', {});
  const grid = el('div', { class: 'cards' });
  const choice = el('fieldset', { class: 'choices' }, el('legend', { class: 'hidden' }, 'Metrics to draw'), keys.map((key) =>
    el('label', {}, el('input', { type: 'checkbox', value: key, checked: chosen.has(key), onchange: ({ target }) => choose(key, target.checked) }), key),
  ));
  let cards = [];

  function choose(key, isChosen) {
    if (isChosen) chosen.add(key);
    else chosen.delete(key);
    render();
  }

  function render() {
    count.textContent = `${chosen.size} of ${keys.length}`;
    const order = [...DEFAULT_CURVES.filter((key) => chosen.has(key)), ...keys.filter((key) => chosen.has(key) && !DEFAULT_CURVES.includes(key))];
    cards = order.map((key) => makeCard(key, app, logs, render));
    grid.replaceChildren(...cards.map(({ node }) => node));
    cards.forEach((card) => card.draw());
  }

  const windows = [0, 5, 10, 25, 50, 100];
  const smoothing = el('select', { id: 'smoothing', onchange: () => {
    app.smoothing = Number(smoothing.value);
    render();
  } }, windows.map((window) => el('option', { value: window }, window ? `mean of ${window} steps` : 'off')));
  body.append(el('div', { class: 'controls' }, el('details', { class: 'chooser' }, el('summary', {}, 'Metrics ', count), choice),
    el('label', { class: 'smoothing' }, 'smoothing', smoothing)), grid);
  return { render, moveStep: () => cards.forEach((card) => card.moveStep()) };
}

function makeCard(key, app, logs, render) {
  const runs = app.visible().filter((run) => run.curves.has(key));
  const host = el('div', { class: 'plot' });
  const readout = el('p', { class: 'readout', 'aria-label': `${key} at the step` });
  const isLog = logs.has(key);
  const toggle = el('button', {
    class: 'mini', 'aria-pressed': String(isLog), title: 'Logarithmic axis; values up to 0 are gaps',
    onclick: () => {
      if (isLog) logs.delete(key);
      else logs.add(key);
      render();
    },
  }, 'log');
  const meaning = MEANINGS[key] ?? (key.startsWith(EVALUATED) ? 'on held-out prompts' : '');
  const node = el('article', { class: 'card', 'data-key': key },
    el('header', {}, el('h3', {}, key), toggle), el('p', { class: 'meaning' }, meaning), readout, host);
  let chart = null;

  const moveStep = () => {
    readout.replaceChildren(...runs.map((run) => {
      const value = valueAt(run.curves.get(key), app.step);
      return el('span', { class: `run-${run.index}`, 'data-run': run.index, 'data-value': exact(value), title: `${run.name}: ${exact(value)}` },
        el('i', { class: 'swatch' }), short(value));
    }));
    chart?.moveCursor(app.step);
  };
  const draw = () => {
    chart = drawChart(host, curveSpec(key, runs, app, isLog));
    moveStep();
  };
  return { node, draw, moveStep };
}

function curveSpec(key, runs, app, isLog) {
  let [low, high] = [Infinity, -Infinity];
  const marks = [];
  for (const run of runs) {
    const { xs, ys, sparse } = run.curves.get(key);
    for (const value of ys) {
      if (value === null || (isLog && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    const isSmoothed = app.smoothing > 1 && !sparse;
    marks.push({ type: 'line', run: run.index, xs, ys, role: isSmoothed ? 'raw' : '' });
    if (isSmoothed) marks.push({ type: 'line', run: run.index, xs, ys: smoothed(ys, app.smoothing), role: 'smooth' });
    else if (ys.length <= 40) marks.push({ type: 'dots', run: run.index, xs, ys });
  }
  [low, high] = isLog ? logRange(low, high) : niceRange(low, high);
  return {
    label: `${key} by step of ${runs.map((run) => run.name).join(', ') || 'no run'}`,
    height: 188,
    x: { kind: 'linear', low: app.steps.low, high: app.steps.high, whole: true },
    y: { kind: isLog ? 'log' : 'linear', low, high },
    marks,
    cursor: app.step,
    choose: (x) => app.setStep(x),
    find: (x, y, { py, toY }) => findStep(runs, key, x, py, toY),
  };
}

function logRange(low, high) {
  return low > high ? [0.1, 1] : low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
}

/** Returns the step nearest to the pointer, and every run's value there with all its digits. */
function findStep(runs, key, x, py, toY) {
  let step = null;
  for (const run of runs) {
    const { xs } = run.curves.get(key);
    const i = nearest(xs, x);
    if (i >= 0 && (step === null || Math.abs(xs[i] - x) < Math.abs(step - x))) step = xs[i];
  }
  if (step === null) return null;
  const rows = [];
  let closest = null;
  for (const run of runs) {
    const { xs, ys } = run.curves.get(key);
    const i = lastUpTo(xs, step);
    if (i < 0 || xs[i] !== step) continue;
    rows.push({ run: run.index, name: run.name, text: exact(ys[i]) });
    if (ys[i] !== null && Number.isFinite(toY(ys[i])) && (closest === null || Math.abs(toY(ys[i]) - py) < Math.abs(toY(closest) - py))) closest = ys[i];
  }
  return { x: step, y: closest, title: `step ${step.toLocaleString('en')}`, rows };
}

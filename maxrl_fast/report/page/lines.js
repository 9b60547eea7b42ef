// What the charts draw: a line for each run, or for the seeds of one configuration their mean with its standard error.

// What evaluations are shown by: pass@k, or the mean reward and max@k if a run has rewards other than 0 and 1.
let score = 'pass@k';
const scoreName = (k) => (score === 'pass@k' ? `pass@${k}` : k === 1 ? 'mean reward' : `max@${k}`);

/** Returns every curve of a run: key -> {xs, ys}. */
function curvesOf(run) {
  const curves = new Map();
  for (const [key, ys] of Object.entries(run.metrics)) curves.set(key, { xs: run.steps, ys });
  if (run.kind !== 'run') return curves;
  for (const [set, coverage] of [['', run.coverage], ...Object.entries(run.sets)]) {
    const ks = ascending(coverage.flatMap(({ rows }) => rows.map(([k]) => k)));
    for (const k of ks) {
      const points = coverage.filter(({ rows }) => rows.some((row) => row[0] === k));
      curves.set(`${EVALUATED}${set && `${set} `}${scoreName(k)}`, { xs: points.map(({ step }) => step), ys: points.map(({ rows }) => rows.find((row) => row[0] === k)[1]), sparse: true });
    }
  }
  for (const [key, ys] of Object.entries(run.eval_metrics)) curves.set(`${EVALUATED}${key}`, { xs: run.eval_steps, ys, sparse: true });
  return curves;
}

/** Returns the visible lines: runs, and in place of the visible runs of a group (if seeds are merged) the group. */
function linesOf(runs, { data, seeds }) {
  const lines = [];
  for (const run of runs) {
    const group = seeds === 'mean' ? data.groups.find((group) => group.runs.includes(run.index)) : null;
    const known = group && lines.find((line) => line.group === group);
    if (known) known.runs.push(run);
    else lines.push({ index: run.index, name: group ? group.name : run.name, kind: run.kind, group, runs: [run] });
  }
  for (const line of lines) {
    line.has = (key) => line.runs.some((run) => run.curves.has(key));
    line.curve = (key, window = 0) => mergedCurve(line.runs.filter((run) => run.curves.has(key)).map((run) => smoothedCurve(run.curves.get(key), window)));
  }
  return lines;
}

/** Returns the curve of moving means of the last `window` numbers; gaps stay gaps. */
function smoothedCurve(curve, window) {
  if (window < 2 || curve.sparse) return curve;
  const recent = [];
  let sum = 0;
  const ys = curve.ys.map((value) => {
    if (value === null) return null;
    recent.push(value);
    sum += value;
    if (recent.length > window) sum -= recent[recent.length - 1 - window];
    return sum / Math.min(recent.length, window);
  });
  return { ...curve, ys };
}

/** Returns one curve as it is; several as their mean, with `low` and `high` one standard error away. */
function mergedCurve(curves) {
  if (curves.length === 1) return curves[0];
  const columns = curves.map((curve) => {
    const at = new Map(curve.xs.map((x, i) => [x, curve.ys[i]]));
    const last = curve.xs.at(-1);
    const end = lastNumber(curve)?.value ?? null; // a shorter run keeps its last value, so that the mean has no jump where it ends
    return (x) => (x > last ? end : at.get(x)); // undefined where the run has no such step
  });
  const all = ascending(curves.flatMap((curve) => curve.xs)).map((x) => [x, columns.map((column) => column(x))]);
  const shared = all.filter(([, values]) => !values.includes(undefined)); // a mean over other runs at each step would jump
  const estimates = shared.map(([, values]) => meanAndError(values));
  const side = (sign) => estimates.map(({ mean, error }) => (error === null ? null : mean + sign * error));
  return { xs: shared.map(([x]) => x), sparse: curves[0].sparse, ys: estimates.map(({ mean }) => mean), low: side(-1), high: side(1) };
}

/** Returns the mean of the numbers, and its standard error if there are at least two; null is left out. */
function meanAndError(values) {
  const known = values.filter((value) => value !== null);
  const mean = meanOf(known);
  if (known.length < 2) return { mean, error: null };
  const variance = known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (known.length - 1);
  return { mean, error: Math.sqrt(variance / known.length) };
}

function lastNumber({ xs, ys }) {
  const i = ys.findLastIndex((value) => value !== null);
  return i < 0 ? null : { step: xs[i], value: ys[i] };
}

/**
 * Returns a curve's value at a step, and the step that it is from: for training metrics exactly that step, for evaluations the
 * last one up to it. Behind the end of a curve it keeps its last value.
 */
function valueAt(curve, step) {
  const { xs, ys, sparse } = curve;
  if (step > xs.at(-1)) return lastNumber(curve) ?? { step, value: null };
  const i = lastUpTo(xs, step);
  return i >= 0 && (sparse || xs[i] === step) ? { step: xs[i], value: ys[i] } : { step, value: null };
}

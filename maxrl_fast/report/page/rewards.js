// How the rewards of the samples, and their components, are distributed.

/** Returns the items of the last step that has some, up to `step`; items without a step always count. */
function atStep(items, step) {
  const last = items.reduce((last, item) => (item.step !== null && item.step <= step && item.step > last ? item.step : last), -1);
  return items.filter((item) => item.step === null || item.step === last);
}

function makeRewards(body, app) {
  const state = { source: app.sources[0][0], quantity: 'reward' };
  const host = el('div', {});
  const caption = el('p', { class: 'caption' });
  const value = (sample) => (state.quantity === 'reward' ? sample.reward : sample.components[state.quantity] ?? null);

  function controls() {
    const names = new Set(app.runs.flatMap((run) => run.lazy[state.source].flatMap(({ components }) => Object.keys(components))));
    if (!names.has(state.quantity)) state.quantity = 'reward';
    return [
      app.sources.length > 1 && [segmented, 'source', 'Samples', app.sources],
      names.size && [select, 'quantity', 'quantity', ['reward', ...names].map((name) => [name, name])],
    ];
  }

  function render() {
    const samplesOf = ({ lazy }) => atStep(lazy[state.source], app.step);
    const sets = app.lines().map((line) => ({ line, values: line.runs.flatMap(samplesOf).map(value) })).filter(({ values }) => values.length);
    const known = sets.map(({ line, values }) => ({ line, total: values.length, values: values.filter((value) => value !== null) }));
    const bins = binsOf(known.flatMap(({ values }) => values));
    host.replaceChildren(bins.length ? drawBars(`Histogram of ${state.quantity}`, bins.map(({ label, holds }) => ({
      label,
      bars: known.filter(({ values }) => values.length).map(({ line, values }) => {
        const number = values.filter(holds).length;
        return { run: line, value: number / values.length, text: `${((100 * number) / values.length).toFixed(1)}% · ${count(number)}` };
      }),
    }))) : empty('The visible runs have no such samples.'));
    caption.textContent = known.map(({ line, total, values }) => `${line.name}: mean ${short(meanOf(values))} over ${plural(values.length, 'sample')}${total > values.length ? `, ${count(total - values.length)} without a value` : ''}`).join('; ');
  }
  body.append(controlsOf(state, controls, render), host, caption);
  return { render, moveStep: render };
}

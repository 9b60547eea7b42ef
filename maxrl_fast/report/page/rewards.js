// How the rewards of the samples, and their components, are distributed.

function makeRewards(body, app) {
  const sources = app.sources;
  const state = { source: sources[0][0], mode: 'all', quantity: 'reward' };
  const controls = el('div', { class: 'filters' });
  const host = el('div', {});
  const caption = el('p', { class: 'caption' });
  body.append(controls, host, caption);
  const value = (sample) => (state.quantity === 'reward' ? sample.reward : sample.components[state.quantity] ?? null);

  function fillControls() {
    const names = [...new Set(app.runs.flatMap((run) => run.lazy[state.source].flatMap(({ components }) => Object.keys(components))))];
    if (state.quantity !== 'reward' && !names.includes(state.quantity)) state.quantity = 'reward';
    const set = (name) => (value) => {
      state[name] = value;
      fillControls();
      render();
    };
    controls.replaceChildren(...[
      sources.length > 1 ? segmented('Samples', sources, state.source, set('source')) : null,
      app.hasSteps && segmented('Steps', [['all', 'All steps'], ['step', 'At the step']], state.mode, set('mode')),
      names.length ? select('quantity', 'quantity', [['reward', 'reward'], ...names.map((name) => [name, name])], state.quantity, set('quantity')) : null,
    ].filter(Boolean));
  }

  /** Returns the samples of all steps, or of the last step with samples up to the slider. */
  function samplesOf(run) {
    const samples = run.lazy[state.source];
    if (state.mode === 'all') return samples;
    const last = samples.reduce((last, { step }) => (step !== null && step <= app.step && step > last ? step : last), -1);
    return samples.filter(({ step }) => step === null || step === last);
  }

  function render() {
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
  fillControls();
  return { render, moveStep: () => state.mode === 'step' && render() };
}

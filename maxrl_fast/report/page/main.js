// The page's state (visible runs, step, smoothing), its toolbar and its sections.

const SECTIONS = [
  ['runs', 'Runs', makeRuns, () => true],
  ['curves', 'Curves', makeCurves, (app) => app.runs.some((run) => run.curves.size)],
  ['coverage', 'Coverage', makeCoverage, (app) => app.runs.some((run) => run.coverage.length)],
  ['weights', 'Weight by pass rate', makeWeights, (app) => app.runs.some((run) => run.kind === 'run')],
  ['norms', 'Gradient norm by pass rate', makeNorms, (app) => app.runs.some((run) => run.points.step.length)],
  ['timings', 'Time', makeTimings, (app) => app.runs.some((run) => Object.keys(run.seconds).length)],
  ['warnings', 'Warnings', makeWarnings, (app) => app.runs.some((run) => run.kind === 'run')],
  ['samples', 'Samples', makeSamples, (app) => app.runs.some((run) => run.samples.length)],
];
const ABOUT = {
  coverage: 'How often at least one of k samples is correct, on held-out prompts.',
  weights: 'The factor by which the objective scales a prompt’s gradient, by the prompt’s pass rate.',
  norms: 'The norm of each prompt’s own gradient, which shows the prompts that dominate an update.',
  timings: 'Seconds by stage, and their share of the total.',
};

function start() {
  const data = JSON.parse(document.getElementById('data').textContent);
  const runs = data.runs.map((run, index) => ({ ...run, index, curves: curvesOf(run), isShown: true }));
  const all = [...new Set(runs.flatMap((run) => [...run.curves.values()].flatMap(({ xs }) => (xs.length ? [xs[0], xs[xs.length - 1]] : []))))];
  const [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
  let sections = [];
  const app = {
    data, runs, step: high, smoothing: 0,
    steps: low === high ? { low: low - 0.5, high: high + 0.5 } : { low, high },
    visible: () => runs.filter((run) => run.isShown),
    render: () => sections.forEach((section) => section.render?.()),
    setStep(x) {
      const step = Math.min(high, Math.max(low, Math.round(x)));
      if (!Number.isFinite(step) || step === app.step) return;
      app.step = step;
      app.showStep();
      sections.forEach((section) => section.moveStep?.());
    },
    showStep: () => {},
  };
  document.title = `${runs.map((run) => run.name).join(', ')} – maxrl_fast report`;
  fillToolbar(document.getElementById('toolbar'), app, low, high);
  const main = document.getElementById('sections');
  const contents = document.getElementById('contents');
  main.replaceChildren();
  sections = SECTIONS.filter(([, , , isNeeded]) => isNeeded(app)).map(([id, title, make]) => {
    const body = el('div', { class: 'body' });
    main.append(el('section', { id, 'aria-labelledby': `${id}-title` }, el('h2', { id: `${id}-title` }, title), ABOUT[id] ? el('p', { class: 'about' }, ABOUT[id]) : null, body));
    contents.append(el('a', { href: `#${id}` }, title));
    return make(body, app);
  });
  app.render();
}

function fillToolbar(bar, app, low, high) {
  const chips = app.runs.map((run) =>
    el('button', { class: `chip run-${run.index}`, 'aria-pressed': 'true', title: `Show or hide ${run.name}`, onclick: ({ currentTarget }) => {
      run.isShown = !run.isShown;
      currentTarget.setAttribute('aria-pressed', String(run.isShown));
      app.render();
    } }, el('i', { class: 'swatch' }), el('span', {}, run.name)));
  bar.append(el('div', { class: 'chips', role: 'group', 'aria-label': 'Runs' }, chips));
  if (!app.runs.some((run) => run.curves.size)) return;
  const slider = el('input', { type: 'range', id: 'step', min: low, max: high, step: 1, value: app.step, 'aria-label': 'Step', oninput: () => app.setStep(Number(slider.value)) });
  const number = el('input', { type: 'number', id: 'step-number', min: low, max: high, step: 1, value: app.step, 'aria-label': 'Step as a number', onchange: () => app.setStep(Number(number.value)) });
  app.showStep = () => {
    slider.value = app.step;
    number.value = app.step;
  };
  bar.append(el('div', { class: 'stepper' }, el('label', { for: 'step' }, 'step'), slider, number));
}

start();

// The page's state (visible runs, seeds, step, smoothing), its toolbar and its sections.

// id, title, what it shows, how it is made, whether the runs have it, and whether it needs the samples, which are unpacked later
const SECTIONS = [
  ['runs', 'Runs', '', makeRuns, () => true],
  ['curves', 'Curves', '', makeCurves, (app) => app.hasSteps],
  ['coverage', 'Coverage', 'How often at least one of k samples is correct, on held-out prompts.', makeCoverage, (app) => app.has((run) => run.coverage.length)],
  ['weights', 'Weight by pass rate', 'The factor by which the objective scales a prompt’s gradient, by the prompt’s pass rate.', makeWeights, (app) => app.hasRuns],
  ['rewards', 'Rewards', 'The kept samples of the last step up to the slider’s, by reward.', makeRewards, (app) => app.sources.length, true],
  ['warnings', 'Warnings', '', makeWarnings, (app) => app.hasRuns],
  ['prompts', 'Prompts', 'The fraction of correct samples of each held-out prompt at two evaluations.', makePrompts, (app) => app.has((run) => run.shown.prompts), true],
  ['samples', 'Samples', 'Prompts with their responses and rewards.', makeSamples, (app) => app.sources.length, true],
];
const ABOUT_REWARDS = {
  coverage: 'The best reward of k samples, on held-out prompts. Rewards are not only 0 and 1.',
  prompts: 'The mean and the maximum reward of each held-out prompt at two evaluations.',
};

function start() {
  const data = JSON.parse(document.getElementById('data').textContent);
  if (data.runs.some((run) => run.score === 'max_at_k')) score = 'max@k';
  const runs = data.runs.map((run, index) => ({ ...run, index, curves: curvesOf(run), isShown: true }));
  const [low, high] = stepRange(runs);
  let sections = [];
  const app = {
    data, runs, step: high, smoothing: usualWindow(runs), seeds: 'mean',
    steps: low === high ? { low: low - 0.5, high: high + 0.5 } : { low, high },
    sources: [['samples', 'Evaluations'], ['rollouts', 'Training rollouts']].filter(([source]) => runs.some((run) => run.shown[source])),
    has: (holds) => runs.some(holds), hasSteps: runs.some((run) => run.curves.size), hasRuns: runs.some((run) => run.kind === 'run'),
    visible: () => runs.filter((run) => run.isShown),
    lines: () => linesOf(app.visible(), app),
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
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawCharts);
  fillToolbar(document.getElementById('toolbar'), app, low, high);
  const main = document.getElementById('sections');
  const contents = document.getElementById('contents');
  main.replaceChildren();
  const later = [];
  for (const [id, title, about, make, isNeeded, isLazy] of SECTIONS) {
    if (!isNeeded(app)) continue;
    const body = el('div', { class: 'body' }, isLazy && empty('Unpacking the samples …'));
    const said = (score === 'max@k' && ABOUT_REWARDS[id]) || about;
    main.append(el('section', { id, 'aria-label': title }, el('h2', {}, title), said && el('p', { class: 'about' }, said), body));
    contents.append(el('a', { href: `#${id}` }, title));
    if (isLazy) later.push([body, make]);
    else sections.push(make(body, app));
  }
  app.render();
  unpack(runs).then(() => {
    const made = later.map(([body, make]) => {
      body.replaceChildren();
      return make(body, app);
    });
    sections.push(...made);
    made.forEach((section) => section.render?.());
  }).catch((error) => later.forEach(([body]) => body.replaceChildren(empty(`The samples cannot be unpacked: ${error.message}`))));
}

/** Gives every run its samples, rollouts and prompts. */
async function unpack(runs) {
  const bytes = Uint8Array.from(atob(document.getElementById('samples-data').textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const { texts, runs: packed } = JSON.parse(await new Response(stream).text());
  const rows = (rows) => rows.map((row) => ({ ...row, prompt: texts[row.prompt] }));
  runs.forEach((run, i) => {
    run.lazy = { samples: rows(packed[i].samples), rollouts: rows(packed[i].rollouts), prompts: packed[i].prompts };
    run.promptTexts = new Map([...(packed[i].prompts.texts ?? []), ...run.lazy.samples.map(({ id, prompt }) => [id, prompt])]);
  });
}

function stepRange(runs) {
  const ends = runs.flatMap((run) => [...run.curves.values()].flatMap(({ xs }) => (xs.length ? [xs[0], xs[xs.length - 1]] : [])));
  return ends.length ? extent(ends) : [0, 1];
}

function fillToolbar(bar, app, low, high) {
  const chips = el('div', { class: 'chips', role: 'group', 'aria-label': 'Runs' });
  const fillChips = () => chips.replaceChildren(...linesOf(app.runs, app).map((line) => {
    const isShown = line.runs.some((run) => run.isShown);
    return el('button', { class: 'chip', run: line.index, 'aria-pressed': String(isShown), title: `Show or hide ${line.runs.map((run) => run.name).join(', ')}`, onclick: () => {
      line.runs.forEach((run) => { run.isShown = !isShown; });
      fillChips();
      app.render();
    } }, swatch(), el('span', {}, line.name));
  }));
  fillChips();
  bar.append(chips);
  if (app.data.groups.length) {
    bar.append(controlsOf(app, () => [[segmented, 'seeds', 'Seeds', [['mean', 'Mean of seeds'], ['each', 'Each seed']]]], () => {
      fillChips();
      app.render();
    }));
  }
  if (!app.hasSteps) return;
  const slider = el('input', { type: 'range', id: 'step', min: low, max: high, step: 1, value: app.step, 'aria-label': 'Step', oninput: () => app.setStep(Number(slider.value)) });
  const number = el('input', { type: 'number', id: 'step-number', min: low, max: high, step: 1, value: app.step, 'aria-label': 'Step as a number', onchange: () => app.setStep(Number(number.value)) });
  app.showStep = () => {
    slider.value = app.step;
    number.value = app.step;
  };
  bar.append(el('div', { class: 'stepper' }, el('label', { for: 'step' }, 'step'), slider, number));
}

start();

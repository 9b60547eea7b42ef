// Samples by prompt, of one run or of two side by side; within a prompt by step.

const PER_PAGE = 5; // prompts
const isRight = (sample) => sample.reward !== null && sample.reward > 0.5;
const OUTCOMES = {
  all: ['all', () => true],
  right: ['correct', isRight],
  wrong: ['wrong', (sample) => sample.reward !== null && !isRight(sample)],
  unscored: ['not scored', (sample) => sample.reward === null],
  truncated: ['truncated', (sample) => sample.truncated],
};

function makeSamples(body, app) {
  const state = { source: app.sources[0][0], left: null, right: null, step: '', outcome: 'all', text: '' };
  const list = el('div', { class: 'samples' });
  const number = el('span', { class: 'count', role: 'status' });
  const pages = pager(() => {
    render();
    body.scrollIntoView({ block: 'start' });
  });
  const stepsOf = (runs) => ascending(runs.flatMap((run) => run.lazy[state.source].map(({ step }) => step)).filter((step) => step !== null));
  const choose = (name) => {
    if (name === 'source') [state.left, state.step] = [null, ''];
    pages.first();
    render();
  };

  function controls() {
    const runs = app.runs.filter((run) => run.lazy[state.source].length);
    const groupOf = (run) => app.data.groups.find((group) => group.runs.includes(run.index)) ?? run;
    const place = (run) => (run ? String(run.index) : '');
    if (!runs.some((run) => place(run) === state.left)) {
      state.left = place(runs[0]);
      state.right = place(runs.find((run) => groupOf(run) !== groupOf(runs[0])) ?? runs[1]);
    }
    const [names, steps] = [runs.map((run) => [run.index, run.name]), stepsOf(runs)];
    return [
      app.sources.length > 1 && [segmented, 'source', 'Samples', app.sources],
      [select, 'left', 'run', names],
      runs.length > 1 && [select, 'right', 'beside', [['', 'none'], ...names]],
      steps.length && [select, 'step', 'step', [['', 'all'], ['slider', 'at the slider'], ...steps.map((step) => [step, count(step)])]],
      [select, 'outcome', 'reward', Object.entries(OUTCOMES).map(([value, [text]]) => [value, text])],
    ];
  }

  const shownRuns = () => unique([state.left, state.right]).filter((place) => place !== '').map((place) => app.runs[Number(place)]);

  function chosen(run) {
    const text = state.text.toLowerCase();
    const [, holds] = OUTCOMES[state.outcome];
    const steps = stepsOf([run]);
    const step = state.step === 'slider' ? (steps[Math.max(0, lastUpTo(steps, app.step))] ?? null) : Number(state.step);
    return run.lazy[state.source].filter((sample) =>
      (state.step === '' || sample.step === step) && holds(sample) &&
      (!text || sample.prompt.toLowerCase().includes(text) || sample.response.toLowerCase().includes(text)));
  }

  function render() {
    const columns = shownRuns().map((run) => ({ run, samples: chosen(run) }));
    const byPrompt = columns.map(({ samples }) => Map.groupBy(samples, ({ prompt }) => prompt));
    const prompts = unique(byPrompt.flatMap((own) => [...own.keys()]));
    const sum = (number) => columns.reduce((sum, column) => sum + number(column), 0);
    const [found, inPage] = [sum(({ samples }) => samples.length), sum(({ run }) => run.lazy[state.source].length)];
    const total = sum(({ run }) => run.in_files[state.source]);
    number.textContent = `${plural(prompts.length, 'prompt')}, ${count(found)} of ${plural(total, 'sample')}${inPage < total ? `; this page has ${count(inPage)} of them` : ''}`;
    const shown = pages.show(prompts, PER_PAGE);
    const cards = shown.map((prompt) => promptCard(prompt, columns.map(({ run }, i) => ({ run, samples: byPrompt[i].get(prompt) ?? [] }))));
    list.replaceChildren(...(cards.length ? cards : [empty('No sample matches.')]));
  }
  const search = el('label', { class: 'search' }, 'text', el('input', { type: 'search', name: 'text', placeholder: 'in prompt or response', oninput: ({ target }) => {
    state.text = target.value;
    choose();
  } }));
  body.append(el('div', { class: 'filters' }, controlsOf(state, controls, choose), search), number, list, pages.node);
  return { render, moveStep: () => state.step === 'slider' && render() };
}

function promptCard(prompt, columns) {
  const first = columns.flatMap(({ samples }) => samples)[0];
  const maze = mazeOf(prompt);
  const ids = unique(columns.flatMap(({ samples }) => samples.map(({ id }) => id))); // of one text
  return el('article', { class: maze ? 'sample with-maze' : 'sample', 'data-id': exact(first.id) },
    el('header', {}, el('h3', {}, `prompt ${ids.slice(0, 8).map(count).join(', ')}${ids.length > 8 ? ' …' : ''}`), el('span', { class: 'facts' }, first.answer && `answer ${first.answer}`), first.columns && folded('columns', () => el('pre', {}, first.columns))),
    el('div', { class: 'text prompt' }, maze ? [drawMaze(maze), folded('prompt as text', () => el('pre', {}, prompt))] : textCell(prompt)),
    el('div', { class: 'columns' }, columns.map(({ run, samples }) => el('div', { class: 'column' },
      el('header', {}, runLabel(run), samples.length > 0 && el('span', { class: 'facts' }, meanReward(samples))),
      samples.length ? byStep(samples).map(([step, own], i, all) => stepPart(step, own, maze, i === 0 || i === all.length - 1)) : empty('no sample of this prompt')))));
}

/** Returns a part that is made when it is first opened. */
function folded(name, make, isOpen = false) {
  const node = el('details', { open: isOpen, ontoggle: () => node.open && node.children.length === 1 && node.append(make()) }, el('summary', {}, name));
  if (isOpen) node.append(make());
  return node;
}

const byStep = (samples) => [...Map.groupBy(samples, ({ step }) => step)].sort(([a], [b]) => a - b);

function meanReward(samples) {
  const known = samples.map(({ reward }) => reward).filter((reward) => reward !== null);
  return `mean reward ${short(meanOf(known))} over ${plural(known.length, 'sample')}`;
}

function stepPart(step, samples, maze, isOpen) {
  const make = () => el('div', { class: maze ? 'responses mazes' : 'responses' }, samples.map((sample) => response(sample, maze)));
  return step === null ? make() : folded(`step ${count(step)} · ${meanReward(samples)}`, make, isOpen);
}

function response(sample, maze) {
  const value = short(sample.reward);
  const [kind, mark, path] = sample.reward === null ? ['unscored', 'not scored', 'muted'] : isRight(sample) ? ['right', `✓ ${value}`, 'good'] : ['wrong', `✗ ${value}`, 'bad'];
  const facts = [
    sample.tokens !== null && plural(sample.tokens, 'token'), sample.turns && plural(sample.turns, 'turn'), sample.advantage !== null && `advantage ${short(sample.advantage)}`,
    ...Object.entries(sample.components).map(([name, value]) => `${name} ${short(value)}`),
  ].filter(Boolean);
  const tags = [sample.truncated && 'truncated', sample.left_out && `${count(sample.left_out)} characters left out`].filter(Boolean);
  return el('div', { class: `response ${kind}` },
    el('p', {}, el('span', { class: 'reward', title: `reward ${exact(sample.reward)}` }, mark), tags.map((tag) => el('span', { class: 'tag' }, tag)), el('span', { class: 'facts' }, facts.join(' · '))),
    maze ? [drawMaze(maze, sample.response, path), folded('moves', () => el('pre', {}, sample.response || ' '))] : textCell(sample.response, sample.turns ? turnsOf : undefined));
}

/** Returns the parts of an episode; ⟦ and ⟧ are only around what an environment inserted (tasks/texts.py). */
const turnsOf = (text) => text.split(/[⟦⟧]/).map((part, i) => (i % 2 ? el('mark', { title: 'inserted by the environment' }, part) : part));

/** Shows a text unchanged, with its spaces and line breaks; a long one scrolls. */
const textCell = (text, partsOf = (whole) => [whole]) => el('pre', { tabindex: 0 }, partsOf(text || ' '));

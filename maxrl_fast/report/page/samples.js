// Samples with their rewards, one page at a time.

const PAGE = 10;
const LONG = 900; // characters, or LINES lines; much longer texts are shortened until the reader expands them
const LINES = 12;
const isRight = (sample) => sample.reward !== null && sample.reward > 0.5;
const OUTCOMES = {
  all: ['all', () => true],
  right: ['correct', isRight],
  wrong: ['wrong', (sample) => sample.reward !== null && !isRight(sample)],
  unscored: ['not scored', (sample) => sample.reward === null],
  truncated: ['truncated', (sample) => sample.truncated],
};

function makeSamples(body, app) {
  const all = app.runs.flatMap((run) => run.samples.map((sample) => ({ run, ...sample })));
  const filter = { run: '', step: '', outcome: 'all', text: '' };
  let page = 0;
  const list = el('div', { class: 'samples', role: 'table', 'aria-label': 'Samples' });
  const count = el('span', { class: 'count', role: 'status' });
  const place = el('span', { class: 'place' });
  const previous = el('button', { onclick: () => turn(-1) }, '← Previous');
  const next = el('button', { onclick: () => turn(1) }, 'Next →');

  const steps = [...new Set(all.map(({ step }) => step))].filter((step) => step !== null).sort((a, b) => a - b);
  const runs = app.runs.filter((run) => run.samples.length);
  const set = (name) => ({ target }) => {
    filter[name] = target.value;
    page = 0;
    render();
  };
  const select = (label, name, choices) =>
    el('label', {}, label, el('select', { name, onchange: set(name) }, choices.map(([value, text]) => el('option', { value }, text))));
  body.append(
    el('div', { class: 'filters' },
      select('run', 'run', [['', 'all visible'], ...runs.map((run) => [run.index, run.name])]),
      select('step', 'step', [['', 'all'], ['slider', 'at the slider'], ...steps.map((step) => [step, step.toLocaleString('en')])]),
      select('reward', 'outcome', Object.entries(OUTCOMES).map(([value, [text]]) => [value, text])),
      el('label', { class: 'search' }, 'text', el('input', { type: 'search', name: 'text', placeholder: 'in prompt or response', oninput: set('text') })),
      count),
    list, el('div', { class: 'pages' }, previous, place, next));

  function chosen() {
    const shown = new Set(app.visible());
    const text = filter.text.toLowerCase();
    const [, holds] = OUTCOMES[filter.outcome];
    const step = filter.step === 'slider' ? (steps[Math.max(0, lastUpTo(steps, app.step))] ?? null) : filter.step === '' ? null : Number(filter.step);
    return all.filter((sample) =>
      (filter.run === '' ? shown.has(sample.run) : sample.run.index === Number(filter.run)) &&
      (filter.step === '' || sample.step === step) && holds(sample) &&
      (!text || sample.prompt.toLowerCase().includes(text) || sample.response.toLowerCase().includes(text)));
  }

  function render() {
    const found = chosen();
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(page, pages - 1);
    count.textContent = `${found.length.toLocaleString('en')} of ${all.length.toLocaleString('en')}`;
    place.textContent = `page ${page + 1} of ${pages.toLocaleString('en')}`;
    previous.disabled = page === 0;
    next.disabled = page === pages - 1;
    list.replaceChildren(...(found.length ? found.slice(page * PAGE, (page + 1) * PAGE).map(sampleRow) : [empty('No sample matches.')]));
  }

  function turn(by) {
    page += by;
    render();
    body.scrollIntoView({ block: 'start' });
  }
  return { render, moveStep: () => filter.step === 'slider' && render() };
}

function sampleRow(sample) {
  const outcome = sample.reward === null ? ['unscored', 'not scored'] : isRight(sample) ? ['right', `✓ ${short(sample.reward)}`] : ['wrong', `✗ ${short(sample.reward)}`];
  const facts = [sample.id === null ? null : `prompt ${sample.id}`, sample.step === null ? null : `step ${sample.step}`, sample.tokens === null ? null : `${short(sample.tokens)} tokens`];
  return el('article', { class: `sample ${outcome[0]}`, role: 'row' },
    el('header', { role: 'cell' }, el('span', { class: 'reward', title: `reward ${exact(sample.reward)}` }, outcome[1]), runLabel(sample.run),
      el('span', { class: 'facts' }, facts.filter(Boolean).join(' · ')), sample.truncated ? el('span', { class: 'tag' }, 'truncated') : null,
      sample.left_out ? el('span', { class: 'tag' }, `${sample.left_out.toLocaleString('en')} characters left out`) : null),
    textCell('prompt', sample.prompt), textCell('response', sample.response));
}

/** Shows a text unchanged, with its spaces and line breaks; a long one is shortened until the reader expands it. */
function textCell(name, text) {
  const lines = text.split('\n');
  const isLong = text.length > 1.5 * LONG || lines.length > 1.5 * LINES;
  const cut = lines.slice(0, LINES).join('\n').slice(0, LONG);
  const shown = el('pre', {}, isLong ? `${cut} …` : text || ' ');
  const more = isLong && el('button', { class: 'mini', 'aria-expanded': 'false', onclick: () => {
    const isOpen = more.getAttribute('aria-expanded') === 'true';
    shown.textContent = isOpen ? `${cut} …` : text;
    more.textContent = isOpen ? `Show all ${text.length.toLocaleString('en')} characters` : 'Show less';
    more.setAttribute('aria-expanded', String(!isOpen));
  } }, `Show all ${text.length.toLocaleString('en')} characters`);
  return el('div', { class: `text ${name}`, role: 'cell' }, el('h4', {}, name), shown, more || null);
}

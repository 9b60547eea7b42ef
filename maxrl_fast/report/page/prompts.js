// The pass rate (or mean reward) of each held-out prompt at two evaluations: which prompts were gained, and which lost.

const PROMPTS_PER_PAGE = 20;
const CHANGES = {
  all: ['all prompts', () => true],
  gained: ['gained', ({ change }) => change > 0],
  lost: ['lost', ({ change }) => change < 0],
  equal: ['unchanged', ({ change }) => change === 0],
  never: ['never solved', ({ before, after }) => before === 0 && after === 0],
};
const HEADERS = [['id', 'prompt'], ['before', 'before'], ['after', 'after'], ['change', 'change'], ['text', 'text']];

function makePrompts(body, app) {
  const evaluations = app.runs.flatMap((run) => (run.lazy.prompts.evaluations ?? []).map((evaluation, i) => ({
    run, evaluation, ids: run.lazy.prompts.ids, name: `${run.name}${evaluation.step === null ? '' : `, step ${count(evaluation.step)}`}`, isLast: i === run.lazy.prompts.evaluations.length - 1,
  })));
  const state = { before: 0, after: 0, show: 'all', key: evaluations.length > 1 ? 'change' : 'before', isDown: evaluations.length > 1 };
  const matching = (place) => evaluations.map((_, i) => i).filter((i) => evaluations[i].run.prompt_set === evaluations[place].run.prompt_set);
  const lastOf = (run) => evaluations.findIndex((other) => other.run === run && other.isLast);
  state.after = lastOf(evaluations[0].run);
  if (state.after === 0) state.after = matching(0).find((i) => i > 0) ?? 0; // evaluations of one policy each
  const controls = el('div', { class: 'filters' });
  const summary = el('p', { class: 'summary', role: 'status' });
  const host = el('div', {});
  const pages = pager(() => render());
  body.append(controls, summary, host, pages.node);

  function fillControls() {
    const choices = (places) => places.map((i) => [i, evaluations[i].name]);
    const set = (name) => (value) => {
      state[name] = name === 'show' ? value : Number(value);
      if (name === 'before' && !matching(state.before).includes(state.after)) state.after = lastOf(evaluations[state.before].run);
      pages.first();
      fillControls();
      render();
    };
    controls.replaceChildren(
      select('before', 'before', choices([...evaluations.keys()]), state.before, set('before')),
      select('after', 'after', choices(matching(state.before)), state.after, set('after')),
      select('show', 'show', Object.entries(CHANGES).filter(([value]) => value !== 'never' || score === 'pass@k').map(([value, [text]]) => [value, text]), state.show, set('show')));
  }

  function rows() {
    const [one, other] = [evaluations[state.before], evaluations[state.after]];
    const [before, after] = [numbersOf(one), numbersOf(other)];
    return [...before.keys()].filter((id) => after.has(id)).map((id) => ({
      id, before: before.get(id).mean, after: after.get(id).mean, change: after.get(id).mean - before.get(id).mean, most: [before.get(id).most, after.get(id).most], text: one.run.promptTexts.get(id) ?? other.run.promptTexts.get(id) ?? '',
    }));
  }

  function header([key, text]) {
    const isSorted = state.key === key;
    return el('th', { scope: 'col', 'aria-sort': isSorted ? (state.isDown ? 'descending' : 'ascending') : 'none' }, el('button', { class: 'sort', onclick: () => {
      [state.key, state.isDown] = [key, isSorted ? !state.isDown : key !== 'id' && key !== 'text'];
      pages.first();
      render();
    } }, text, isSorted ? (state.isDown ? ' ↓' : ' ↑') : ''));
  }

  function render() {
    const all = rows();
    const shown = all.filter(CHANGES[state.show][1]);
    const sign = state.isDown ? -1 : 1;
    shown.sort((a, b) => sign * (a[state.key] < b[state.key] ? -1 : a[state.key] > b[state.key] ? 1 : 0) || a.id - b.id);
    const number = (name) => all.filter(CHANGES[name][1]).length;
    const { prompts } = evaluations[state.before].run.lazy;
    const known = prompts.num_prompts > prompts.ids.length ? ` Numbers of the first ${count(prompts.ids.length)} of ${count(prompts.num_prompts)} prompts are kept.` : '';
    summary.textContent = `${plural(all.length, 'prompt')}: ${number('gained')} gained, ${number('lost')} lost, ${number('equal')} unchanged${score === 'pass@k' ? `, ${number('never')} of them never solved` : ''}.${known}`;
    const page = pages.show(Math.ceil(shown.length / PROMPTS_PER_PAGE));
    host.replaceChildren(!shown.length ? empty('No prompt matches.') : table(HEADERS.map(header), shown.slice(page * PROMPTS_PER_PAGE, (page + 1) * PROMPTS_PER_PAGE).map(promptRow), { class: 'prompts', label: score === 'pass@k' ? 'Pass rate by prompt' : 'Mean reward by prompt' }));
  }
  fillControls();
  return { render };
}

/** Returns the mean and the maximum reward of each prompt; the mean of rewards of 0 and 1 is the pass rate. */
function numbersOf({ evaluation, ids }) {
  const { num_correct: correct, num_samples: samples, reward_mean: means, reward_max: most } = evaluation;
  return new Map(ids.map((id, i) => [id, correct ? { mean: correct[i] / samples, most: Math.min(1, correct[i]) } : { mean: means[i], most: most[i] }]));
}

function promptRow({ id, before, after, change, most, text }) {
  const rate = (value, i) => el('td', { class: 'number' }, value.toFixed(3), score === 'pass@k' ? null : el('small', {}, ` max ${most[i].toFixed(3)}`));
  const maze = mazeOf(text);
  return el('tr', { 'data-id': id }, el('th', { scope: 'row' }, count(id)), rate(before, 0), rate(after, 1),
    el('td', { class: `number ${change > 0 ? 'gained' : change < 0 ? 'lost' : ''}` }, `${change > 0 ? '+' : change < 0 ? '−' : ''}${Math.abs(change).toFixed(3)}`),
    el('td', { class: 'excerpt' }, maze ? drawMaze(maze) : text ? `${text.slice(0, 160)}${text.length > 160 ? ' …' : ''}` : el('span', { class: 'facts' }, 'not kept')));
}

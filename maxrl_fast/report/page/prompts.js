// The pass rate of each held-out prompt at two evaluations: which prompts were gained, and which lost.

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
      select('show', 'show', Object.entries(CHANGES).map(([value, [text]]) => [value, text]), state.show, set('show')));
  }

  function rows() {
    const [one, other] = [evaluations[state.before], evaluations[state.after]];
    const rates = ({ evaluation, ids }) => new Map(ids.map((id, i) => [id, evaluation.num_correct[i] / evaluation.num_samples]));
    const [before, after] = [rates(one), rates(other)];
    return [...before.keys()].filter((id) => after.has(id)).map((id) => ({
      id, before: before.get(id), after: after.get(id), change: after.get(id) - before.get(id), text: one.run.promptTexts.get(id) ?? other.run.promptTexts.get(id) ?? '',
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
    const known = prompts.num_prompts > prompts.ids.length ? ` Counts of the first ${count(prompts.ids.length)} of ${count(prompts.num_prompts)} prompts are kept.` : '';
    summary.textContent = `${plural(all.length, 'prompt')}: ${number('gained')} gained, ${number('lost')} lost, ${number('equal')} unchanged, ${number('never')} of them never solved.${known}`;
    const page = pages.show(Math.ceil(shown.length / PROMPTS_PER_PAGE));
    host.replaceChildren(!shown.length ? empty('No prompt matches.') : table(HEADERS.map(header), shown.slice(page * PROMPTS_PER_PAGE, (page + 1) * PROMPTS_PER_PAGE).map(promptRow), { class: 'prompts', label: 'Pass rate by prompt' }));
  }
  fillControls();
  return { render };
}

function promptRow({ id, before, after, change, text }) {
  const rate = (value) => el('td', { class: 'number' }, value.toFixed(3));
  const maze = mazeOf(text);
  return el('tr', { 'data-id': id }, el('th', { scope: 'row' }, count(id)), rate(before), rate(after),
    el('td', { class: `number ${change > 0 ? 'gained' : change < 0 ? 'lost' : ''}` }, `${change > 0 ? '+' : change < 0 ? '−' : ''}${Math.abs(change).toFixed(3)}`),
    el('td', { class: 'excerpt' }, maze ? drawMaze(maze) : text ? `${text.slice(0, 160)}${text.length > 160 ? ' …' : ''}` : el('span', { class: 'facts' }, 'not kept')));
}

// The pass rate (or mean reward) of each held-out prompt at two evaluations: which prompts were gained, and which lost.

const PROMPTS_PER_PAGE = 20;
const CHANGES = {
  all: ['all prompts', () => true],
  gained: ['gained', ({ change }) => change > 0],
  lost: ['lost', ({ change }) => change < 0],
  equal: ['unchanged', ({ change }) => change === 0],
  never: ['never solved', ({ before, after }) => before === 0 && after === 0],
};
const HEADERS = { id: 'prompt', before: 'before', after: 'after', change: 'change', text: 'text' };

function makePrompts(body, app) {
  const evaluations = app.runs.flatMap((run) => (run.lazy.prompts.evaluations ?? []).map((evaluation) => ({
    run, evaluation, name: run.name + whenOf(evaluation),
  })));
  const isMany = evaluations.length > 1;
  const state = { before: 0, after: 0, show: 'all', key: isMany ? 'change' : 'before', isDown: isMany };
  const matching = () => [...evaluations.keys()].filter((i) => evaluations[i].run.prompt_set === evaluations[state.before].run.prompt_set);
  const lastOf = (place) => evaluations.findLastIndex(({ run }) => run === evaluations[place].run);
  state.after = lastOf(0) || (matching()[1] ?? 0); // of evaluations of one policy each, the next
  const summary = el('p', { class: 'summary', role: 'status' });
  const host = el('div', {});
  const pages = pager(render);

  function controls() {
    const choices = (places) => places.map((i) => [i, evaluations[i].name]);
    if (!matching().includes(Number(state.after))) state.after = lastOf(state.before);
    const shown = Object.entries(CHANGES).filter(([value]) => value !== 'never' || score === 'pass@k');
    return [
      [select, 'before', 'before', choices([...evaluations.keys()])],
      [select, 'after', 'after', choices(matching())],
      [select, 'show', 'show', shown.map(([value, [text]]) => [value, text])],
    ];
  }

  function rows() {
    const [one, other] = [evaluations[state.before], evaluations[state.after]];
    const [before, after] = [numbersOf(one), numbersOf(other)];
    return [...before.keys()].filter((id) => after.has(id)).map((id) => {
      const [from, to] = [before.get(id), after.get(id)];
      const text = one.run.promptTexts.get(id) ?? other.run.promptTexts.get(id) ?? '';
      return { id, before: from.mean, after: to.mean, change: to.mean - from.mean, most: [from.most, to.most], text };
    });
  }

  function header([key, text]) {
    const isSorted = state.key === key;
    return el('th', { scope: 'col', 'aria-sort': isSorted ? (state.isDown ? 'descending' : 'ascending') : 'none' }, el('button', { class: 'sort', onclick: () => {
      [state.key, state.isDown] = [key, isSorted ? !state.isDown : key !== 'id' && key !== 'text'];
      choose();
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
    const page = pages.show(shown, PROMPTS_PER_PAGE).map(promptRow);
    host.replaceChildren(!page.length ? empty('No prompt matches.') : table(Object.entries(HEADERS).map(header), page, { class: 'prompts', label: score === 'pass@k' ? 'Pass rate by prompt' : 'Mean reward by prompt' }));
  }
  const choose = () => {
    pages.first();
    render();
  };
  body.append(controlsOf(state, controls, choose), summary, host, pages.node);
  return { render };
}

/** Returns the mean and the maximum reward of each prompt; the mean of rewards of 0 and 1 is the pass rate. */
function numbersOf({ evaluation, run }) {
  const { num_correct: correct, num_samples: samples, reward_mean: means, reward_max: most } = evaluation;
  return new Map(run.lazy.prompts.ids.map((id, i) => [id, correct ? { mean: correct[i] / samples, most: Math.min(1, correct[i]) } : { mean: means[i], most: most[i] }]));
}

function promptRow({ id, before, after, change, most, text }) {
  const rate = (value, i) => el('td', { class: 'number' }, value.toFixed(3), score === 'pass@k' ? null : el('small', {}, ` max ${most[i].toFixed(3)}`));
  const maze = mazeOf(text);
  return el('tr', { 'data-id': id }, el('th', { scope: 'row' }, count(id)), rate(before, 0), rate(after, 1),
    el('td', { class: `number ${change > 0 ? 'gained' : change < 0 ? 'lost' : ''}` }, `${change > 0 ? '+' : change < 0 ? '−' : ''}${Math.abs(change).toFixed(3)}`),
    el('td', { class: 'excerpt' }, maze ? drawMaze(maze) : text ? `${text.slice(0, 160)}${text.length > 160 ? ' …' : ''}` : el('span', { class: 'facts' }, 'not kept')));
}

// Elements, numbers, tables and the tooltip. Text of a run only ever becomes text nodes.

const SVG = 'http://www.w3.org/2000/svg'; // a namespace name; it is not fetched

const isGiven = (value) => (value ?? false) !== false;

/** Returns an HTML or SVG element; children are nodes or text. What is null, undefined or false is left out. */
const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

function filled(node, attributes = {}, children) {
  for (const [name, value] of Object.entries(attributes).filter(([, value]) => isGiven(value))) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'run') node.style.setProperty('--colour', `var(--${variableOf(value)})`);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter(isGiven));
  return node;
}

/** Returns the CSS variable of a run's colour; colours repeat after ten runs. */
const variableOf = (run) => (typeof run === 'number' ? `c${run % 10}` : run);

const unique = (values) => [...new Set(values)];
const ascending = (numbers) => unique(numbers).sort((a, b) => a - b);
const count = (number) => number.toLocaleString('en');
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;

/** Formats a number with four digits and thousands separators. */
function short(value) {
  if (!isGiven(value)) return '–';
  if (value === 0 || Number.isInteger(value)) return Math.abs(value) < 1e15 ? count(value) : value.toExponential(3);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e9) return value.toExponential(3).replace('e+', 'e');
  const digits = Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(size))));
  return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Formats a number with all its digits. */
const exact = (value) => (isGiven(value) ? String(value) : '–');

/** Returns the index of the last number up to x in an ascending list; -1 if there is none. */
const lastUpTo = (numbers, x) => numbers.findLastIndex((number) => number <= x);

/** Returns the index of the nearest number in an ascending list; -1 if it is empty. */
function nearest(numbers, x) {
  const below = lastUpTo(numbers, x);
  if (below < 0) return numbers.length ? 0 : -1;
  return below + 1 < numbers.length && numbers[below + 1] - x < x - numbers[below] ? below + 1 : below;
}

function extent(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const number of numbers) {
    if (isGiven(number)) [low, high] = [Math.min(low, number), Math.max(high, number)];
  }
  return [low, high];
}

const meanOf = (numbers) => (numbers.length ? numbers.reduce((sum, number) => sum + number, 0) / numbers.length : null);

const swatch = () => el('i', { class: 'swatch' });
const runLabel = (run) => el('span', { class: 'run-name', run: run.index }, swatch(), el('span', {}, run.name));
const empty = (text) => el('p', { class: 'empty' }, text);

function table(headers, rows, attributes = {}) {
  const heads = headers.map((header) => (header instanceof Node ? header : el('th', { scope: 'col' }, header)));
  return el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': attributes.label },
    el('table', { class: attributes.class }, el('thead', {}, el('tr', {}, heads)), el('tbody', {}, rows)));
}

/** Returns a group of buttons of which one is pressed; choices are [value, text]. */
function segmented(label, name, choices, current, choose) {
  const buttons = choices.map(([value, text]) => el('button', { 'aria-pressed': String(value === current), 'data-choice': value, onclick: () => choose(value) }, text));
  return el('div', { class: 'segmented', role: 'group', 'aria-label': label }, buttons);
}

function select(label, name, choices, current, choose) {
  const options = choices.map(([value, text]) => el('option', { value, selected: String(value) === String(current) }, text));
  return el('label', {}, label, el('select', { name, onchange: ({ target }) => choose(target.value) }, options));
}

/** Returns controls of `state`. specs() lists them, after each choice again: [segmented or select, name in state, label, choices]. */
function controlsOf(state, specs, changed) {
  const host = el('div', { class: 'filters' });
  const fill = () => host.replaceChildren(...specs().filter(Boolean).map(([make, name, label, choices]) => make(label, name, choices, state[name], (value) => {
    state[name] = value;
    fill();
    changed(name);
  })));
  fill();
  return host;
}

/** Returns the buttons that turn pages, and show(items, size of a page), which returns those of the page. */
function pager(turned) {
  let page = 0;
  const place = el('span', { class: 'place' });
  const turn = (by) => {
    page += by;
    turned();
  };
  const previous = el('button', { onclick: () => turn(-1) }, '← Previous');
  const next = el('button', { onclick: () => turn(1) }, 'Next →');
  const node = el('div', { class: 'pages' }, previous, place, next);
  const show = (items, size) => {
    const pages = Math.ceil(items.length / size);
    page = Math.max(0, Math.min(page, pages - 1));
    place.textContent = `page ${page + 1} of ${count(Math.max(1, pages))}`;
    previous.disabled = page === 0;
    next.disabled = page >= pages - 1;
    node.hidden = pages < 2;
    return items.slice(page * size, (page + 1) * size);
  };
  return { node, show, first: () => { page = 0; } };
}

function showTooltip(event, { title, rows }) {
  const tooltip = document.getElementById('tooltip');
  tooltip.replaceChildren(
    el('strong', {}, title),
    ...rows.map(({ run, name, text }) => el('div', { run }, swatch(), el('span', {}, name), el('b', {}, text))));
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const room = document.documentElement.clientWidth;
  const x = event.clientX + 16 + width < room ? event.clientX + 16 : Math.max(4, event.clientX - width - 16);
  const y = Math.max(4, Math.min(event.clientY - height / 2, window.innerHeight - height - 4));
  tooltip.style.transform = `translate(${x}px, ${y}px)`;
}

function hideTooltip() {
  document.getElementById('tooltip').hidden = true;
}

// Elements, numbers, scales and paths for the charts. Text of a run only ever becomes text nodes.

const SVG = 'http://www.w3.org/2000/svg'; // a namespace name; it is not fetched

/** Returns an HTML element; children are nodes or text. Attributes that are null, undefined or false are left out. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Returns an SVG element, likewise. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Formats a number with four digits and thousands separators. */
function short(value) {
  if (value === null || value === undefined) return '–';
  if (value === 0 || Number.isInteger(value)) return Math.abs(value) < 1e15 ? value.toLocaleString('en') : value.toExponential(3);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e9) return value.toExponential(3).replace('e+', 'e');
  const digits = Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(size))));
  return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Formats a number with all its digits. */
function exact(value) {
  return value === null || value === undefined ? '–' : String(value);
}

/** Formats a tick's label with as many digits as the distance between ticks needs. */
function tickLabel(value, gap) {
  const size = Math.max(Math.abs(value), gap);
  if (value === 0) return '0';
  if (size >= 1e15 || size < 1e-3) {
    const power = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
    const factor = Number((value / 10 ** power).toPrecision(6));
    return `${factor}e${power}`;
  }
  for (const [unit, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(value) >= unit && gap >= 1e3) return `${Number((value / unit).toPrecision(6))}${letter}`;
  }
  if (size >= 1e4) return Math.round(value).toLocaleString('en');
  const digits = gap >= 1 ? 0 : Math.min(8, Math.ceil(-Math.log10(gap) - 1e-9));
  return value.toFixed(Number.isInteger(Number((gap * 10 ** digits).toPrecision(6))) ? digits : digits + 1);
}

/** Returns about `wanted` round numbers in [low, high], 1, 2 or 5 times a power of ten apart. */
function niceTicks(low, high, wanted, whole = false) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  let gap = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.72);
  if (whole) gap = Math.max(1, Math.round(gap));
  const ticks = [];
  for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i++) ticks.push(Number((i * gap).toPrecision(12)));
  return { ticks, gap };
}

/** Returns the powers of ten in [low, high], and 2 and 5 times them if there is room. */
function decadeTicks(low, high, wanted) {
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.ceil(Math.log10(high) - 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / wanted));
  const factors = (last - first) * 3 <= wanted + 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
  }
  return ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
}

/** Returns the map from numbers to pixels. kind: linear, log (base ten) or binary (base two). */
function makeScale(kind, low, high, from, to) {
  const map = kind === 'linear' ? (x) => x : kind === 'log' ? Math.log10 : Math.log2;
  const back = kind === 'linear' ? (x) => x : kind === 'log' ? (x) => 10 ** x : (x) => 2 ** x;
  const span = map(high) - map(low) || 1;
  const scale = (x) => from + ((map(x) - map(low)) / span) * (to - from);
  scale.invert = (pixel) => back(map(low) + ((pixel - from) / (to - from)) * span);
  return scale;
}

/** Returns the range of an axis for finite numbers: from 0 if they come close to it, else with a margin. */
function niceRange(low, high) {
  if (low > high) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : low > 0 ? [0, low * 1.25] : [low * 1.25, 0];
  const margin = (high - low) * 0.06;
  const from = low >= 0 && low < high * 0.6 ? 0 : low - margin;
  const to = high <= 0 && high > low * 0.6 ? 0 : high + margin;
  return [from, to];
}

/** Splits a line at its gaps: returns lists of consecutive indices whose value is a number. */
function pieces(values, holds = (value) => value !== null) {
  const found = [];
  let piece = null;
  for (let i = 0; i < values.length; i++) {
    if (!holds(values[i])) piece = null;
    else if (piece) piece.push(i);
    else found.push((piece = [i]));
  }
  return found;
}

/** Keeps the first, lowest, highest and last point of each pixel column if there are many: the picture stays the same. */
function thin(indices, xs, values, width) {
  if (indices.length <= 4 * width) return indices;
  const low = xs[indices[0]];
  const span = xs[indices[indices.length - 1]] - low || 1;
  const kept = [];
  let start = 0;
  while (start < indices.length) {
    const column = Math.floor(((xs[indices[start]] - low) / span) * width);
    let end = start;
    let least = start;
    let most = start;
    while (end < indices.length && Math.floor(((xs[indices[end]] - low) / span) * width) === column) {
      if (values[indices[end]] < values[indices[least]]) least = end;
      if (values[indices[end]] > values[indices[most]]) most = end;
      end++;
    }
    const chosen = [...new Set([start, least, most, end - 1])].sort((a, b) => a - b);
    kept.push(...chosen.map((i) => indices[i]));
    start = end;
  }
  return kept;
}

/** Returns a path through the points; the round line ends show a single point between gaps as a dot. */
function linePath(xs, values, toX, toY, width, holds) {
  const parts = [];
  for (const piece of pieces(values, holds)) {
    const points = thin(piece, xs, values, width).map((i) => `${toX(xs[i]).toFixed(2)},${toY(values[i]).toFixed(2)}`);
    parts.push(`M${points.join('L')}${points.length === 1 ? 'h0' : ''}`);
  }
  return parts.join('');
}

/** Returns the moving mean of the last `window` numbers at each position; gaps stay gaps. */
function smoothed(values, window) {
  const sums = [];
  const recent = [];
  let sum = 0;
  for (const value of values) {
    if (value !== null) {
      recent.push(value);
      sum += value;
      if (recent.length > window) sum -= recent.shift();
    }
    sums.push(value === null ? null : sum / recent.length);
  }
  return sums;
}

/** Returns the index of the last number that is at most x in an ascending list; -1 if there is none. */
function lastUpTo(numbers, x) {
  let low = -1;
  let high = numbers.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (numbers[middle] <= x) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Returns the index of the number nearest to x in an ascending list; -1 if it is empty. */
function nearest(numbers, x) {
  const below = lastUpTo(numbers, x);
  if (below < 0) return numbers.length ? 0 : -1;
  return below + 1 < numbers.length && numbers[below + 1] - x < x - numbers[below] ? below + 1 : below;
}

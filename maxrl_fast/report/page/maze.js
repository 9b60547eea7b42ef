// Mazes: a prompt of the maze task as a picture, with the path of a response (maxrl_fast/tasks/maze.py has the words).

const MOVES = { UP: [-1, 0], DOWN: [1, 0], LEFT: [0, -1], RIGHT: [0, 1] };
const CELLS = new Set(['PATH', 'WALL', 'GOAL', 'START']);

/** Returns {size, cells, start, goal} of a prompt that is a square maze, or null. */
function mazeOf(prompt) {
  const found = /^(?:<bos> )?GRID_START ([A-Z ]+) GRID_END PATH_START$/.exec(prompt);
  if (!found) return null;
  const rows = found[1].split('NEWLINE').map((row) => row.trim().split(' ')).filter((row) => row[0] !== '');
  const size = rows.length;
  if (size > 64 || rows.some((row) => row.length !== size || row.some((cell) => !CELLS.has(cell)))) return null;
  const place = (word) => {
    const row = rows.findIndex((cells) => cells.includes(word));
    return row < 0 ? null : [row, rows[row].indexOf(word)];
  };
  const [start, goal] = [place('START'), place('GOAL')];
  return start && goal ? { size, cells: rows, start, goal } : null;
}

/** Returns the cells that a response enters, and the cell or the word that ended its path too early (null if none did). */
function walk({ size, cells, start, goal }, response) {
  const path = [start];
  for (const word of response.split(' ')) {
    const [row, column] = path[path.length - 1];
    if (word === 'DONE' || (row === goal[0] && column === goal[1])) break;
    if (!MOVES[word]) return { path, hit: null, stray: word };
    const next = [row + MOVES[word][0], column + MOVES[word][1]];
    const isInside = next.every((place) => place >= 0 && place < size);
    if (!isInside || cells[next[0]][next[1]] === 'WALL') return { path, hit: next, stray: null };
    path.push(next);
  }
  return { path, hit: null, stray: null };
}

/** Draws a maze, and the path of a response if one is given: up to the wall that it enters, which has a cross. */
function drawMaze(maze, response = null, run = 'muted') {
  const { size, cells, start, goal } = maze;
  const walls = cells.flatMap((row, i) => row.map((cell, j) => (cell === 'WALL' ? `M${j},${i}h1v1h-1z` : '')));
  const { path, hit, stray } = response === null ? { path: [], hit: null, stray: null } : walk(maze, response);
  const centre = ([row, column]) => `${column + 0.5},${row + 0.5}`;
  const label = response === null ? `maze of ${size} by ${size} cells` :
    `path of ${plural(path.length - 1, 'move')}${hit ? ', then into a wall' : stray ? `, then ${stray || 'nothing'}` : ''}`;
  const pixels = Math.max(96, Math.min(13 * size, 240));
  return svg('svg', { class: 'maze', run, width: pixels, height: pixels, viewBox: `-0.5 -0.5 ${size + 1} ${size + 1}`, role: 'img', 'aria-label': label },
    svg('title', {}, label), svg('rect', { class: 'floor', width: size, height: size }), svg('path', { class: 'walls', d: walls.join('') }),
    svg('rect', { class: 'goal', x: goal[1] + 0.1, y: goal[0] + 0.1, width: 0.8, height: 0.8 }),
    svg('circle', { class: 'start', cx: start[1] + 0.5, cy: start[0] + 0.5, r: 0.38 }),
    path.length > 1 ? svg('polyline', { class: 'walk', points: path.map(centre).join(' ') }) : null,
    hit ? svg('path', { class: 'hit', d: `M${hit[1] + 0.15},${hit[0] + 0.15}l.7,.7m0,-.7l-.7,.7` }) : null);
}

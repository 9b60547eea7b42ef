"""The mazes of the MaxRL paper (appendix E.1): the response is the moves from start to goal."""

import random
import zlib
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import Limit
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.tasks import ReferenceAnswer, decode_words, word_tokenizer_files

# One token per word; ids 17..31 are reserved, as in the paper's configuration.
_WORDS = """<pad> <bos> <eos> <unk> GRID_START GRID_END PATH_START DONE
PATH WALL GOAL START NEWLINE UP DOWN LEFT RIGHT"""
WORDS = _WORDS.split()
VOCAB_SIZE = 32
PAD, BOS, EOS, UNK, GRID_START, GRID_END, PATH_START, DONE = range(8)
PATH, WALL, GOAL, START, NEWLINE, UP, DOWN, LEFT, RIGHT = range(8, 17)
MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
# about one in this many distinct mazes is held out; at every size both splits have some
TEST_SHARE = 5

Cell = tuple[int, int]
Grid = list[list[bool]]  # [n][n], True where the cell is open


def generate_maze(size: int, rng: random.Random) -> Grid:
    """Return a spanning tree of the rooms at odd coordinates, by Prim's algorithm."""

    def pop_random(items: list[Cell]) -> Cell:
        # Python guarantees the same stream in every version only for random().
        i = int(rng.random() * len(items))
        items[i], items[-1] = items[-1], items[i]
        return items.pop()

    def around(row: int, column: int) -> list[Cell]:
        rooms = [(row + 2 * dr, column + 2 * dc) for dr, dc in MOVES.values()]
        return [(r, c) for r, c in rooms if 0 < r < size and 0 < c < size]

    is_open = [[False] * size for _ in range(size)]
    is_open[1][1] = True
    frontier = around(1, 1)
    seen = {(1, 1), *frontier}
    while frontier:
        row, column = pop_random(frontier)
        rooms = around(row, column)
        near_row, near_column = pop_random([(r, c) for r, c in rooms if is_open[r][c]])
        is_open[row][column] = is_open[(row + near_row) // 2][(column + near_column) // 2] = True
        frontier += [near for near in rooms if near not in seen]
        seen.update(rooms)
    return is_open


def shortest_path(is_open: Grid) -> list[int]:
    """A generated maze is a tree, so its simple path is unique."""
    goal, paths = len(is_open) - 2, {(1, 1): list[int]()}
    stack = [*paths]
    while (goal, goal) not in paths:
        row, column = stack.pop()
        for move, (dr, dc) in MOVES.items():
            cell = row + dr, column + dc
            if is_open[cell[0]][cell[1]] and cell not in paths:
                paths[cell] = [*paths[row, column], move]
                stack.append(cell)
    return paths[goal, goal]


def encode_maze(is_open: Grid) -> list[int]:
    size = len(is_open)
    tokens = [BOS, GRID_START]
    for row in is_open:
        tokens += [PATH if cell else WALL for cell in row]
        tokens.append(NEWLINE)
    tokens[2 + (size + 1) + 1] = START
    tokens[2 + (size - 2) * (size + 1) + size - 2] = GOAL
    return [*tokens, GRID_END, PATH_START]


def cells_of(prompts: Prompts, size: int) -> Tensor:
    """Return the cells' tokens [G, size, size]."""
    rows = prompts.tokens.view(len(prompts), -1)[:, 2:-2].view(-1, size, size + 1)
    return rows[:, :, :size]


def judge(prompts: Prompts, rollouts: Rollouts, size: int) -> Tensor:
    """Return rewards [S] float32: 1 for a walk to the goal and DONE, else 0. Every token before
    DONE must be a move, and none up to the goal may enter a wall or leave the grid."""
    device = rollouts.tokens.device
    is_open = cells_of(prompts, size).flatten(1) != WALL
    is_open = is_open.repeat_interleave(len(rollouts) // len(prompts), 0)  # [S, size * size]
    tokens = rollouts.padded_tokens(PAD)  # [S, L]
    is_done = tokens == DONE
    before_done = is_done.cumsum(1) == 0
    moves = torch.tensor([*MOVES], device=device)
    steps = torch.zeros(VOCAB_SIZE, 2, dtype=torch.int64, device=device)
    steps[moves] = torch.tensor([*MOVES.values()], device=device)
    position = 1 + steps[tokens].cumsum(1)  # [S, L, 2], row and column after each token
    inside = ((position >= 0) & (position < size)).all(-1)
    row, column = position.clamp(0, size - 1).unbind(-1)
    is_legal = inside & is_open.gather(1, row * size + column)
    at_goal = inside & (row == size - 2) & (column == size - 2) & before_done
    counts = before_done & (at_goal.cumsum(1) - at_goal.long() == 0)  # not after the goal
    is_walk = (torch.isin(tokens, moves) | ~before_done).all(1) & (is_legal | ~counts).all(1)
    return (is_done.any(1) & is_walk & at_goal.any(1)).float()


_WANTED = "an odd number from 7 to 31 (there are only four 5x5 mazes)"
MazeSize = Annotated[int, Limit(_WANTED, lambda x: 7 <= x <= 31 and x % 2 == 1)]


@dataclass(frozen=True)
class MazeOptions:
    """Mazes."""

    maze_size: MazeSize = 9
    """Cells along one side of a maze, odd, 7 to 31. There are 192 mazes of 7x7, of which 38 are
    held out, and 100,352 of 9x9."""


class MazeTask:
    """Mazes by index. Maze i is the first draw of its own random stream in its split, which a CRC
    of its tokens decides: no test maze appears in training, whatever the seeds. maze_size: odd, at
    least 5."""

    vocab_size = VOCAB_SIZE
    fingerprint = ""
    num_test_prompts: int | None = None
    has_demonstrations = True
    stop_ids: tuple[int, ...] = (DONE, EOS)
    reward: str | None = None
    answer_limit: int | None = None

    def __init__(self, maze_size: int = 9, seed: int = 0):
        self.size, self.seed, size = maze_size, seed, maze_size
        self.name, self.prompt_length = f"maze {size}x{size}", size * (size + 1) + 4
        # any simple path and DONE; 128 at 17x17, where the paper allows 180
        longest = 2 * ((size - 1) // 2) ** 2
        self.max_new_tokens = longest if size < 17 else max(longest, 180)

    def maze(self, split: str, index: int) -> Grid:
        rng = random.Random(f"maze {self.size} {split} {self.seed} {index}")
        while True:
            is_open = generate_maze(self.size, rng)
            if (zlib.crc32(bytes(encode_maze(is_open))) % TEST_SHARE == 0) == (split == "test"):
                return is_open

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        return self._encode(start, [self.maze(split, i) for i in range(start, start + count)])

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        mazes = [self.maze("train", i) for i in range(start, start + count)]
        answers = [[*shortest_path(maze), DONE, EOS] for maze in mazes]
        return self._encode(start, mazes), Rollouts.given(answers)

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        return judge(prompts, rollouts, self.size)

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """The moves and DONE are an answer without reasoning."""
        mazes, num_rollouts = cells_of(prompts, self.size) != WALL, len(rollouts) // len(prompts)
        found = [ReferenceAnswer(0, [], [*shortest_path(x), DONE]) for x in mazes.tolist()]
        return [answer for answer in found for _ in range(num_rollouts)]

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        return decode_words(WORDS, tokens)

    def _encode(self, start: int, mazes: list[Grid]) -> Prompts:
        return Prompts(*pack([*map(encode_maze, mazes)]), torch.arange(start, start + len(mazes)))

    def answer(self, response: str) -> str:
        return response.partition("DONE")[0].strip()

    def tokenizer_files(self) -> dict[str, Any]:
        return word_tokenizer_files(WORDS, VOCAB_SIZE)

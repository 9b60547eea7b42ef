import random
from collections import deque

import pytest
import torch

from maxrl_fast.records import Rollouts
from maxrl_fast.tasks import maze
from maxrl_fast.tasks.maze import MazeTask, encode_maze, judge, shortest_path

ROWS = ["WWWWWWW", "WSWPPPW", "WPWPWWW", "WPPPPPW", "WPWWWPW", "WPWPPGW", "WWWWWWW"]
LETTERS = {"W": "WALL", "P": "PATH", "S": "START", "G": "GOAL", "\n": "NEWLINE"}
PAPER_PROMPT = ["<bos>", "GRID_START", *(LETTERS[x] for row in ROWS for x in f"{row}\n")]
PAPER_PROMPT += ["GRID_END", "PATH_START"]
PAPER_ANSWER = ["DOWN", "DOWN", "RIGHT", "RIGHT", "RIGHT", "RIGHT", "DOWN", "DOWN", "DONE", "<eos>"]
# rows of maze 7 of seed 5 as bits; the generator must not change
GOLDEN = [0, 254, 138, 186, 2, 254, 8, 254, 0]
ID = {word: i for i, word in enumerate(maze.WORDS)}


def grid_of(words):
    rows = " ".join(words[2:-2]).split("NEWLINE")[:-1]
    return [[word != "WALL" for word in row.split()] for row in rows]


def test_the_papers_example():
    is_open = grid_of(PAPER_PROMPT)
    assert encode_maze(is_open) == [ID[word] for word in PAPER_PROMPT]
    assert [*shortest_path(is_open), maze.DONE, maze.EOS] == [ID[word] for word in PAPER_ANSWER]


def test_words_are_in_the_order_of_the_papers_vocabulary():
    # maze/ckpt-1500/tokenizer.json of github.com/tajwarfahim/maxrl; no prompt has 17 to 31
    words = "<pad> <bos> <eos> <unk> GRID_START GRID_END PATH_START DONE PATH WALL GOAL START "
    words += "NEWLINE UP DOWN LEFT RIGHT"
    assert [*maze.WORDS] == words.split()
    vocabulary = MazeTask(5).tokenizer_files()["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == [*range(32)]


def walk_length(is_open):
    goal = (len(is_open) - 2,) * 2
    distance, queue = {(1, 1): 0}, deque([(1, 1)])
    while queue:
        row, column = queue.popleft()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if is_open[cell[0]][cell[1]] and cell not in distance:
                distance[cell] = distance[row, column] + 1
                queue.append(cell)
    return len(distance), distance.get(goal)


@pytest.mark.parametrize("size", [5, 7, 17, 31])
def test_mazes_are_spanning_trees_with_the_shortest_path(size):
    task = MazeTask(size)
    rooms = ((size - 1) // 2) ** 2
    for split in ("train", "test"):
        for i in range(3):
            is_open = task.maze(split, i)
            reached, length = walk_length(is_open)
            # connected, with the number of openings of a tree
            assert reached == sum(map(sum, is_open)) == 2 * rooms - 1
            assert all(is_open[r][c] for r in range(1, size, 2) for c in range(1, size, 2))
            path = shortest_path(is_open)
            assert len(path) == length <= task.max_new_tokens - 1
            assert len(encode_maze(is_open)) == task.prompt_length
    assert size != 17 or task.prompt_length == 310


def test_mazes_are_the_same_on_every_machine_and_in_any_order():
    task = MazeTask(9, seed=5)
    assert [sum(x << i for i, x in enumerate(row)) for row in task.maze("train", 7)] == GOLDEN
    prompts = task.prompts("train", 3, 4)
    for place, i in enumerate(range(3, 7)):
        assert prompts.take(place, 1).tokens.tolist() == task.prompts("train", i, 1).tokens.tolist()
    assert prompts.ids.tolist() == [3, 4, 5, 6]
    others = MazeTask(9, seed=6).prompts("train", 3, 4)
    assert others.tokens.tolist() != prompts.tokens.tolist()
    solutions = task.demonstrations(3, 4)[1]
    assert task.score(prompts, solutions).tolist() == [1.0] * 4


@pytest.mark.parametrize("size", [5, 9])
def test_no_test_maze_is_ever_trained_on(size):
    tasks = [MazeTask(size, seed) for seed in (0, 1)]
    train, test = (
        {tuple(encode_maze(task.maze(split, i))) for task in tasks for i in range(300)}
        for split in ("train", "test")
    )
    assert train
    assert test
    assert not train & test
    assert size != 5 or len(train | test) == 4  # all 5x5 mazes


def slow_score(is_open, tokens):
    if maze.DONE not in tokens:
        return 0
    moves = tokens[: tokens.index(maze.DONE)]
    if any(move not in maze.MOVES for move in moves):
        return 0
    row, column, goal = 1, 1, len(is_open) - 2
    for move in moves:
        row, column = row + maze.MOVES[move][0], column + maze.MOVES[move][1]
        if not (0 <= row < len(is_open) and 0 <= column < len(is_open)) or not is_open[row][column]:
            return 0
        if (row, column) == (goal, goal):
            return 1
    return 0


def mutations(path, rng):
    opposite = dict(zip(maze.MOVES, (maze.DOWN, maze.UP, maze.RIGHT, maze.LEFT), strict=True))
    back, done = opposite[path[-1]], maze.DONE
    yield from ([*path, done], path, [*path, done, maze.EOS], [*path, maze.EOS, done])
    yield [*path, maze.RIGHT, done]  # into a wall after the goal
    yield [*path, back, done]  # away from the goal
    yield [*path, back, path[-1], done]  # away and back
    yield from ([*path[:-1], done, path[-1]], [done], [maze.EOS])
    yield [maze.UP, maze.UP, maze.DOWN, maze.DOWN, *path, done]  # out of the grid and back
    for _ in range(20):
        wrong = list(path)
        for _ in range(rng.randint(1, 3)):
            odd = rng.choice([*maze.MOVES, *maze.MOVES, done, maze.PATH, maze.PAD])
            wrong[rng.randrange(len(wrong))] = odd
        yield [*wrong, done]
        yield [rng.choice([*maze.MOVES, done]) for _ in range(rng.randint(1, 3 * len(path)))]


@pytest.mark.parametrize("size", [5, 9, 17])
def test_scores_equal_the_slow_scorer(size):
    task, rng = MazeTask(size), random.Random(0)
    prompts = task.prompts("train", 0, 8)
    answers, expected = [], []
    for i in range(8):
        is_open = task.maze("train", i)
        tried = list(mutations(shortest_path(is_open), rng))
        answers += tried
        expected += [slow_score(is_open, answer) for answer in tried]
    rewards = judge(prompts, Rollouts.given(answers), size)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == expected
    assert 0.05 < sum(expected) / len(expected) < 0.5

"""Partial credit for mazes: `--task maze --reward
examples/papers/maze_progress.py:fraction_of_the_way`.
"""

from functools import lru_cache

MOVES = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
Cell = tuple[int, int]


@lru_cache(maxsize=4096)  # the rollouts of a group share their prompt
def distances_to_goal(prompt: str) -> tuple[Cell, dict[Cell, int]]:
    """Return the start cell and each open cell's number of moves to the goal, for a maze in the
    words of the maze task.
    """
    rows = prompt.partition("GRID_START")[2].partition("GRID_END")[0].split("NEWLINE")
    words = {(i, j): word for i, row in enumerate(rows) for j, word in enumerate(row.split())}
    # used for START and GOAL, which occur once
    place = {word: cell for cell, word in words.items()}
    distances, queue = {place["GOAL"]: 0}, [place["GOAL"]]
    for cell in queue:  # breadth-first search: the queue grows while it is read
        for dr, dc in MOVES.values():
            near = (cell[0] + dr, cell[1] + dc)
            if words.get(near, "WALL") != "WALL" and near not in distances:
                distances[near] = distances[cell] + 1
                queue.append(near)
    return place["START"], distances


def fraction_of_the_way(prompt: str, response: str) -> float:
    """Return 1 for a solution by the maze task, else the fraction of the way to the goal that the
    walk covered.

    The walk ends before its first illegal move, and its closest point to the goal counts. A walk
    that reaches the goal without a correct end (DONE after nothing but moves) earns one step less
    than the whole way.
    """
    cell, distances = distances_to_goal(prompt)
    length = nearest = distances[cell]
    moves, done, _ = response.partition("DONE")
    words = moves.split()
    for word in words:
        dr, dc = MOVES.get(word, (0, 0))
        cell = (cell[0] + dr, cell[1] + dc)
        if word not in MOVES or cell not in distances or nearest == 0:
            break
        nearest = min(nearest, distances[cell])
    is_solved = nearest == 0 and bool(done) and all(word in MOVES for word in words)
    return 1.0 if is_solved else (length - max(nearest, 1)) / length

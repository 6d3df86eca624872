"""Darkroom: find a hidden goal cell on a square grid. Many copies are stepped at once, with NumPy."""

import numpy as np

MOVES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [0, 0]])  # row and column of each action; the last one stays
NUM_ACTIONS = len(MOVES)
TRAIN_SHARE = 0.9  # of the goals


class Darkroom:
    """Copies of a room of `grid_size` x `grid_size` cells, one for each goal cell in `goals`, int (N,) from row * size + column.

    An episode starts in the centre and lasts `horizon` steps. The reward is 1 after each step that ends on the goal,
    else 0. Walls stop a move.
    """

    def __init__(self, goals: np.ndarray, grid_size: int, horizon: int) -> None:
        self.goals = np.asarray(goals)
        self.grid_size = grid_size
        self.horizon = horizon
        self.after = neighbours(grid_size)
        self.cells = self._start()
        self.time = 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """Take one action (N,) in each copy; return the cells (N,), the rewards (N,) and whether the episode is over.

        After the end of an episode `cells` are the first of the next one; those returned are the last of the old one.
        """
        reached = self.after[self.cells, actions]
        rewards = (reached == self.goals).astype(np.int64)
        self.time += 1
        is_done = self.time == self.horizon
        self.cells = reached
        if is_done:
            self.cells, self.time = self._start(), 0
        return reached, rewards, is_done

    def _start(self) -> np.ndarray:
        return np.full(len(self.goals), centre(self.grid_size))


def centre(grid_size: int) -> int:
    """Return the cell where episodes start."""
    return (grid_size // 2) * (grid_size + 1)


def neighbours(grid_size: int) -> np.ndarray:
    """Return the cell that each action leads to, int (cells, actions)."""
    places = np.stack(np.divmod(np.arange(grid_size**2), grid_size), axis=1)  # row, column
    rows, columns = np.moveaxis(np.clip(places[:, None] + MOVES, 0, grid_size - 1), -1, 0)
    return np.asarray(rows * grid_size + columns)


def split_goals(grid_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and the test goals: 73 and 8 of 81."""
    order = np.random.default_rng(seed).permutation(grid_size**2)
    num_train = round(TRAIN_SHARE * len(order))
    return np.sort(order[:num_train]), np.sort(order[num_train:])

"""Darkroom and key-to-door: hidden cells on a square grid.

Many copies are stepped at once, with NumPy.
"""

import numpy as np

# row and column of each action; the last one stays
MOVES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [0, 0]])
NUM_ACTIONS = len(MOVES)
TRAIN_SHARE = 0.9  # of the goals


class Darkroom:
    """Copies of a room of `grid_size` x `grid_size` cells, one for each goal in `goals`, int (N,):
    row * size + column.

    An episode starts in the centre and lasts `horizon` steps. The reward is 1 after each step that
    ends on the goal, else 0. Walls stop a move.
    """

    num_phases = 1  # what an episode's rewards so far tell of the next one

    def __init__(self, goals: np.ndarray, grid_size: int, horizon: int) -> None:
        self.goals = np.asarray(goals)
        self.grid_size = grid_size
        self.horizon = horizon
        self.after = neighbours(grid_size)
        self._start()

    def _start(self) -> None:
        self.cells = np.full(len(self.goals), centre(self.grid_size))
        self.phases = np.zeros(len(self.goals), np.int64)
        self.time = 0

    @classmethod
    def all_goals(cls, grid_size: int) -> np.ndarray:
        """Return every goal there is."""
        return np.arange(grid_size**2)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """Take one action (N,) in each copy; return the cells (N,), the rewards (N,) and whether
        the episode is over.

        After the end of an episode `cells` and `phases` are the first of the next one; the cells
        returned are the last of the old one.
        """
        reached = self.after[self.cells, actions]
        self.cells = reached
        rewards = self._rewards().astype(np.int64)
        self.time += 1
        is_done = self.time == self.horizon
        if is_done:
            self._start()
        return reached, rewards, is_done

    def _rewards(self) -> np.ndarray:
        return self.cells == self.goals


class KeyToDoor(Darkroom):
    """The same with a hidden key and a hidden door (Dark Key-to-Door of Laskin et al. 2022): a goal
    is key * cells + door.

    The first step onto the key has the reward 1, then the first step onto the door, then nothing.
    The agent sees neither where they are nor whether it has the key. `phases` (N,) are 0 without
    the key, 1 with it, 2 after the door.
    """

    num_phases = 3

    @classmethod
    def all_goals(cls, grid_size: int) -> np.ndarray:
        pairs = np.arange(grid_size**4)
        return pairs[pairs // grid_size**2 != pairs % grid_size**2]

    def _rewards(self) -> np.ndarray:
        key, door = np.divmod(self.goals, self.grid_size**2)
        rewards = self.cells == np.choose(self.phases, [key, door, -1])
        self.phases = self.phases + rewards
        return rewards


ROOMS = {"darkroom": Darkroom, "key_to_door": KeyToDoor}


def centre(grid_size: int) -> int:
    """Return the cell where episodes start."""
    return (grid_size // 2) * (grid_size + 1)


def neighbours(grid_size: int) -> np.ndarray:
    """Return the cell that each action leads to, int (cells, actions)."""
    places = np.stack(np.divmod(np.arange(grid_size**2), grid_size), axis=1)  # row, column
    rows, columns = np.moveaxis(np.clip(places[:, None] + MOVES, 0, grid_size - 1), -1, 0)
    return np.asarray(rows * grid_size + columns)


def split_goals(goals: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and the test goals: 73 and 8 of 81."""
    order = np.random.default_rng(seed).permutation(goals)
    num_train = round(TRAIN_SHARE * len(order))
    return np.sort(order[:num_train]), np.sort(order[num_train:])

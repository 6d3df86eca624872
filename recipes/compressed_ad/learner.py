"""The source learner, whose learning histories are distilled: tabular, optimistic, one table for each stream.

It learns the value of standing in each cell. Values start high, so that it explores; experience corrects them. After each
step it plans: a few sweeps of value iteration over the cells that it has visited (Dyna: Sutton and Barto 2018, sections
8.2 and 2.6). Actions are greedy, and random with a probability that falls over the history.
"""

from dataclasses import dataclass

import numpy as np

from recipes.compressed_ad.environment import NUM_ACTIONS, Darkroom, neighbours
from utils.common.config import FRACTION, Options, option


@dataclass(frozen=True)
class Learner(Options):
    """The options of the learner. A stay on the goal is worth 1 / (1 - discount)."""

    discount: float = option(0.9, "of the learner", above=0, below=1)
    optimism: float = option(0.4, "value of an unknown cell, as a share of a stay on the goal", **FRACTION)
    planning_sweeps: int = option(4, "of value iteration after each step", at_least=0)
    first_randomness: float = option(0.2, "share of random actions at the start of a history", **FRACTION)
    last_randomness: float = option(0.02, "the same from the middle of a history on", **FRACTION)

    def randomness(self, step: int, num_steps: int) -> float:
        """Return the share of random actions at a step of a history."""
        progress = min(step / max(num_steps / 2, 1), 1)
        return self.first_randomness + (self.last_randomness - self.first_randomness) * progress


History = dict[str, np.ndarray]


def learn(
    goal: int, *, num_streams: int, num_steps: int, grid_size: int, horizon: int, seed: int, learner: Learner
) -> History:
    """Return the histories of independent learners (streams) with one goal, in the layout of the data file.

    `states` and `next_states` int32 (steps, streams, 2), `actions` and `rewards` int32 (steps, streams), `dones` bool.
    """
    generator = np.random.default_rng([seed, goal])
    room = Darkroom(np.full(num_streams, goal), grid_size, horizon)
    after, streams = neighbours(grid_size), np.arange(num_streams)
    values = np.full((num_streams, grid_size**2), learner.optimism / (1 - learner.discount))
    visited = np.zeros(values.shape, bool)
    seen_rewards = np.zeros(values.shape)
    steps: list[tuple[np.ndarray, ...]] = []
    for step in range(num_steps):
        cells = room.cells
        # The first of equally good actions: ties are broken alike in all streams.
        actions = values[streams[:, None], after[cells]].round(6).argmax(1)
        is_random = generator.random(num_streams) < learner.randomness(step, num_steps)
        actions = np.where(is_random, generator.integers(NUM_ACTIONS, size=num_streams), actions)
        reached, rewards, is_done = room.step(actions)
        visited[streams, reached] = True
        seen_rewards[streams, reached] = rewards
        for _ in range(learner.planning_sweeps):
            best_next = values[:, after].max(2)  # (streams, cells)
            values = np.where(visited, seen_rewards + learner.discount * best_next, values)
        steps.append((cells, actions, rewards, reached, np.full(num_streams, is_done)))
    cells, actions, rewards, reached, dones = map(np.stack, zip(*steps, strict=True))
    return {
        "states": places(cells, grid_size),
        "actions": actions.astype(np.int32),
        "rewards": rewards.astype(np.int32),
        "next_states": places(reached, grid_size),
        "dones": dones,
    }


def places(cells: np.ndarray, grid_size: int) -> np.ndarray:
    """Return rows and columns of cells (…): int32 (…, 2)."""
    return np.stack(np.divmod(cells, grid_size), axis=-1).astype(np.int32)

"""The source learner, whose learning histories are distilled: tabular, optimistic, one table for
each stream.

It learns the value of each step's end: the cell, and the phase in which the step began. Values
start high, so that it explores; experience corrects them. After each step it plans: a few sweeps of
value iteration over what it has visited (Dyna: Sutton and Barto 2018, sections 8.2 and 2.6).
Actions are greedy, and random with a probability that falls over the history.
"""

import numpy as np

from recipes.compressed_ad.environment import NUM_ACTIONS, neighbours
from recipes.compressed_ad.settings import Settings

History = dict[str, np.ndarray]


def learn(config: Settings, goal: int) -> History:
    """Return the histories of independent learners (streams) with one goal, in the layout of the
    data file.

    `states` and `next_states` int32 (steps, streams, 2), `actions` and `rewards` int32 (steps,
    streams), `dones` bool.
    """
    num_streams, grid_size = config.source_streams, config.grid_size
    generator = np.random.default_rng([config.alg_seed, goal])
    room = config.room(np.full(num_streams, goal), grid_size, config.horizon)
    after = neighbours(grid_size)
    streams = np.arange(num_streams)
    values = np.full(
        (num_streams, room.num_phases, grid_size**2), config.optimism / (1 - config.discount)
    )
    # After the last phase but one nothing is left to find.
    values[:, 1:][:, -1:] = 0
    visited = np.zeros(values.shape, bool)
    seen_rewards = np.zeros(values.shape)
    next_phases = np.broadcast_to(np.arange(room.num_phases)[:, None], values.shape).copy()
    steps: list[tuple[np.ndarray, ...]] = []
    for step in range(config.source_steps):
        cells, phases = room.cells, room.phases
        # The first of equally good actions: ties are broken alike in all streams.
        actions = values[streams[:, None], phases[:, None], after[cells]].round(6).argmax(1)
        progress = min(step / max(config.source_steps / 2, 1), 1)
        randomness = (
            config.first_randomness + (config.last_randomness - config.first_randomness) * progress
        )
        is_random = generator.random(num_streams) < randomness
        actions = np.where(is_random, generator.integers(NUM_ACTIONS, size=num_streams), actions)
        reached, rewards, is_done = room.step(actions)
        visited[streams, phases, reached] = True
        seen_rewards[streams, phases, reached] = rewards
        next_phases[streams, phases, reached] = np.minimum(phases + rewards, room.num_phases - 1)
        for _ in range(config.planning_sweeps):
            # (streams, phases, cells)
            best_next = np.take_along_axis(values[:, :, after].max(3), next_phases, 1)
            values = np.where(visited, seen_rewards + config.discount * best_next, values)
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

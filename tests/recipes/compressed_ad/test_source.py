"""The room, the source learner, and the file of its histories."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recipes.compressed_ad.environment import Darkroom, split_goals
from recipes.compressed_ad.histories import read_histories, write_histories
from recipes.compressed_ad.learner import Learner, learn
from tests.recipes.compressed_ad.small import small_settings, write_small_histories
from tests.recipes.harness import refused


def test_walls_stop_moves_and_the_goal_rewards_every_step_that_ends_there() -> None:
    room = Darkroom(np.array([0, 8, 4]), 3, 4)  # two corners and the centre
    assert room.cells.tolist() == [4, 4, 4]
    up_down_stay = np.array([1, 0, 4])
    assert [room.step(up_down_stay)[0].tolist() for _ in range(2)] == [[1, 7, 4], [1, 7, 4]]
    reached, rewards, is_done = room.step(np.array([3, 2, 4]))  # column - 1, column + 1, stay
    assert (reached.tolist(), rewards.tolist(), is_done) == ([0, 8, 4], [1, 1, 1], False)
    reached, rewards, is_done = room.step(np.array([4, 4, 0]))
    assert (reached.tolist(), rewards.tolist(), is_done) == ([0, 8, 7], [1, 1, 0], True)
    assert room.cells.tolist() == [4, 4, 4]  # the next episode


def test_81_goals_are_73_for_training_and_8_for_the_test() -> None:
    train, test = split_goals(9, 0)
    assert (len(train), len(test)) == (73, 8)
    assert sorted([*train, *test]) == list(range(81))
    assert split_goals(9, 1)[1].tolist() != test.tolist()


def test_the_learner_finds_a_far_goal_and_keeps_to_it() -> None:
    history = learn(0, num_streams=8, num_steps=400, grid_size=9, horizon=20, seed=1, learner=Learner())
    returns = history["rewards"].reshape(20, 20, 8).sum(1).mean(1)
    assert returns[:2].mean() < 3
    assert returns[-5:].mean() > 11  # of 13: the corner is 8 steps away
    assert history["states"].shape == (400, 8, 2)
    assert history["dones"].sum() == 20 * 8
    assert (history["states"][::20] == 4).all()


def test_the_file_gives_back_what_the_learners_did(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    write_small_histories(settings)
    found = read_histories(settings.data_file, np.array([2, 7]), 2, 100, 3)
    assert found.shape == (4, 100, 4)
    again = learn(7, num_streams=2, num_steps=270, grid_size=3, horizon=5, seed=42, learner=Learner())
    assert found[2, :, 1].tolist() == again["actions"][:100, 0].tolist()
    assert found[3, :, 2].tolist() == again["rewards"][:100, 1].tolist()
    row, column = np.divmod(found[3, :, 3], 3)
    assert np.stack([row, column], 1).tolist() == again["next_states"][:100, 1].tolist()


def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    file, goals = settings.data_file, np.array([1])
    with refused("no such file; make it with python collect.py"):
        read_histories(file, goals, 1, 10, 3)
    write_small_histories(settings)
    with refused("9 goals, but a grid of 9 x 9 has 81"):
        read_histories(file, goals, 1, 10, 9)
    with refused("goal 1 has 2 streams of 270 steps, 2 of 1000 are asked for"):
        read_histories(file, goals, 2, 1000, 3)
    file.write_bytes(file.read_bytes()[:1000])
    with refused("not a file of histories (", "; run python collect.py again"):
        read_histories(file, goals, 1, 10, 3)
    write_histories(file, [])
    assert [path.name for path in file.parent.iterdir()] == [file.name]

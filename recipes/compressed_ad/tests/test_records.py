"""The room, the source learner, its histories, and the records that a training draws from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.compressed_ad.distillation import loaders
from recipes.compressed_ad.environment import Darkroom, KeyToDoor, split_goals
from recipes.compressed_ad.histories import read_histories, write_histories
from recipes.compressed_ad.learner import learn
from recipes.compressed_ad.records import TestBatches, TrainBatches, draw_records
from recipes.compressed_ad.settings import Settings
from recipes.compressed_ad.sizes import RECORDS_OF_DEPTH
from recipes.compressed_ad.tests.small import small_settings, write_small_histories
from tests.support.recipes import assert_refused

# --- The room, the source learner, and the file of its histories ----------------------------------


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


def test_the_key_rewards_once_then_the_door_once_then_nothing() -> None:
    # (key, door); the centre is cell 4
    room = KeyToDoor(np.array([5 * 9 + 4, 4 * 9 + 5, 0 * 9 + 5]), 3, 6)
    assert len(KeyToDoor.all_goals(3)) == 9 * 8
    # column + 1, - 1, stay
    found = [room.step(np.full(3, action)) for action in (2, 3, 4, 2, 3, 2)]
    assert np.stack([rewards for _, rewards, _ in found], 1).tolist() == [
        [1, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],  # the door without the key
    ]
    assert (room.phases.tolist(), room.cells.tolist()) == ([0, 0, 0], [4, 4, 4])  # the next episode


def test_81_goals_are_73_for_training_and_8_for_the_test() -> None:
    train, test = split_goals(np.arange(81), 0)
    assert (len(train), len(test)) == (73, 8)
    assert sorted([*train, *test]) == list(range(81))
    assert split_goals(np.arange(81), 1)[1].tolist() != test.tolist()


def test_the_learner_finds_a_far_goal_and_keeps_to_it() -> None:
    history = learn(Settings(source_streams=8, source_steps=400), 0)
    returns = history["rewards"].reshape(20, 20, 8).sum(1).mean(1)
    assert returns[:2].mean() < 3
    assert returns[-5:].mean() > 11  # of 13: the corner is 8 steps away
    assert history["states"].shape == (400, 8, 2)
    assert history["dones"].sum() == 20 * 8
    assert (history["states"][::20] == 4).all()


def test_the_learner_finds_a_far_key_and_a_far_door() -> None:
    room: dict[str, Any] = {
        "environment": "key_to_door",
        "grid_size": 7,
        "discount": 0.95,
        "optimism": 0.03,
    }
    history = learn(Settings(source_streams=8, source_steps=600, **room), 0 * 49 + 48)
    returns = history["rewards"].reshape(30, 20, 8).sum(1).mean(1)
    assert returns[:2].mean() < 1
    assert returns[-5:].mean() > 1.6  # two corners: 18 of 20 steps, one detour is too much


def test_the_file_gives_back_what_the_learners_did(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    write_small_histories(settings)
    found = read_histories(settings, np.array([2, 7]), 2, 100)
    assert found.shape == (4, 100, 4)
    again = learn(settings, 7)
    assert found[2, :, 1].tolist() == again["actions"][:100, 0].tolist()
    assert found[3, :, 2].tolist() == again["rewards"][:100, 1].tolist()
    row, column = np.divmod(found[3, :, 3], 3)
    assert np.stack([row, column], 1).tolist() == again["next_states"][:100, 1].tolist()


def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    file, goals = settings.data_file, np.array([1])
    with assert_refused("no such file; make it with python collect.py"):
        read_histories(settings, goals, 1, 10)
    write_small_histories(settings)
    with assert_refused("9 goals, but the configuration has 81; run python collect.py"):
        read_histories(replace(settings, grid_size=9), goals, 1, 10)
    with assert_refused("goal 1 has 2 streams of 270 steps, 2 of 1000 are asked for"):
        read_histories(settings, goals, 2, 1000)
    file.write_bytes(file.read_bytes()[:1000])
    with assert_refused("not a file of histories (", "; run python collect.py"):
        read_histories(settings, goals, 1, 10)
    with assert_refused("histories of 200 steps: 261 are needed"):
        draw_records(1, 200, 0)
    write_histories(file, [])
    assert [path.name for path in file.parent.iterdir()] == [file.name]


# --- Training records: what a batch holds, and how ranks share them -------------------------------


NUM_STEPS = 270


def numbered_histories(count: int) -> np.ndarray:
    """Return histories whose steps tell who they are: cell and next cell together are the step's
    number.
    """
    steps = np.arange(NUM_STEPS)
    columns = np.broadcast_arrays(steps // 200, steps % 5, np.arange(count)[:, None], steps % 200)
    return np.stack(columns, -1).astype(np.uint8)


def step_numbers(steps: np.ndarray) -> np.ndarray:
    return np.asarray(steps[..., 0].astype(int) * 200 + steps[..., 3])


def batches(**changes: int) -> TrainBatches:
    options = {"batch_size": 4, "num_batches": 30, "seed": 3, **changes}
    return TrainBatches(numbered_histories(6), draw_records(6, NUM_STEPS, 0), **options)


@pytest.mark.parametrize("depth", range(4))
def test_a_batch_holds_segments_then_recent_steps_then_the_actions_to_predict(depth: int) -> None:
    histories = numbered_histories(6)
    records = draw_records(6, NUM_STEPS, 0)[depth]
    assert len(records) == 6 * RECORDS_OF_DEPTH[depth]
    chosen = np.arange(0, len(records), 5)
    batch = records.batch(histories, chosen)
    first_query = batch["recent"].shape[1] + 1 - batch["query_cells"].shape[1]
    assert first_query == (10 if depth else 11)
    for row, (history, start, length, *segments) in enumerate(records.table[chosen]):
        position = 0
        for stage, count in enumerate(segments):
            steps = batch["segments"][stage][row].numpy()
            assert batch["segment_lengths"][row, stage] == count
            assert step_numbers(steps[:count]).tolist() == list(range(position, position + count))
            assert not steps[count:].any()
            position += count
        if depth:
            assert position == start
        recent = batch["recent"][row].numpy()[:length]
        assert step_numbers(recent).tolist() == list(range(start, start + length))
        assert (recent[:, 2] == history).all()
        targets = batch["targets"][row].numpy()
        wanted = [number % 5 for number in range(start + first_query, start + length + 1)]
        assert targets.tolist() == wanted + [-1] * (len(targets) - len(wanted))
        cells = batch["query_cells"][row].numpy()[: len(wanted)]
        assert cells.tolist() == [
            number // 200 for number in range(start + first_query, start + length + 1)
        ]


def test_two_ranks_share_the_batch_of_one_rank_with_the_same_depth() -> None:
    one = batches(batch_size=8)
    two = [batches(rank=rank, world_size=2) for rank in range(2)]
    depths = set()
    for number in range(80):  # several passes
        depth, numbers = one.records_of(number)
        parts = [each.records_of(number) for each in two]
        assert [part[0] for part in parts] == [depth, depth]
        assert np.concatenate([part[1] for part in parts]).tolist() == numbers.tolist()
        depths.add(depth)
    assert depths == {0, 1, 2, 3}


def test_a_pass_uses_no_record_twice_and_the_next_pass_has_another_order() -> None:
    loader = batches(batch_size=6)
    per_pass = sum(6 * number // 6 for number in RECORDS_OF_DEPTH)
    first, second = (
        [loader.records_of(number) for number in range(begin, begin + per_pass)]
        for begin in (0, per_pass)
    )
    used = [(depth, number) for depth, numbers in first for number in numbers]
    assert len(used) == len(set(used)) == 6 * 93
    composed = [
        {(depth, *sorted(numbers.tolist())) for depth, numbers in each} for each in (first, second)
    ]
    assert len(composed[0] & composed[1]) < len(first) / 10, "batches of other records"
    assert [depth for depth, _ in first] != [depth for depth, _ in second]


def test_the_test_uses_each_record_once_over_all_ranks() -> None:
    records = draw_records(2, NUM_STEPS, 1)
    parts = [
        TestBatches(numbered_histories(2), records, batch_size=7, rank=rank, world_size=3).parts
        for rank in range(3)
    ]
    used = sorted(
        (depth, int(number)) for part in parts for depth, numbers in part for number in numbers
    )
    assert used == [
        (depth, number) for depth in range(4) for number in range(2 * RECORDS_OF_DEPTH[depth])
    ]


def test_the_baseline_sees_recent_steps_alone_and_each_record_has_a_target(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, encoder_layers=0)
    write_small_histories(settings)
    for loader in loaders(settings, 1, 0, 1):
        (records,) = loader.records
        assert len(records) > 80
        batch = records.batch(loader.histories, np.arange(len(records)))
        assert batch["segments"] == []
        assert (batch["targets"] >= 0).any(1).all()  # a mean over no target is not a number

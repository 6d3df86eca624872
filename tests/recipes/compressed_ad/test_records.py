"""Training records: what a batch holds, and how ranks share them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipes.compressed_ad.distillation import loaders
from recipes.compressed_ad.records import TestBatches, TrainBatches, draw_records
from recipes.compressed_ad.sizes import RECORDS_OF_DEPTH
from tests.recipes.compressed_ad.small import small_settings, write_small_histories
from tests.recipes.harness import refused

NUM_STEPS = 270


def numbered_histories(count: int) -> np.ndarray:
    """Return histories whose steps tell who they are: cell and next cell together are the step's number."""
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
        assert cells.tolist() == [number // 200 for number in range(start + first_query, start + length + 1)]


def test_short_histories_are_refused() -> None:
    with refused("histories of 200 steps: 261 are needed"):
        draw_records(1, 200, 0)


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
        [loader.records_of(number) for number in range(begin, begin + per_pass)] for begin in (0, per_pass)
    )
    used = [(depth, number) for depth, numbers in first for number in numbers]
    assert len(used) == len(set(used)) == 6 * 93
    assert [numbers.tolist() for _, numbers in first] != [numbers.tolist() for _, numbers in second]


def test_a_batch_depends_on_its_number_alone() -> None:
    whole, late = batches(), batches()
    whole.set_epoch(2)
    late.set_epoch(2, 27)
    expected = list(whole)[27:]
    found = list(late)
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["recent"].tolist() == theirs["recent"].tolist()


def test_the_test_uses_each_record_once_over_all_ranks() -> None:
    records = draw_records(2, NUM_STEPS, 1)
    parts = [
        TestBatches(numbered_histories(2), records, batch_size=7, rank=rank, world_size=3).parts for rank in range(3)
    ]
    used = sorted((depth, int(number)) for part in parts for depth, numbers in part for number in numbers)
    assert used == [(depth, number) for depth in range(4) for number in range(2 * RECORDS_OF_DEPTH[depth])]


def test_the_baseline_sees_recent_steps_alone_and_each_record_has_a_target(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, encoder_layers=0)
    write_small_histories(settings)
    for loader in loaders(settings, 1, 0, 1):
        (records,) = loader.records
        assert len(records) > 80
        batch = records.batch(loader.histories, np.arange(len(records)))
        assert batch["segments"] == []
        assert (batch["targets"] >= 0).any(1).all()  # a mean over no target is not a number

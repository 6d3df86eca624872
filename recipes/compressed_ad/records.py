"""Training samples: records that index learning histories, batched by compression depth and divided
among the ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes.compressed_ad.sizes import (
    CONTEXTS,
    MAX_DEPTH,
    OFFSETS,
    RECENT,
    RECORDS_OF_DEPTH,
    SEGMENTS,
)
from yolo_seg_ddp.utils.errors import UserError

Histories = np.ndarray  # uint8 (histories, steps, 4): see sizes.STEP_FIELDS


@dataclass(frozen=True)
class Records:
    """Records of one depth: rows of `table`, int32 (records, 3 + depth): history, first recent
    step, recent steps, segments.
    """

    depth: int
    table: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, histories: Histories, numbers: np.ndarray) -> dict[str, Any]:
        """Return the records with these numbers as a batch: the model's inputs, and `targets` int64
        (B, queries).

        A target of -1 is padding. Every recent step from the shortest context on is a target.
        """
        history, start, length, *segments = self.table[numbers].T
        first_query = (RECENT if self.depth else CONTEXTS)[0]
        # one more: the step after the context is a target, too
        window = _steps(histories, history, start, length + 1)
        targets = window[:, first_query:, 1].astype(np.int64)
        targets[np.arange(first_query, window.shape[1]) > length[:, None]] = -1
        begins = np.cumsum([np.zeros_like(start), *segments], axis=0)
        return {
            "recent": torch.from_numpy(np.ascontiguousarray(window[:, :-1])),
            "query_cells": torch.from_numpy(np.ascontiguousarray(window[:, first_query:, 0])),
            "segments": [
                torch.from_numpy(_steps(histories, history, begin, count))
                for begin, count in zip(begins, segments, strict=False)
            ],
            "segment_lengths": torch.from_numpy(
                np.array(segments, np.int64).T.reshape(len(history), self.depth).copy()
            ),
            "targets": torch.from_numpy(targets),
        }


def _steps(
    histories: Histories, history: np.ndarray, start: np.ndarray, length: np.ndarray
) -> np.ndarray:
    """Return steps `start` to `start + length` of histories, padded with zeros to the longest:
    uint8 (B, L, 4).
    """
    offsets = np.arange(length.max())
    is_real = offsets < length[:, None]
    places = np.where(is_real, start[:, None] + offsets, 0)
    return np.asarray(histories[history[:, None], places] * is_real[..., None].astype(np.uint8))


def draw_records(num_histories: int, num_steps: int, seed: int) -> list[Records]:
    """Draw 93 records of each history, by depth.

    Raises UserError when histories are too short for them.
    """
    needed = max(OFFSETS[1] + CONTEXTS[1], MAX_DEPTH * SEGMENTS[1] + RECENT[1]) + 1
    if num_steps < needed:
        raise UserError(
            f"histories of {num_steps} steps: {needed} are needed; collect longer ones (num_steps)"
        )
    drawn = []
    for depth, number in enumerate(RECORDS_OF_DEPTH):
        generator = np.random.default_rng([seed, depth])
        history = np.repeat(np.arange(num_histories), number)
        segments = generator.integers(*SEGMENTS, (len(history), depth), endpoint=True)
        start = (
            segments.sum(1) if depth else generator.integers(*OFFSETS, len(history), endpoint=True)
        )
        length = generator.integers(*(RECENT if depth else CONTEXTS), len(history), endpoint=True)
        drawn.append(
            Records(depth, np.column_stack([history, start, length, segments]).astype(np.int32))
        )
    return drawn


class TrainBatches:
    """This rank's training batches. All ranks have the same depth in a step, and different records.

    In a pass each depth's records are shuffled and cut into batches for all ranks together; then
    the batches are shuffled. All this depends only on the seed and the pass. `batch_size` is per
    rank. One epoch of the engine has `num_batches`.
    """

    def __init__(
        self,
        histories: Histories,
        records: list[Records],
        *,
        batch_size: int,
        num_batches: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.histories = histories
        self.records = records
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._next = 0
        self._pass: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Let the next iteration begin with this batch of this epoch."""
        self._next = epoch * self.num_batches + start_batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        end = self._next - self._next % self.num_batches + self.num_batches
        for number in range(self._next, end):
            depth, numbers = self.records_of(number)
            yield self.records[depth].batch(self.histories, numbers)

    def records_of(self, number: int) -> tuple[int, np.ndarray]:
        """Return the depth and this rank's records of batch `number`, counted from the start of the
        training.
        """
        per_pass = sum(self._batches_of(records) for records in self.records)
        which, place = divmod(number, per_pass)
        if which != self._pass[0]:
            self._pass = which, self._shuffled(which)
        depth, numbers = self._pass[1][place]
        return depth, numbers[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]

    def _batches_of(self, records: Records) -> int:
        return max(len(records) // (self.batch_size * self.world_size), 1)

    def _shuffled(self, which: int) -> list[tuple[int, np.ndarray]]:
        """Return depth and record numbers of all batches of a pass; the remainder of each depth
        waits for other passes.
        """
        together = self.batch_size * self.world_size
        batches = []
        for records in self.records:
            order = np.random.default_rng([self.seed, which, records.depth]).permutation(
                len(records)
            )
            count = self._batches_of(records)
            # repeats records if there are too few
            rows = np.resize(order, count * together).reshape(count, together)
            batches += [(records.depth, row) for row in rows]
        order = np.random.default_rng([self.seed, which]).permutation(len(batches))
        return [batches[number] for number in order]


class TestBatches:
    """This rank's share of all records, in order; no record is repeated."""

    __test__ = False  # not a test, for pytest

    def __init__(
        self,
        histories: Histories,
        records: list[Records],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.histories = histories
        self.records = records
        self.parts = [
            (each.depth, share[first : first + batch_size])
            for each in records
            for share in [np.arange(rank, len(each), world_size)]
            for first in range(0, len(share), batch_size)
        ]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for depth, numbers in self.parts:
            yield self.records[depth].batch(self.histories, numbers)

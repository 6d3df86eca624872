"""What the loop prints and records of a batch: a line every ten batches, with facts of every rank."""

from __future__ import annotations

import math
import statistics
import time

import torch

from utils.common.devices import peak_memory_bytes
from utils.common.text import format_bytes, format_duration
from utils.distributed import all_reduce_sum, communication_device, rank
from utils.engine.meters import FIELDS, EpochMeter, RankMeter
from utils.engine.state import Progress
from utils.engine.task import Task
from utils.run.log import RunLog
from utils.run.records import SlowRank, others_ms
from utils.run.view import device_words

MOST_RANKS_CHARTED = 8  # each with a line of its own in TensorBoard
Ranks = dict[str, list[float]]  # by the names of FIELDS: one value for each rank


class BatchLog:
    """Logs a batch on the console, in metrics.jsonl and in TensorBoard."""

    def __init__(self, device: torch.device, world_size: int, task: Task | None = None) -> None:
        self.task = task or Task()
        self.device = device
        self.world_size = world_size
        self.rank_meter = RankMeter(device)
        self._slow_rank = SlowRank()

    def write(
        self,
        log: RunLog,
        values: dict[str, torch.Tensor],
        progress: Progress,
        position: int,
        meter: EpochMeter,
        batches: tuple[int, int],
    ) -> None:
        """Log one batch; `batches` counts those of this epoch and those that remain in the run.

        Every rank must reach this: the logged values are means over all ranks, gathered by one collective.
        """
        lap = meter.lap()
        names = sorted(values)
        sums = self._gather([values[name] for name in names], self.rank_meter.lap(lap.data_wait_share))
        reported = {name: total / self.world_size for name, total in zip(names, sums, strict=False)}
        of_ranks = sums[len(names) :]
        ranks = {name: of_ranks[number :: len(FIELDS)] for number, name in enumerate(FIELDS)}
        if not log.is_main:
            return
        slow_rank = self._slow_rank.update(ranks["own_ms"], lap.step_ms, lap.num_batches)
        images_per_s = meter.num_samples * self.world_size / meter.elapsed_s
        speed = f"{images_per_s:.1f} {self.task.samples}/s"
        line = batch_line(position, batches, reported["loss"], meter, speed, peak_memory_bytes(self.device))
        gpus = " ".join(device_words(ranks))
        log.print(", ".join([line, *([gpus] if gpus else []), *_slow_words(slow_rank, ranks)]))
        speeds = {
            "images_per_s": images_per_s,
            "step_ms": lap.step_ms,
            "data_wait_share": statistics.fmean(ranks["data_wait_share"]),
        }
        place = {"epoch": progress.epoch + 1, "batch": position, "global_step": progress.global_step}
        measured = {name: found for name, found in ranks.items() if not all(map(math.isnan, found))}
        record = {
            "kind": "batch",
            **place,
            **reported,
            **speeds,
            "num_batches": batches[0],
            "time_s": round(time.time(), 1),
            "slow_rank": slow_rank,
            "ranks": measured,
        }
        log.metrics(record)
        log.scalars("batch", {**reported, **speeds}, progress.global_step)
        log.scalars("ranks", _charted(measured), progress.global_step)
        self.task.after_log(record, log)

    def _gather(self, values: list[torch.Tensor], mine: list[float]) -> list[float]:
        """Return the sums of `values` over ranks, then every rank's `mine`, by one all-reduce."""
        of_ranks = torch.zeros(self.world_size, len(mine))
        of_ranks[rank() if self.world_size > 1 else 0] = torch.tensor(mine)
        place = communication_device()
        stacked = torch.stack([value.detach().float() for value in values])
        return all_reduce_sum(torch.cat([stacked.to(place), of_ranks.flatten().to(place)])).tolist()


def _slow_words(slow_rank: int | None, ranks: Ranks) -> list[str]:
    if slow_rank is None:
        return []
    own_ms = ranks["own_ms"]
    return [f"rank {slow_rank} is slow ({own_ms[slow_rank]:.0f} ms, others {others_ms(own_ms, slow_rank):.0f} ms)"]


def _charted(ranks: Ranks) -> dict[str, float]:
    """Return the values for TensorBoard: each rank's own time; mean and maximum of the others."""
    charted = {f"own_ms/{number}": value for number, value in enumerate(ranks.get("own_ms", [])[:MOST_RANKS_CHARTED])}
    for name, values in ranks.items():
        known = [value for value in values if not math.isnan(value)]
        charted[f"{name}_max"] = max(known)
        charted[f"{name}_mean"] = statistics.fmean(known)
    return charted


def batch_line(
    position: int, batches: tuple[int, int], loss: float, meter: EpochMeter, speed: str, memory_bytes: int
) -> str:
    """Return the console line of one batch; `batches` counts those of the epoch and those that remain in the run."""
    per_batch_s = meter.elapsed_s / max(meter.num_batches, 1)
    return (
        f"  Batch [{position}/{batches[0]}] - Loss: {loss:.4f} | {speed}, "
        f"data wait {meter.data_wait_s / meter.elapsed_s:.0%}, {format_bytes(memory_bytes)}, "
        f"{format_duration(batches[1] * per_batch_s)} left"
    )

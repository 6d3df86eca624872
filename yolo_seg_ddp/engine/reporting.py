"""What the loop prints and records: a line every ten batches, with readings of every rank, and the
end of each epoch.
"""

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from yolo_seg_ddp.engine.meters import FIELDS, EpochMeter, RankMeter
from yolo_seg_ddp.engine.options import EngineOptions
from yolo_seg_ddp.engine.state import Progress, TrainState
from yolo_seg_ddp.engine.task import Epoch, Task
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.run.records import SlowRank, others_ms
from yolo_seg_ddp.run.view import device_words
from yolo_seg_ddp.utils.devices import peak_memory_bytes
from yolo_seg_ddp.utils.distributed import (
    all_reduce_sum,
    any_rank,
    communication_device,
    rank,
    run_on_main,
)
from yolo_seg_ddp.utils.files import warn_on_write_error
from yolo_seg_ddp.utils.text import coloured, format_bytes, format_duration

MOST_RANKS_CHARTED = 8  # each with a line of its own in TensorBoard
Ranks = dict[str, list[float]]  # by the names of FIELDS: one value for each rank


class BatchLog:
    """Logs a batch on the console, in metrics.jsonl and in TensorBoard."""

    def __init__(self, device: torch.device, world_size: int, task: Task | None = None) -> None:
        self.task = task or Task()
        self.device = device
        self.world_size = world_size
        self.rank_meter = RankMeter(device)
        self.validation_s = 0.0  # of the last epoch
        self.bar = tqdm(disable=True)  # of a run, on a terminal
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

        Every rank must reach this: the logged values are means over all ranks, gathered by one
        collective.
        """
        lap = meter.lap()
        names = sorted(values)
        sums = self._gather(
            [values[name] for name in names], self.rank_meter.lap(lap.data_wait_share)
        )
        reported = {name: total / self.world_size for name, total in zip(names, sums, strict=False)}
        of_ranks = sums[len(names) :]
        ranks = {name: of_ranks[number :: len(FIELDS)] for number, name in enumerate(FIELDS)}
        if not log.is_main:
            return
        slow_rank = self._slow_rank.update(ranks["own_ms"], lap.step_ms, lap.num_batches)
        images_per_s = meter.num_samples * self.world_size / meter.elapsed_s
        validations_s = (batches[1] // batches[0] + 1) * self.validation_s
        left_s = round(batches[1] * meter.elapsed_s / max(meter.num_batches, 1) + validations_s)
        self.bar.n = (self.bar.total or 0) - batches[1]
        self.bar.set_postfix_str(
            f"epoch {progress.epoch + 1}, {format_duration(left_s)} left", refresh=False
        )
        words = [
            f"  Batch [{position}/{batches[0]}] - Loss: {reported['loss']:.4f} | "
            f"{images_per_s:.1f} {self.task.samples}/s",
            f"data wait {meter.data_wait_s / meter.elapsed_s:.0%}",
            format_bytes(peak_memory_bytes(self.device)),
            f"{format_duration(left_s)} left",
            *filter(None, [" ".join(device_words(ranks))]),
        ]
        if slow_rank is not None:
            own_ms = ranks["own_ms"]
            others = f"others {others_ms(own_ms, slow_rank):.0f} ms"
            words.append(f"rank {slow_rank} is slow ({own_ms[slow_rank]:.0f} ms, {others})")
        log.print(", ".join(words))
        speeds = {
            "images_per_s": images_per_s,
            "step_ms": lap.step_ms,
            "data_wait_share": statistics.fmean(ranks["data_wait_share"]),
        }
        place = {
            "epoch": progress.epoch + 1,
            "batch": position,
            "global_step": progress.global_step,
        }
        measured = {
            name: readings for name, readings in ranks.items() if not all(map(math.isnan, readings))
        }
        record = {
            "kind": "batch",
            **place,
            **reported,
            **speeds,
            "num_batches": batches[0],
            "left_s": left_s,
            "time_s": round(time.time(), 1),
            "slow_rank": slow_rank,
            "ranks": measured,
        }
        log.metrics(record)
        log.scalars("batch", {**reported, **speeds}, progress.global_step)
        own_ms = measured.get("own_ms", [])[:MOST_RANKS_CHARTED]
        charted = {f"own_ms/{number}": value for number, value in enumerate(own_ms)}
        for name, readings in measured.items():
            known = [value for value in readings if not math.isnan(value)]
            charted |= {f"{name}_max": max(known), f"{name}_mean": statistics.fmean(known)}
        log.scalars("ranks", charted, progress.global_step)
        self.task.after_log(record, log)

    def _gather(self, values: list[torch.Tensor], mine: list[float]) -> list[float]:
        """Return the sums of `values` over ranks, then every rank's `mine`, by one all-reduce."""
        of_ranks = torch.zeros(self.world_size, len(mine))
        of_ranks[rank() if self.world_size > 1 else 0] = torch.tensor(mine)
        place = communication_device()
        stacked = torch.stack([value.detach().float() for value in values])
        return all_reduce_sum(torch.cat([stacked.to(place), of_ranks.flatten().to(place)])).tolist()


@dataclass(eq=False)
class EpochEnd:
    """Counts finished epochs, keeps the best and the last model, and reports each epoch.

    Every rank must reach each method.
    """

    state: TrainState
    task: Task
    options: EngineOptions
    log: RunLog

    def count(self, record: dict[str, Any], model: nn.Module) -> bool:
        """Count an epoch, whose reported values are `record`, and write best.pt and last.pt; return
        whether it is the best.
        """
        progress = self.state.progress
        best_before = progress.best_value, progress.best_epoch
        self._compare_with_best(record)
        for name, number in _numbers(record).items():
            if name not in ("epoch", "global_step"):
                progress.history.setdefault(name, []).append(float(number))
        progress.epoch += 1
        progress.batch = 0
        patience = self.options.patience or 0
        progress.stopped_early = 0 < patience <= progress.epoch - 1 - progress.best_epoch
        is_best = progress.best_epoch == progress.epoch - 1
        has_best = run_on_main(lambda: self._save_models(record, model, is_best))
        if any_rank(has_best is False):
            progress.best_value, progress.best_epoch = best_before
        return is_best

    def report(self, record: dict[str, Any], epoch: Epoch, is_best: bool) -> None:
        """Write a finished epoch to metrics.jsonl, results.csv and TensorBoard, print its lines,
        and tell the task.
        """
        run_on_main(lambda: self._report(record, epoch, is_best))

    def _report(self, record: dict[str, Any], epoch: Epoch, is_best: bool) -> None:
        monitor, progress = self.options.monitor, self.state.progress
        keeps_it = is_best and self.options.save_best
        self.log.metrics({"kind": "epoch", **record})
        charted = {
            name: value for name, value in record.items() if name not in ("epoch", "global_step")
        }
        self.log.scalars("epoch", charted, record["epoch"])
        names = filter(record.__contains__, dict.fromkeys((*self.task.shown, monitor)))
        shown = [f"{name.replace('_map50_95', ' mAP50-95')} {record[name]:.4f}" for name in names]
        row = f"  Epoch {record['epoch']}/{self.options.epochs}: {', '.join(shown)}"
        row = coloured(row, "green") if is_best else row
        self.log.print(*self.task.epoch_lines(record, monitor, keeps_it), row)
        with warn_on_write_error("what follows an epoch"):
            self.task.after_epoch(record, epoch)
        if progress.stopped_early:
            self.log.print(
                f"  No better {monitor} since epoch {progress.best_epoch + 1}: stopping early"
            )

    def _compare_with_best(self, record: dict[str, Any]) -> None:
        name, progress = self.options.monitor, self.state.progress
        if name not in record:
            raise KeyError(f"{name} is not reported; there is {', '.join(sorted(record))}")
        value = float(record[name])
        best = progress.best_value
        is_number = value == value
        wants_high = self.options.higher_is_better
        wants_high = self.task.is_score(name) if wants_high is None else wants_high
        is_better = best is None or (value > best if wants_high else value < best)
        # Rank 0's comparison counts for all, in case the last bits differ.
        if any_rank(is_number and is_better and rank() == 0):
            progress.best_value = value
            progress.best_epoch = progress.epoch

    def _save_models(self, record: dict[str, Any], model: nn.Module, is_best: bool) -> bool:
        """Write last.pt and best.pt; return False when best.pt could not be written."""
        wants_best = is_best and self.options.save_best
        has_best = not wants_best
        info = {"epoch": record["epoch"], "metrics": _numbers(record)}
        for wanted, name in ((self.options.save_last, "last.pt"), (wants_best, "best.pt")):
            if wanted:
                path = self.log.run_dir / name
                with warn_on_write_error(str(path)):
                    self.task.save(path, model, info)
                    has_best |= name == "best.pt"
        return has_best


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float)}

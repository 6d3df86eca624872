"""The one training loop of the project. It knows nothing of YOLO: model, loss, data and metric are passed in.

    engine = TrainingEngine(model=model, device=device, distributed=True, local_rank=0, world_size=2)
    history = engine.train(train_loader=..., val_loader=..., optimizer=..., criterion=..., num_epochs=100)

A batch is `(inputs, targets)`, or whatever `prepare_batch(batch, device)` turns into that pair.
`criterion(outputs, targets)` returns the loss, or `(loss, {name: value})`; a value called `loss` is what is reported.
Of accumulated batches the mean is taken, unless the criterion has `begin_group()`: then it is called before the first of
them, and `criterion.carry` scales the gradient so far before each is added (see `utils.loss.SegmentationLoss`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.common.devices import Precision, choose_precision, peak_memory_bytes
from utils.common.files import warn_on_write_error
from utils.common.signals import StopFlag
from utils.common.tensor_files import atomic_torch_save
from utils.distributed import (
    all_reduce_sum,
    any_rank,
    average_tensors,
    cleanup_ddp,
    collective_timeout_s,
    join_process_group,
    max_over_ranks,
    rank,
)
from utils.distributed.ddp import wrap_for_ranks
from utils.distributed.sync_bn import convert_sync_batchnorm
from utils.engine.ema import ModelEMA
from utils.engine.meters import EpochMeter
from utils.engine.nonfinite import NonFiniteGuard, RollBack
from utils.engine.recovery import Recovery
from utils.engine.reporting import BatchLog, epoch_lines
from utils.engine.stall import StallWatch
from utils.engine.state import Progress
from utils.engine.step import Batch, PrepareBatch, _batch_length, _named_values, default_prepare_batch
from utils.engine.stopping import STOP_CHECK_STEPS, Cadence
from utils.engine.upload import Upload
from utils.run.log import RunLog

STALL_SHARE = 0.8  # of the time a collective may take: after that much silence the stacks are shown
Evaluator = Callable[[nn.Module, Any], dict[str, Any]]


def save_weights(path: Path, module: nn.Module, info: dict[str, Any]) -> None:
    """Write a model's weights with a few facts about the run: the deployable file when nothing better is passed in."""
    atomic_torch_save({"model_state_dict": module.state_dict(), **info}, path)


class TrainingEngine:
    """Trains any module on one process or many. See the module's docstring; every rank calls every method."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        backend: str | None = None,
        use_amp: bool = True,
        precision: Precision | None = None,
        use_ema: bool = False,
        ema_decay: float = 0.9999,
        ema_ramp_updates: float = 2000.0,
        gradient_clip_val: float | None = None,
        accumulation_steps: int = 1,
        sync_batchnorm: bool = False,
        static_graph: bool = False,
        grad_compression: str = "none",
        compile_model: bool = False,
        log_interval: int = 10,
        save_every_s: float | None = None,
        save_dir: str | Path = "./checkpoints",
        experiment_name: str = "",
        prepare_batch: PrepareBatch = default_prepare_batch,
        evaluator: Evaluator | None = None,
        save_model: Callable[[Path, nn.Module, dict[str, Any]], None] = save_weights,
        on_epoch_end: Callable[[dict[str, Any]], None] | None = None,
        config: dict[str, Any] | None = None,
        checkpoint_facts: dict[str, Any] | None = None,
        tensorboard: bool = True,
    ) -> None:
        """Place the model on the device and wrap it for `world_size` ranks (`local_rank` is this one's device index).

        With `distributed` the process group must exist (`setup_distributed`); `backend` is what it was made with (unset: NCCL for a GPU, gloo for the CPU).
        `static_graph` and `grad_compression` are those of `utils.distributed.ddp.wrap_for_ranks`.
        A checkpoint is written after each epoch, and within it when the last one is `save_every_s` old.
        `evaluator(model, loader)` returns named values on every rank and replaces the plain validation loss.
        `checkpoint_facts` stand in each checkpoint's manifest. Only rank 0 calls `save_model(path, raw module, info)` and `on_epoch_end(record)`.
        """
        self.device = device
        self.world_size = world_size if distributed else 1
        self.precision = precision or choose_precision("auto" if use_amp else "off", device)
        self.gradient_clip_val = gradient_clip_val
        self.accumulation_steps = accumulation_steps
        self.log_interval = log_interval
        self.save_every_s = save_every_s
        self.save_dir = Path(save_dir) / experiment_name
        self.prepare_batch = prepare_batch
        self.upload = Upload(device)
        self.evaluator = evaluator
        self.save_model = save_model
        self.on_epoch_end = on_epoch_end
        self.config = config or {}
        self.checkpoint_facts = checkpoint_facts or {}
        self.progress = Progress()
        self.stop_flag = StopFlag()
        self.cadence = Cadence()

        raw = model.to(device)
        if distributed and sync_batchnorm:
            raw = convert_sync_batchnorm(raw, device)
        self.sync_batchnorm = distributed and sync_batchnorm
        self.raw_model = raw
        self.model: nn.Module = raw
        if distributed:
            self.model = wrap_for_ranks(
                raw,
                device,
                local_rank,
                backend=backend,
                static_graph=static_graph,
                grad_compression=grad_compression,
            )
        self.ema = ModelEMA(raw, ema_decay, ema_ramp_updates) if use_ema else None
        if compile_model:
            raw.compile()  # after the copy: the average is only judged, and never compiled
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision.use_scaler)
        self.is_main = rank() == 0
        self.log = RunLog(self.save_dir, self.is_main, tensorboard)
        self.batch_log = BatchLog(device, self.world_size)
        self.rank_meter = self.batch_log.rank_meter
        self.stopped_by_signal = False
        self.guard = NonFiniteGuard(device)
        self.recovery = Recovery(self)
        self.stall_watch = StallWatch(self.save_dir, rank(), STALL_SHARE * collective_timeout_s())

    setup_distributed = staticmethod(join_process_group)
    cleanup_distributed = staticmethod(cleanup_ddp)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(
        self,
        train_loader: Any,
        val_loader: Any,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[[Any, Any], Any],
        scheduler: Any = None,
        num_epochs: int = 100,
        *,
        save_best: bool = True,
        save_last: bool = True,
        early_stopping_patience: int | None = None,
        monitor_metric: str = "val_loss",
        higher_is_better: bool | None = None,
        resume: bool = False,
    ) -> dict[str, list[float]]:
        """Train until `num_epochs` are complete and return the history: one list per reported value.

        `scheduler.step_update(step)` is called before each optimizer step where it exists, else `scheduler.step()`
        after each epoch. `resume` continues from the newest checkpoint in the run folder. Stops early after
        `early_stopping_patience` epochs without a better `monitor_metric` (higher is better if its name says `acc` or
        `map`, unless told). On a signal of `StopFlag` all ranks save a checkpoint at the same step and return.
        """
        if higher_is_better is None:
            higher_is_better = any(word in monitor_metric.lower() for word in ("acc", "map"))
        if resume:
            self.recovery.load(optimizer, scheduler)
        progress = self.progress
        with self.stop_flag, self.stall_watch, self.rank_meter:
            epoch_start_s = time.perf_counter()
            while progress.epoch < num_epochs and not progress.stopped_early:
                self.cadence.start(progress.global_step)
                if self._agree_to_stop():
                    self.recovery.save_if_owed(optimizer, scheduler)
                    break
                self.log.print(f"\nEpoch {progress.epoch + 1}", "-" * 60)
                try:
                    record = progress.trained or self.train_one_epoch(
                        train_loader, optimizer, criterion, scheduler, num_epochs
                    )
                except RollBack:
                    self.recovery.roll_back(optimizer, scheduler)
                    progress = self.progress
                    continue
                self.recovery.require_agreement()
                if record is None:
                    self.recovery.save(optimizer, scheduler, is_last_chance=True)
                    break
                with self.recovery.validating(record, optimizer, scheduler):
                    record.update(self.validate(val_loader, criterion))
                best_before = progress.best_value, progress.best_epoch
                self._finish_epoch(record, monitor_metric, higher_is_better, early_stopping_patience)
                if scheduler is not None and not hasattr(scheduler, "step_update"):
                    scheduler.step()
                is_best = progress.best_epoch == progress.epoch - 1
                if any_rank(not self._save_models(record, save_best and is_best, save_last)):
                    progress.best_value, progress.best_epoch = best_before
                record["total_epoch_time_s"] = time.perf_counter() - epoch_start_s
                epoch_start_s = time.perf_counter()
                # Before the checkpoint: a kill between the two repeats the epoch, and then also what was told of it.
                self._report(record, is_best, monitor_metric)
                self.recovery.save(optimizer, scheduler)
        self.log.close()
        return progress.history

    def train_one_epoch(
        self, loader: Any, optimizer: torch.optim.Optimizer, criterion: Any, scheduler: Any, num_epochs: int
    ) -> dict[str, Any] | None:
        """Run the rest of the current epoch; return its record, or None when all ranks agreed to stop.

        After a resume in mid-epoch the record's means and speeds cover what was left of that epoch.
        """
        self.model.train()
        progress, meter = self.progress, EpochMeter()
        num_batches = len(loader)
        start = progress.batch
        optimizer.zero_grad(set_to_none=True)
        for position, batch in self._batches(loader, meter):
            if [progress.epoch, position] in progress.left_out:
                progress.batch = position + 1
                continue
            is_last_of_group = (position + 1) % self.accumulation_steps == 0 or position + 1 == num_batches
            # The last group of an epoch may be smaller: divide by what it really holds.
            group_start = position - position % self.accumulation_steps
            group_size = min(self.accumulation_steps, num_batches - group_start)
            if position == group_start and self._has_group_loss(criterion):
                criterion.begin_group()
            values, num_samples = self._forward_backward(batch, criterion, group_size, is_last_of_group)
            meter.add(values, num_samples)
            if is_last_of_group:
                self._optimizer_step(optimizer, scheduler)
                progress.batch = position + 1
                is_last = progress.batch == num_batches
                if is_last or progress.global_step % STOP_CHECK_STEPS == 0:
                    self.recovery.require_health()
                is_due = not is_last and self.cadence.is_due(progress.global_step, STOP_CHECK_STEPS)
                if is_due and self._agree_to_stop(lambda: self._save_within_epoch(optimizer, scheduler)):
                    return None
            if position % self.log_interval == 0 or position + 1 == num_batches:
                to_come = (num_epochs - progress.epoch) * num_batches - position - 1
                self.batch_log.write(self.log, values, progress, position, meter, (num_batches, to_come))
        record: dict[str, Any] = {f"train_{name}": value for name, value in meter.means().items()}
        record.update(
            epoch=progress.epoch + 1,
            global_step=progress.global_step,
            lr=max(group["lr"] for group in optimizer.param_groups),
            **meter.speed(num_batches - start, self.world_size),
            peak_memory_bytes=peak_memory_bytes(self.device),
        )
        return record

    @torch.no_grad()
    def validate(self, loader: Any, criterion: Any) -> dict[str, Any]:
        """Judge the averaged weights (the raw ones without EMA) on every rank's share; same values on every rank."""
        loader = self.stall_watch.watched(loader)
        if self.evaluator is not None:
            return self.evaluator(self.evaluation_model, loader)
        model, meter = self.evaluation_model, EpochMeter()
        model.eval()
        for batch in loader:
            inputs, targets = self.prepare_batch(batch, self.device)
            with self._autocast():
                values = _named_values(criterion(model(inputs), targets))[1]
            meter.add(values, _batch_length(inputs))
        return {f"val_{name}": value for name, value in meter.means().items()}

    @property
    def evaluation_model(self) -> nn.Module:
        """The module to judge and to deploy: the moving average where there is one."""
        return self.ema.module if self.ema is not None else self.raw_model

    # -- one step ---------------------------------------------------------------------------------------------------

    def _forward_backward(
        self, batch: Batch, criterion: Any, group_size: int, is_last_of_group: bool
    ) -> tuple[dict[str, torch.Tensor], int]:
        inputs, targets = self.upload(self.prepare_batch, batch)
        # Gradients cross the network once per optimizer step, with its last micro-batch.
        hold = not is_last_of_group and isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if hold else contextlib.nullcontext():  # type: ignore[operator,union-attr]
            if self.sync_batchnorm:
                self.rank_meter.meet()  # in the first layer
            with self._autocast():
                outputs = self.model(inputs)
                self.rank_meter.meet()  # the criterion may ask the other ranks for something
                loss, values = _named_values(criterion(outputs, targets))
            if not self._has_group_loss(criterion):
                loss = loss / group_size
            elif gradients := [weight.grad for weight in self.raw_model.parameters() if weight.grad is not None]:
                torch._foreach_mul_(gradients, criterion.carry)
            self.scaler.scale(loss).backward()
        return values, _batch_length(inputs)

    def _has_group_loss(self, criterion: Any) -> bool:
        return self.accumulation_steps > 1 and hasattr(criterion, "begin_group")

    def _optimizer_step(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        if hasattr(scheduler, "step_update"):
            scheduler.step_update(self.progress.global_step)
        self.scaler.unscale_(optimizer)
        limit = math.inf if self.gradient_clip_val is None else self.gradient_clip_val
        norm = nn.utils.clip_grad_norm_(self.raw_model.parameters(), limit, foreach=True)
        if self.scaler.is_enabled():  # leaves out bad steps by itself, and lowers its scale
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            self.guard.step(optimizer, norm)
        optimizer.zero_grad(set_to_none=True)
        if self.world_size > 1 and not self.sync_batchnorm:
            # Those of frozen layers stay as they are, to the last bit.
            training = (module for module in self.raw_model.modules() if module.training)
            average_tensors(buffer for module in training for buffer in module.buffers(recurse=False))
        if self.ema is not None:
            self.ema.update(self.raw_model)
        self.progress.global_step += 1

    def _autocast(self) -> Any:
        if self.precision.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision.dtype)

    def _batches(self, loader: Any, meter: EpochMeter) -> Iterator[tuple[int, Batch]]:
        """Yield (position in the epoch, batch) from where the epoch stands, timing the wait for each."""
        start = self.progress.batch
        skip = _set_epoch(loader, self.progress.epoch, start)
        iterator = iter(loader)
        for _ in range(skip):
            next(iterator)
        for position in range(start, len(loader)):
            self.rank_meter.begin()
            waiting_since_s = time.perf_counter()
            batch = next(iterator)
            meter.data_wait_s += time.perf_counter() - waiting_since_s
            self.stall_watch.beat()
            yield position, batch

    def _agree_to_stop(self, when_due: Callable[[], None] | None = None) -> bool:
        """Return whether any rank was told to stop; else do `when_due` if a checkpoint is. Every rank must reach this."""
        step = self.progress.global_step
        own = [self.stop_flag.is_set, self.recovery.is_due(), self.cadence.own_step_s(step)]
        stops, is_due, slowest_step_s = max_over_ranks(own)
        self.cadence.agreed(step, slowest_step_s)
        if not stops:
            if is_due and when_due is not None:
                when_due()
            return False
        self.stopped_by_signal = True
        self.log.print(
            f"Stopping ({self.stop_flag.reason or 'told by another process'}): the same command continues from here"
        )
        return True

    # -- the end of an epoch ----------------------------------------------------------------------------------------

    def _finish_epoch(
        self, record: dict[str, Any], monitor_metric: str, higher_is_better: bool, patience: int | None
    ) -> None:
        """Advance the clock, then decide together whether this epoch is the best and whether to stop."""
        progress = self.progress
        if monitor_metric not in record:
            raise KeyError(f"{monitor_metric} is not reported; there is {', '.join(sorted(record))}")
        value = float(record[monitor_metric])
        best = progress.best_value
        # Rank 0's comparison counts for all, should the last bits differ.
        is_better = value == value and (best is None or (value > best if higher_is_better else value < best))
        if any_rank(is_better and self.is_main):
            progress.best_value, progress.best_epoch = value, progress.epoch
        for name, number in record.items():
            if isinstance(number, int | float) and name not in ("epoch", "global_step"):
                progress.history.setdefault(name, []).append(float(number))
        progress.epoch += 1
        progress.batch = 0
        waited = progress.epoch - 1 - progress.best_epoch
        progress.stopped_early = patience is not None and patience > 0 and waited >= patience

    def _save_within_epoch(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.recovery.require_agreement()
        self.recovery.save(optimizer, scheduler)

    def _save_models(self, record: dict[str, Any], save_best: bool, save_last: bool) -> bool:
        """Write the deployable files; return False when the best one was refused, for the next good epoch to be it."""
        if not self.is_main:
            return True
        best_stands = not save_best
        info = {"epoch": record["epoch"], "metrics": {k: v for k, v in record.items() if isinstance(v, int | float)}}
        for wanted, name in ((save_last, "last.pt"), (save_best, "best.pt")):
            if wanted:
                with warn_on_write_error(str(self.save_dir / name)):
                    self.save_model(self.save_dir / name, self.evaluation_model, info)
                    best_stands |= name == "best.pt"
        return best_stands

    def _report(self, record: dict[str, Any], is_best: bool, monitor_metric: str) -> None:
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self.log.metrics({"kind": "epoch", **record})
        self.log.csv(numbers)
        self.log.scalars("epoch", numbers, record["epoch"])
        self.log.print(*epoch_lines(record, monitor_metric if is_best else None))
        if self.is_main and self.on_epoch_end is not None:
            with warn_on_write_error("what is told after an epoch"):
                self.on_epoch_end(record)
        if self.progress.stopped_early:
            self.log.print(f"  No better {monitor_metric} since epoch {self.progress.best_epoch + 1}: stopping early")

    def _reduce_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all ranks. Every rank must reach this."""
        return all_reduce_sum(tensor) / self.world_size


def _set_epoch(loader: Any, epoch: int, start_batch: int) -> int:
    """Tell a loader which epoch begins; return how many batches must be skipped by hand."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch, start_batch)
        return 0
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
            break
    return start_batch

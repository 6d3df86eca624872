"""The training loop, for any task, on one process or many.

    options = EngineOptions(epochs=100)
    engine = TrainingEngine(model, device, options, task=MyTask(), run="models/mine")
    history = engine.train(train_loader, val_loader, optimizer, scheduler=scheduler)

Every rank calls every method. `yolo_seg_ddp.engine.task.Task` says how batches, loss, evaluation
and files look.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from yolo_seg_ddp.engine.cuda_graphs import GraphedNetwork
from yolo_seg_ddp.engine.loading import (
    Upload,
    batches_from,
    each_sample_once,
    require_equal_batches,
)
from yolo_seg_ddp.engine.meters import EpochMeter
from yolo_seg_ddp.engine.options import EngineOptions
from yolo_seg_ddp.engine.recovery import NonFiniteGuard, Recovery, RollBack
from yolo_seg_ddp.engine.reporting import BatchLog, EpochEnd
from yolo_seg_ddp.engine.state import ModelEMA, Progress, TrainState
from yolo_seg_ddp.engine.stopping import StallWatch, StopAgreement, Watched
from yolo_seg_ddp.engine.task import Batch, Epoch, Task, batch_length, named_values
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.utils.devices import choose_precision, peak_memory_bytes
from yolo_seg_ddp.utils.distributed import (
    average_tensors,
    collective_timeout_s,
    is_distributed,
    rank,
    world_size,
)
from yolo_seg_ddp.utils.distributed.ddp import wrap_for_ranks
from yolo_seg_ddp.utils.distributed.sync_bn import convert_sync_batchnorm
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.signals import StopFlag
from yolo_seg_ddp.utils.text import is_terminal

# PyTorch's 65536 overflows at a fresh start: YOLO's first gradients fit fp16 up to a scale of 256
# (measured).
FIRST_SCALE = 2.0**6
BAR = "{percentage:3.0f}% |{bar:20}|{postfix}"
# After this share of a collective's time limit without progress the stacks are written.
STALL_SHARE = 0.8


class TrainingEngine:
    """Trains a module. `state` is what checkpoints hold, `recovery` saves and resumes."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: EngineOptions | None = None,
        *,
        task: Task | None = None,
        run: str | Path = "./checkpoints",
        distributed: bool | None = None,
        manifest: dict[str, Any] | None = None,
    ) -> None:
        """Move the model to the device and, for several ranks, wrap it for DistributedDataParallel.

        `run` is the folder for checkpoints, metrics and models. `distributed`: whether to train
        with the other ranks of the process group; unset: if there are any. Each checkpoint's
        manifest holds `manifest`, too.
        """
        self.options = options or EngineOptions()
        folder = Path(run)
        self.task = task or Task()
        self.device = device
        if distributed and not dist.is_initialized():
            raise UserError(
                "distributed=True without a process group: call setup_ddp or setup_distributed "
                "first"
            )
        distributed = is_distributed() if distributed is None else distributed
        self.world_size = world_size() if distributed else 1
        self.is_main = rank() == 0
        self.precision = choose_precision(self.options.precision, device)
        raw, self.model = _prepare_model(model, device, self.options, distributed)
        ema = (
            ModelEMA(raw, self.options.ema_decay, self.options.ema_ramp)
            if self.options.ema
            else None
        )
        if self.options.compile:
            # This comes after the copy for the average, which is only evaluated.
            raw.compile()
        scaler = torch.amp.GradScaler(device.type, FIRST_SCALE, enabled=self.precision.use_scaler)
        self.state = TrainState(raw, ema, scaler, self.options.accumulate)
        writes = self.is_main and not self.options.quiet
        columns = self.task.columns
        self.log = RunLog(folder, writes, self.options.tensorboard, columns)
        self.batch_log = BatchLog(device, self.world_size, self.task)
        self.epoch_end = EpochEnd(self.state, self.task, self.options, self.log)
        self.upload = Upload(device)
        self.guard = NonFiniteGuard(device)
        self.wrapped = isinstance(self.model, DistributedDataParallel)
        self.syncs_batchnorm = self.wrapped and self.options.sync_batchnorm
        network = (
            GraphedNetwork(raw, device, self.precision) if self._may_use_graphs() else self.model
        )
        self.network = self.batch_log.rank_meter.around(network, waits=self.syncs_batchnorm)
        checkpoints = self.task.checkpoints(folder)
        self.recovery = Recovery(
            self.state, self.guard, self.log, self.options, checkpoints, manifest or {}
        )
        self.stop_flag = StopFlag()
        self.stop_agreement = StopAgreement()
        self.stopped_by = ""  # the signal that ended the training on all ranks
        self.stall_watch = StallWatch(folder, rank(), STALL_SHARE * collective_timeout_s())
        self._epoch_start_s = time.perf_counter()

    @property
    def progress(self) -> Progress:
        """What has been trained so far."""
        return self.state.progress

    @property
    def evaluation_model(self) -> nn.Module:
        """The module to evaluate and to deploy: the moving average, or without
        one the raw module.
        """
        return self.state.ema.module if self.state.ema is not None else self.state.model

    # -- the loop: `train`, or its steps one by one, as train_yolo_ddp.py shows them ---------------

    def train(
        self,
        train_loader: Any,
        val_loader: Any,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        scheduler: Any = None,
        *,
        resume: bool = False,
    ) -> dict[str, list[float]]:
        """Train until `options.epochs` are complete and return the history: one list per reported
        value.

        `criterion(outputs, targets)` is the loss of a task without its own. The task calls the
        scheduler: `Task.schedule_step` and `Task.schedule_epoch` say when. `resume` continues from
        the newest checkpoint in the run folder. On SIGTERM or Ctrl-C (`StopFlag`) all ranks save a
        checkpoint at the same step and return.
        """
        self.begin(optimizer, criterion, scheduler)
        with self.running(train_loader, resume=resume):
            while self.begin_epoch():
                with self.rolling_back():
                    record = self.progress.record_awaiting_validation or self.train_one_epoch(
                        train_loader
                    )
                    self.finish_epoch(record, train_loader, val_loader)
        return self.progress.history

    def begin(
        self, optimizer: torch.optim.Optimizer, criterion: Any = None, scheduler: Any = None
    ) -> None:
        """Set what `train_one_epoch` trains with."""
        self.state.optimizer = optimizer
        self.state.scheduler = scheduler
        if criterion is not None:
            self.task.criterion = criterion

    @contextmanager
    def running(self, train_loader: Any, *, resume: bool = False) -> Iterator[None]:
        """Listen to signals and watch for a stall while epochs are trained; `resume`: first load
        the newest checkpoint.
        """
        require_equal_batches(train_loader)
        if resume:
            self.recovery.load()
        self.stopped_by = ""
        is_off = not (self.log.is_main and is_terminal(sys.stdout, sys.stderr))
        total = len(train_loader)
        self.batch_log.bar = bar = tqdm(
            total=total * self.options.epochs, disable=is_off, leave=False, bar_format=BAR
        )
        with bar, self.stop_flag, self.stall_watch, self.batch_log.rank_meter.gpu or nullcontext():
            self._epoch_start_s = time.perf_counter()
            yield
        self.log.close()

    def begin_epoch(self) -> bool:
        """Return whether there is an epoch to train: False after the last, and when all ranks
        agreed to stop.
        """
        if (
            self.stopped_by
            or self.progress.epoch >= self.options.epochs
            or self.progress.stopped_early
        ):
            return False
        self.stop_agreement.start(self.progress.global_step)
        if self._agree_to_stop():
            self.recovery.save_if_owed()
            return False
        self.log.print(f"\nEpoch {self.progress.epoch + 1}", "-" * 60)
        return True

    @contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Return to the last checkpoint after several steps with non-finite gradients; the epochs
        then go on from there.
        """
        try:
            yield
        except RollBack:
            self.recovery.roll_back()

    def finish_epoch(
        self, record: dict[str, Any] | None, train_loader: Any, val_loader: Any
    ) -> None:
        """Validate, report and save the trained epoch of `record`; None: save where all ranks
        agreed to stop.
        """
        self.recovery.require_agreement()
        if record is None:
            self.recovery.save(is_last_chance=True)
            return
        if self.progress.epoch + 1 < self.options.epochs:
            self.task.load_ahead(train_loader, self.progress.epoch + 1)
        with self.recovery.validating(record):
            record.update(self.validate(val_loader))
        self.task.schedule_epoch(self.state.scheduler)
        is_best = self.epoch_end.count(record, self.evaluation_model)
        now_s = time.perf_counter()
        record["total_epoch_time_s"] = now_s - self._epoch_start_s
        self.batch_log.validation_s = max(record["total_epoch_time_s"] - record["epoch_time_s"], 0)
        self._epoch_start_s = now_s
        # Before the checkpoint: a kill between the two repeats the epoch, and then its report too.
        self.epoch_end.report(record, self._epoch(self.progress.epoch), is_best)
        self.recovery.save()

    def train_one_epoch(self, loader: Any) -> dict[str, Any] | None:
        """Train the rest of the current epoch; return its record, or None when all ranks agreed to
        stop.

        After a resume in mid-epoch the record's means and speeds cover the rest of that epoch.
        """
        self.model.train()
        progress = self.progress
        meter = EpochMeter()
        accumulate = self.state.accumulate
        num_batches = len(loader)
        # The data may have shrunk since; then the epoch begins anew.
        progress.batch = start = progress.batch if progress.batch < num_batches else 0
        self.state.optimizer.zero_grad(set_to_none=True)
        for position, batch in self._batches(loader, meter):
            if [progress.epoch, position] in progress.left_out:
                progress.batch = position + 1
                continue
            is_last_batch = position + 1 == num_batches
            is_last_of_group = (position + 1) % accumulate == 0 or is_last_batch
            group_start = position - position % accumulate
            # An epoch's last group may be smaller.
            group_size = min(accumulate, num_batches - group_start)
            values, num_samples = self.forward_backward(
                batch, group_size, is_first=position == group_start, is_last=is_last_of_group
            )
            meter.add(values, num_samples)
            self.batch_log.bar.update()
            if is_last_of_group:
                self.update()
                progress.batch = position + 1
                if self._must_stop(is_last_batch):
                    return None
            if position % self.options.log_interval == 0 or is_last_batch:
                to_come = (self.options.epochs - progress.epoch) * num_batches - position - 1
                self.batch_log.write(
                    self.log, values, progress, position, meter, (num_batches, to_come)
                )
        record: dict[str, Any] = {f"train_{name}": value for name, value in meter.means().items()}
        record.update(
            epoch=progress.epoch + 1,
            global_step=progress.global_step,
            lr=self.state.optimizer.param_groups[0]["lr"],
            **meter.speed(num_batches - start, self.world_size),
            peak_memory_bytes=peak_memory_bytes(self.device),
        )
        return record

    # -- one step ----------------------------------------------------------------------------------

    def forward_backward(
        self, batch: Batch, group_size: int = 1, *, is_first: bool = True, is_last: bool = True
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Add a batch's gradients; return its values to report and its number of samples.

        The batch is one of `group_size` of an optimizer step. At the last one DDP sums the
        gradients over all ranks.
        """
        is_in_group = self.state.accumulate > 1
        if is_in_group and is_first:
            self.task.begin_group()
        inputs, targets = self.upload(self.task.prepare, batch)
        hold = not is_last and self.wrapped
        with self.model.no_sync() if hold else nullcontext():  # type: ignore[operator]
            with self.precision.autocast(self.device):
                outputs = self.network(inputs)
                loss, values = named_values(self.task.loss(outputs, targets))
            if is_in_group:
                weights = self.state.model.parameters()
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                loss = self.task.join_group(loss, group_size, gradients)
            self.state.scaler.scale(loss).backward()
        return values, batch_length(inputs)

    def update(self) -> None:
        """Take the optimizer's step with the gradients so far, then update statistics and moving
        average.
        """
        state, optimizer = self.state, self.state.optimizer
        self.task.schedule_step(state.scheduler, state.progress.global_step)
        state.scaler.unscale_(optimizer)
        most = math.inf if self.options.clip_norm is None else self.options.clip_norm
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), most, foreach=True)
        if self.guard.should_step(optimizer, norm):
            optimizer.step()
        # This lowers its scale after a non-finite gradient; without fp16 it does nothing.
        state.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if self.wrapped and not self.syncs_batchnorm:
            # Statistics of frozen layers are equal on all ranks and stay bitwise as they are.
            training = (module for module in state.model.modules() if module.training)
            average_tensors(
                buffer for module in training for buffer in module.buffers(recurse=False)
            )
        if state.ema is not None:
            state.ema.update(state.model)
        state.progress.global_step += 1

    # -- what surrounds the steps ------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, loader: Any) -> dict[str, Any]:
        """Evaluate `evaluation_model`, each rank on its share without repeats; return the same
        values on every rank.
        """
        with each_sample_once(loader):
            return self.task.evaluate(
                self.evaluation_model, Watched(self.stall_watch, loader), self._epoch()
            )

    def _batches(self, loader: Any, meter: EpochMeter) -> Iterator[tuple[int, Batch]]:
        """Yield (position in the epoch, batch) from where the epoch stands, and time the wait for
        each.
        """
        start = self.progress.batch
        iterator = batches_from(loader, self.progress.epoch, start, self.options.seed)
        for position in range(start, len(loader)):
            self.batch_log.rank_meter.begin()
            waiting_since_s = time.perf_counter()
            batch = next(iterator)
            meter.data_wait_s += time.perf_counter() - waiting_since_s
            self.stall_watch.beat()
            yield position, batch

    def _must_stop(self, is_last_batch: bool) -> bool:
        """After an optimizer step, where it is due: raise RollBack, write a checkpoint, or return
        True to stop.
        """
        step = self.progress.global_step
        if is_last_batch or self.stop_agreement.is_regular(step):
            self.recovery.require_health()
        agrees_now = self.stop_agreement.is_due(step) or self.recovery.is_due_at(step)
        return not is_last_batch and agrees_now and self._agree_to_stop(may_save=True)

    def _agree_to_stop(self, may_save: bool = False) -> bool:
        """Return whether any rank was told to stop; if not, save a checkpoint if one is due.

        Every rank must reach this.
        """
        step = self.progress.global_step
        stops, save_is_due = self.stop_agreement.agree(
            step, self.stop_flag.is_set, self.recovery.is_due()
        )
        if stops:
            self.stopped_by = self.stop_flag.reason or "a signal to another process"
            self.log.print(f"Stopping ({self.stopped_by}): run the same command again to resume")
        elif save_is_due and may_save:
            self.recovery.require_agreement()
            self.recovery.save()
        return stops

    def _may_use_graphs(self) -> bool:
        """Whether CUDA graphs give what the network gives: not with DDP's hooks, and not where
        gradients accumulate.
        """
        options = self.options
        others = self.wrapped or options.accumulate > 1 or options.compile
        return (
            self.device.type == "cuda"
            and options.cuda_graph == "auto"
            and self.task.repeats_kernels
            and not others
        )

    def _epoch(self, number: int | None = None) -> Epoch:
        number = number or self.progress.epoch + 1
        is_last = number >= self.options.epochs or self.progress.stopped_early
        return Epoch(number, is_last, self.device, self.precision, self.log)


def _prepare_model(
    model: nn.Module, device: torch.device, options: EngineOptions, distributed: bool
) -> tuple[nn.Module, nn.Module]:
    """Return the module on its device, and what to call: it or its DDP wrapper."""
    raw = model.to(device)
    # One process on a CPU, too, so that it trains what several do.
    is_alone_on_cpu = device.type == "cpu" and not is_distributed()
    if options.sync_batchnorm and (distributed or is_alone_on_cpu):
        raw = convert_sync_batchnorm(raw)
    if not distributed:
        return raw, raw
    is_unnumbered_gpu = device.type == "cuda" and device.index is None
    wrapped = wrap_for_ranks(
        raw,
        device,
        torch.cuda.current_device() if is_unnumbered_gpu else device.index or 0,
        backend=dist.get_backend(),
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        grad_compression=options.grad_compression,
    )
    return raw, wrapped

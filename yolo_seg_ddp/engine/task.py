"""What is trained: how batches, loss, evaluation and files look.

The engine calls a Task; its defaults serve a classifier.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from yolo_seg_ddp.engine.meters import EpochMeter
from yolo_seg_ddp.run.checkpoint import CheckpointFolders, CheckpointStore
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.utils.devices import Precision, copy_to_device
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save

Batch = Any
NamedValues = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Epoch:
    """The epoch that a task evaluates or follows up."""

    number: int  # counted from 1
    is_last: bool  # no epoch follows, as far as is known
    device: torch.device
    precision: Precision
    log: RunLog


class Task:
    """Override what differs from a classifier.

    Every rank calls `prepare`, `loss`, `evaluate` and `checkpoints`; rank 0 the others.
    """

    criterion: Callable[[Any, Any], Any] | None = None
    # Whether the network runs the same operators in every step, reads no value on the host, and the
    # loss uses the same outputs.
    repeats_kernels = False
    samples = "images"  # what the log calls the samples
    # The reported values in an epoch's row on the console, beside the one that chooses best.pt.
    shown: tuple[str, ...] = ("val_loss",)
    # the first columns of results.csv: {reported value: its name there}
    columns: Mapping[str, str] = {}

    def __init__(self, criterion: Callable[[Any, Any], Any] | None = None) -> None:
        self.criterion = criterion

    def prepare(self, batch: Batch, device: torch.device) -> tuple[Any, Any]:
        """Return a batch of the loader as (inputs, targets) on the device.

        Here: the batch is such a pair of tensors.
        """
        inputs, targets = batch
        return copy_to_device(inputs, device), copy_to_device(targets, device)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor | tuple[torch.Tensor, NamedValues]:
        """Return the batch's mean loss (), or (loss, {name: value ()}); a value named `loss`
        replaces it in reports.

        Here: the criterion's, given to the constructor or to `TrainingEngine.train`.
        """
        if self.criterion is None:
            raise TypeError("no loss: give train() a criterion, or override Task.loss")
        result: torch.Tensor | tuple[torch.Tensor, NamedValues] = self.criterion(outputs, targets)
        return result

    def begin_group(self) -> None:
        """Begin an optimizer step that takes several batches. Here: nothing."""

    def join_group(
        self, loss: torch.Tensor, num_batches: int, gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return what a batch's loss adds to an optimizer step that takes `num_batches`. Here: its
        share of their mean.

        `gradients` are those of the batches before, which may be changed in place.
        """
        return loss / num_batches

    def schedule_step(self, scheduler: Any, step: int) -> None:
        """Set the learning rate of an optimizer step, counted from 0.

        Here: by `scheduler.step_update(step)`, where it has that method.
        """
        if hasattr(scheduler, "step_update"):
            scheduler.step_update(step)

    def schedule_epoch(self, scheduler: Any) -> None:
        """Set the learning rate after an epoch.

        Here: by `scheduler.step()`, where no step sets it.
        """
        if scheduler is not None and not hasattr(scheduler, "step_update"):
            scheduler.step()

    def load_ahead(self, loader: Any, epoch: int) -> None:
        """Let the training loader's workers load an epoch, counted from 0, during the validation
        before it.

        Here: by `loader.begin(epoch)`, where it has that method.
        """
        if hasattr(loader, "begin"):
            loader.begin(epoch)

    def evaluate(self, model: nn.Module, loader: Any, epoch: Epoch) -> dict[str, Any]:
        """Evaluate a module, not wrapped, on this rank's share; return named values, equal on every
        rank.

        Here: the means over all ranks of what `loss` returns, each named `val_<name>`.
        """
        model.eval()
        meter = EpochMeter()
        for batch in loader:
            inputs, targets = self.prepare(batch, epoch.device)
            with epoch.precision.autocast(epoch.device):
                values = named_values(self.loss(model(inputs), targets))[1]
            meter.add(values, batch_length(inputs))
        return {f"val_{name}": value for name, value in meter.means().items()}

    def is_score(self, name: str) -> bool:
        """Whether a higher value of `name` is better.

        Here: if it contains "acc" or a word that begins with "map", and no "loss".
        """
        words = re.split(r"[^a-z]+", name.lower())
        return "loss" not in words and any(
            "acc" in word or word.startswith("map") for word in words
        )

    def save(self, path: Path, model: nn.Module, info: dict[str, Any]) -> None:
        """Write best.pt or last.pt: the module to deploy, with what is known of the run.

        Here: its state dict.
        """
        atomic_torch_save({"model_state_dict": model.state_dict(), **info}, path)

    def checkpoints(self, run_folder: Path) -> CheckpointStore:
        """Return where complete states are kept.

        Here: the newest two, with checksums, in `checkpoint/`. Every rank calls this.
        """
        return CheckpointFolders(run_folder / "checkpoint")

    def after_log(self, record: dict[str, Any], log: RunLog) -> None:
        """Follow up a logged batch, whose line of metrics.jsonl is `record`. Here: nothing."""

    def epoch_lines(self, record: dict[str, Any], monitor: str, is_best: bool) -> list[str]:
        """Return the console lines that close an epoch, whose reported values are `record`;
        `is_best`: best.pt is written.
        """
        return [
            f"  Average Loss: {record['train_loss']:.4f}",
            f"  Time: {record['epoch_time_s']:.1f}s",
            f"  Throughput: {record['batches_per_s']:.1f} batches/sec "
            f"({record['images_per_s']:.1f} {self.samples}/s, "
            f"data wait {record['data_wait_share']:.0%})",
            f"  ✓ Saved checkpoint (loss: {record['train_loss']:.4f})"
            + (f", best {monitor} so far" if is_best else ""),
        ]

    def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
        """Follow up a finished epoch, whose reported values are `record`. Here: nothing."""


def named_values(
    result: torch.Tensor | tuple[torch.Tensor, NamedValues],
) -> tuple[torch.Tensor, NamedValues]:
    """Split what `Task.loss` returned into the loss to differentiate and the values to report."""
    loss, values = result if isinstance(result, tuple) else (result, {})
    return loss, {"loss": loss, **values}


def batch_length(inputs: Any) -> int:
    """Return the number of samples in a tensor, a list, or a dictionary of them."""
    return len(next(iter(inputs.values()))) if isinstance(inputs, dict) else len(inputs)

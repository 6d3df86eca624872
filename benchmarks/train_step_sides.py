"""The two training steps that `train_step.py` compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.measure.step_timer import (
    LEARNING_RATE,
    MOMENTUM,
    WEIGHT_DECAY,
    StepTimer,
    build_training,
    time_training_steps,
)
from yolo_seg_ddp.utils.devices import Precision, tune_device
from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.yolo.model import YoloModel
from yolo_seg_ddp.yolo.optimizer import OPTIMIZER_NAMES


class OurSide:
    """The trainer's engine with all that it does between two batches; every step uses the same
    batch.
    """

    def __init__(
        self,
        model: YoloModel,
        batch: Batch,
        device: torch.device,
        precision: Precision,
        optimizer: str,
    ) -> None:
        self.engine = build_training(model, device, precision, optimizer)
        self.engine.model.train()
        self.batch = batch

    def phases_ms(self, warmup: int, steps: int) -> np.ndarray:
        """Train `warmup` + `steps` steps; return the ms of the PHASES of
        `steps` steps, (steps, 5).
        """
        with _trainers_switches(self.engine.device):
            return time_training_steps(self.engine, self.batch, warmup, steps)


class TheirSide:
    """Ultralytics' model, loss, optimizer, clip and moving average, with its trainer's defaults.

    Those are deterministic algorithms, and on a GPU AMP (fp16) and weights in channels-last memory
    format.
    """

    def __init__(
        self, model: YoloModel, batch: Batch, device: torch.device, optimizer: str
    ) -> None:
        prepare_environment()
        from ultralytics.engine.trainer import BaseTrainer
        from ultralytics.utils.torch_utils import ModelEMA

        self.device = device
        self.model = model.to(device).train()
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, overlap_mask=True, epochs=100)
        self.batch = _their_batch(batch, device)
        self.amp = device.type == "cuda"
        # Ultralytics' own methods, called with the few attributes of a trainer that they use.
        name = OPTIMIZER_NAMES[optimizer]
        rule = {"name": name, "lr": LEARNING_RATE, "momentum": MOMENTUM, "decay": WEIGHT_DECAY}
        trainer: Any = SimpleNamespace(model=self.model, ema=ModelEMA(self.model), device=device)
        trainer.scaler = torch.amp.GradScaler(device.type, enabled=self.amp)
        trainer.optimizer = BaseTrainer.build_optimizer(trainer, self.model, **rule)
        trainer.optimizer.zero_grad()
        self.scaler = trainer.scaler
        self.optimizer_step = partial(BaseTrainer.optimizer_step, trainer)

    def phases_ms(self, warmup: int, steps: int) -> np.ndarray:
        """See OurSide."""
        timer = StepTimer(self.device)
        with _their_switches():
            for _ in range(warmup + steps):
                self._step(timer)
            # It ends the last step.
            timer.mark("input")
            return timer.phases_ms()[-steps:]

    def _step(self, timer: StepTimer) -> None:
        timer.mark("input")
        with torch.autocast("cuda") if self.amp else nullcontext():
            batch = {
                name: value.to(self.device, non_blocking=True) for name, value in self.batch.items()
            }
            batch["img"] = batch["img"].float() / 255
            timer.mark("forward")
            outputs = self.model(batch["img"])
            timer.mark("loss")
            loss = self.model.loss(batch, outputs)[0].sum()
        timer.mark("backward")
        self.scaler.scale(loss).backward()
        timer.mark("optimizer")
        self.optimizer_step()


Side = OurSide | TheirSide


@contextmanager
def _trainers_switches(device: torch.device) -> Iterator[None]:
    """Set PyTorch's global switches as our trainer does, then restore them: the other side runs in
    the same process.
    """
    matmul = torch.get_float32_matmul_precision()
    tf32 = torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    tune_device(device, deterministic=False, fixed_shapes=True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=True)


@contextmanager
def _their_switches() -> Iterator[None]:
    """Set PyTorch's global switches as Ultralytics' trainer does by default, then restore them."""
    from ultralytics.utils.torch_utils import init_seeds, unset_deterministic

    init_seeds(1, deterministic=True)
    try:
        yield
    finally:
        unset_deterministic()


def _their_batch(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the batch that Ultralytics' loader would make of the same images and objects,
    page-locked for a GPU.
    """
    low, high = batch.boxes.split(2, 1)
    theirs = {
        "img": batch.images.permute(0, 3, 1, 2).contiguous(),
        "batch_idx": batch.batch_index.float(),
        "cls": batch.class_ids.float()[:, None],
        "bboxes": torch.cat([(low + high) / 2, high - low], 1) / batch.images.shape[1],
        "masks": batch.masks,
        "sem_masks": _pixel_classes(batch),
    }
    return (
        {name: tensor.pin_memory() for name, tensor in theirs.items()}
        if device.type == "cuda"
        else theirs
    )


def _pixel_classes(batch: Batch) -> torch.Tensor:
    """Return the class of each mask pixel's object, 0 where there is none, float32 (B, S / 4, S /
    4): for YOLO26.
    """
    starts = torch.searchsorted(batch.batch_index, torch.arange(len(batch)))
    numbers = (batch.masks.long() - 1 + starts[:, None, None]).clamp(
        0, max(len(batch.class_ids) - 1, 0)
    )
    classes = batch.class_ids[numbers] if len(batch.class_ids) else torch.zeros_like(numbers)
    return (classes * (batch.masks > 0)).float()

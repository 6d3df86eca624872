"""Builds the parts of a YOLO segmentation training from the trainer's options: data sets, task, schedule."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils import distributed
from utils.common.devices import choose_precision
from utils.common.errors import UserError, printable
from utils.common.files import warn_on_write_error, write_text_atomic
from utils.data.cache import open_or_build_check
from utils.data.dataset import Batch, Photo, SegmentationDataset, count_classes, open_images, read_photos
from utils.data.dataset_yaml import DatasetSpec
from utils.data.loader import LoaderPlan, batch_bytes, multi_scale_sizes, plan_loader
from utils.data.windows import Windows, open_windows
from utils.engine import EngineOptions, Epoch, Task, TrainingEngine
from utils.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps
from utils.evaluation.evaluate import evaluate, headline
from utils.run.folder import OwnedRun
from utils.run.records import MEAN_MAP, read_config
from utils.run.status import RUNNING
from utils.training.batch_size import probe_batch_size
from utils.training.config import TrainConfig
from utils.training.pictures import Curves, ValidationPictures
from utils.training.plan import SKIPPED_PHOTOGRAPHS
from utils.yolo.inputs import Targets, prepare_batch
from utils.yolo.loss import inverse_frequency_weights
from utils.yolo.loss26 import EndToEndLoss, loss_for
from utils.yolo.model import YoloModel, copy_for_prediction, save_deployable
from utils.yolo.optimizer import GRADIENT_CLIP_NORM, OptimizerPlan

SKIPPED_FILE = "skipped_photographs.txt"
SMALL_BATCH_SIZE = 16  # images per GPU below which batch statistics are shared by default


def open_dataset(
    config: TrainConfig, spec: DatasetSpec, split: str, colours_on_device: bool, say: distributed.Say
) -> SegmentationDataset:
    """Read a split's labels and open, or build, its packed cache or its block store. The split `train` is augmented."""
    photos, folder = read_photos(spec, split, say), spec.cache_folder
    packed = windowed = index = None
    if config.window_config and split == "train":
        windowed = open_windows(
            photos, config.img_size, config.window_config, config.seed, folder, split, say, skips_bad=config.skip_bad
        )
        index = windowed.store.index
        say("\n".join(window_lines(windowed.windows, config.epochs)))
    elif config.cache != "none":
        packed = open_images(photos, config.img_size, folder, split, say, skips_bad=config.skip_bad)
        index = packed.index if packed else None
        if config.cache == "packed" and index is None:
            raise UserError(
                f"--cache packed: {folder} has no room for it; make room, or use --cache auto, which does without"
            )
    if config.skip_bad and index is None:
        index = open_or_build_check([photo.file for photo in photos], folder, split, say)
    unusable = index.unusable if index else {}
    return SegmentationDataset(
        index.usable(photos) if index else photos,
        config.img_size,
        packed=packed,
        windowed=windowed,
        augment=config.augment if split == "train" else None,
        mosaic_epochs=config.mosaic_epochs,
        seed=config.seed,
        colours_on_device=colours_on_device,
        skipped={os.path.relpath(photos[position].file, spec.root): line for position, line in unusable.items()},
    )


def keep_skipped(run: OwnedRun, skipped: dict[str, str]) -> list[str]:
    """Write which photographs `--skip-bad` left out to the run folder; return a line for the console.

    Every rank must reach this. Raises UserError if this machine cannot read other photographs than rank 0's, or if a
    resumed run left out others: its samples would differ.
    """
    names = sorted(skipped)
    if distributed.any_rank(distributed.broadcast_from_main(names) != names):
        raise UserError("--skip-bad: the machines cannot read different photographs; copy the data set to all again")
    file = run.folder / SKIPPED_FILE
    earlier = run.choices.get(SKIPPED_PHOTOGRAPHS, [])
    if run.resumes and earlier != names:
        changed = printable(min(set(earlier) ^ set(names)), 400)
        what = "was left out and now can be read, or is gone" if changed in earlier else "cannot be read any more"
        raise UserError(
            f"{run.folder}: {changed} {what}, and a resumed run needs the same photographs: undo the change "
            f"({SKIPPED_FILE} lists what was left out), or choose a new --save-dir"
        )
    if not names:
        return []
    if distributed.rank() == 0:
        with warn_on_write_error(str(file)):
            write_text_atomic(file, "".join(f"{printable(skipped[name], 5000)}\n" for name in names))
    return [f"{len(names)} photographs cannot be read and are left out (--skip-bad): {file} lists them"]


def window_lines(windows: Windows, epochs: int) -> list[str]:
    """Return lines for the console: how many windows there are, and after how many epochs each object was in one."""
    config, needed = windows.config, windows.epochs_until_seen()
    lines = [
        f"Windows: {config.per_photo} per photograph and epoch, {len(windows)} in all, at scale {config.low_scale:g} to "
        f"{config.high_scale:g}"
    ]
    if len(needed):
        most, half = int(needed.max()), int(np.median(needed))
        lines.append(
            f"  every object is in a window at least once in any {most} epochs, of half the photographs in any {half}"
        )
        if most > epochs:
            lines.append(
                f"  the run has {epochs} epochs: --windows {-(-most * config.per_photo // epochs)} shows all objects"
            )
    largest = int(windows.sizes.max())
    if largest < 2 * windows.side_px:
        lines.append(
            f"  the photographs have at most {largest} pixels a side; parse_labels.py --long-side native keeps all they had"
        )
    return lines


def class_weights(config: TrainConfig, train_set: SegmentationDataset, num_classes: int) -> torch.Tensor | None:
    """Return the class weights of `--class-weights`, float32 (classes,). Every rank reads all labels, so all agree."""
    if config.class_weights == "none":
        return None
    return inverse_frequency_weights(count_classes(train_set.photos, num_classes))


def weight_lines(weights: torch.Tensor | None, names: tuple[str, ...]) -> list[str]:
    """Return a line that shows the class weights, if there are any."""
    if weights is None:
        return []
    return ["Class weights: " + ", ".join(f"{name} {w:.3g}" for name, w in zip(names, weights.tolist(), strict=True))]


def find_batch_size(config: TrainConfig, model: YoloModel, device: torch.device) -> int | None:
    """Return what `--batch-size auto` means for this rank's device; None where a number was given. Before the group."""
    if config.batch_size:
        return None
    img_size = max(multi_scale_sizes(config.img_size)) if config.multi_scale else config.img_size
    colours = config.augment if varies_colours_on_device(config, device) else None
    return probe_batch_size(model, device, choose_precision(config.amp, device), img_size, colours)


def varies_colours_on_device(config: TrainConfig, device: torch.device) -> bool:
    """Return whether `--colour` lets the device vary the colours, not the loader."""
    return config.colour == "device" or (config.colour == "auto" and device.type == "cuda")


def agree_batch_size(config: TrainConfig, found: int | None) -> int:
    """Return the batch size of all ranks: as given, else an earlier run's, else the least found. Every rank must reach this."""
    if found is None:
        return config.batch_size
    earlier = distributed.broadcast_from_main(read_config(Path(config.save_dir)).get("batch_size"))
    return earlier or distributed.min_over_ranks(found)


def plan_workers(config: TrainConfig, workers: int, local_world_size: int) -> LoaderPlan:
    """Cut the loader's workers to what shared memory holds, at the largest size that a batch may have."""
    side_px = max(multi_scale_sizes(config.img_size)) if config.multi_scale else config.img_size
    return plan_loader(workers, config.prefetch, batch_bytes(config.batch_size, side_px), local_world_size)


class Segmentation(Task):
    """YOLO segmentation: its batches, its loss and metrics, its pictures and its deployable files."""

    shown = ("val_loss", "box_map50", "box_map50_95", "mask_map50", "mask_map50_95")

    def __init__(
        self,
        config: TrainConfig,
        model: YoloModel,
        names: tuple[str, ...],
        run: OwnedRun,
        val_photos: list[Photo],
        weights: torch.Tensor | None,
    ) -> None:
        super().__init__(loss_for(model, class_weights=weights, within_reach=config.within_reach))
        self.config = config
        self.names = names
        self.run = run
        self.val_criterion = loss_for(model)  # always the same, so that all runs' losses compare
        self.curves = Curves(run.folder)
        ranks = distributed.rank(), distributed.world_size()
        self.pictures = ValidationPictures(val_photos, names, config.val_pictures_every, *ranks)

    def prepare(self, batch: Batch, device: torch.device) -> tuple[torch.Tensor, Targets]:
        """Return images float (B, 3, S, S) from 0 to 1 and their targets, on the device."""
        return prepare_batch(batch, device)

    def evaluate(self, model: torch.nn.Module, loader: Any, epoch: Epoch) -> dict[str, float]:
        """Return the validation loss and the mean average precisions over all ranks."""
        on_image = self.pictures.observer(epoch.number, epoch.is_last)
        predictor = copy_for_prediction(model)
        found = evaluate(
            predictor,
            loader,
            self.names,
            self.val_criterion,
            epoch.device,
            precision=epoch.precision,
            on_image=on_image,
        )
        values = headline(found.metrics)
        if self.config.monitor == MEAN_MAP:
            values[MEAN_MAP] = (values["mask_map50_95"] + values["box_map50_95"]) / 2
        return values

    def save(self, path: Path, model: torch.nn.Module, info: dict[str, Any]) -> None:
        """Write a file that Ultralytics opens."""
        config = self.config
        windows = asdict(config.window_config) if config.window_config else None
        save_deployable(path, model, info, img_size=config.img_size, data=config.data, windows=windows)

    def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
        """Draw curves and validation pictures, and update the run's status."""
        self.curves.draw(epoch.is_last)
        self.pictures.finish(self.run.folder, epoch.log.image, epoch.number)
        self.run.set_status(RUNNING, epoch=epoch.number, step=record["global_step"])


def follow_epochs(criterion: Any, engine: TrainingEngine) -> None:
    """Let YOLO26's loss read from the engine how much of the run is done: whole epochs, as in Ultralytics.

    They are part of every checkpoint, so a resumed run has the same weights of the loss.
    """
    if isinstance(criterion, EndToEndLoss):
        criterion.run_done = lambda: engine.progress.epoch / max(engine.options.epochs - 1, 1)


def engine_options(config: TrainConfig, device: torch.device) -> EngineOptions:
    """Return the engine's part of the trainer's options."""
    small_batch = device.type == "cuda" and config.batch_size < SMALL_BATCH_SIZE
    return EngineOptions(
        epochs=config.epochs,
        precision=config.amp,
        accumulate=config.accumulate,
        clip_norm=GRADIENT_CLIP_NORM,
        ema_decay=config.ema_decay if config.ema else None,
        ema_ramp=config.ema_ramp,
        sync_batchnorm=config.sync_bn == "on" or (config.sync_bn == "auto" and small_batch),
        static_graph=config.accumulate == 1,
        grad_compression=config.grad_compression,
        compile=config.compile,
        monitor=config.monitor,
        patience=config.patience,
        save_every_s=config.save_every_minutes * 60 or None,
        tensorboard=config.tensorboard,
    )


def build_schedule(
    config: TrainConfig, plan: OptimizerPlan, optimizer: torch.optim.Optimizer, batches_per_epoch: int
) -> StepSchedule:
    """Warm-up and cosine over all optimizer steps of the run."""
    steps = -(-batches_per_epoch // config.accumulate)
    warmup = warmup_steps(config.warmup_epochs, steps, config.epochs)
    spec = ScheduleSpec(
        plan.lr, steps * config.epochs, warmup, momentum=plan.momentum, warmup_bias_lr=plan.warmup_bias_lr
    )
    return StepSchedule(optimizer, spec)

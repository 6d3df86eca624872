"""Builds the parts of a YOLO segmentation training from the trainer's options and plan: data sets, task, engine, loaders.

What the augmentation's unset options become follows from the directions and shapes of the labelled objects.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils import distributed
from utils.common.config import section_of
from utils.common.errors import UsageError, UserError
from utils.data.augment import Augmentation
from utils.data.cache import open_or_build_check
from utils.data.dataset import SegmentationDataset, open_images, read_photos
from utils.data.dataset_yaml import DatasetSpec
from utils.data.images import read_image
from utils.data.label_statistics import class_bends, common_direction, label_lengths, spread_out
from utils.data.labels import Photo
from utils.data.loader import EpochBatches, ShardBatches, get_dataloader, multi_scale_sizes, val_prefetch
from utils.data.windows import Windows, open_windows
from utils.engine import EngineOptions, Epoch, TrainingEngine
from utils.engine.options import LoopOptions
from utils.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps
from utils.evaluation.evaluate import evaluate, headline
from utils.evaluation.metrics.thin_objects import MIN_ELONGATION
from utils.evaluation.native_masks import choose_thin_classes, sizes_on_disk, small_labels_hint
from utils.measure.step_timer import SegmentationStep
from utils.predict.lines.label_facts import LabelledPhoto, measure_wire_labels
from utils.run.folder import OwnedRun
from utils.run.records import MEAN_MAP
from utils.run.status import RUNNING
from utils.training.config import TrainConfig
from utils.training.pictures import CHOSEN_FROM, Curves, ValidationPictures, save_first_pictures
from utils.training.plan import Data, TrainPlan, varies_colours_on_device
from utils.yolo.loss26 import EndToEndLoss, loss_for
from utils.yolo.model import YoloModel, copy_for_prediction, save_deployable
from utils.yolo.optimizer import GRADIENT_CLIP_NORM, build_optimizer

VAL_SEED = 0  # of the windows on which trainings validate: those of all runs show the same
LABELLED_PHOTOS, MEASURED_PHOTOS = 64, 1000  # whose wires are looked at; whose labels' lengths are measured
SMALL_BATCH_SIZE = 16  # images per GPU below which batch statistics are shared by default
MOST_VAL_WORKERS = 8  # each costs the memory of a process, on top of those that load for the training
# For photographs from above: with --fliplr 0.5 every direction is equally likely. docs/research/wires.md has the measurement.
FROM_ABOVE = {"degrees": 90.0, "flipud": 0.5, "draw_wires": 0.5}
MAX_AGREEMENT = 0.9  # poles of photographs from the ground have 1.0, wires of a drone that looks down 0.6 to 0.75


def open_data(config: TrainConfig, spec: DatasetSpec, device: torch.device, say: distributed.Say) -> Data:
    """Open both splits of the data set; build their packed caches or block stores where they are missing."""
    on_device = varies_colours_on_device(config, device)
    labelled = [(split, read_photos(spec, split, say)) for split in ("train", "val")]  # wrong labels are said first
    if not any(len(photo.class_ids) for photo in labelled[0][1]):
        raise UserError(
            f"{config.data}: no photograph of train has an object, so there is nothing to learn; check its labels"
        )
    train, val = (open_dataset(config, spec, *photos_of, on_device, say) for photos_of in labelled)
    if not config.windows and (hint := small_labels_hint(train.photos, spec.names, config.img_size)):
        say(hint)
    return Data(spec.names, train, val, spec.root)


def open_dataset(
    config: TrainConfig,
    spec: DatasetSpec,
    split: str,
    photos: list[Photo],
    colours_on_device: bool,
    say: distributed.Say,
) -> SegmentationDataset:
    """Open, or build, a split's packed cache or its block store. The split `train` is augmented."""
    folder = spec.cache_folder
    packed = windowed = index = None
    if config.window_config:
        seed = config.seed if split == "train" else VAL_SEED
        windowed = open_windows(
            photos, config.img_size, config.window_config, seed, folder, split, say, skips_bad=config.skip_bad
        )
        index = windowed.store.index
        if split == "train":
            say("\n".join(window_lines(windowed.windows, config.epochs)))
            if config.reach == "auto":
                say(
                    "Objects are assigned to anchors that can predict their whole box, because of --windows (--reach off: to all)"
                )
    elif config.cache != "none":
        packed = open_images(
            [photo.file for photo in photos], config.img_size, folder, split, say, skips_bad=config.skip_bad
        )
        index = packed.index if packed else None
        if config.cache == "packed" and index is None:
            raise UserError(
                f"--cache packed: {folder} has no room for it; make room, or use --cache auto, which does without"
            )
    if config.skip_bad and index is None:
        index = open_or_build_check([photo.file for photo in photos], folder, split, say)
    unusable = index.unusable if index else {}
    skipped = {os.path.relpath(photos[position].file, spec.root): line for position, line in unusable.items()}
    photos = index.usable(photos) if index else photos
    return SegmentationDataset(
        photos,
        config.img_size,
        packed=packed,
        windowed=windowed,
        augment=choose_augmentation(config, photos, spec.names, say) if split == "train" else None,
        mosaic_epochs=config.mosaic_epochs(config.epochs),
        seed=config.seed,
        colours_on_device=colours_on_device,
        skipped=skipped,
    )


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


def thin_classes_of(data: Data) -> tuple[int, ...]:
    """Return the classes that inference gives centrelines after a training on windows: those with long and thin labels."""
    train = data.train
    return train.augment.wire_classes if train.augment and train.windowed else ()


def wire_labels_of(data: Data, thin: tuple[int, ...]) -> dict[str, Any] | None:
    """Return how wires of thin classes are labelled in at most LABELLED_PHOTOS photographs; None without such classes."""
    size_of = sizes_on_disk(data.train.photos)
    labelled = [index for index, photo in enumerate(data.train.photos) if photo.polygons]
    photos = []
    for index in labelled[:: max(1, len(labelled) // LABELLED_PHOTOS)][:LABELLED_PHOTOS] if thin else []:
        photo, size = data.train.photos[index], size_of(index)
        outlines = [outline * size for outline in photo.polygons]
        photos.append(LabelledPhoto(photo.class_ids, outlines, size, partial(read_image, photo.file)))
    return measure_wire_labels(photos, thin) if thin else None


def label_lengths_of(data: Data) -> list[float]:
    """Return how long labels are in at most MEASURED_PHOTOS photographs of a training on windows; nothing without windows."""
    if data.train.windowed is None:
        return []
    windows = data.train.windowed.windows
    photos = list(zip(windows.photos, windows.sizes[:, ::-1], strict=True))
    labels = photos[:: max(1, len(photos) // MEASURED_PHOTOS)][:MEASURED_PHOTOS]
    lengths = [(np.ptp(outline, axis=0) * size).max() for photo, size in labels for outline in photo.polygons]
    class_ids = [class_id for photo, _ in labels for class_id in photo.class_ids]
    return label_lengths(np.array(class_ids, int), np.array(lengths, float))


def line_rules(facts: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return a line that says which rules predictions of thin classes follow, from the facts of the labels."""
    shares = dict(zip(facts["wires_parallel"][::2], facts["wires_parallel"][1::2], strict=True))
    alike = ", ".join(f"{names[class_id]} (share of length {share:g})" for class_id, share in shares.items())
    ends = ", ".join(names[class_id] for class_id in facts["wires_end_at"])
    bent = ", ".join(names[class_id] for class_id in facts["wires_bent"])
    rules = [f"labels run alike in {alike}, so lines that run otherwise are less sure"] if alike else []
    rules.append(f"labels end at {ends}, and so do lines" if ends else "lines that continue each other are one")
    rules += [f"those of {bent} do not, because its labels are curved"] if bent else []
    return "Found lines: " + "; ".join(rules)


class Segmentation(SegmentationStep):
    """YOLO segmentation: its batches, its loss and metrics, its pictures and its deployable files."""

    shown = ("val_loss", "box_map50", "box_map50_95", "mask_map50", "mask_map50_95")

    def __init__(self, plan: TrainPlan, model: YoloModel, run: OwnedRun, data: Data) -> None:
        super().__init__(loss_for(model, class_weights=plan.class_weights, within_reach=plan.config.within_reach))
        self.config, self.names, self.run = plan.config, data.names, run
        self.val_criterion = loss_for(model)  # always the same, so that all runs' losses compare
        self.curves = Curves(run.folder)
        self.thin_classes = thin_classes_of(data)
        is_main = distributed.rank() == 0  # which calls `save`
        self.wire_labels = wire_labels_of(data, self.thin_classes) if is_main else None
        self.label_lengths = label_lengths_of(data) if is_main else None
        if self.wire_labels:
            print(line_rules(self.wire_labels, data.names), flush=True)
        labels = [data.val.labels(index) for index in range(min(len(data.val), CHOSEN_FROM))]
        ranks, are_windows = (distributed.rank(), distributed.world_size()), data.val.windowed is not None
        every = plan.config.val_pictures_every
        self.pictures = ValidationPictures(labels, data.names, every, *ranks, are_windows=are_windows)

    def evaluate(self, model: torch.nn.Module, loader: Any, epoch: Epoch) -> dict[str, float]:
        """Return the validation loss and the mean average precisions over all ranks."""
        predictor, criterion = copy_for_prediction(model), self.val_criterion
        on_image = self.pictures.observer(epoch.number, epoch.is_last)
        observed: dict[str, Any] = {"precision": epoch.precision, "on_image": on_image}
        values = headline(evaluate(predictor, loader, self.names, criterion, epoch.device, **observed).metrics)
        if self.config.monitor == MEAN_MAP:
            values[MEAN_MAP] = (values["mask_map50_95"] + values["box_map50_95"]) / 2
        return values

    def save(self, path: Path, model: torch.nn.Module, info: dict[str, Any]) -> None:
        """Write a file that Ultralytics opens."""
        config = self.config
        windows = asdict(config.window_config) if config.window_config else None
        facts: dict[str, Any] = {"img_size": config.img_size, "data": config.data, "windows": windows}
        facts |= {"wire_labels": self.wire_labels, "label_lengths": self.label_lengths}
        save_deployable(path, model, info, **facts, thin_classes=self.thin_classes)

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


def build_engine(plan: TrainPlan, device: torch.device, model: YoloModel, run: OwnedRun, data: Data) -> TrainingEngine:
    """Return the engine of a run, with its task."""
    config = plan.config
    small_batch = device.type == "cuda" and config.batch_size < SMALL_BATCH_SIZE
    options = EngineOptions(
        **vars(section_of(config, LoopOptions)),
        precision=config.amp,
        clip_norm=GRADIENT_CLIP_NORM,
        sync_batchnorm=config.sync_bn == "on" or (config.sync_bn == "auto" and small_batch),
        static_graph=config.accumulate == 1,
        monitor=config.monitor,
        save_every_s=config.save_every_minutes * 60 or None,
    )
    task = Segmentation(plan, model, run, data)
    engine = TrainingEngine(model, device, options, task=task, run=run.folder, facts=plan.facts)
    follow_epochs(task.criterion, engine)
    return engine


def train(plan: TrainPlan, device: torch.device, model: YoloModel, run: OwnedRun, data: Data) -> TrainingEngine:
    """Train all epochs; return the engine. Every rank must reach this."""
    config, rank, world_size = plan.config, distributed.rank(), distributed.world_size()
    sizes = multi_scale_sizes(config.img_size) if config.multi_scale else ()
    num_images = len(data.train)
    batches = EpochBatches(num_images, config.batch_size, rank, world_size, config.seed, sizes, config.accumulate)
    val_batches = ShardBatches(len(data.val), 2 * config.batch_size, rank, world_size)
    if rank == 0 and not run.resumes:
        save_first_pictures(data.train, batches, data.names, run.folder)
    optimizer = build_optimizer(model, plan.optimizer)
    engine = build_engine(plan, device, model, run, data)
    pins, prefetch = device.type == "cuda", config.prefetch
    val_workers = min(plan.workers, len(val_batches), MOST_VAL_WORKERS)
    engine.train(
        train_loader=get_dataloader(data.train, batches, plan.workers, pins, prefetch),
        val_loader=get_dataloader(data.val, val_batches, val_workers, pins, val_prefetch(prefetch)),
        optimizer=optimizer,
        scheduler=build_schedule(plan, optimizer, len(batches)),
        resume=run.resumes,
    )
    return engine


def build_schedule(plan: TrainPlan, optimizer: torch.optim.Optimizer, batches_per_epoch: int) -> StepSchedule:
    """Warm-up and cosine over all optimizer steps of the run."""
    config, chosen = plan.config, plan.optimizer
    steps = -(-batches_per_epoch // config.accumulate)
    warmup = warmup_steps(config.warmup_epochs, steps, config.epochs)
    spec = ScheduleSpec(
        chosen.lr, steps * config.epochs, warmup, momentum=chosen.momentum, warmup_bias_lr=chosen.warmup_bias_lr
    )
    return StepSchedule(optimizer, spec)


def choose_augmentation(
    config: TrainConfig, photos: list[Photo], names: tuple[str, ...], say: distributed.Say
) -> Augmentation:
    """Return the augmentation without unset options and with the thin classes, alike on all ranks; say what was chosen.

    Raises UsageError for `--draw-wires` where no class is thin, and for `--paste` where all are.
    """
    size_of, augment = sizes_on_disk(photos), config.augment
    thin = choose_thin_classes(("auto",), photos, size_of, names)
    chosen_photos = spread_out([index for index, photo in enumerate(photos) if len(photo.polygons)])
    in_pixels = ((photos[n].class_ids, [outline * size_of(n) for outline in photos[n].polygons]) for n in chosen_photos)
    bends = class_bends(in_pixels, thin) if thin else {}
    straight = tuple(class_id for class_id in thin if bends[class_id] <= 1)
    curved = [class_id for class_id in thin if class_id not in straight]
    unset = [name for name in FROM_ABOVE if getattr(config, name) is None and (straight or name != "draw_wires")]
    agreement = common_direction(photos, size_of, curved) if unset else None
    if agreement is not None and agreement < MAX_AGREEMENT:
        options: dict[str, Any] = {name: FROM_ABOVE[name] for name in unset}
        typed = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in options.items())
        chosen = f"training with {typed}" if config.windows else f"{typed} may help"
        say(f"Labelled objects lie in many directions (agreement {agreement:.2f}, limit {MAX_AGREEMENT}): {chosen}")
        augment = replace(augment, **options) if config.windows else augment
    elif agreement is not None and config.windows:
        say(
            f"Labelled objects agree in their direction ({agreement:.2f}, limit {MAX_AGREEMENT}): photographs are not turned "
            "(--degrees 90 --flipud 0.5 turn them)"
        )
    if augment.paste and all(np.isin(photo.class_ids, thin).all() for photo in photos):
        raise UsageError(
            "--paste: the training labels hold no object to paste; thin classes, such as wires, are not pasted"
        )
    if augment.draw_wires:
        if not thin:
            raise UsageError("--draw-wires: no class of the training labels is as thin as wires are")
        say(f"Wires are drawn as {', '.join(names[class_id] for class_id in straight or thin)}; --draw-wires 0: none")
    if config.windows and curved:
        bent = ", ".join(f"{names[class_id]} {bends[class_id]:.1f} times" for class_id in curved)
        say(
            f"Curved labels: {bent} as curved as wires may be. They count as no wires: none are "
            "drawn (--draw-wires 0.5 draws some), and they have no direction (--degrees 90 turns photographs)"
        )
    if config.windows and thin:
        lines = ", ".join(names[class_id] for class_id in thin)
        say(
            f"Thin classes: {lines}, at least {MIN_ELONGATION:g} times as long as wide. They are found as lines "
            "(evaluate_model.py --thin-classes none: as masks)"
        )
    return replace(augment, wire_classes=thin, drawn_classes=straight)

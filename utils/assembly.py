"""Builds the parts of a YOLOv8-seg training from its options: photographs, engine, schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from utils import distributed
from utils.common.config import to_dict
from utils.common.devices import choose_precision
from utils.data.dataset import Photo, SegmentationDataset, count_classes, open_images, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.loader import LoaderPlan, batch_bytes, multi_scale_sizes, plan_loader
from utils.engine.loop import TrainingEngine
from utils.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps
from utils.evaluation.evaluate import evaluate, headline
from utils.measure.batch_size import probe_batch_size
from utils.run.folder import OwnedRun
from utils.run.records import read_config
from utils.run.status import RUNNING
from utils.train_config import TrainConfig
from utils.train_plan import GLOBAL_BATCH_SIZE
from utils.training_pictures import Curves, ValidationPictures
from utils.yolo.inputs import prepare_batch
from utils.yolo.loss import SegmentationLoss, inverse_frequency_weights
from utils.yolo.model import YoloModel, save_deployable
from utils.yolo.optimizer import GRADIENT_CLIP_NORM, OptimizerPlan

SMALL_BATCH_SIZE = 16  # images per GPU below which batch statistics are shared by default


def open_dataset(config: TrainConfig, split: str, colours_on_device: bool, say: distributed.Say) -> SegmentationDataset:
    """Read a split's labels and open, or build, its packed copy; augmented if it is `train`."""
    spec = load_dataset_yaml(config.data)
    photos = read_photos(spec, split)
    packed = None if config.cache == "none" else open_images(photos, config.img_size, spec.root / ".cache", split, say)
    return SegmentationDataset(
        photos,
        config.img_size,
        packed=packed,
        augment=config.augment if split == "train" else None,
        mosaic_epochs=config.mosaic_epochs,
        seed=config.seed,
        colours_on_device=colours_on_device,
    )


def class_weights(config: TrainConfig, train_set: SegmentationDataset, num_classes: int) -> torch.Tensor | None:
    """Return the weights of `--class-weights`. Every rank has read all labels, so all find the same."""
    if config.class_weights == "none":
        return None
    return inverse_frequency_weights(count_classes(train_set.photos, num_classes))


def weight_lines(weights: torch.Tensor | None, names: tuple[str, ...]) -> list[str]:
    """Say how the classes are weighted, if they are."""
    if weights is None:
        return []
    return ["Class weights: " + ", ".join(f"{name} {w:.3g}" for name, w in zip(names, weights.tolist(), strict=True))]


def find_batch_size(config: TrainConfig, model: YoloModel, device: torch.device) -> int | None:
    """Return what `--batch-size auto` means for this rank's device; None where a number was given. Before the group."""
    if config.batch_size:
        return None
    img_size = max(multi_scale_sizes(config.img_size)) if config.multi_scale else config.img_size
    return probe_batch_size(model, device, choose_precision(config.amp, device), img_size)


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


def build_engine(
    config: TrainConfig,
    plan: OptimizerPlan,
    model: YoloModel,
    device: torch.device,
    ranks: distributed.RankInfo,
    names: tuple[str, ...],
    run: OwnedRun,
    val_photos: list[Photo],
) -> TrainingEngine:
    """Tell the general training loop what YOLO needs: its batches, its judge, its pictures and its deployable file."""
    precision = choose_precision(config.amp, device)
    criterion = SegmentationLoss(model)  # without class weights: validation losses of all runs compare

    def judge(module: torch.nn.Module, loader: Any) -> dict[str, float]:
        epoch = engine.progress.epoch + 1
        on_image = pictures.observer(epoch, is_last=epoch == config.epochs)
        found = evaluate(module, loader, names, criterion, device, precision=precision, on_image=on_image)
        return headline(found.metrics)

    curves = Curves(run.folder)
    pictures = ValidationPictures(val_photos, names, config.val_pictures_every, ranks.rank, ranks.world_size)

    def after_epoch(record: dict[str, Any]) -> None:
        curves.draw(is_last=record["epoch"] == config.epochs or engine.progress.stopped_early)
        pictures.finish(run.folder, engine.log.image, record["epoch"])
        run.set_status(RUNNING, epoch=record["epoch"], step=record["global_step"])

    small_batch = device.type == "cuda" and config.batch_size < SMALL_BATCH_SIZE
    engine = TrainingEngine(
        model=model,
        device=device,
        distributed=ranks.world_size > 1,
        local_rank=device.index or 0,
        world_size=ranks.world_size,
        backend="nccl" if device.type == "cuda" else "gloo",
        precision=precision,
        use_ema=config.ema,
        ema_decay=config.ema_decay,
        ema_ramp_updates=config.ema_ramp,
        gradient_clip_val=GRADIENT_CLIP_NORM,
        accumulation_steps=config.accumulate,
        sync_batchnorm=config.sync_bn == "on" or (config.sync_bn == "auto" and small_batch),
        static_graph=config.accumulate == 1,
        grad_compression=config.grad_compression,
        compile_model=config.compile,
        save_every_s=config.save_every_minutes * 60 or None,
        save_dir=run.folder,
        prepare_batch=prepare_batch,
        evaluator=judge,
        save_model=partial(save_deployable, img_size=config.img_size, data=config.data),
        on_epoch_end=after_epoch,
        config=to_dict(config),
        checkpoint_facts={
            GLOBAL_BATCH_SIZE: plan.global_batch_size,
            "world_size": ranks.world_size,
            "optimizer": plan.name,
            "amp": precision.name,
        },
        tensorboard=config.tensorboard,
    )
    return engine


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

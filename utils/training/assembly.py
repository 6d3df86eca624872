"""Builds the parts of a YOLO segmentation training from the trainer's options and plan: task, engine, loaders."""

from pathlib import Path
from typing import Any

import torch

from utils import distributed
from utils.common.config import section_of
from utils.data.loader import EpochBatches, ShardBatches, get_dataloader, multi_scale_sizes, val_prefetch
from utils.engine import EngineOptions, Epoch, TrainingEngine
from utils.engine.options import LoopOptions
from utils.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps
from utils.evaluation.evaluate import evaluate, headline
from utils.run.folder import OwnedRun
from utils.run.records import MEAN_MAP
from utils.run.status import RUNNING
from utils.training.data import Data
from utils.training.pictures import CHOSEN_FROM, Curves, ValidationPictures, save_first_pictures
from utils.training.plan import TrainPlan, save_arguments
from utils.training.step import SegmentationStep
from utils.yolo.loss import PARTS
from utils.yolo.loss26 import EndToEndLoss, loss_for
from utils.yolo.model import YoloModel, copy_for_prediction, save_deployable
from utils.yolo.optimizer import GRADIENT_CLIP_NORM, build_optimizer

SMALL_BATCH_SIZE = 16  # images per GPU below which batch statistics are shared by default
MOST_VAL_WORKERS = 8  # each costs the memory of a process, on top of those that load for the training
SCORES = {"precision": "precision", "recall": "recall", "map50": "mAP50", "map50_95": "mAP50-95"}
COLUMNS = {  # Ultralytics' names, in its order
    **{f"train_{part}": f"train/{part}_loss" for part in PARTS},
    **{f"{kind}_{own}": f"metrics/{its}({kind[0].upper()})" for kind in ("box", "mask") for own, its in SCORES.items()},
    **{f"val_{part}": f"val/{part}_loss" for part in PARTS},
    "lr": "lr/pg0",
}


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

    shown = ("mask_map50_95", "box_map50_95", "val_loss")
    columns = COLUMNS

    def __init__(self, plan: TrainPlan, model: YoloModel, run: OwnedRun, data: Data) -> None:
        super().__init__(loss_for(model, class_weights=plan.class_weights, within_reach=data.regime.within_reach))
        self.config, self.names, self.run = plan.config, data.names, run
        self.val_criterion = loss_for(model)  # always the same, so that all runs' losses compare
        self.curves = Curves(run.folder)
        self.facts = data.file_facts() if distributed.rank() == 0 else {}  # which calls `save`
        if "thin_classes" in self.facts:
            print(line_rules(self.facts, data.names), flush=True)
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
        save_deployable(path, model, info, img_size=self.config.img_size, data=self.config.data, **self.facts)

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
    if rank == 0:
        save_arguments(plan, run.folder)
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
    spec = ScheduleSpec(chosen.lr, steps * config.epochs, warmup, momentum=chosen.momentum)
    return StepSchedule(optimizer, spec)

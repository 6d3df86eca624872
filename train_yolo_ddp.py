"""Train YOLOv8 segmentation on one process or many.

    python train_yolo_ddp.py --model yolov8n-seg.pt --epochs 10 --batch-size 16
    bash train_ddp.sh 4
    python -m torch.distributed.run --nproc_per_node=4 train_yolo_ddp.py --model yolov8m-seg.pt

The same command again continues an interrupted run. `--help` lists every option with its default.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from utils import distributed
from utils.config import parse_config, to_dict
from utils.dataset import (
    EpochBatches,
    SegmentationDataset,
    ShardBatches,
    count_classes,
    get_dataloader,
    multi_scale_sizes,
    open_images,
    read_photos,
)
from utils.dataset_yaml import load_dataset_yaml
from utils.distributed import cleanup_ddp, setup_ddp
from utils.engine import TrainingEngine
from utils.errors import EXIT_STOPPED_BY_SIGNAL, run_script
from utils.evaluation import evaluate, headline, prepare_batch
from utils.logs import print_banner
from utils.loss import SegmentationLoss, inverse_frequency_weights
from utils.model import YoloModel, build_model, freeze_layers, save_deployable
from utils.optimizer import GRADIENT_CLIP_NORM, build_optimizer
from utils.parallel import tune_device
from utils.preview import Curves, save_first_batch
from utils.run_folder import OwnedRun, resume_arguments
from utils.run_status import FINISHED, RUNNING, STOPPED
from utils.runtime import choose_device, choose_precision, choose_threads_and_workers, die_with_parent, seed_everything
from utils.schedule import ScheduleSpec, StepSchedule, warmup_steps
from utils.shared_memory import LoaderPlan, batch_bytes, plan_loader
from utils.train_config import OptimizerPlan, TrainConfig, plan_optimizer

SMALL_BATCH_SIZE = 16  # images per GPU below which batch statistics are shared by default


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(
        TrainConfig, "Train YOLOv8 segmentation with DistributedDataParallel", resume_arguments(sys.argv[1:])
    )
    ranks = distributed.read_rank_environment()
    die_with_parent()
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(ranks.local_world_size, config.num_workers, device.type)
    loading = plan_workers(config, workers, ranks.local_world_size)
    workers, threads = loading.workers, config.threads or threads
    torch.set_num_threads(threads)
    seed_everything(config.seed)
    tune_device(device, deterministic=config.deterministic, fixed_shapes=not config.multi_scale)

    # Everything slow or likely to fail comes before the process group: no rank waits in a collective meanwhile.
    spec = load_dataset_yaml(config.data)
    say = print if ranks.is_main else _quiet
    on_device = config.colour == "device" or (config.colour == "auto" and device.type == "cuda")
    train_set, val_set = (_dataset(config, split, on_device, say) for split in ("train", "val"))
    model = build_model(config.model, spec.names).to(memory_format=torch.channels_last)
    freeze_layers(model, config.freeze)
    weights = _class_weights(config, train_set, len(spec.names))
    plan = plan_optimizer(config, ranks.world_size, len(train_set), len(spec.names))
    setup_ddp(device, ranks)
    try:
        with OwnedRun(config) as run:
            print_banner(ranks.world_size, ranks.rank)
            place = f"Device: {device}, {threads} threads and {workers} loader workers per process"
            say("\n".join([*run.notes, *loading.notes, *plan.arithmetic, *_weight_lines(weights, spec.names), place]))

            sizes = multi_scale_sizes(config.img_size) if config.multi_scale else ()
            batches = EpochBatches(len(train_set), config.batch_size, ranks.rank, ranks.world_size, config.seed, sizes)
            val_batches = ShardBatches(len(val_set), 2 * config.batch_size, ranks.rank, ranks.world_size)
            pin_memory = device.type == "cuda"
            if ranks.is_main and not run.resumes:
                save_first_batch(train_set, batches, spec.names, run.folder / "train_batch0.jpg")
            optimizer = build_optimizer(model, plan)
            engine = build_engine(config, model, device, ranks, spec.names, run)
            engine.train(
                train_loader=get_dataloader(train_set, batches, workers, pin_memory, config.prefetch),
                val_loader=get_dataloader(val_set, val_batches, min(workers, 2), pin_memory, min(config.prefetch, 4)),
                optimizer=optimizer,
                criterion=SegmentationLoss(model, class_weights=weights),
                scheduler=build_schedule(config, plan, optimizer, len(batches)),
                num_epochs=config.epochs,
                early_stopping_patience=config.patience or None,
                monitor_metric=config.monitor,
                resume=run.resumes,
            )
            return conclude(engine, run, say)
    finally:
        cleanup_ddp()


def plan_workers(config: TrainConfig, workers: int, local_world_size: int) -> LoaderPlan:
    """Cut the loader's workers to what shared memory holds, at the largest size that a batch may have."""
    side_px = max(multi_scale_sizes(config.img_size)) if config.multi_scale else config.img_size
    return plan_loader(workers, config.prefetch, batch_bytes(config.batch_size, side_px), local_world_size)


def conclude(engine: TrainingEngine, run: OwnedRun, say: distributed.Say) -> int:
    """Say how the training ended, to the user and in the run's status; return the exit code."""
    progress, monitor = engine.progress, run.config.monitor
    place = {"epoch": progress.epoch, "step": progress.global_step}
    if engine.stopped_by_signal:
        run.say(STOPPED, engine.stop_flag.reason or "a signal to another process", **place)
        return EXIT_STOPPED_BY_SIGNAL
    run.say(FINISHED, "stopped early" if progress.stopped_early else "", **place)
    if progress.best_value is None:
        best = f"absent: {monitor} was never a number"
    else:
        best = f"{monitor} {progress.best_value:.4f}, epoch {progress.best_epoch + 1}"
    say(
        f"\nTraining complete after {progress.epoch} epochs: {run.folder / 'best.pt'} ({best}), {run.folder / 'last.pt'}"
    )
    return 0


def build_engine(
    config: TrainConfig,
    model: YoloModel,
    device: torch.device,
    ranks: distributed.RankInfo,
    names: tuple[str, ...],
    run: OwnedRun,
) -> TrainingEngine:
    """Tell the general training loop what YOLO needs: its batches, its judge and its deployable file."""
    precision = choose_precision(config.amp, device)
    criterion = SegmentationLoss(model)  # without class weights: validation losses of all runs compare

    def judge(module: torch.nn.Module, loader: Any) -> dict[str, float]:
        return headline(evaluate(module, loader, names, criterion, device, precision=precision).metrics)

    curves = Curves(run.folder)

    def after_epoch(record: dict[str, Any]) -> None:
        curves.draw(is_last=record["epoch"] == config.epochs or engine.progress.stopped_early)
        run.say(RUNNING, epoch=record["epoch"], step=record["global_step"])

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
        save_dir=run.folder,
        prepare_batch=prepare_batch,
        evaluator=judge,
        save_model=partial(save_deployable, img_size=config.img_size, data=config.data),
        on_epoch_end=after_epoch,
        config=to_dict(config),
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


def _dataset(config: TrainConfig, split: str, colours_on_device: bool, say: distributed.Say) -> SegmentationDataset:
    spec = load_dataset_yaml(config.data)
    photos = read_photos(spec, split)
    packed = None if config.cache == "none" else open_images(photos, config.img_size, spec.root / ".cache", split, say)
    augment = config.augment if split == "train" else None
    return SegmentationDataset(
        photos,
        config.img_size,
        packed=packed,
        augment=augment,
        mosaic_epochs=config.mosaic_epochs,
        seed=config.seed,
        colours_on_device=colours_on_device,
    )


def _class_weights(config: TrainConfig, train_set: SegmentationDataset, num_classes: int) -> torch.Tensor | None:
    """Every rank has read all labels, so all find the same weights."""
    if config.class_weights == "none":
        return None
    return inverse_frequency_weights(count_classes(train_set.photos, num_classes))


def _weight_lines(weights: torch.Tensor | None, names: tuple[str, ...]) -> list[str]:
    if weights is None:
        return []
    return ["Class weights: " + ", ".join(f"{name} {w:.3g}" for name, w in zip(names, weights.tolist(), strict=True))]


def _quiet(*_: object) -> None:
    """Say nothing: only rank 0 talks."""


if __name__ == "__main__":
    run_script(main)

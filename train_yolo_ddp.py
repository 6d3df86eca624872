"""Train YOLO segmentation on one process or many.

    python train_yolo_ddp.py --model yolov8n-seg.pt --epochs 10 --batch-size 16
    bash train_ddp.sh 4
    python -m torch.distributed.run --nproc_per_node=4 train_yolo_ddp.py --model yolov8m-seg.pt

The same command again continues an interrupted run. `--help` lists every option with its default.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from utils import distributed
from utils.common.config import parse_config
from utils.common.cores import choose_threads_and_workers, free_cores, threads_beside_others
from utils.common.devices import choose_device, choose_precision, seed_everything, tune_device
from utils.common.errors import explain_out_of_memory, run_script
from utils.common.signals import die_with_parent
from utils.data.dataset import SegmentationDataset
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.loader import EpochBatches, ShardBatches, get_dataloader, multi_scale_sizes
from utils.distributed import cleanup_ddp, setup_ddp
from utils.engine import TrainingEngine
from utils.run.folder import OwnedRun, resume_arguments
from utils.run.log import print_banner
from utils.run.mlflow import mirror
from utils.training import assembly
from utils.training.config import TrainConfig
from utils.training.pictures import save_first_pictures
from utils.training.plan import (
    GLOBAL_BATCH_SIZE,
    batches_per_step,
    keep_choices,
    keep_threads,
    plan_optimizer,
    run_choices,
)
from utils.yolo.model import YoloModel, build_model, freeze_layers
from utils.yolo.optimizer import build_optimizer


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(
        TrainConfig, "Train YOLO segmentation with DistributedDataParallel", resume_arguments(sys.argv[1:])
    )
    ranks = distributed.read_rank_environment()
    die_with_parent()
    device = choose_device(config.device, ranks.local_rank)
    most_threads, workers = choose_threads_and_workers(ranks.local_world_size, config.num_workers, device.type)
    threads = config.threads or most_threads
    # Only of one process: several that start together would take each other for other programs.
    if device.type == "cpu" and not config.threads and most_threads > 1 and ranks.local_world_size == 1:
        threads = threads_beside_others(most_threads, free_cores())
    torch.set_num_threads(threads)
    seed_everything(config.seed)
    tune_device(device, deterministic=config.deterministic, fixed_shapes=not config.multi_scale)

    # Everything slow or likely to fail comes before the process group, so that no rank waits in a collective for it.
    spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
    say = distributed.main_printer(ranks.rank)
    on_device = assembly.varies_colours_on_device(config, device)
    train_set, val_set = (assembly.open_dataset(config, spec, split, on_device, say) for split in ("train", "val"))
    model = build_model(config.model, spec.names).to(memory_format=torch.channels_last)
    freeze_layers(model, config.freeze)
    found = assembly.find_batch_size(config, model, device)
    setup_ddp(device, ranks)
    config = replace(config, batch_size=assembly.agree_batch_size(config, found))
    too_large = (
        f"GPU {device.index}: --batch-size {config.batch_size} at {config.img_size} pixels does not fit its memory; "
        f"halve it and double --accumulate (the same training), or let --batch-size auto choose"
    )
    with explain_out_of_memory(too_large), OwnedRun(config) as run:
        print_banner(ranks.world_size, ranks.rank)
        threads = config.threads or keep_threads(threads, most_threads, ranks.world_size, run.choices)
        torch.set_num_threads(threads)
        loading = assembly.plan_workers(config, workers, ranks.local_world_size)
        place = f"Device: {device}, {threads} threads and {loading.workers} loader workers per process"
        say("\n".join([*run.notes, *loading.notes, place]))
        if threads < most_threads and not config.threads:
            reason = "as when the run began" if run.resumes else "because other programs use the cores"
            say(f"Compute threads: {threads} of {most_threads}, {reason} (--threads {most_threads} uses all)")
        with mirror(run.folder, config.mlflow):
            code = train(config, run, device, model, spec.names, (train_set, val_set), loading.workers, say)
    cleanup_ddp()  # not after an error: NCCL would wait for ranks that have not failed
    return code


def train(
    config: TrainConfig,
    run: OwnedRun,
    device: torch.device,
    model: YoloModel,
    names: tuple[str, ...],
    datasets: tuple[SegmentationDataset, SegmentationDataset],
    workers: int,
    say: distributed.Say,
) -> int:
    """Train in an open run folder, as a member of the process group; return the exit code."""
    train_set, val_set = datasets
    skipped = {**train_set.skipped, **val_set.skipped}
    rank, world_size = distributed.rank(), distributed.world_size()
    config, lines = keep_choices(config, run.choices, device)
    lines += assembly.keep_skipped(run, skipped)
    batches_now = batches_per_step(config, world_size, run.choices)
    if batches_now != config.accumulate:
        images = run.choices[GLOBAL_BATCH_SIZE]
        lines.append(f"{batches_now} batches per step, so that the run keeps its {images} images per step")
        config = replace(config, accumulate=batches_now)
    plan = plan_optimizer(config, world_size, len(train_set), len(names))
    weights = assembly.class_weights(config, train_set, len(names))
    say("\n".join([*lines, *plan.arithmetic, *assembly.weight_lines(weights, names)]))

    sizes = multi_scale_sizes(config.img_size) if config.multi_scale else ()
    batches = EpochBatches(len(train_set), config.batch_size, rank, world_size, config.seed, sizes, config.accumulate)
    val_batches = ShardBatches(len(val_set), 2 * config.batch_size, rank, world_size)
    pin_memory = device.type == "cuda"
    if rank == 0 and not run.resumes:
        save_first_pictures(train_set, batches, names, run.folder)
    optimizer = build_optimizer(model, plan)
    task = assembly.Segmentation(config, model, names, run, val_set.photos, weights)
    options = assembly.engine_options(config, device)
    facts = run_choices(plan, choose_precision(config.amp, device), world_size, torch.get_num_threads(), skipped)
    engine = TrainingEngine(model, device, options, task=task, run=run.folder, facts=facts)
    assembly.follow_epochs(task.criterion, engine)
    engine.train(
        train_loader=get_dataloader(train_set, batches, workers, pin_memory, config.prefetch),
        val_loader=get_dataloader(val_set, val_batches, min(workers, 2), pin_memory, min(config.prefetch, 4)),
        optimizer=optimizer,
        scheduler=assembly.build_schedule(config, plan, optimizer, len(batches)),
        resume=run.resumes,
    )
    return conclude(engine, config, run, say)


def conclude(engine: TrainingEngine, config: TrainConfig, run: OwnedRun, say: distributed.Say) -> int:
    """Report how the training ended, on the console and in the run's status; return the exit code."""
    progress, monitor = engine.progress, config.monitor
    stopped_by = engine.stop_flag.reason or "a signal to another process" if engine.stopped_by_signal else ""
    reason = "stopped early" if progress.stopped_early else ""
    code = run.conclude(stopped_by, reason, epoch=progress.epoch, step=progress.global_step)
    if stopped_by:
        return code
    if progress.best_value is None:
        best = f"absent: {monitor} was never a number"
    else:
        best = f"{monitor} {progress.best_value:.4f}, epoch {progress.best_epoch + 1}"
    say(
        f"\nTraining complete after {progress.epoch} epochs: {run.folder / 'best.pt'} ({best}), {run.folder / 'last.pt'}"
    )
    return code


if __name__ == "__main__":
    run_script(main)

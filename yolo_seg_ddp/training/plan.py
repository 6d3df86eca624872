"""What follows from the trainer's options on this machine, decided once: device, threads, batch,
optimizer, what a resumed run keeps.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from yolo_seg_ddp.data.dataset import count_classes
from yolo_seg_ddp.data.loader import batch_bytes, largest_side_px, plan_loader
from yolo_seg_ddp.data.options import DataOptions
from yolo_seg_ddp.run.folder import NOT_KEPT, OwnedRun
from yolo_seg_ddp.run.records import CONFIG_FILE
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.data import Data
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.cores import (
    choose_threads_and_workers,
    free_cores,
    threads_beside_others,
    usable_cpu_count,
)
from yolo_seg_ddp.utils.devices import (
    Precision,
    choose_device,
    choose_precision,
    seed_everything,
    tune_device,
)
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.files import warn_on_write_error, write_text_atomic
from yolo_seg_ddp.utils.options import PRECISION_CHOICES, to_dict
from yolo_seg_ddp.utils.text import counted
from yolo_seg_ddp.yolo.loss import balancing_weights
from yolo_seg_ddp.yolo.optimizer import OPTIMIZER_NAMES, OptimizerPlan, scaled_lr
from yolo_seg_ddp.yolo.options import ADAMW_LR, FEW_STEPS, NOMINAL_BATCH_SIZE, SGD_LR

GLOBAL_BATCH_SIZE = "global_batch_size"  # one of a run's choices: images per optimizer step
# two more: compute threads per process, and the cores that it could use
THREADS, CORES = "threads", "cores"
# another: what --skip-bad left out, by its path in the data set, sorted
SKIPPED_PHOTOGRAPHS = "skipped_photographs"
ARGUMENTS_FILE = "args.yaml"
SKIPPED_FILE = "skipped_photographs.txt"


# --- this process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceSetup:
    """What a process uses of its machine.

    `most_threads` is what its cores allow, `threads` what it begins with.
    """

    ranks: distributed.RankInfo
    device: torch.device
    precision: Precision
    most_threads: int
    threads: int
    workers: int


def setup_device(config: TrainConfig, ranks: distributed.RankInfo) -> DeviceSetup:
    """Choose this process's device, compute threads and loader workers, and prepare PyTorch for
    them.
    """
    device = choose_device(config.device, ranks.local_rank)
    most_threads, workers = choose_threads_and_workers(
        ranks.local_world_size, config.num_workers, device.type
    )
    threads = config.threads or most_threads
    # Only of one process: several that start together would take each other for other programs.
    if (
        device.type == "cpu"
        and not config.threads
        and most_threads > 1
        and ranks.local_world_size == 1
    ):
        threads = threads_beside_others(most_threads, free_cores())
    torch.set_num_threads(threads)
    seed_everything(config.seed)
    tune_device(device, deterministic=config.deterministic, fixed_shapes=not config.multi_scale)
    return DeviceSetup(
        ranks, device, choose_precision(config.amp, device), most_threads, threads, workers
    )


# --- the run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainPlan:
    """How a run trains: made once, when all that may be `auto` is known. Everything after it reads
    the plan.

    `options` have no `auto` left that an earlier start decided. `class_weights`: float32
    (classes,), or None. `choices` are what a resumed run must keep although it may be started
    elsewhere: each checkpoint's manifest holds them. `lines` are for the console.
    """

    options: TrainConfig
    setup: DeviceSetup
    workers: int
    optimizer: OptimizerPlan
    class_weights: torch.Tensor | None
    choices: dict[str, Any]
    lines: list[str]


def plan_training(
    options: TrainConfig, setup: DeviceSetup, run: OwnedRun, data: Data, *, is_trained: bool
) -> TrainPlan:
    """Decide how the run trains, and set the number of compute threads. Every rank must reach this.

    `is_trained`: the model begins with trained weights.
    """
    ranks, device = setup.ranks, setup.device
    threads = options.threads or keep_threads(
        setup.threads, setup.most_threads, ranks.world_size, run.choices
    )
    torch.set_num_threads(threads)
    workers, notes = plan_workers(
        options.batch_size, options, setup.workers, ranks.local_world_size
    )
    lines = [*run.notes, *notes]
    lines.append(
        f"Device: {device}, {counted(threads, 'thread')} and {counted(workers, 'loader worker')} "
        "per process"
    )
    if threads < setup.most_threads and not options.threads:
        reason = "as when the run began" if run.resumes else "because other programs use the cores"
        lines.append(
            f"Compute threads: {threads} of {setup.most_threads}, {reason} (--threads "
            f"{setup.most_threads} uses all)"
        )

    # What a resumed run keeps.
    kept, notes = restore_resolved_options(options, run.choices, device)
    lines += [*notes, *keep_skipped(run, data.skipped)]
    batch_size, accumulate = batches_per_step(options, ranks.world_size, run.choices)
    if (batch_size, accumulate) != (options.batch_size, options.accumulate):
        images = counted(run.choices[GLOBAL_BATCH_SIZE], "image")
        each = (
            f"{counted(batch_size, 'image')} per process and {counted(accumulate, 'batch')} per "
            "step"
        )
        lines.append(f"{each}, so that the run keeps its {images} per step")
    options = replace(options, **kept, batch_size=batch_size, accumulate=accumulate)

    optimizer = plan_optimizer(options, ranks.world_size, len(data.train), is_trained=is_trained)
    lines += optimizer.arithmetic
    # Every rank reads all labels, so all agree.
    counts = count_classes(data.train.photos, len(data.spec.names))
    weights = plan_class_weights(options.class_weights, optimizer.name, counts)
    if weights is not None:
        ordered = sorted(zip(weights.tolist(), data.spec.names, strict=True))
        least, most = (f"{weight:.2g} ({name})" for weight, name in (ordered[0], ordered[-1]))
        lines.append(
            f"Class weights: {least} to {most}, because classes have unequal numbers of objects; "
            "--class-weights none: all alike"
        )
    choices = {
        GLOBAL_BATCH_SIZE: optimizer.global_batch_size,
        "world_size": ranks.world_size,
        "optimizer": optimizer.name,
        "lr": optimizer.base_lr,
        "amp": choose_precision(options.amp, device).name,
        THREADS: threads,
        CORES: usable_cpu_count(),
        SKIPPED_PHOTOGRAPHS: sorted(data.skipped),
        "data": run.data.digest if run.data else None,
    }
    return TrainPlan(options, setup, workers, optimizer, weights, choices, lines)


def save_arguments(plan: TrainPlan, folder: Path) -> None:
    """Write `args.yaml`: the run's options under Ultralytics' names where it has them, with what
    the run chose itself.
    """
    names = {"img_size": "imgsz", "batch_size": "batch", "num_workers": "workers", "lr": "lr0"}
    optimizer = {
        "optimizer": plan.optimizer.name,
        "lr": plan.optimizer.lr,
        "momentum": plan.optimizer.momentum,
    }
    chosen = {
        "task": "segment",
        "mode": "train",
        **to_dict(plan.options),
        "num_workers": plan.workers,
        **optimizer,
    }
    chosen |= {"project": str(folder.parent), "name": folder.name}
    options = {
        names.get(name, name): value for name, value in chosen.items() if name not in NOT_KEPT
    }
    head = (
        "# The run's options under Ultralytics' names; batch is that of a process. --config reads "
        f"{CONFIG_FILE}.\n"
    )
    with warn_on_write_error(str(folder / ARGUMENTS_FILE)):
        write_text_atomic(folder / ARGUMENTS_FILE, head + yaml.safe_dump(options, sort_keys=False))


def plan_workers(
    batch_size: int, data: DataOptions, workers: int, local_world_size: int
) -> tuple[int, list[str]]:
    """Cut the loader's workers to what shared memory holds, at the largest size that a batch may
    have.
    """
    largest_bytes = batch_bytes(
        batch_size, largest_side_px(data.img_size, multi_scale=data.multi_scale)
    )
    return plan_loader(workers, data.prefetch, largest_bytes, local_world_size)


def plan_class_weights(wanted: str, optimizer: str, counts: np.ndarray) -> torch.Tensor | None:
    """Return what the loss weighs the classes by, from their numbers of objects; see
    `balancing_weights`. None if all count alike.

    `auto` follows the optimizer, because a resumed run keeps its optimizer.
    """
    if wanted == "auto":
        wanted = "root" if optimizer == "adamw" else "none"
    return balancing_weights(counts) if wanted == "root" else None


def plan_optimizer(
    config: TrainConfig, world_size: int, num_images: int, *, is_trained: bool = False
) -> OptimizerPlan:
    """Choose the optimizer and derive the effective batch, learning rate and weight decay, with
    lines that explain them.

    Weight decay grows with the batch as in YOLOv5.
    """
    global_batch = config.batch_size * world_size * config.accumulate
    steps = -(-num_images // global_batch)
    name, choice = config.optimizer, []
    if name == "auto":
        is_short = is_trained and steps * config.epochs < FEW_STEPS and not config.windows
        name, other = ("adamw", "musgd") if is_short else ("musgd", "adamw")
        weights = f"the weights are {'trained' if is_trained else 'random'}"
        reason = (
            f"{weights} and there are {steps * config.epochs} "
            f"steps{' on windows' * bool(config.windows)}"
        )
        choice = [
            f"Optimizer: {OPTIMIZER_NAMES[name]}, because {reason}; --optimizer {other} takes "
            f"{OPTIMIZER_NAMES[other]}"
        ]
    is_adamw = name == "adamw"
    base_lr = config.lr or (ADAMW_LR if is_adamw else SGD_LR)
    lr = scaled_lr(base_lr, config.lr_scale, global_batch)
    scaling = (
        "" if lr == base_lr else f"{base_lr:g} x {lr / base_lr:g} ({config.lr_scale} scaling) = "
    )
    weight_decay = config.weight_decay * global_batch / NOMINAL_BATCH_SIZE
    arithmetic = (
        f"Effective batch: {counted(config.batch_size, 'image')} x "
        f"{counted(world_size, 'process')} x {counted(config.accumulate, 'batch')} per step = "
        f"{global_batch}",
        *choice,
        f"Learning rate: {scaling}{lr:g} ({OPTIMIZER_NAMES[name]})",
        f"Weight decay: {config.weight_decay:g} x {global_batch}/{NOMINAL_BATCH_SIZE} = "
        f"{weight_decay:g}",
        f"Steps: {counted(num_images, 'image')} / {global_batch} = {steps} per epoch, "
        f"{steps * config.epochs} in all",
    )
    momentum = 0.9 if is_adamw else 0.937
    return OptimizerPlan(name, lr, weight_decay, momentum, global_batch, arithmetic, base_lr)


# --- what a resumed run keeps ---------------------------------------------------------------------


def restore_resolved_options(
    options: TrainConfig, choices: dict[str, Any], device: torch.device
) -> tuple[dict[str, Any], list[str]]:
    """Return what `auto` became when the run began, by the options' names, and lines for the
    console.

    `choices` are those of the resumed run; empty for a new one. Another version or machine might
    choose differently, but an optimizer cannot load another optimizer's state, and a run should
    keep its precision.
    """
    kept = dict[str, Any]()
    lines = list[str]()
    optimizer, precision = choices.get("optimizer"), choices.get("amp")
    if optimizer in OPTIMIZER_NAMES and options.optimizer in ("auto", optimizer):
        kept["optimizer"] = optimizer
        # Other versions had other rates.
        if options.lr is None and "lr" in choices:
            kept["lr"] = choices["lr"]
    if options.amp == "auto" and precision in PRECISION_CHOICES[1:]:
        try:
            choose_precision(precision, device)
            kept["amp"] = precision
        except UserError:
            now = choose_precision("auto", device).name
            began = f"The run began with --amp {precision}"
            lines.append(f"{began}, which this device does not support; continuing with {now}")
    return kept, lines


def keep_threads(threads: int, most: int, world_size: int, choices: dict[str, Any]) -> int:
    """Return how many compute threads, at most `most`, a run without `--threads` uses: `threads` if
    it is new.

    A run that continues with as many cores and processes keeps the number with which it began: the
    number changes how sums are rounded, and depended on what else ran then.
    """
    began = choices.get(THREADS)
    same = choices.get(CORES) == usable_cpu_count() and choices.get("world_size") == world_size
    return min(began, most) if same and isinstance(began, int) and began > 0 else threads


def batches_per_step(
    config: TrainConfig, world_size: int, choices: dict[str, Any]
) -> tuple[int, int]:
    """Return each rank's batch size, and how many batches it takes per optimizer step, so that a
    resumed run keeps its global batch.

    `choices` are those of the resumed run; empty for a new one. With an equal global batch, the
    order of the samples and the optimizer steps do not depend on the number of ranks. A batch is
    never larger than `config` says, since it has to fit the memory. Raises UserError when the
    number of ranks does not divide the global batch.
    """
    global_batch_size = choices.get(GLOBAL_BATCH_SIZE)
    if not isinstance(global_batch_size, int) or global_batch_size < 1:
        return config.batch_size, config.accumulate
    per_rank, rest = divmod(global_batch_size, world_size)
    if rest:
        possible = max(number for number in range(1, world_size) if global_batch_size % number == 0)
        raise UserError(
            f"{config.save_dir}: trains with {global_batch_size} images per step, which "
            f"{world_size} processes cannot share evenly; continue with {possible}: bash "
            f"train_ddp.sh {possible} -- --resume {config.save_dir}"
        )
    batches = next(
        number
        for number in range(1, per_rank + 1)
        if per_rank % number == 0 and per_rank // number <= config.batch_size
    )
    return per_rank // batches, batches


def keep_skipped(run: OwnedRun, skipped: dict[str, str]) -> list[str]:
    """Write which photographs `--skip-bad` left out to the run folder; return a line for the
    console.

    Raises UserError if a resumed run left out others: its samples would differ.
    """
    names = sorted(skipped)
    file = run.folder / SKIPPED_FILE
    earlier = run.choices.get(SKIPPED_PHOTOGRAPHS) or []
    if run.resumes and earlier != names:
        changed = printable(min(set(earlier) ^ set(names)), 400)
        what = (
            "was left out and now can be read, or is gone"
            if changed in earlier
            else "cannot be read any more"
        )
        raise UserError(
            f"{run.folder}: {changed} {what}, and a resumed run needs the same photographs: undo "
            f"the change ({SKIPPED_FILE} lists what was left out), or choose a new --save-dir"
        )
    if not names:
        return []
    if distributed.rank() == 0:
        with warn_on_write_error(str(file)):
            write_text_atomic(
                file, "".join(f"{printable(skipped[name], 5000)}\n" for name in names)
            )
    return [
        f"{len(names)} photographs cannot be read and are left out (--skip-bad): {file} lists them"
    ]

"""The arithmetic that follows from the trainer's options: optimizer, learning rate, batches per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from utils.common.cores import usable_cpu_count
from utils.common.devices import PRECISION_CHOICES, Precision, choose_precision
from utils.common.errors import UserError
from utils.training.config import TrainConfig
from utils.yolo.optimizer import (
    NOMINAL_BATCH_SIZE,
    OPTIMIZER_NAMES,
    SGD_LR,
    SGD_WARMUP_BIAS_LR,
    OptimizerPlan,
    scaled_lr,
)

if TYPE_CHECKING:
    import torch


GLOBAL_BATCH_SIZE = "global_batch_size"  # one of a run's choices: images per optimizer step
THREADS, CORES = "threads", "cores"  # two more: compute threads per process, and the cores that it could use
SKIPPED_PHOTOGRAPHS = "skipped_photographs"  # another: what --skip-bad left out, by its path in the data set, sorted


def plan_optimizer(config: TrainConfig, world_size: int, num_images: int, num_classes: int) -> OptimizerPlan:
    """Choose the optimizer and derive the effective batch, learning rate and weight decay, with lines that explain them.

    AdamW's rate is Ultralytics' rule for fine-tuning; weight decay grows with the batch as in YOLOv5. Biases warm up
    from a high rate with SGD and MuSGD, as in YOLOv8; not with AdamW, whose step is as long as the rate itself.
    """
    global_batch = config.batch_size * world_size * config.accumulate
    total_steps = -(-num_images // global_batch) * config.epochs
    name = "musgd" if config.optimizer == "auto" else config.optimizer
    is_adamw = name == "adamw"
    base_lr = config.lr if config.lr is not None else round(0.01 / (4 + num_classes), 6) if is_adamw else SGD_LR
    lr = scaled_lr(base_lr, config.lr_scale, global_batch)
    weight_decay = config.weight_decay * global_batch / NOMINAL_BATCH_SIZE
    arithmetic = (
        f"Effective batch: {config.batch_size} images x {world_size} processes x {config.accumulate} batches per step = {global_batch}",
        f"Learning rate: {base_lr:g} x {lr / base_lr:g} ({config.lr_scale} scaling) = {lr:g} ({OPTIMIZER_NAMES[name]})",
        f"Weight decay: {config.weight_decay:g} x {global_batch}/{NOMINAL_BATCH_SIZE} = {weight_decay:g}",
        f"Steps: {num_images} images / {global_batch} = {-(-num_images // global_batch)} per epoch, {total_steps} in all",
    )
    momentum = 0.9 if is_adamw else 0.937
    warmup_bias_lr = 0.0 if is_adamw else SGD_WARMUP_BIAS_LR
    return OptimizerPlan(name, lr, weight_decay, momentum, warmup_bias_lr, global_batch, arithmetic)


def run_choices(
    plan: OptimizerPlan, precision: Precision, world_size: int, threads: int, skipped: Iterable[str] = ()
) -> dict[str, Any]:
    """Return what a resumed run must keep although it may be started elsewhere: written into each manifest."""
    return {
        GLOBAL_BATCH_SIZE: plan.global_batch_size,
        "world_size": world_size,
        "optimizer": plan.name,
        "amp": precision.name,
        THREADS: threads,
        CORES: usable_cpu_count(),
        SKIPPED_PHOTOGRAPHS: sorted(skipped),
    }


def keep_choices(config: TrainConfig, choices: dict[str, Any], device: torch.device) -> tuple[TrainConfig, list[str]]:
    """Return the options with `auto` replaced by what the run chose when it began, and lines for the console.

    `choices` are those of the resumed run; empty for a new one. Another version or machine might choose differently, but
    an optimizer cannot load another optimizer's state, and a run should keep its precision.
    """
    lines = []
    if config.optimizer == "auto" and choices.get("optimizer") in OPTIMIZER_NAMES:
        config = replace(config, optimizer=choices["optimizer"])
    began = choices.get("amp")
    if config.amp == "auto" and began in PRECISION_CHOICES[1:]:
        try:
            choose_precision(began, device)
            config = replace(config, amp=began)
        except UserError:
            now = choose_precision("auto", device).name
            lines.append(f"The run began with --amp {began}, which this device does not support; continuing with {now}")
    return config, lines


def keep_threads(threads: int, most: int, world_size: int, choices: dict[str, Any]) -> int:
    """Return how many compute threads, at most `most`, a run without `--threads` uses: `threads` if it is new.

    A run that continues with as many cores and processes keeps the number with which it began: the number changes how sums
    are rounded, and depended on what else ran then.
    """
    began = choices.get(THREADS)
    same = choices.get(CORES) == usable_cpu_count() and choices.get("world_size") == world_size
    return min(began, most) if same and isinstance(began, int) and began > 0 else threads


def batches_per_step(config: TrainConfig, world_size: int, choices: dict[str, Any]) -> int:
    """Return how many batches each rank takes per optimizer step so that a resumed run keeps its global batch.

    `choices` are those of the resumed run; empty for a new one. With an equal global batch, the order of the samples and
    the optimizer steps do not depend on the number of ranks. Raises UserError when that number does not divide it.
    """
    global_batch_size = choices.get(GLOBAL_BATCH_SIZE)
    if not isinstance(global_batch_size, int) or global_batch_size < 1:
        return config.accumulate
    batches, rest = divmod(global_batch_size, config.batch_size * world_size)
    if rest or not batches:
        raise UserError(
            f"{config.save_dir}: trains with {global_batch_size} images per step, which {world_size} processes with "
            f"--batch-size {config.batch_size} cannot make up; start a number of processes that divides "
            f"{global_batch_size // config.batch_size}, or choose a new --save-dir"
        )
    return batches

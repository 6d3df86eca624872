"""`--batch-size auto`: find the largest batch that fits the GPU, by training with growing batches."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import torch

from utils.common.devices import Precision, choose_precision
from utils.common.errors import UserError, is_out_of_memory
from utils.data.dataset import Batch
from utils.data.loader import multi_scale_sizes
from utils.measure.step_timer import build_training, time_training_steps
from utils.measure.synthetic import synthetic_batch
from utils.training.config import TrainConfig
from utils.yolo.model import YoloModel

CPU_BATCH_SIZE = 16  # a CPU is not faster with more, and other processes share its memory
MEMORY_SHARE = 0.85  # of the free memory: communication and photographs with many objects need the rest
LARGEST = 1024
OBJECTS_PER_IMAGE = 60
_STEPS = 2


def find_batch_size(config: TrainConfig, model: YoloModel, device: torch.device, num_images: int) -> int | None:
    """Return what `--batch-size auto` means for this process's device; None where a number was given.

    It is at most `num_images`, those of a rank in an epoch. Some memory is left free. The model is not changed. Call this
    before the process group exists: each rank probes its own device. Raises UserError when not even one image fits.
    """
    if config.batch_size:
        return None
    if device.type != "cuda":
        return CPU_BATCH_SIZE
    precision, side_px = choose_precision(config.amp, device), largest_side_px(config)
    colours = config.augment if varies_colours_on_device(config, device) else None  # that takes memory, too

    def fits(batch_size: int) -> bool:
        batch = synthetic_batch(batch_size, side_px, model.nc, objects_per_image=OBJECTS_PER_IMAGE, colours=colours)
        return _fits(model, device, precision, batch)

    return largest_that_fits(fits, side_px, max(min(LARGEST, num_images), 1))


def largest_side_px(config: TrainConfig) -> int:
    """Return the largest side that a network input may have."""
    return max(multi_scale_sizes(config.img_size)) if config.multi_scale else config.img_size


def varies_colours_on_device(config: TrainConfig, device: torch.device) -> bool:
    """Return whether `--colour` lets the device vary the colours, not the loader."""
    return config.colour == "device" or (config.colour == "auto" and device.type == "cuda")


def largest_that_fits(fits: Callable[[int], bool], img_size: int, most: int) -> int:
    """Return the largest of 1, 2, 3, 4, 6, 8, 12, 16, … up to `most` that fits. Above one that does not fit none is tried."""
    found, step = 0, 1
    while step <= most and fits(step):
        found, step = step, step * 2
    if not found:
        raise UserError(f"--batch-size auto: not one image of {img_size} pixels fits the GPU; use a smaller --img-size")
    between = found + found // 2
    return between if found > 1 and between <= most and fits(between) else found


def _fits(model: YoloModel, device: torch.device, precision: Precision, batch: Batch) -> bool:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        engine = build_training(copy.deepcopy(model), device, precision)
        time_training_steps(engine, batch, warmup_steps=1, steps=_STEPS)
        return torch.cuda.max_memory_reserved(device) <= MEMORY_SHARE * free_bytes
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        engine = None  # type: ignore[assignment] # before the next, larger attempt
        gc.collect()
        torch.cuda.empty_cache()

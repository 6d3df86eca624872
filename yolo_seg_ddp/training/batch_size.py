"""What `--batch-size auto` means: a few steps are trained with growing batches, until one does not
fit.
"""

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import torch

from yolo_seg_ddp.data.augment import AugmentOptions
from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.measure.step_timer import build_training, time_training_steps
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.run.records import read_config
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.devices import Precision
from yolo_seg_ddp.utils.errors import UserError, is_out_of_memory
from yolo_seg_ddp.yolo.inputs import varies_colours_on
from yolo_seg_ddp.yolo.model import YoloModel

CPU_BATCH_SIZE = 16  # a CPU is not faster with more, and other processes share its memory
# of the free memory: communication and photographs with many objects need the rest
MEMORY_SHARE = 0.85
LARGEST = 1024
OBJECTS_PER_IMAGE = 60
STEPS = 2


def find_batch_size(
    device: torch.device,
    precision: Precision,
    model: YoloModel,
    side_px: int,
    augment: AugmentOptions,
    num_images: int,
) -> int:
    """Return what `--batch-size auto` means for this process's device.

    `side_px`: the largest side of an input. `num_images`: those of a rank in an epoch, the most.
    Some memory is left free. The model is not changed. Call this before the process group exists:
    each rank probes its own device. Raises UserError when not even one image fits.
    """
    if device.type != "cuda":
        return CPU_BATCH_SIZE
    # that takes memory, too
    colours = augment if varies_colours_on(device, augment.colour) else None

    def fits(batch_size: int) -> bool:
        batch = synthetic_batch(
            batch_size, side_px, model.nc, objects_per_image=OBJECTS_PER_IMAGE, colours=colours
        )
        return _fits(model, device, precision, batch)

    return largest_that_fits(fits, side_px, max(min(LARGEST, num_images), 1))


def largest_that_fits(fits: Callable[[int], bool], img_size: int, most: int) -> int:
    """Return the largest of 1, 2, 3, 4, 6, 8, 12, 16, … up to `most` that fits.

    Above one that does not fit none is tried.
    """
    largest, step = 0, 1
    while step <= most and fits(step):
        largest = step
        step = step * 2
    if not largest:
        raise UserError(
            f"--batch-size auto: not one image of {img_size} pixels fits the GPU; use a smaller "
            "--img-size"
        )
    between = largest + largest // 2
    return between if largest > 1 and between <= most and fits(between) else largest


def _fits(model: YoloModel, device: torch.device, precision: Precision, batch: Batch) -> bool:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        engine = build_training(copy.deepcopy(model), device, precision)
        time_training_steps(engine, batch, warmup_steps=1, steps=STEPS)
        return torch.cuda.max_memory_reserved(device) <= MEMORY_SHARE * free_bytes
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        engine = None  # type: ignore[assignment] # before the next, larger attempt
        gc.collect()
        torch.cuda.empty_cache()


def agree_batch_size(given: int, fitting: int, folder: Path) -> int:
    """Return the batch size of all ranks: as given, else that of the run in `folder`, else
    `fitting`.

    Every rank must reach this.
    """
    if given:
        return given
    earlier = distributed.broadcast_from_main(read_config(folder).get("batch_size"))
    return earlier if type(earlier) is int and earlier > 0 else fitting

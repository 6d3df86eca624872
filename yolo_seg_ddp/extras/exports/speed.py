"""Measures the speed of exports, alternating in one process, and the peak memory of each in a
process of its own.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from yolo_seg_ddp.predict.detections import raw_outputs
from yolo_seg_ddp.predict.models import open_model
from yolo_seg_ddp.utils.devices import choose_precision, peak_memory_bytes
from yolo_seg_ddp.utils.distributed.rank_processes import read_job, run_ranks, write_answer
from yolo_seg_ddp.utils.environment import prepare_environment

MEMORY_CODE = (
    "from yolo_seg_ddp.extras.exports.speed import measure_memory; run_script(measure_memory)"
)
ROUNDS = 15
TIMEOUT_S = 600.0


@torch.no_grad()
def images_per_second(
    runs: Mapping[int, tuple[nn.Module, torch.dtype | None]],
    images: torch.Tensor,
    rounds: int = ROUNDS,
) -> dict[int, float]:
    """Return the images per second of each network with its autocast dtype: the median of rounds,
    each with all networks.

    images (B, 3, S, S) on the device. Resize, suppression and masks are the same for all and are
    not included.
    """
    times_s: dict[int, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (model, dtype) in runs.items():
            start_s = time.perf_counter()
            raw_outputs(model, images, dtype)
            if images.device.type == "cuda":
                torch.cuda.synchronize(images.device)
            # The first one warms up.
            if number:
                times_s[name].append(time.perf_counter() - start_s)
    return {name: len(images) / statistics.median(times) for name, times in times_s.items()}


def peak_memory(path: str, device: str, amp: str, shape: tuple[int, ...]) -> int:
    """Return the peak memory in bytes of a process that opens a model and predicts on two batches.

    On a CPU this is the whole process, Python and its libraries included; on a GPU PyTorch's
    tensors alone.
    """
    job = {
        "path": path,
        "device": device,
        "amp": amp,
        "shape": shape,
        "threads": torch.get_num_threads(),
    }
    (answer,) = run_ranks(MEMORY_CODE, 1, job, TIMEOUT_S)
    return int(answer["bytes"])


def measure_memory() -> None:
    """Measure the memory, in the process that `peak_memory` starts."""
    job: dict[str, Any] = read_job()
    prepare_environment()
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    model = open_model(job["path"], device, job["amp"])
    dtype = choose_precision(job["amp"], device).dtype
    images = torch.zeros(job["shape"], device=device)
    with torch.no_grad():
        for _ in range(2):
            raw_outputs(model, images, dtype)
    write_answer({"bytes": peak_memory_bytes(device)})

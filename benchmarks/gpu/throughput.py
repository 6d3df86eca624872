"""Parts that measure inference and evaluation. Each of them runs alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.plan import Finding, PartFailed, Setting
from benchmarks.gpu.trainings import precision_folder
from yolo_seg_ddp.data.dataset import SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.data.loader import ShardBatches, get_dataloader
from yolo_seg_ddp.evaluation.evaluate import evaluate
from yolo_seg_ddp.predict.detections import raw_outputs
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import Precision, choose_device, tune_device
from yolo_seg_ddp.yolo.loss26 import loss_for
from yolo_seg_ddp.yolo.model import YoloModel, class_names, load_weights


def inference(setting: Setting) -> Finding:
    """Measure images/s of the network alone in each precision, and from photographs to masks."""
    sizes = setting.sizes
    device = choose_device(setting.device, 0)
    tune_device(device, deterministic=False, fixed_shapes=True)
    set_threads(setting)
    model = trained_model(setting, device).eval()
    batch_size = 2 * sizes.batch_size
    images = torch.rand(batch_size, 3, sizes.full_px, sizes.full_px, device=device).to(
        memory_format=torch.channels_last
    )
    speeds = {}
    with torch.no_grad():
        for name, dtype in inference_precisions(setting).items():
            seconds = timed(partial(raw_outputs, model, images, dtype), device, sizes.seconds)
            speeds[name] = batch_size / seconds
    photos = [
        read_image(photo.file)
        for photo in read_photos(load_dataset_yaml(setting.data), "val")[:batch_size]
    ]
    limits = {"confidence": 0.25, "iou": 0.7}

    def predict() -> list[Any]:
        return list(
            Predictor(model, sizes.full_px, device, batch_size, None, limits).predict(
                enumerate(photos)
            )
        )

    speeds["photographs to masks, fp32"] = len(photos) / timed(predict, device, sizes.seconds)
    said = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    return Finding(
        f"images/s at batch {batch_size}: {said}",
        {"batch_size": batch_size, "images_per_s": speeds},
    )


def evaluation(setting: Setting) -> Finding:
    """Measure images/s of an evaluation, loading and metrics included, in each precision."""
    sizes = setting.sizes
    device = choose_device(setting.device, 0)
    workers = set_threads(setting)
    model = trained_model(setting, device)
    dataset = SegmentationDataset(
        read_photos(load_dataset_yaml(setting.data), "train"), sizes.full_px
    )
    speeds, scores = {}, {}
    for name, dtype in inference_precisions(setting).items():
        seconds = []
        # The first pass fills caches.
        for _ in range(2):
            loader = get_dataloader(
                dataset, ShardBatches(len(dataset), 16, 0, 1), workers, setting.is_gpu
            )
            start_s = time.perf_counter()
            precision = Precision("off" if dtype is None else name, dtype, False)
            evaluated = evaluate(
                model, loader, class_names(model), loss_for(model), device, precision=precision
            )
            seconds.append(time.perf_counter() - start_s)
        speeds[name] = len(dataset) / seconds[-1]
        scores[name] = evaluated.metrics["mask_map50_95"]
    said = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    figures = {
        "images": len(dataset),
        "workers": workers,
        "images_per_s": speeds,
        "mask_map50_95": scores,
    }
    return Finding(f"images/s with loading ({workers} workers): {said}", figures)


def set_threads(setting: Setting) -> int:
    """Use as many compute threads as the project's scripts; return the loader workers."""
    threads, workers = choose_threads_and_workers(1, device_type=setting.device)
    torch.set_num_threads(threads if setting.is_gpu else 1)
    return workers


def inference_precisions(setting: Setting) -> dict[str, torch.dtype | None]:
    """Return autocast's dtype by name; a CPU does not compute in fp16."""
    dtypes: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
    return {**dtypes, "fp16": torch.float16} if setting.is_gpu else dtypes


def trained_model(setting: Setting, device: torch.device) -> YoloModel:
    """Return the model of the part `precision_musgd`. Raises PartFailed without it."""
    weights = precision_folder(setting, "musgd", "off") / "best.pt"
    if not weights.exists():
        raise PartFailed(f"there is no {weights}: the part precision_musgd has not trained it")
    return load_weights(str(weights)).to(device, memory_format=torch.channels_last)


def timed(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the seconds of a call: the mean over many, and on a GPU until it has computed them."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):
        call()
    wait()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start_s = time.perf_counter()
        for _ in range(3):
            call()
        wait()
        times.append((time.perf_counter() - start_s) / 3)
    return float(np.median(times))

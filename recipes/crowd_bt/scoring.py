"""Scores images: each image on one of the ranks; then all ranks know all scores."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from crowd_bt.images import Images, normalised
from crowd_bt.model import QualityScorer

from yolo_seg_ddp.data.loader import EpochLoader, ShardBatches, get_dataloader
from yolo_seg_ddp.utils.devices import Precision
from yolo_seg_ddp.utils.distributed import gather_arrays, rank, world_size


def image_loader(
    names: Sequence[str],
    folder: Path,
    size_px: int,
    batch_size: int,
    workers: int,
    pin_memory: bool = False,
) -> EpochLoader:
    """Return a loader of this rank's share of the images."""
    batches = ShardBatches(len(names), batch_size, rank(), world_size())
    return get_dataloader(Images(names, folder, size_px), batches, workers, pin_memory)


@torch.no_grad()
def score_images(
    scorer: QualityScorer,
    loader: Iterable[tuple[torch.Tensor, torch.Tensor]],
    names: Sequence[str],
    device: torch.device,
    precision: Precision,
) -> dict[str, float]:
    """Return each image's quality by name, on every rank. Every rank must reach this."""
    scorer.eval()
    positions, scores = [], []
    for indices, images in loader:
        with precision.autocast(device):
            qualities = scorer(normalised(images.to(device, non_blocking=True)))
        positions.append(indices.numpy())
        scores.append(qualities)
    of_rank = {
        "positions": np.concatenate(positions) if positions else np.zeros(0, np.int64),
        "scores": torch.cat(scores).cpu().numpy() if scores else np.zeros(0, np.float32),
    }
    parts = gather_arrays(of_rank)
    pairs = zip(
        *(np.concatenate([part[name] for part in parts]) for name in ("positions", "scores")),
        strict=True,
    )
    return {names[int(position)]: float(score) for position, score in pairs}

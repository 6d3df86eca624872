"""Small data of known order and a small scorer, without timm."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crowd_bt import train
from crowd_bt.comparisons import LISTS, Comparisons
from crowd_bt.make_data import write_lists, write_pictures
from crowd_bt.model import PairModel, QualityScorer
from crowd_bt.options import TrainConfig
from crowd_bt.task import PairComparison
from torch import nn

from tests.support.recipes import dying
from yolo_seg_ddp.run.folder import OwnedRun

SIZE_PX = 32


def photographs() -> list[tuple[str, np.ndarray]]:
    """Return two pictures with edges everywhere."""
    generator = np.random.default_rng(0)
    coarse = [generator.integers(0, 255, (24, 24, 3)).astype(np.uint8) for _ in range(2)]
    return [
        (f"tiles{number}", np.kron(tiles, np.ones((8, 8, 1), np.uint8)))
        for number, tiles in enumerate(coarse)
    ]


def write_data(folder: Path, reliability: float = 0.9, num_annotators: int = 0) -> Path:
    """Write lists of 90 comparisons of 42 pictures, by one crowd or by annotators whose names are
    known.
    """
    generator = np.random.default_rng(1)
    pictures = write_pictures(folder / "images", photographs(), 42, SIZE_PX, generator)
    write_lists(folder, pictures, 90, reliability, generator)
    for name in LISTS if num_annotators else ():
        items = json.loads((folder / name).read_text())
        for number, item in enumerate(items):
            item["annotator_id"] = f"user{number % num_annotators}"
        (folder / name).write_text(json.dumps(items))
    return folder


def config_for(data: Path, run: Path, **options: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 6,
        "lr": 2e-3,
        "input_size": SIZE_PX,
        "device": "cpu",
    }
    settings |= {
        "data_dir": str(data),
        "image_dir": str(data / "images"),
        "checkpoint_dir": str(run),
        "num_workers": 0,
    }
    return TrainConfig(**{**settings, "pretrained": False, **options})


def small_model(
    eta: float | Sequence[float] = 0.8,
    is_learnable: bool = True,
    *,
    dropout: bool = True,
    draw_log: float = -3.0,
) -> PairModel:
    """Return a scorer with a BatchNorm and a crowd, or its annotators."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    model = PairModel(QualityScorer(backbone, 32), eta, is_learnable, draw_log)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and not dropout:
            layer.p = 0.0
    return model


def read(config: TrainConfig) -> Comparisons:
    return train.read_comparisons(config, lambda line: None)


def train_small(config: TrainConfig, *, kill_at: int = 0) -> None:
    """Train as train.py does; kill this process at its batch number `kill_at`."""
    options = train.engine_options
    # SciPy and TensorBoard take seconds to import
    comparisons = replace(read(config), known_order={})
    with (
        pytest.MonkeyPatch.context() as patch,
        dying(PairComparison, "loss", kill_at),
        OwnedRun(config) as run,
    ):
        patch.setattr(
            train, "engine_options", lambda config: replace(options(config), tensorboard=False)
        )
        model = small_model(
            *train.eta_of(config, comparisons), draw_log=train.first_draw_log(comparisons)
        )
        train.train(config, run, torch.device("cpu"), model, comparisons, 0)

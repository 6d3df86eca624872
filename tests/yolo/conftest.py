"""The networks that the tests of the loss and of model files share, and the loss without terms that somebody adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.yolo.made_up import NAMES, SIZE_PX, WINDOWS
from utils.yolo import mask_loss
from utils.yolo.model import build_model, save_deployable

FAMILIES = ("yolov8n", "yolo11n", "yolo12n", "yolo26n")


@pytest.fixture(autouse=True)
def terms_of_yolov8(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests compare with Ultralytics, or count memory: both without EXTRA_TERMS."""
    monkeypatch.setattr(mask_loss, "EXTRA_TERMS", ())


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    """A network of each family with random weights, in training."""
    torch.manual_seed(0)
    return {family: build_model(f"{family}-seg.yaml", NAMES).train() for family in FAMILIES}


@pytest.fixture(scope="session")
def model(models: dict[str, Any]) -> Any:
    return models["yolov8n"]


@pytest.fixture(scope="session")
def saved(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each network, saved as the trainer does, with its weights beside it."""
    paths = {}
    for family, network in models.items():
        paths[family] = tmp_path_factory.mktemp(family) / "best.pt"
        info = {"epoch": 3, "metrics": {"mask_map50": 0.5}}
        facts: dict[str, Any] = {"img_size": SIZE_PX, "data": "dataset.yaml", "windows": WINDOWS}
        save_deployable(
            paths[family],
            network,
            info,
            **facts,
            thin_classes=(1,),
            wire_labels={"wires_end_at": [0], "wire_width": [1.0, 2.5]},
        )
        torch.save(network.state_dict(), paths[family].with_name("weights.pt"))
    return paths

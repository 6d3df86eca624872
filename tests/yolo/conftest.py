"""The network whose outputs the tests of the loss replace, and the loss without terms that somebody adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.yolo.made_up import NAMES
from utils.yolo import mask_loss
from utils.yolo.model import build_model


@pytest.fixture(autouse=True)
def terms_of_yolov8(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests compare with Ultralytics, or count memory: both without EXTRA_TERMS."""
    monkeypatch.setattr(mask_loss, "EXTRA_TERMS", ())


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model("yolov8n-seg.yaml", NAMES).train()

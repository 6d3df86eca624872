"""The network whose outputs the tests of the loss replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.yolo.made_up import NAMES
from utils.yolo.model import build_model


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model("yolov8n-seg.yaml", NAMES).train()

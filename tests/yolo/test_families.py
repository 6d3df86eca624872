"""The newer model families: Ultralytics' losses, files, resume, and two ranks. YOLOv8's tests are beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.yolo.made_up import NAMES, random_outputs, targets_of
from tests.yolo.test_loss import reference_of
from utils.common.errors import UserError
from utils.yolo.loss import PARTS, SegmentationLoss
from utils.yolo.model import build_model, class_names, load_for_prediction, load_weights, save_deployable

FAMILIES = ("yolo11n", "yolo12n")
SIZE_PX = 64
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    torch.manual_seed(0)
    return {family: build_model(f"{family}-seg.yaml", NAMES).train() for family in FAMILIES}


def doubled(outputs: Any) -> Any:
    """Return a network's outputs in float64."""
    if isinstance(outputs, torch.Tensor):
        return outputs.double()
    if isinstance(outputs, dict):
        return {name: doubled(value) for name, value in outputs.items()}
    return type(outputs)(doubled(value) for value in outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_of_the_loss_equals_ultralytics(models: dict[str, Any], family: str) -> None:
    """Ultralytics computes in float64: in float32 its class part alone differs by 5e-6 from the exact value."""
    model, images = models[family], torch.rand(2, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(0))
    for outputs, counts in ((model(images), [5, 3]), (random_outputs(model, 2, SIZE_PX, 1), [20, 9])):
        targets = targets_of(counts, SIZE_PX)
        loss, values = SegmentationLoss(model, loss_scale=2.0)(outputs, targets)
        expected, expected_parts = reference_of(model, doubled(outputs), targets)
        assert {name: float(values[name]) for name in PARTS} == pytest.approx(expected_parts, rel=1e-6)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_opens_again_with_equal_outputs(models: dict[str, Any], family: str, tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    save_deployable(path, models[family], {}, img_size=SIZE_PX, data="dataset.yaml")
    loaded = load_weights(str(path))
    assert class_names(loaded) == NAMES
    state = models[family].state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, state[name].half().to(value.dtype), msg=name)
    fast = load_for_prediction(str(path), torch.device("cpu"))
    assert not [module for module in fast.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    tuned = build_model(str(path), ("insulator", "tree"))  # another order and number of classes
    for level in range(3):
        kept = tuned.model[-1].cv3[level][-1].weight[0]
        torch.testing.assert_close(kept, loaded.model[-1].cv3[level][-1].weight[2])


def test_a_model_that_the_loss_does_not_know_is_refused_in_one_line() -> None:
    for source in ("yolo26n-seg.yaml", "yolov8n.yaml"):
        with pytest.raises(UserError, match=rf"^--model {source}: its last layer, \w+, is not supported; .*yolo11"):
            build_model(source, NAMES)


def test_weights_that_nobody_publishes_point_to_training_from_scratch() -> None:
    with pytest.raises(UserError, match=r"publishes none; train from scratch: --model yolo12s-seg\.yaml"):
        build_model("yolo12s-seg.pt", NAMES)

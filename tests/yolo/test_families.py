"""The model families: YOLO26 without suppression and resumed, and the newer ones on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.yolo.conftest import NAMES, SIZE_PX, targets_of
from utils import distributed
from utils.engine import EngineOptions, Task, TrainingEngine, stopping
from utils.predict.detections import OneToOne, detect, raw_outputs
from utils.training.assembly import follow_epochs
from utils.yolo.loss26 import loss_for
from utils.yolo.model import build_model, freeze_layers, load_for_prediction, load_weights

ON_RANKS = ("yolo12n", "yolo26n")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_without_suppression_yolo26_finds_what_ultralytics_finds(saved: dict[str, Path]) -> None:
    path = saved["yolo26n"]
    images = torch.rand(2, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(0))
    model, fast = load_weights(str(path)), load_for_prediction(str(path), torch.device("cpu"), nms=False)
    model.end2end = True
    with torch.no_grad():
        outputs, of_fast = raw_outputs(model, images), raw_outputs(fast, images)
        assert isinstance(of_fast, OneToOne)
        torch.testing.assert_close(of_fast["scores"], outputs["scores"], rtol=1e-3, atol=1e-4)
        for name in ("scores", "boxes", "mask_coefficient"):  # an untrained network's are all alike
            outputs[name] = torch.randn(outputs[name].shape, generator=torch.Generator().manual_seed(1))
        strides = [float(stride) for stride in model.stride]
        found = detect(outputs, strides, SIZE_PX, confidence=0.0, iou=0.7, max_detections=40, multi_label=True)
        head = model.model[-1]
        expected = head.postprocess(head._inference(outputs).transpose(1, 2))  # (B, 84, 6 + 32): xyxy, score, class, …
    assert expected[0, 0, 4] > expected[0, 39, 4]
    for image, wanted in zip(found, expected[:, :40], strict=True):
        torch.testing.assert_close(image.scores, wanted[:, 4], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(image.boxes, wanted[:, :4], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(image.coefficients, wanted[:, 6:], rtol=1e-3, atol=1e-3)
        assert image.class_ids.tolist() == wanted[:, 5].int().tolist()


# --- training ------------------------------------------------------------------------------------------------------


class Given(Task):
    """Trains on batches that are given as (images, targets), and does not evaluate."""

    def prepare(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        return batch

    def evaluate(self, model: Any, loader: Any, epoch: Any) -> dict[str, float]:
        return {"val_loss": 0.0}


def engine_for(family: str, folder: Path, **options: Any) -> TrainingEngine:
    """Return the engine for a new model whose first three layers are frozen."""
    torch.manual_seed(0)
    model = build_model(f"{family}-seg.yaml", NAMES)
    freeze_layers(model, 3)
    plain: dict[str, Any] = {"precision": "off", "tensorboard": False, "quiet": True, "save_best": False}
    choices = EngineOptions(epochs=2, ema_decay=0.9, save_last=False, **plain, **options)
    task = Given(loss_for(model))
    engine = TrainingEngine(model, torch.device("cpu"), choices, task=task, run=folder)
    follow_epochs(task.criterion, engine)
    return engine


def batches_of(*counts: list[int]) -> list[Any]:
    """Return a batch for each list: how many objects its images have."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(len(of_image), 3, SIZE_PX, SIZE_PX, generator=generator), targets_of(of_image, SIZE_PX, seed))
        for seed, of_image in enumerate(counts)
    ]


def trained(folder: Path, *, stop_at: int = 0, resume: bool = False) -> dict[str, torch.Tensor]:
    """Train YOLO26 for two epochs of two batches, or until batch `stop_at`; return weights and average."""
    engine = engine_for("yolo26n", folder)
    criterion, shares = engine.task.criterion, []

    def counting(outputs: Any, targets: Any) -> Any:
        shares.append(criterion.share)  # type: ignore[union-attr]
        if len(shares) == stop_at:
            engine.stop_flag.set("test")
        return criterion(outputs, targets)  # type: ignore[misc]

    engine.task.criterion = counting
    optimizer = torch.optim.SGD([p for p in engine.state.model.parameters() if p.requires_grad], 0.01, 0.9)
    engine.train(batches_of([3, 1], [0, 4]), [], optimizer, resume=resume)
    expected = [0.8, 0.8, 0.1, 0.1]
    assert shares == pytest.approx(expected[:stop_at] if stop_at else expected[3 * resume :])
    assert engine.state.ema is not None
    average = {f"average {name}": value for name, value in engine.state.ema.module.state_dict().items()}
    return {**engine.state.model.state_dict(), **average}


def test_yolo26_resumes_in_mid_epoch_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 1)
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "part", stop_at=3)
    continued = trained(tmp_path / "part", resume=True)
    assert whole.keys() == continued.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, continued[name])] == []


def train_on_two_ranks(folder: Path) -> dict[str, Any]:
    """Train YOLO12 and YOLO26 for two steps each; return sums of the weights, and how many parameters had no gradient.

    Rank 1 has no object in its first batch.
    """
    facts: dict[str, Any] = {}
    for family in ON_RANKS:
        engine = engine_for(family, folder / family, sync_batchnorm=True, static_graph=True)
        weights = [p for p in engine.state.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(weights, 0.01, 0.9)
        batches = batches_of([3, 2], [1, 4]) if distributed.rank() == 0 else batches_of([0, 0], [2, 0])
        engine.begin(optimizer)
        assert engine.train_one_epoch(batches) is not None
        state = engine.state.model.state_dict().values()
        facts[family] = {
            "sums": [float(value.double().sum()) for value in state],
            "without": sum(weight not in optimizer.state for weight in weights),
        }
    return facts


def test_two_ranks_train_the_newer_families_together(tmp_path: Path) -> None:
    first, second = run_ranks(train_on_two_ranks, 2, tmp_path, timeout_s=120)
    for family in ON_RANKS:
        assert first[family]["sums"] == second[family]["sums"], family
        assert first[family]["without"] == 0, "DDP would wait for these gradients"

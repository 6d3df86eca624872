"""The model families: YOLO26's loss against Ultralytics', without suppression, resumed, and the
newer families on two ranks.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.yolo.conftest import NAMES, SIZE_PX, assert_same_gradients, batch_of, doubled, targets_of
from yolo_seg_ddp.engine import EngineOptions, Task, TrainingEngine, stopping
from yolo_seg_ddp.predict.detections import OneToOne, detect, raw_outputs
from yolo_seg_ddp.training.task import follow_epochs
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.yolo.inputs import Targets
from yolo_seg_ddp.yolo.loss import PARTS
from yolo_seg_ddp.yolo.loss26 import EndToEndLoss, loss_for
from yolo_seg_ddp.yolo.model import build_model, freeze_layers, load_for_prediction, load_weights

ON_RANKS = ("yolo12n", "yolo26n")
EPOCHS = 11  # of the schedule that is compared


def test_without_suppression_yolo26_finds_what_ultralytics_finds(saved: dict[str, Path]) -> None:
    path = saved["yolo26n"]
    images = torch.rand(2, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(0))
    model, fast = (
        load_weights(str(path)),
        load_for_prediction(str(path), torch.device("cpu"), nms=False),
    )
    model.end2end = True
    with torch.no_grad():
        outputs, of_fast = raw_outputs(model, images), raw_outputs(fast, images)
        assert isinstance(of_fast, OneToOne)
        torch.testing.assert_close(of_fast["scores"], outputs["scores"], rtol=1e-3, atol=1e-4)
        for name in ("scores", "boxes", "mask_coefficient"):  # an untrained network's are all alike
            outputs[name] = torch.randn(
                outputs[name].shape, generator=torch.Generator().manual_seed(1)
            )
        strides = [float(stride) for stride in model.stride]
        limits: dict[str, Any] = {"confidence": 0.0, "iou": 0.7, "max_detections": 40}
        found = detect(outputs, strides, SIZE_PX, **limits, multi_label=True, mask_score=False)
        head = model.model[-1]
        # (B, 84, 6 + 32): xyxy, score, class, …
        expected = head.postprocess(head._inference(outputs).transpose(1, 2))
    assert expected[0, 0, 4] > expected[0, 39, 4]
    for image, wanted in zip(found, expected[:, :40], strict=True):
        torch.testing.assert_close(image.scores, wanted[:, 4], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(image.boxes, wanted[:, :4], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(image.coefficients, wanted[:, 6:], rtol=1e-3, atol=1e-3)
        assert image.class_ids.tolist() == wanted[:, 5].int().tolist()


# --- training -------------------------------------------------------------------------------------


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
    plain: dict[str, Any] = {
        "precision": "off",
        "tensorboard": False,
        "quiet": True,
        "save_best": False,
    }
    choices = EngineOptions(epochs=2, ema_decay=0.9, save_last=False, **plain, **options)
    task = Given(loss_for(model))
    engine = TrainingEngine(model, torch.device("cpu"), choices, task=task, run=folder)
    follow_epochs(task.criterion, engine)
    return engine


def batches_of(*counts: list[int]) -> list[Any]:
    """Return a batch for each list: how many objects its images have."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.rand(len(of_image), 3, SIZE_PX, SIZE_PX, generator=generator),
            targets_of(of_image, SIZE_PX, seed),
        )
        for seed, of_image in enumerate(counts)
    ]


def trained(folder: Path, *, stop_at: int = 0, resume: bool = False) -> dict[str, torch.Tensor]:
    """Train YOLO26 for two epochs of two batches, or until batch `stop_at`; return weights and
    average.
    """
    engine = engine_for("yolo26n", folder)
    criterion, shares = engine.task.criterion, []

    def counting(outputs: Any, targets: Any) -> Any:
        shares.append(criterion.share)  # type: ignore[union-attr]
        if len(shares) == stop_at:
            engine.stop_flag.set("test")
        return criterion(outputs, targets)  # type: ignore[misc]

    engine.task.criterion = counting
    optimizer = torch.optim.SGD(
        [p for p in engine.state.model.parameters() if p.requires_grad], 0.01, 0.9
    )
    engine.train(batches_of([3, 1], [0, 4]), [], optimizer, resume=resume)
    expected = [0.8, 0.8, 0.1, 0.1]
    assert shares == pytest.approx(expected[:stop_at] if stop_at else expected[3 * resume :])
    assert engine.state.ema is not None
    average = {
        f"average {name}": value for name, value in engine.state.ema.module.state_dict().items()
    }
    return {**engine.state.model.state_dict(), **average}


def test_yolo26_resumes_in_mid_epoch_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 1)
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "part", stop_at=3)
    continued = trained(tmp_path / "part", resume=True)
    assert whole.keys() == continued.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, continued[name])] == []


def train_on_two_ranks(folder: Path) -> dict[str, Any]:
    """Train YOLO12 and YOLO26 for two steps each; return sums of the weights, and how many
    parameters had no gradient.

    Rank 1 has no object in its first batch.
    """
    facts: dict[str, Any] = {}
    for family in ON_RANKS:
        engine = engine_for(family, folder / family, sync_batchnorm=True, static_graph=True)
        weights = [p for p in engine.state.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(weights, 0.01, 0.9)
        batches = (
            batches_of([3, 2], [1, 4]) if distributed.rank() == 0 else batches_of([0, 0], [2, 0])
        )
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


def random_outputs(
    model: Any, batch_size: int, size_px: int, seed: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return outputs with widely spread random values, and those that get a gradient.

    No box has a negative width: there Ultralytics' IoU is no overlap.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        outputs = model(torch.zeros(batch_size, 3, size_px, size_px))
    leaves = []

    def leaf(shape: torch.Size, scale: float, shift: float = 0.0) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator) * scale + shift
        leaves.append(noise.abs().requires_grad_() if shape[1] == 4 else noise.requires_grad_())
        return leaves[-1]

    many = outputs["one2many"]
    maps = tuple(leaf(tensor.shape, 0.5) for tensor in many["proto"])
    for name, proto in (("one2many", maps), ("one2one", tuple(tensor.detach() for tensor in maps))):
        for part, scale, shift in (
            ("boxes", 2.0, 2.0),
            ("scores", 1.0, -2.0),
            ("mask_coefficient", 0.5, 0.0),
        ):
            outputs[name][part] = leaf(many[part].shape, scale, shift)
        outputs[name]["proto"] = proto
    return outputs, leaves


@contextmanager
def in_float64() -> Iterator[None]:
    """Let tensors that Ultralytics makes, and its conversions by `float()`, be float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def reference_of(
    model: Any, outputs: dict[str, Any], targets: Targets, epoch: int
) -> tuple[torch.Tensor, dict[str, dict[str, float]]]:
    """Return Ultralytics' loss, summed over the batch, and the parts of both outputs, computed in
    float64.
    """
    from ultralytics.utils.loss import E2ELoss, SegmentLoss26

    model.args = types.SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, overlap_mask=True, epochs=EPOCHS)
    criterion, outputs = E2ELoss(model, SegmentLoss26), doubled(outputs)
    for _ in range(epoch):
        criterion.update()
    with in_float64():
        total, _ = criterion(outputs, batch_of(targets))
        of_both = {}
        for name, loss in (("one2many", criterion.one2many), ("one2one", criterion.one2one)):
            _, parts = loss.loss(outputs[name], batch_of(targets))
            of_both[name] = {
                part.removesuffix("_loss"): float(value) for part, value in parts.items()
            }
    return total.sum(), of_both


@pytest.mark.parametrize(
    ("counts", "seed", "epoch"),
    [
        ([20, 9], 0, 0),
        ([5, 0, 12], 1, 3),
        ([0, 1], 2, 10),
        ([0, 0], 3, 5),
        ([60, 2], 4, 7),
        ([7], 5, 12),
    ],
)
def test_every_part_and_gradient_of_yolo26_equals_ultralytics(
    models: dict[str, Any], counts: list[int], seed: int, epoch: int
) -> None:
    model, targets = models["yolo26n"], targets_of(counts, SIZE_PX, seed)
    outputs, leaves = random_outputs(model, len(counts), SIZE_PX, seed)
    criterion = loss_for(model, loss_scale=float(len(counts)))
    assert isinstance(criterion, EndToEndLoss)
    criterion.run_done = lambda: epoch / (EPOCHS - 1)
    loss, values = criterion(outputs, targets)
    expected, expected_parts = reference_of(model, outputs, targets, epoch)
    many, one = expected_parts["one2many"], expected_parts["one2one"]
    found = {name: float(values[name]) for name in (*PARTS, "sem")}
    assert found == pytest.approx(
        {"dfl" if name == "l1" else name: value for name, value in many.items()}, rel=1e-6
    )
    # Ultralytics counts `sem` in the one-to-one outputs too, detached.
    assert float(values["one2one"]) == pytest.approx(sum(one.values()) - one["sem"], rel=1e-6)
    for output, parts in ((criterion.many, many), (criterion.one, one)):
        name = "one2many" if output is criterion.many else "one2one"
        sums = output.sums({**outputs[name], "proto": outputs[name]["proto"][0]}, targets)
        of_output = sums.normalised(sums.normalisers).tolist()
        assert of_output == pytest.approx(
            [parts[part] for part in ("box", "seg", "cls", "l1")], rel=1e-6
        )
    assert_same_gradients(loss, expected, leaves)

"""YOLO26's loss: Ultralytics' numbers and gradients on one rank (on two: test_loss.py)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.yolo.conftest import SIZE_PX, assert_same_gradients, batch_of, doubled, targets_of
from utils.yolo.inputs import Targets
from utils.yolo.loss import PARTS
from utils.yolo.loss26 import EndToEndLoss, loss_for

EPOCHS = 11
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(models: dict[str, Any]) -> Any:
    return models["yolo26n"]


def random_outputs(model: Any, batch_size: int, size_px: int, seed: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
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
        for part, scale, shift in (("boxes", 2.0, 2.0), ("scores", 1.0, -2.0), ("mask_coefficient", 0.5, 0.0)):
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
    """Return Ultralytics' loss, summed over the batch, and the parts of both outputs, computed in float64."""
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
            of_both[name] = {part.removesuffix("_loss"): float(value) for part, value in parts.items()}
    return total.sum(), of_both


@pytest.mark.parametrize(
    ("counts", "seed", "epoch"),
    [([20, 9], 0, 0), ([5, 0, 12], 1, 3), ([0, 1], 2, 10), ([0, 0], 3, 5), ([60, 2], 4, 7), ([7], 5, 1)],
)
def test_every_part_and_gradient_equals_ultralytics(model: Any, counts: list[int], seed: int, epoch: int) -> None:
    targets = targets_of(counts, SIZE_PX, seed)
    outputs, leaves = random_outputs(model, len(counts), SIZE_PX, seed)
    criterion = loss_for(model, loss_scale=float(len(counts)))
    assert isinstance(criterion, EndToEndLoss)
    criterion.run_done = lambda: epoch / (EPOCHS - 1)
    loss, values = criterion(outputs, targets)
    expected, expected_parts = reference_of(model, outputs, targets, epoch)
    many, one = expected_parts["one2many"], expected_parts["one2one"]
    found = {name: float(values[name]) for name in (*PARTS, "sem")}
    assert found == pytest.approx({"dfl" if name == "l1" else name: value for name, value in many.items()}, rel=1e-6)
    # Ultralytics counts `sem` in the one-to-one outputs too, detached.
    assert float(values["one2one"]) == pytest.approx(sum(one.values()) - one["sem"], rel=1e-6)
    for output, parts in ((criterion.many, many), (criterion.one, one)):
        name = "one2many" if output is criterion.many else "one2one"
        sums = output.sums({**outputs[name], "proto": outputs[name]["proto"][0]}, targets)
        of_output = sums.normalised(sums.normalisers).tolist()
        assert of_output == pytest.approx([parts[part] for part in ("box", "seg", "cls", "l1")], rel=1e-6)
    assert_same_gradients(loss, expected, leaves)


def test_the_share_of_each_output_follows_ultralytics_schedule(model: Any) -> None:
    from ultralytics.utils.loss import E2ELoss, SegmentLoss26

    model.args = types.SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, overlap_mask=True, epochs=EPOCHS)
    reference, criterion = E2ELoss(model, SegmentLoss26), EndToEndLoss(model)
    for epoch in range(EPOCHS + 2):
        criterion.run_done = lambda epoch=epoch: epoch / (EPOCHS - 1)  # type: ignore[misc]
        assert criterion.share == pytest.approx(reference.o2m)
        reference.update()

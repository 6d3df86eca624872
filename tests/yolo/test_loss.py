"""The segmentation loss: Ultralytics' numbers on one rank, and one rank's gradients on two and three."""

from __future__ import annotations

import os
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.yolo.conftest import NAMES, SIZE_PX, assert_same_gradients, batch_of, doubled, random_outputs, targets_of
from utils import distributed
from utils.engine import EngineOptions, TrainingEngine
from utils.yolo.inputs import Targets
from utils.yolo.loss import PARTS, LossGains, SegmentationLoss
from utils.yolo.loss26 import loss_for
from utils.yolo.model import build_model

BATCH_SIZE_PER_RANK = 2
pytestmark = pytest.mark.usefixtures("one_thread")


def share_of(targets: Targets, images: slice) -> Targets:
    """Return the targets of a range of images, as those images' own batch."""
    chosen = (targets.batch_index >= images.start) & (targets.batch_index < images.stop)
    return Targets(
        targets.batch_index[chosen] - images.start,
        targets.class_ids[chosen],
        targets.boxes[chosen],
        targets.masks[images],
        targets.size_px,
    )


def reference_of(model: Any, outputs: dict[str, Any], targets: Targets) -> tuple[torch.Tensor, dict[str, float]]:
    """Return Ultralytics' loss, summed over the batch, and its parts.

    It computes in float64: in float32 its class part alone differs by 5e-6 from the exact value.
    """
    from ultralytics.utils.loss import v8SegmentationLoss

    model.args = types.SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, overlap_mask=True)
    batch = {name: value.float() for name, value in batch_of(targets).items()}
    total, parts = v8SegmentationLoss(model)(doubled(outputs), batch)
    return total.sum(), {name: float(parts[f"{name}_loss"]) for name in PARTS}


@pytest.mark.parametrize(
    ("family", "counts", "seed", "sureness"),
    [
        *[("yolov8n", *case, 1) for case in (([3, 1, 4], 0), ([5, 0, 12], 1), ([0, 0, 1], 2), ([40, 2, 0], 3))],
        *[("yolov8n", *case, 1) for case in (([0, 0, 0], 4), ([7], 5), ([1, 60], 7), ([300], 9))],
        *[("yolov8n", [2, 3, 5, 7, 11], 8, 1), ("yolo11n", [20, 9], 1, 1), ("yolo12n", [5, 3], 1, 1)],
        ("yolov8n", [6], 2, 12),  # logits of some hundreds
    ],
)
def test_every_part_and_gradient_equals_ultralytics(
    models: dict[str, Any], family: str, counts: list[int], seed: int, sureness: int
) -> None:
    model, size_px = models[family], 256  # some objects are longer than the 15 cells of the finest level's reach
    targets = targets_of(counts, size_px, seed)
    outputs = random_outputs(model, len(counts), size_px, seed)
    outputs["mask_coefficient"].data.mul_(sureness)
    loss, values = SegmentationLoss(model, loss_scale=float(len(counts)))(outputs, targets)
    expected, expected_parts = reference_of(model, outputs, targets)
    assert {name: float(values[name]) for name in PARTS} == pytest.approx(expected_parts, rel=1e-6, abs=1e-7)
    assert (expected_parts["box"] > 0) == (sum(counts) > 0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(values["loss"]) == pytest.approx(sum(expected_parts.values()), rel=1e-6)
    leaves = [outputs[name] for name in ("boxes", "scores", "mask_coefficient", "proto")]
    assert_same_gradients(loss, expected, leaves)


def test_gains_scale_their_own_parts(model: Any) -> None:
    targets = targets_of([3, 2], 64)
    outputs = random_outputs(model, 2, 64, 0)
    _, plain = SegmentationLoss(model)(outputs, targets)
    _, scaled = SegmentationLoss(model, LossGains(box=15, cls=1.5, dfl=6))(outputs, targets)
    ratios = {name: float(scaled[name] / plain[name]) for name in PARTS}
    assert ratios == pytest.approx({"box": 2, "seg": 2, "cls": 3, "dfl": 4})


def test_the_loss_under_autocast_is_computed_in_float32(model: Any) -> None:
    targets = targets_of([3, 2], 64)
    outputs = random_outputs(model, 2, 64, 0)
    _, expected = SegmentationLoss(model)(outputs, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss, values = SegmentationLoss(model)(outputs, targets)
    assert loss.dtype == torch.float32
    assert values == expected


FAMILIES_ON_RANKS = (("yolov8n", 2), ("yolov8n", 3), ("yolo26n", 2))
SCENES = {"unequal": [2, 0, 4, 9, 2, 3], "one rank empty": [4, 6, 0, 0, 2, 3], "all empty": [0] * 6}


def gradient_of(wrapped: nn.Module, model: Any, images: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, float]:
    """Return the gradient of all parameters as one vector, and the reported loss."""
    model.zero_grad()
    loss, values = loss_for(model)(wrapped(images), targets)
    loss.backward()
    gradients = [parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat(gradients), float(values["loss"])


def join_world(family: str, world_size: int) -> None:
    """Make a group of the first `world_size` processes; several can follow one another."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefixed = dist.PrefixStore(f"{family} on {world_size}", store)
    dist.init_process_group("gloo", store=prefixed, rank=int(os.environ["RANK"]), world_size=world_size)


def frozen_model(family: str = "yolov8n") -> Any:
    """Return a network, the same on every rank, whose BatchNorm does not look at the batch.

    YOLOv8's boxes begin two to three cells wide instead of fifteen, so that they overlap the objects and the score sums
    are well above 1, below which the normaliser is held at 1.
    """
    torch.manual_seed(0)
    model = build_model(f"{family}-seg.yaml", NAMES).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with torch.no_grad():
        for branch in model.model[-1].cv2 if family == "yolov8n" else ():
            branch[-1].bias.copy_((torch.randn(4, 16) + torch.eye(16)[1] * 6).flatten())
    return model


def compare_with_one_rank() -> dict[str, Any]:
    """Return, on rank 0, the relative difference of gradient and loss from one rank's, by family, ranks and scene."""
    rank = int(os.environ["RANK"])
    images = torch.rand(6, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1))
    reduce = distributed.all_reduce_sum
    answers: dict[str, Any] = {}
    for family, world_size in FAMILIES_ON_RANKS:
        if rank >= world_size:
            continue
        model, of_all = frozen_model(family), slice(BATCH_SIZE_PER_RANK * world_size)
        whole = {scene: targets_of(counts[of_all], SIZE_PX) for scene, counts in SCENES.items()}
        alone = {name: gradient_of(model, model, images[of_all], whole[name]) for name in whole if rank == 0}
        join_world(family, world_size)
        wrapped = DistributedDataParallel(model)
        share = slice(BATCH_SIZE_PER_RANK * rank, BATCH_SIZE_PER_RANK * (rank + 1))
        for scene in (*SCENES, "own normalisers"):
            if scene == "own normalisers":  # each rank divides by its own target count: the usual mistake
                distributed.all_reduce_sum = partial(torch.mul, other=world_size)
            of_scene = scene if scene in SCENES else "unequal"
            targets = share_of(whole[of_scene], share)
            gradient, loss = gradient_of(wrapped, model, images[share], targets)
            distributed.all_reduce_sum = reduce
            with torch.no_grad():
                score_sum = loss_for(model).sums(model(images[share]), targets).normalisers[0]
            mean_loss, score_sum = reduce(torch.stack([torch.tensor(loss) / world_size, score_sum])).tolist()
            if rank == 0:
                expected, expected_loss = alone[of_scene]
                answers[f"{family} on {world_size}: {scene}"] = {
                    "gradient": float((gradient - expected).norm() / expected.norm()),
                    "loss": abs(mean_loss - expected_loss) / expected_loss,
                    "norm": float(expected.norm()),
                    "score sum": score_sum,
                }
        dist.destroy_process_group()
        del wrapped
    return answers


@pytest.fixture(scope="module")
def comparison() -> dict[str, dict[str, Any]]:
    return run_ranks(compare_with_one_rank, 3, join=False, timeout_s=120)[0]


@pytest.mark.parametrize(("family", "world_size"), FAMILIES_ON_RANKS)
@pytest.mark.parametrize("scene", SCENES)
def test_ranks_together_compute_the_gradient_of_one(
    comparison: dict[str, dict[str, Any]], scene: str, family: str, world_size: int
) -> None:
    difference = comparison[f"{family} on {world_size}: {scene}"]
    assert difference["norm"] > 1
    assert (difference["score sum"] > 1) == (scene != "all empty")  # else the normaliser does nothing
    assert difference["gradient"] <= 1e-5
    assert difference["loss"] <= 1e-5
    assert comparison[f"{family} on {world_size}: own normalisers"]["gradient"] > 1e-2


def step_of(counts: list[int], accumulation_steps: int, folder: Path, criterion_type: Any) -> torch.Tensor:
    """Return how one optimizer step of plain descent moves the weights, from 4 images in so many micro-batches."""
    model = frozen_model()
    before = torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])
    images = torch.rand(4, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1))
    targets = targets_of(counts, SIZE_PX)
    shares = [slice(start, start + 4 // accumulation_steps) for start in range(0, 4, 4 // accumulation_steps)]
    options = EngineOptions(accumulate=accumulation_steps, precision="off", quiet=True)
    engine = TrainingEngine(model, torch.device("cpu"), options, run=folder)
    engine.task.prepare = lambda batch, device: batch  # type: ignore[method-assign]
    batches = [(images[share], share_of(targets, share)) for share in shares]
    engine.model.train = lambda mode=True: engine.model  # type: ignore[method-assign] # BatchNorm stays frozen
    engine.begin(torch.optim.SGD(model.parameters(), lr=1.0), criterion_type(model, loss_scale=1.0))
    engine.train_one_epoch(batches)
    after = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return after - before


def mean_of_batches(model: Any, loss_scale: float) -> Any:
    """Return the usual accumulation: each micro-batch by its own normaliser, then the mean."""
    return SegmentationLoss(model, loss_scale=loss_scale).__call__


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [5, 0, 12, 3], [0, 0, 3, 2]], ids=str)
def test_accumulated_batches_step_nearly_as_one_batch(counts: list[int], tmp_path: Path) -> None:
    whole = step_of(counts, 1, tmp_path, SegmentationLoss)
    halves = step_of(counts, 2, tmp_path, SegmentationLoss)
    assert (halves - whole).norm() <= 0.025 * whole.norm()
    if counts[:2] != counts[2:]:
        usual = step_of(counts, 2, tmp_path, mean_of_batches)
        assert (usual - whole).norm() > 0.4 * whole.norm()


def test_every_group_of_accumulated_batches_begins_anew(tmp_path: Path) -> None:
    counts = [6, 6, 1, 1]
    quarters = step_of(counts, 4, tmp_path, SegmentationLoss)
    whole = step_of(counts, 1, tmp_path, SegmentationLoss)
    assert (quarters - whole).norm() <= 0.05 * whole.norm()
    model = frozen_model()
    criterion = SegmentationLoss(model)
    outputs, targets = random_outputs(model, 2, SIZE_PX, 0), targets_of([150, 90], SIZE_PX)
    criterion.begin_group()
    first = criterion(outputs, targets)[0]
    criterion(outputs, targets)
    assert float(criterion.gradient_rescale) == pytest.approx(0.5)
    criterion.begin_group()
    assert criterion(outputs, targets)[0] == first

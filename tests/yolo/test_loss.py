"""The segmentation loss: Ultralytics' numbers on one rank, one rank's gradients on two and three;
boxes and their anchors.
"""

import dataclasses
import os
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.ops import complete_box_iou_loss

from tests.support.ranks import run_ranks
from tests.yolo.conftest import (
    NAMES,
    SIZE_PX,
    assert_same_gradients,
    batch_of,
    doubled,
    random_outputs,
    targets_of,
    with_regions,
)
from yolo_seg_ddp.data.dataset import UNKNOWN
from yolo_seg_ddp.data.labels import ANY_CLASS
from yolo_seg_ddp.engine import EngineOptions, Task, TrainingEngine
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.yolo.assigner import PredictedMasks, inside_boxes
from yolo_seg_ddp.yolo.boxes import AnchorGrid, anchor_grid, complete_iou
from yolo_seg_ddp.yolo.inputs import Targets
from yolo_seg_ddp.yolo.loss import PARTS, SegmentationLoss, _ClassError
from yolo_seg_ddp.yolo.loss26 import loss_for
from yolo_seg_ddp.yolo.model import build_model
from yolo_seg_ddp.yolo.training_step import SegmentationStep

BATCH_SIZE_PER_RANK = 2


def share_of(targets: Targets, images: slice) -> Targets:
    """Return the targets of a range of images, as those images' own batch."""
    ignored, of = vars(targets)["ignored"], vars(targets)["ignored_of"]
    here = slice(0) if of is None else (of[0] >= images.start) & (of[0] < images.stop)
    chosen = (targets.batch_index >= images.start) & (targets.batch_index < images.stop)
    return Targets(
        targets.batch_index[chosen] - images.start,
        targets.class_ids[chosen],
        targets.boxes[chosen],
        targets.masks[images],
        targets.size_px,
        ignored=None if of is None else ignored[here],
        ignored_of=None if of is None else of[:, here] - torch.tensor([[images.start], [0]]),
        rough=None if targets.rough is None else targets.rough[chosen],
        boxed=None if targets.boxed is None else targets.boxed[chosen],
        colours=None if targets.colours is None else targets.colours[images],
    )


def reference_of(
    model: Any, outputs: dict[str, Any], targets: Targets
) -> tuple[torch.Tensor, dict[str, float]]:
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
        *[
            ("yolov8n", *case, 1)
            for case in (([3, 1, 4], 0), ([5, 0, 12], 1), ([0, 0, 1], 2), ([40, 2, 0], 3))
        ],
        *[("yolov8n", *case, 1) for case in (([0, 0, 0], 4), ([7], 5), ([1, 60], 7), ([300], 9))],
        *[
            ("yolov8n", [2, 3, 5, 7, 11], 8, 1),
            ("yolo11n", [20, 9], 1, 1),
            ("yolo12n", [5, 3], 1, 1),
        ],
        ("yolov8n", [6], 2, 12),  # logits of some hundreds
    ],
)
def test_every_part_and_gradient_equals_ultralytics(
    models: dict[str, Any], family: str, counts: list[int], seed: int, sureness: int
) -> None:
    # some objects are longer than the 15 cells of the finest level's reach
    model, size_px = models[family], 256
    targets = targets_of(counts, size_px, seed)
    outputs = random_outputs(model, len(counts), size_px, seed)
    outputs["mask_coefficient"].data.mul_(sureness)
    loss, values = SegmentationLoss(model, loss_scale=float(len(counts)))(outputs, targets)
    expected, expected_parts = reference_of(model, outputs, targets)
    assert {name: float(values[name]) for name in PARTS} == pytest.approx(
        expected_parts, rel=1e-6, abs=1e-7
    )
    assert (expected_parts["box"] > 0) == (sum(counts) > 0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(values["loss"]) == pytest.approx(sum(expected_parts.values()), rel=1e-6)
    leaves = [outputs[name] for name in ("boxes", "scores", "mask_coefficient", "proto")]
    assert_same_gradients(loss, expected, leaves)


def test_the_loss_under_autocast_is_computed_in_float32(model: Any) -> None:
    targets = targets_of([3, 2], 64)
    outputs = random_outputs(model, 2, 64, 0)
    _, expected = SegmentationLoss(model)(outputs, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss, values = SegmentationLoss(model)(outputs, targets)
    assert loss.dtype == torch.float32
    assert values == expected


FAMILIES_ON_RANKS = (("yolov8n", 2), ("yolov8n", 3), ("yolo26n", 2))
SCENES = {
    "unequal": [2, 0, 4, 9, 2, 3],
    "one rank empty": [4, 6, 0, 0, 2, 3],
    "all empty": [0] * 6,
    "regions": [2, 0, 4, 9, 2, 3],
}


def gradient_of(
    wrapped: nn.Module, model: Any, images: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, float]:
    """Return the gradient of all parameters as one vector, and the reported loss."""
    model.zero_grad()
    weights = torch.linspace(0.5, 2, len(NAMES))
    loss, values = loss_for(model, class_weights=weights)(wrapped(images), targets)
    loss.backward()
    gradients = [
        parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.requires_grad
    ]
    return torch.cat(gradients), float(values["loss"])


def join_world(family: str, world_size: int) -> None:
    """Make a group of the first `world_size` processes; several can follow one another."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    prefixed = dist.PrefixStore(f"{family} on {world_size}", store)
    dist.init_process_group(
        "gloo", store=prefixed, rank=int(os.environ["RANK"]), world_size=world_size
    )


def frozen_model(family: str = "yolov8n") -> Any:
    """Return a network, the same on every rank, whose BatchNorm does not look at the batch.

    YOLOv8's boxes begin two to three cells wide instead of fifteen, so that they overlap the
    objects and the score sums are well above 1, below which the normaliser is held at 1.
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
    """Return, on rank 0, the relative difference of gradient and loss from one rank's, by family,
    ranks and scene.
    """
    rank = int(os.environ["RANK"])
    images = torch.rand(6, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1))
    reduce = distributed.all_reduce_sum
    answers: dict[str, Any] = {}
    for family, world_size in FAMILIES_ON_RANKS:
        if rank >= world_size:
            continue
        model, of_all = frozen_model(family), slice(BATCH_SIZE_PER_RANK * world_size)
        whole = {scene: targets_of(counts[of_all], SIZE_PX) for scene, counts in SCENES.items()}
        # image, class
        whole["regions"] = with_regions(whole["regions"], (0, ANY_CLASS), (1, 2), (3, 0), (3, 1))
        third = torch.arange(len(whole["regions"].class_ids)) % 3
        # Some neighbours are of like colour.
        colours = torch.randn(of_all.stop, 3, *whole["regions"].masks.shape[1:])
        whole["regions"] = dataclasses.replace(
            whole["regions"], rough=third == 1, boxed=third == 2, colours=colours
        )
        alone = {
            name: gradient_of(model, model, images[of_all], whole[name])
            for name in whole
            if rank == 0
        }
        join_world(family, world_size)
        wrapped = DistributedDataParallel(model)
        share = slice(BATCH_SIZE_PER_RANK * rank, BATCH_SIZE_PER_RANK * (rank + 1))
        for scene in (*SCENES, "own normalisers"):
            # each rank divides by its own target count: the usual mistake
            if scene == "own normalisers":
                distributed.all_reduce_sum = partial(torch.mul, other=world_size)
            of_scene = scene if scene in SCENES else "unequal"
            targets = share_of(whole[of_scene], share)
            gradient, loss = gradient_of(wrapped, model, images[share], targets)
            distributed.all_reduce_sum = reduce
            with torch.no_grad():
                score_sum = loss_for(model).sums(model(images[share]), targets).normalisers[0]
            mean_loss, score_sum = reduce(
                torch.stack([torch.tensor(loss) / world_size, score_sum])
            ).tolist()
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
    return run_ranks(compare_with_one_rank, 3, join=False)[0]


@pytest.mark.parametrize(("family", "world_size"), FAMILIES_ON_RANKS)
@pytest.mark.parametrize("scene", SCENES)
def test_ranks_together_compute_the_gradient_of_one(
    comparison: dict[str, dict[str, Any]], scene: str, family: str, world_size: int
) -> None:
    difference = comparison[f"{family} on {world_size}: {scene}"]
    assert difference["norm"] > 1
    # else the normaliser does nothing
    assert (difference["score sum"] > 1) == (scene != "all empty")
    assert difference["gradient"] <= 1e-5
    assert difference["loss"] <= 1e-5
    assert comparison[f"{family} on {world_size}: own normalisers"]["gradient"] > 1e-2


@pytest.mark.parametrize("family", ["yolov8n", "yolo26n"])
def test_in_a_region_to_ignore_background_teaches_nothing_and_objects_are_learned(
    family: str,
) -> None:
    model, plain = frozen_model(family), targets_of([6, 6, 6], SIZE_PX)
    targets = with_regions(plain, (0, ANY_CLASS), (1, 2))
    # YOLO26 chooses anchors by their masks, too
    targets = dataclasses.replace(targets, masks=plain.masks)
    outputs = model(torch.rand(3, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1)))
    is_yolo26 = "one2many" in outputs
    leaves = (
        [outputs[name]["scores"] for name in ("one2many", "one2one")]
        if is_yolo26
        else [outputs["scores"]]
    )
    leaves += [outputs["one2many"]["proto"][1]] if is_yolo26 else []  # the class of each pixel
    taught, without = (
        torch.autograd.grad(loss_for(model)(outputs, given)[0], leaves, retain_graph=True)
        for given in (targets, plain)
    )
    is_left = anchor_grid(STRIDES, SIZE_PX, torch.device("cpu")).sides[2] < SIZE_PX / 2  # (A,)
    for now, before in list(zip(taught, without, strict=True))[: 1 + is_yolo26]:
        in_region, is_same = torch.zeros_like(now, dtype=torch.bool), now == before
        in_region[0, :, is_left] = in_region[1, 2, is_left] = True
        assert is_same[~in_region | (before < 0)].all(), "elsewhere, and where an object is learned"
        assert (now[~is_same] == 0).all()
        assert (~is_same).sum() > 100
    if is_yolo26:
        pixels = taught[-1][..., : taught[-1].shape[-1] // 2]
        step = SIZE_PX // 4 // pixels.shape[-2]
        is_free = (plain.masks == 0)[:, ::step, ::step][..., : pixels.shape[-1]]
        assert not pixels[0, :, is_free[0]].any()
        assert pixels[0, :, ~is_free[0]].any()
        assert not pixels[1, 2, is_free[1]].any()
        assert pixels[1, 0, is_free[1]].all()


@pytest.mark.parametrize("family", ["yolov8n", "yolo26n"])
def test_of_a_box_class_and_box_are_learned_as_ever(family: str) -> None:
    model, plain = frozen_model(family), targets_of([6, 6], SIZE_PX)
    outputs = model(torch.rand(2, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1)))
    sets = [outputs["one2many"], outputs["one2one"]] if "one2many" in outputs else [outputs]
    leaves = [each[name] for name in ("scores", "boxes", "mask_coefficient") for each in sets]
    pixels = [outputs["one2many"]["proto"][1]] if len(sets) == 2 else []  # the class of each pixel
    masks = plain.masks.clone()
    masks[0, -4:] = UNKNOWN
    targets = dataclasses.replace(plain, masks=masks, boxed=plain.batch_index == 0)
    taught, without = (
        torch.autograd.grad(loss_for(model)(outputs, given)[0], leaves + pixels, retain_graph=True)
        for given in (targets, plain)
    )
    for number, (now, before) in enumerate(zip(taught, without, strict=True)):
        # YOLO26 chooses other anchors, for it compares no masks of boxes.
        if number < 2 * len(sets) and family == "yolov8n":
            assert torch.equal(now, before), "class and box"
        elif number < len(leaves):
            assert now[0].any(), "the box teaches"
        else:
            step = masks.shape[-1] // now.shape[-1]
            seen = masks[0, ::step, ::step].long()
            of_object = plain.class_ids[:6][(seen - 1).clamp(min=0)]
            at = torch.zeros_like(now[0], dtype=torch.bool)
            at.scatter_(0, of_object[None], seen[None] > 0)
            at |= seen == UNKNOWN
            assert not now[0][at].any()
            assert now[0][~at].all()


@pytest.mark.parametrize("family", ["yolov8n", "yolo26n"])
def test_of_a_rough_outline_only_the_class_is_learned(family: str) -> None:
    model, plain = frozen_model(family), targets_of([6, 6], SIZE_PX)
    outputs = model(torch.rand(2, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1)))
    sets = [outputs["one2many"], outputs["one2one"]] if "one2many" in outputs else [outputs]
    leaves = [each[name] for name in ("scores", "boxes", "mask_coefficient") for each in sets]
    pixels = [outputs["one2many"]["proto"][1]] if len(sets) == 2 else []  # the class of each pixel
    targets = dataclasses.replace(plain, rough=plain.batch_index == 0)
    taught, without = (
        torch.autograd.grad(loss_for(model)(outputs, given)[0], leaves + pixels, retain_graph=True)
        for given in (targets, plain)
    )
    assert all(gradient[0].any() for gradient in without)
    for number, (now, before) in enumerate(zip(taught, without, strict=True)):
        if number < len(sets):
            assert torch.equal(now, before), "the class"
        elif number < len(leaves):
            assert not now[0].any(), "the outline"
            ratio = now[1][before[1] != 0] / before[1][before[1] != 0]
            torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)
            assert ratio.mean() > 1.1, "a mean over the others"
        else:
            step = targets.masks.shape[-1] // now.shape[-1]
            of_object = plain.class_ids[:6][
                (plain.masks[0, ::step, ::step].long() - 1).clamp(min=0)
            ]
            at = torch.zeros_like(now[0], dtype=torch.bool).scatter_(
                0, of_object[None], plain.masks[0, ::step, ::step][None] > 0
            )
            assert not now[0][at].any()
            assert now[0][~at].all()
            torch.testing.assert_close(now[1], before[1])


@pytest.mark.parametrize(("rest", "expected"), [(0, 0.5), (-1, 1.0)])
def test_masks_are_compared_where_no_region_is_to_be_ignored(rest: int, expected: float) -> None:
    masks, everywhere = (
        torch.full((1, 8, 8), rest, dtype=torch.int32),
        torch.tensor([0.0, 0, 32, 32]).view(4, 1, 1),
    )
    masks[0, :4] = 1
    predicted = PredictedMasks(torch.ones(1, 32, 8, 8), torch.ones(1, 32, 1), masks, 32)
    chosen = torch.zeros(1, 1, 1, dtype=torch.int64)
    assert predicted.overlap(chosen, chosen == 0, everywhere).item() == expected


def step_of(
    counts: list[int], accumulation_steps: int, folder: Path, criterion_type: Any
) -> torch.Tensor:
    """Return how one optimizer step of plain descent moves the weights, from 4 images in so many
    micro-batches.
    """
    model = frozen_model()
    before = torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])
    images = torch.rand(4, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(1))
    targets = targets_of(counts, SIZE_PX)
    shares = [
        slice(start, start + 4 // accumulation_steps)
        for start in range(0, 4, 4 // accumulation_steps)
    ]
    options = EngineOptions(accumulate=accumulation_steps, precision="off", quiet=True)
    task = SegmentationStep() if criterion_type is SegmentationLoss else Task()
    task.prepare = lambda batch, device: batch  # type: ignore[method-assign]
    engine = TrainingEngine(model, torch.device("cpu"), options, task=task, run=folder)
    batches = [(images[share], share_of(targets, share)) for share in shares]
    # BatchNorm stays frozen
    engine.model.train = lambda mode=True: engine.model  # type: ignore[method-assign]
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


def random_sides(num_pairs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sides (4, N) of two boxes each: overlapping, one within the other, and apart."""
    generator = torch.Generator().manual_seed(seed)
    first, second = 0.2 + 6 * torch.rand(2, 4, num_pairs, generator=generator, dtype=torch.float64)
    second[:, ::3] = first[:, ::3] * 0.7
    second[0, 1::3] = -8 - second[2, 1::3]  # to the right of the first
    second[2, 1::3] += 16
    return first, second


def xyxy(sides: torch.Tensor) -> torch.Tensor:
    """Return the boxes (N, 4) of sides (4, N) from the point (0, 0)."""
    return (sides * torch.tensor([[-1], [-1], [1], [1]])).T


@pytest.mark.parametrize("seed", range(3))
def test_complete_iou_and_its_slope_equal_those_of_the_formula(seed: int) -> None:
    first, second = random_sides(60, seed)
    first.requires_grad_()
    expected = 1 - complete_box_iou_loss(xyxy(first), xyxy(second))  # (N,)
    (wanted,) = torch.autograd.grad(expected.sum(), first)
    found, slope = complete_iou(first.detach(), second, with_slope=True)
    assert (expected < 0).any()
    assert (expected > 0.3).any()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    assert slope is not None
    torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-6)
    assert complete_iou(first.detach(), second)[1] is None


@pytest.mark.parametrize(
    "sides",
    [(1, 2, 3, 4), (1, 2, -1, 4), (0, 0, 0, 0), (-9, -9, 9, 9)],
    ids=["equal", "no width", "no area", "apart"],
)
def test_degenerate_boxes_have_finite_numbers(sides: tuple[int, ...]) -> None:
    first, second = torch.tensor(sides, dtype=torch.float32), torch.tensor([1.0, 2, 3, 4])
    for pair in ((first, second), (second, first), (first, first)):
        found, slope = complete_iou(pair[0][:, None], pair[1][:, None], with_slope=True)
        assert slope is not None
        assert bool(torch.isfinite(found).all() and torch.isfinite(slope).all())
        assert float(found) <= 1


def test_the_weighted_class_part_passes_gradcheck_and_equals_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).mul_(4).requires_grad_()
    scores = torch.rand(2, 3, 7, generator=generator, dtype=torch.float64)
    weights = torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64)

    def error(logits: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _ClassError.apply(logits, logits.detach().sigmoid(), scores, weights)
        return found

    expected = F.binary_cross_entropy_with_logits(logits, scores, weight=weights, reduction="sum")
    torch.testing.assert_close(error(logits), expected, rtol=1e-7, atol=0)
    assert torch.autograd.gradcheck(error, logits)


STRIDES = [8.0, 16.0, 32.0]
REACH_CELLS = 15  # YOLOv8 predicts distances of at most 15 cells


def anchors_in(
    box: list[float], size_px: int, reach_cells: int | None
) -> tuple[torch.Tensor, AnchorGrid]:
    grid = anchor_grid(STRIDES, size_px, torch.device("cpu"))
    return inside_boxes(torch.tensor([[box]]), STRIDES, grid, reach_cells)[0, 0], grid


@pytest.mark.parametrize(
    ("size_px", "box"),
    [
        (320, [0, 100, 320, 107]),  # a level wire across the input
        (640, [0, 100, 640, 107]),
        (640, [300.3, 0, 305.1, 640]),
        (640, [0, 0, 640, 640]),
    ],
)
def test_every_anchor_of_a_long_object_can_predict_its_whole_box(
    size_px: int, box: list[float]
) -> None:
    inside, grid = anchors_in(box, size_px, REACH_CELLS)
    true_sides = torch.tensor([-box[0], -box[1], box[2], box[3]])[:, None] - grid.sides
    is_reached = true_sides.amax(0) <= REACH_CELLS * grid.strides
    assert inside.any()
    assert (is_reached | (grid.strides == STRIDES[-1]))[inside].all()
    without, _ = anchors_in(box, size_px, None)
    assert not is_reached[without].all()


@pytest.mark.parametrize("box", [[40, 40, 52, 60], [100, 30, 106, 100], [50, 50, 160, 169]])
def test_the_anchors_of_a_short_object_stay_as_in_yolov8(box: list[float]) -> None:
    assert torch.equal(anchors_in(box, 320, REACH_CELLS)[0], anchors_in(box, 320, None)[0])


def test_an_object_longer_than_any_anchor_reaches_keeps_those_of_the_coarsest_level() -> None:
    inside, grid = anchors_in([0, 500, 1280, 506], 1280, REACH_CELLS)
    assert inside.any()
    assert set(grid.strides[inside].tolist()) == {STRIDES[-1]}

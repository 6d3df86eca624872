import itertools
from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.predict.tile_scenes import iou_of, stroke, wires_and_pole
from tests.yolo.colour_network import ColourNetwork, install, paint
from yolo_seg_ddp.predict.detections import Detections, Letterbox, PhotoPrediction
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.merge_tiles import MergedInstance, TileDetection
from yolo_seg_ddp.predict.options import check_tiles
from yolo_seg_ddp.predict.postprocess import average_with_whole, steps_for
from yolo_seg_ddp.predict.regions import Region, Runs
from yolo_seg_ddp.predict.tiles import Predictor, Tiling, choose_tiling, cut_tiles, overlap_px
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.yolo.model import build_model


@pytest.mark.parametrize("size", [(2800, 1900), (1281, 960), (641, 640), (4000, 500), (700, 3000)])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_tiles_cover_the_photograph_overlap_and_end_at_its_edges(
    size: tuple[int, int], share: float
) -> None:
    width, height = size
    tiles = cut_tiles(width, height, 640, share)
    seen = np.zeros((height, width), np.uint16)
    for left, top, right, bottom in tiles:
        assert (right - left, bottom - top) == (min(640, width), min(640, height))
        seen[top:bottom, left:right] += 1
    assert seen.min() >= 1
    assert len(set(tiles)) == len(tiles)
    for low, high, length in ((0, 2, width), (1, 3, height)):
        sides = sorted({(tile[low], tile[high]) for tile in tiles})
        assert (sides[0][0], sides[-1][1]) == (0, length)
        overlaps = [before[1] - after[0] for before, after in itertools.pairwise(sides)]
        assert all(overlap >= max(128, share * 640) for overlap in overlaps)


def test_a_photograph_no_larger_than_a_tile_has_none_and_small_tiles_overlap_by_half() -> None:
    assert cut_tiles(640, 480, 640) == []
    assert len(cut_tiles(641, 480, 640)) == 2
    assert (overlap_px(96, 0.2), overlap_px(96, 0.9)) == (48, 86)
    assert len(cut_tiles(300, 96, 96)) == 6


class OneDisc(nn.Module):
    """Finds what is red, with one confidence and one probability of its mask's pixels."""

    stride = (8, 16, 32)
    names: ClassVar = {0: "pole"}
    args: ClassVar[dict[str, Any]] = {}

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return decoded outputs as an export does, with one anchor."""
        red = images[:, 0] - images[:, 1]
        prototypes = torch.where(
            functional.avg_pool2d(red[:, None], 4) > 0.5, np.log(3), -5.0
        ).expand(-1, 32, -1, -1)
        is_seen = (red > 0.5).any(2).any(1)
        pixels = [
            torch.nonzero((image > 0.5) | ~seen).flip(1)
            for image, seen in zip(red, is_seen, strict=True)
        ]
        corners = torch.stack([torch.cat([at.amin(0), at.amax(0) + 1]) for at in pixels]).float()
        centres, sizes = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
        return {
            "xywh": torch.cat([centres, sizes], 1)[..., None],
            "probabilities": self.score * is_seen.float()[:, None, None],
            "mask_coefficient": torch.eye(32)[:1, :, None].expand(len(images), -1, -1),
            "proto": prototypes,
        }


@pytest.mark.parametrize("radius", [30, 60])
def test_joined_tiles_and_the_whole_photograph_multiply_a_score_by_its_mask_once(
    radius: int,
) -> None:
    photo = np.full((300, 400, 3), 114, np.uint8)
    cv2.circle(photo, (190, 140), radius, (255, 0, 0), -1)

    def predict(score: float, tiling: Tiling | None, **limits: Any) -> PhotoPrediction:
        how = (
            OneDisc(score),
            128,
            torch.device("cpu"),
            4,
            tiling,
            {"confidence": 0.1, "iou": 0.7, **limits},
        )
        ((_, _, prediction),) = Predictor(*how).predict([(0, photo)])
        return prediction

    for tiling in (None, Tiling(128, larger=False)):
        found, plain = predict(0.8, tiling), predict(0.8 * 0.75, tiling, mask_score=False)
        assert len(found.boxes) == 1
        assert found.detections.scores.tolist() == pytest.approx([0.6], abs=1e-6)
        assert found.detections.scores.tolist() == pytest.approx(
            plain.detections.scores.tolist(), abs=1e-6
        )
        assert found.boxes.tolist() == plain.boxes.tolist()
        assert found.masks[0].mask.tolist() == plain.masks[0].mask.tolist()


# --- prediction -----------------------------------------------------------------------------------

SIZE = (1280, 896)
SCENE = wires_and_pole(SIZE)  # across 24 tiles


def predict_all(
    photos: list[np.ndarray],
    batch_size: int,
    tiling: Tiling | None,
    most: int = 300,
    thin: tuple[int, ...] = (),
    facts: dict[str, Any] | None = None,
) -> tuple[ColourNetwork, list[tuple[int, np.ndarray, PhotoPrediction]]]:
    model = ColourNetwork()
    model.args |= facts or {}
    limits = {"confidence": 0.25, "iou": 0.7}
    predictor = Predictor(
        model,
        320,
        torch.device("cpu"),
        batch_size,
        tiling,
        limits,
        most,
        thin=thin,
        steps=steps_for(model, thin),
    )
    return model, list(predictor.predict(enumerate(photos)))


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_wires_across_24_tiles_are_found_whole_whatever_the_batch_size(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    photos = [
        paint(SCENE, SIZE),
        paint([], SIZE)[:400, :400],
        paint(SCENE[3:], SIZE)[:300, 800:1100],
    ]
    model, found = predict_all(photos, batch_size, Tiling(320))
    # across tiles and photographs, the last one filled up
    assert set(model.batch_sizes) == {batch_size}
    assert sum(model.batch_sizes) < 25 + 5 + 1 + batch_size
    assert [key for key, *_ in found] == [0, 1, 2]
    assert all(photo is photos[key] for key, photo, _ in found)
    assert [len(prediction.masks) for *_, prediction in found] == [4, 0, 1]
    prediction = found[0][2]
    for class_id, mask in SCENE:
        ious = [iou_of(region, mask) for region in prediction.masks]
        position = int(np.argmax(ious))
        assert ious[position] >= 0.99
        assert prediction.class_ids[position] == class_id
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        expected = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        np.testing.assert_array_equal(prediction.boxes[position], expected)
    assert (np.diff(prediction.detections.scores.numpy()) <= 0).all()
    placement = Letterbox(320, (320, 224), (0, 48), SIZE)
    np.testing.assert_allclose(
        placement.boxes_to_photo(prediction.detections.boxes), prediction.boxes, atol=1e-3
    )
    # The batch size changes no bit.
    _, alone = predict_all(photos[:1], 64, Tiling(320))
    np.testing.assert_array_equal(alone[0][2].detections.scores, prediction.detections.scores)
    for one, other in zip(alone[0][2].masks, prediction.masks, strict=True):
        np.testing.assert_array_equal(one.mask, other.mask)


@pytest.mark.parametrize(
    ("labels", "tile_px", "factor"),
    [
        (1.2, 320, 1 / (1 + (np.log(1.2) / 0.5) ** 2)),
        (0.6, 640, 1 / (1 + (np.log(1.2) / 0.5) ** 2)),
        (0.5, 320, 1.0),
    ],
)
def test_what_is_shorter_than_the_labels_of_its_class_is_less_sure(
    labels: float, tile_px: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    (_, pole), windows = SCENE[3], {"per_photo": 8, "low_scale": 0.5, "high_scale": 1.0}
    length_px = float(np.ptp(np.argwhere(pole), axis=0).max() + 1)
    photos = [paint(SCENE, SIZE)]

    def scores(*lengths: float, thin: tuple[int, ...] = ()) -> dict[int, list[float]]:
        facts = {"windows": windows, "label_lengths": [*lengths]}
        _, ((*_, found),) = predict_all(photos, 16, Tiling(tile_px), thin=thin, facts=facts)
        assert (np.diff(found.detections.scores.numpy()) <= 0).all()
        return {
            number: found.detections.scores[found.class_ids == number].tolist() for number in (0, 1)
        }

    before, after = scores(), scores(1, labels * length_px, 0.5)
    _, ((*_, whole),) = predict_all(photos, 16, None)
    (whole_score,) = whole.detections.scores[
        whole.detections.class_ids == 1
    ].tolist()  # this pass shows the pole as long as it is
    assert after[1] == pytest.approx(
        [before[1][0] - (1 - factor) * (before[1][0] - whole_score / 2)], rel=0.01
    )
    assert after[0] == before[0]
    # lines are judged by their own length
    assert len(scores(1, 20 * length_px, 0.5, thin=(1,))[1]) == 1
    # What is left of it is under the least confidence, and so is half of the whole photograph's.
    assert scores(1, 20 * length_px, 0.5)[1] == ([whole_score / 2] if whole_score >= 0.5 else [])


def test_the_whole_photograph_changes_boxes_and_confidences_of_what_it_shows() -> None:
    """Rows: in tiles and in the whole photograph; in tiles alone; small; of a class of lines; in
    the whole photograph alone.

    Of the whole photograph's last two, one is of another class than what tiles show there, the
    other less sure than the first.
    """
    boxes = np.array(
        [[0, 40, 100, 200], [300, 0, 360, 200], [500, 0, 592, 92], [0, 300, 400, 310]], np.float32
    )
    whole_boxes = [
        [10, 0, 110, 240],
        [600, 400, 700, 500],
        *boxes[2:].tolist(),
        [300, 0, 360, 200],
        [0, 40, 100, 200],
    ]
    found = Detections(
        torch.zeros(4, 4),
        torch.tensor([0.9, 0.8, 0.7, 0.6]),
        torch.tensor([0, 0, 0, 1]),
        torch.zeros(4, 0),
    )
    mask = np.ones((10, 10), bool)
    line = Line(np.array([[0.0, 305.0], [400.0, 305.0]]), np.full(2, 10.0), np.zeros((0, 2, 2)))
    tiles = PhotoPrediction(
        found, [Region(number, 0, mask) for number in range(4)], boxes, [None, None, None, line]
    )
    runs = Runs.of(mask, 50, 50)
    whole = [
        MergedInstance((TileDetection(-1, class_id, score, np.array(box, np.float32), runs),))
        for class_id, score, box in zip(
            (0, 0, 0, 1, 2, 0), (*[0.5] * 5, 0.3), whole_boxes, strict=True
        )
    ]
    placement = Letterbox(320, (320, 224), (0, 48), SIZE)  # 96 pixels are 24 of the input, 32 are 8
    result = average_with_whole(tiles, whole, placement, lines=(1,), least=0.3, most=300)
    np.testing.assert_allclose(
        result.detections.scores, [0.7, 0.7, 0.6, 0.4]
    )  # half of 0.5 is under the least confidence
    np.testing.assert_array_equal(result.boxes, [[0, 20, 100, 220], *boxes[[2, 3, 1]]])
    np.testing.assert_allclose(
        placement.boxes_to_photo(result.detections.boxes), result.boxes, atol=1e-3
    )
    assert [region.left for region in result.masks] == [0, 2, 3, 1]
    assert [one is line for one in result.lines] == [False, False, True, False]
    alone = average_with_whole(tiles, whole, placement, lines=(1,), least=0.2, most=5)
    assert [region.left for region in alone.masks] == [0, 2, 3, 1, 50]
    assert alone.detections.scores[-1] == 0.25
    best = average_with_whole(tiles, whole, placement, lines=(1,), least=0.2, most=3)
    assert [region.left for region in best.masks] == [0, 2, 3], "not the first three rows"


def test_larger_tiles_change_nothing_that_the_smallest_show_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    size = (2600, 360)
    wires = [(0, stroke(size, [(50, 300 - dy), (2550, 80 - dy)], 10)) for dy in (0, 60)]
    assert len(Tiling(320).tiles_of(paint(wires, size))) == 2
    found = []
    for batch_size in (1, 64):
        _, ((*_, prediction),) = predict_all([paint(wires, size)], batch_size, Tiling(320))
        assert len(prediction.masks) == 2
        assert all(
            max(iou_of(region, mask) for region in prediction.masks) >= 0.99 for _, mask in wires
        )
        found.append(prediction)
    np.testing.assert_array_equal(found[0].detections.scores, found[1].detections.scores)
    np.testing.assert_array_equal(found[0].boxes, found[1].boxes)


def test_larger_tiles_follow_while_the_photograph_is_twice_as_long() -> None:
    def sizes(width: int, height: int) -> list[int]:
        levels = Tiling(320).tiles_of(np.zeros((height, width, 3), np.uint8))
        return [max(right - left for left, _, right, _ in level) for level in levels]

    assert sizes(320, 200) == []
    assert sizes(2559, 1700) == [320]
    assert sizes(1700, 2560) == [320, 1280]
    assert sizes(5472, 3648) == [320, 1280]
    assert sizes(10240, 600) == [320, 1280, 5120]


def test_of_many_objects_the_most_confident_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    spots = [
        (0, stroke(SIZE, [(90 + 200 * n, 100), (90 + 200 * n, 101)], 10 + 2 * n)) for n in range(6)
    ]
    _, ((*_, found),) = predict_all([paint(spots, SIZE)], 8, Tiling(320))
    _, ((*_, best),) = predict_all([paint(spots, SIZE)], 8, Tiling(320), most=4)
    assert len(found.masks) == 6
    np.testing.assert_array_equal(best.boxes, found.boxes[:4])


def test_photographs_no_larger_than_a_tile_are_predicted_as_without_tiles_and_as_alone() -> None:
    torch.manual_seed(0)
    model = build_model("yolov8n-seg.yaml", ("one", "two")).eval()
    rng = np.random.default_rng(0)
    photos = [
        rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in ((60, 90), (128, 64), (96, 96))
    ]
    limits = {"confidence": 0.0, "iou": 0.7, "classes": None}

    def predict(batch_size: int, tiling: Tiling | None) -> list[PhotoPrediction]:
        predictor = Predictor(model, 96, torch.device("cpu"), batch_size, tiling, limits, 5)
        return [prediction for *_, prediction in predictor.predict(enumerate(photos))]

    for photo, plain, tiled, alone in zip(
        photos, predict(2, None), predict(2, Tiling(128)), predict(1, None), strict=True
    ):
        assert len(plain.detections) == len(plain.masks) == 5
        assert (plain.boxes <= [photo.shape[1], photo.shape[0]] * 2).all()
        for name in ("boxes", "scores", "class_ids", "coefficients"):
            np.testing.assert_array_equal(
                getattr(tiled.detections, name), getattr(plain.detections, name)
            )
        np.testing.assert_array_equal(tiled.boxes, plain.boxes)
        for one, other in zip(tiled.masks, plain.masks, strict=True):
            np.testing.assert_array_equal(one.mask, other.mask)
        # another batch size rounds differently
        np.testing.assert_allclose(alone.boxes, plain.boxes, atol=1e-2)
        np.testing.assert_array_equal(alone.class_ids, plain.class_ids)


def test_auto_follows_the_models_training() -> None:
    model = ColourNetwork()
    assert choose_tiling("auto", 0.2, model, 320) is None
    assert choose_tiling("640", 0.3, model, 320) == Tiling(640, 0.3)
    model.args["windows"] = {"per_photo": 4, "low_scale": 0.25, "high_scale": 0.5}
    assert choose_tiling("auto", 0.2, model, 320) == Tiling(640, 0.2)
    assert choose_tiling("off", 0.2, model, 320) is None
    # it never saw larger tiles
    model.args["windows"] = {"per_photo": 4, "low_scale": 0.5, "high_scale": 0.5}
    assert choose_tiling("auto", 0.2, model, 320) == Tiling(640, 0.2, larger=False)
    assert choose_tiling("320", 0.2, model, 320) == Tiling(320, 0.2, larger=False)
    assert len(Tiling(320, larger=False).tiles_of(np.zeros((100, 5472, 3), np.uint8))) == 1
    for wrong in ("on", "12", "-640", "6.5"):
        with pytest.raises(UsageError, match=f"--tiles {wrong}: must be auto, off or"):
            check_tiles(wrong)

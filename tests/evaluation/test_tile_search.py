"""Evaluation on tiles: wires that a shrunk photograph loses, judged in the photograph's pixels, on
one rank or several.
"""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.prepare.parsing.tool_folder import whole
from tests.support.oracle import GREY_STEP, NAMES, SIZE_PX, evaluate_oracle
from tests.support.ranks import run_ranks
from tests.yolo.colour_network import COLOURS, ColourNetwork, install
from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset
from yolo_seg_ddp.data.label_shapes import sizes_on_disk
from yolo_seg_ddp.evaluation.coco import CocoCollector, evaluate_with_faster_coco_eval
from yolo_seg_ddp.evaluation.evaluate import AP_LIMITS, Evaluation, PhotoPixels
from yolo_seg_ddp.evaluation.native_masks import fill_outline, place
from yolo_seg_ddp.evaluation.tile_search import TileSearch
from yolo_seg_ddp.predict.tiles import Predictor, Tiling

CPU = torch.device("cpu")
SIZE = (800, 600)


def wire_photos(folder: Path) -> list[Photo]:
    """Return three photographs with two long wires and a short one, and one as small as a tile,
    with two.
    """
    photos = []
    for index in range(4):
        width, height = size = (300, 250) if index == 3 else SIZE
        lines = [
            ((0, 20 + 9 * index), (width, 60)),
            ((0, 130), (width, 100 + 5 * index)),
            ((90, 220), (240, 235)),
        ]
        lines = lines[: 2 if index == 3 else 3]
        image = np.full((height, width, 3), 3 + GREY_STEP * index, np.uint8)
        polygons = []
        for number, (start, end) in enumerate(lines):
            across = (
                np.array([end[1] - start[1], start[0] - end[0]])
                / np.hypot(*np.subtract(end, start))
                * 3.5
            )
            outline = (
                np.array([start, end, end, start]) + np.array([[1], [1], [-1], [-1]]) * across
            ).clip(0, size)
            image[whole(fill_outline(outline, size), width, height)] = COLOURS[min(number, 1)]
            polygons.append((outline / size).astype(np.float32))
        file = folder / f"{index}.png"
        if not file.exists():
            cv2.imwrite(str(file), image[:, :, ::-1])
        photos.append(Photo(file, np.array([0, 1, 1][: len(lines)]), polygons))
    return photos


def evaluate_wires(
    folder: Path, batch_size: int = 6, tiles: bool = True, collector: CocoCollector | None = None
) -> Evaluation:
    photos = wire_photos(folder)
    predictor = Predictor(ColourNetwork(), 320, CPU, batch_size, Tiling(320), AP_LIMITS)
    find = TileSearch(predictor, photos) if tiles else None
    pixels = PhotoPixels(
        sizes_on_disk(photos), True, [collector.see_masks] if collector else [], find=find
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        return evaluate_oracle(
            photos, 3, photo=pixels, on_image=[collector.see_image] if collector else []
        )


def metrics_of(folder: Path, batch_size: int) -> dict[str, Any]:
    return evaluate_wires(folder, batch_size).metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wires")
    wire_photos(folder)
    return folder


def test_wires_are_judged_whole_and_the_loss_is_that_of_whole_photographs(
    folder: Path, tmp_path: Path
) -> None:
    photos = wire_photos(folder)
    collector = CocoCollector([photo.file for photo in photos], sizes_on_disk(photos), tmp_path)
    on_tiles, plain = (
        evaluate_wires(folder, collector=collector),
        evaluate_wires(folder, tiles=False),
    )
    assert on_tiles.metrics["num_targets"] == 11
    assert on_tiles.metrics["num_images"] == 4
    assert on_tiles.metrics["mask_map50"] == pytest.approx(1, abs=0.01)
    assert on_tiles.metrics["mask_map50_95"] > 0.8
    assert on_tiles.metrics["box_map50_95"] > 0.9
    assert on_tiles.metrics["val_loss"] == plain.metrics["val_loss"]
    assert [len(result.scores) for result in on_tiles.results] == [3, 3, 3, 2]
    collector.gather()
    judged = evaluate_with_faster_coco_eval(
        collector.write_ground_truth(NAMES), collector.write_predictions()
    )
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95"):
        assert on_tiles.metrics[name] == pytest.approx(judged[name], abs=0.006)


def test_a_photograph_shown_again_is_not_predicted_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = wire_photos(folder)
    dataset = SegmentationDataset(photos, SIZE_PX)
    samples = [dataset[0, index] for index in range(2)]
    placements = [place(sample, SIZE) for sample in samples]
    search = TileSearch(Predictor(ColourNetwork(), 320, CPU, 6, Tiling(320), AP_LIMITS), photos)
    install(monkeypatch)
    first = list(search(samples, placements))
    monkeypatch.setattr("yolo_seg_ddp.evaluation.tile_search.read_image", None)
    again = list(search(samples[1:], placements[1:]))
    assert len(again[0][0]) == 3
    torch.testing.assert_close(again[0][0].boxes, first[1][0].boxes, rtol=0, atol=0)
    assert again[0][1] is first[1][1]


def test_ranks_and_batch_size_change_no_number(folder: Path) -> None:
    expected = metrics_of(folder, 6)
    expected["val_loss"] = pytest.approx(expected["val_loss"], rel=1e-6)
    for found in run_ranks(metrics_of, 3, folder, 4):
        for name in (
            "mask_map50_95",
            "box_map50_95",
            "by_size",
            "confusion_matrix",
            "per_class",
            "val_loss",
        ):
            assert found[name] == expected[name], name

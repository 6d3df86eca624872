"""Predictions for CVAT and Label Studio."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO

from tests.prepare.parsing.raw_folder import photo
from tests.prepare.parsing.tool_folder import (
    HEIGHT,
    NAMES,
    WIDTH,
    Mask,
    annotation,
    build,
    coco,
    drawn,
    hard_masks,
    iou,
    labels_of,
    run_lengths,
    write_folder,
)
from tests.support.plugin import read_json
from yolo_seg_ddp.predict.annotation_files import (
    COCO_FILE,
    LABEL_STUDIO_FILE,
    ToolFiles,
    ToolWriter,
    merge_tool_files,
)
from yolo_seg_ddp.predict.detections import Detections, PhotoPrediction
from yolo_seg_ddp.predict.prediction_files import Source
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.utils.errors import UserError

MASKS = hard_masks()


def prediction(regions: list[Region]) -> PhotoPrediction:
    scores = torch.linspace(0.9, 0.5, len(regions))
    found = Detections(
        torch.zeros(len(regions), 4),
        scores,
        torch.ones(len(regions), dtype=torch.int64),
        torch.zeros(0),
    )
    return PhotoPrediction(found, regions, np.zeros((len(regions), 4)))


def test_masks_survive_the_way_from_coco_through_yolo_back_to_the_tools(tmp_path: Path) -> None:
    masks = list(MASKS.values())
    content = coco(
        [annotation(number, 1, run_lengths(mask)) for number, mask in enumerate(masks, 1)]
    )
    assert_masks_survive(tmp_path, write_folder(tmp_path / "raw", content), masks)


def assert_masks_survive(tmp_path: Path, raw: Path, masks: list[Mask]) -> dict[str, Any]:
    """Build a data set, write its labels as predictions and compare them with masks; return the
    task for Label Studio.
    """
    build(raw)
    regions = [drawn(polygon) for _, polygon in labels_of(tmp_path / "processed")]
    files = ToolFiles(tmp_path / "out", NAMES, raw / "images", "run/best", True, True)
    with ToolWriter(files, 0) as writer:
        writer.add(
            Source(0, raw / "images" / "a.jpg", "a.jpg"), (HEIGHT, WIDTH, 3), prediction(regions)
        )
    merge_tool_files(files, 1)

    written = read_json(tmp_path / "out" / COCO_FILE)
    assert written["images"] == [
        {"id": 1, "width": WIDTH, "height": HEIGHT, "file_name": "a.jpg", "license": 0}
    ]
    assert [one["name"] for one in written["categories"]] == [*NAMES]
    assert {one["category_id"] for one in written["annotations"]} == {2}
    decoder = COCO(str(tmp_path / "out" / COCO_FILE))
    for one, mask in zip(decoder.loadAnns(decoder.getAnnIds()), masks, strict=True):
        assert iou(decoder.annToMask(one).astype(bool), mask) >= 0.99
        rows, columns = np.nonzero(mask)
        edges = (columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1)
        assert one["bbox"] == pytest.approx(edges, abs=1)
        assert one["area"] == pytest.approx(mask.sum(), rel=0.01)
    kinds = [isinstance(one["segmentation"], list) for one in written["annotations"]]
    assert kinds == [name in ("wire", "border") for name in MASKS]  # the others have holes

    (entry,) = read_json(tmp_path / "out" / LABEL_STUDIO_FILE)
    assert entry["data"] == {"image": "/data/local-files/?d=images/a.jpg"}
    (found,) = entry["predictions"]
    assert (found["model_version"], found["score"]) == ("run/best", pytest.approx(0.7))
    assert [one["value"]["polygonlabels"] for one in found["result"]] == [["wire"]] * len(masks)
    return dict(entry)


def test_parts_of_several_ranks_are_joined_in_order_and_a_missing_one_is_named(
    tmp_path: Path,
) -> None:
    files = ToolFiles(tmp_path / "out", NAMES, tmp_path, "run/best", True, True)
    for position in range(5):
        (tmp_path / f"{position}.jpg").write_bytes(photo(WIDTH, HEIGHT))
    for rank in (0, 1):
        with ToolWriter(files, rank) as writer:
            for position in range(rank, 5, 2):
                regions = [Region(0, 0, MASKS["border"])] * (position % 3)
                source = Source(position, tmp_path / f"{position}.jpg", str(position))
                writer.add(source, (HEIGHT, WIDTH, 3), prediction(regions))
    with pytest.raises(UserError, match="a folder that all machines share"):
        merge_tool_files(files, 3)
    merge_tool_files(files, 2)
    written = read_json(tmp_path / "out" / COCO_FILE)
    assert [image["file_name"] for image in written["images"]] == [
        f"{position}.jpg" for position in range(5)
    ]
    assert [(one["id"], one["image_id"]) for one in written["annotations"]] == [
        (1, 2),
        (2, 3),
        (3, 3),
        (4, 5),
    ]
    tasks = read_json(tmp_path / "out" / LABEL_STUDIO_FILE)
    assert [len(entry["predictions"][0]["result"]) for entry in tasks] == [0, 1, 2, 0, 1]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "annotations",
        "label_studio.json",
    ]

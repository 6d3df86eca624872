"""One photograph and its label: pixels, outlines, line width, and EXIF frame."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.sources.parsing.raw_folder import BOX, NAMES, build, photo, polygon, record, write_csv
from utils.data.dataset_yaml import label_file_for, load_dataset_yaml
from utils.data.images import read_image, upright_size
from utils.data.labels import read_yolo_label


def test_outlines_lie_on_the_pixels_they_were_drawn_on(raw: Path) -> None:
    manifest = build(raw)
    spec = load_dataset_yaml(raw.parent / "processed" / "dataset.yaml")
    assert spec.names == NAMES
    files = [file for split in ("train", "val") for file in spec.image_files(split)]
    assert sorted(file.name for file in files) == [f"{a} ({b}).jpg" for a in (1, 2) for b in (1, 2, 3)]
    for file in files:
        image = read_image(file)
        assert max(image.shape[:2]) == (400 if file.name.startswith("1") else 500)
        class_ids, polygons = read_yolo_label(label_file_for(file), len(NAMES))
        assert class_ids.tolist() == [NAMES.index("insulator"), NAMES.index("conductor")]
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.fillPoly(mask, [np.round(polygons[0] * image.shape[1::-1]).astype(np.int32)], 1)
        red = (image[..., 0] > 150) & (image[..., 1] < 130)
        assert (red & (mask > 0)).sum() / (red | (mask > 0)).sum() > 0.93
    assert manifest["counts"]["objects"]["insulator"] == manifest["counts"]["objects"]["conductor"]
    assert sum(manifest["counts"]["photographs"].values()) == 6
    assert manifest["problems"] == []


def test_wire_width_is_in_pixels_of_the_original(raw: Path) -> None:
    build(raw, line_width_px=10.0)
    (file,) = (raw.parent / "processed").glob("*/labels/2 (1).txt")
    wire = read_yolo_label(file, len(NAMES))[1][1] * (1000, 500)
    assert np.ptp(wire[:, 1]) == pytest.approx(10, abs=0.01)


def test_small_upright_jpeg_is_copied_byte_for_byte(raw: Path) -> None:
    build(raw)
    (file,) = (raw.parent / "processed").glob("*/images/1 (1).jpg")
    assert file.read_bytes() == (raw / "Circuit1" / "1 (1).JPG").read_bytes()


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("drawn_on", ["upright", "stored"])
def test_outlines_of_turned_photographs_find_their_frame(raw: Path, orientation: int, drawn_on: str) -> None:
    data = photo(orientation=orientation)
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(data)
    width, height = upright_size(data)
    assert (width, height) == (300, 400)
    far = (390, 280) if drawn_on == "stored" else (280, 390)  # fits one frame only
    write_csv(raw, [("1 (1).JPG", [BOX, polygon("pole", (far[0] - 30, far[1] - 30), (far[0], far[1] - 30), far)])])
    manifest = build(raw)
    assert record(manifest, "1 (1).jpg")["exif_frame"] == drawn_on
    assert manifest["counts"]["turned_photographs"] == {drawn_on: 1}
    if drawn_on == "stored":
        image = read_image(raw.parent / "processed" / "train" / "images" / "1 (1).jpg")
        _, polygons = read_yolo_label(raw.parent / "processed" / "train" / "labels" / "1 (1).txt", len(NAMES))
        center = (polygons[0].mean(axis=0) * (width, height)).astype(int)
        assert image[center[1], center[0], 0] > 200


def test_frame_that_cannot_be_told_is_counted_and_can_be_given(raw: Path) -> None:
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(photo(orientation=6))
    write_csv(raw, [("1 (1).JPG", [BOX])])
    assert record(build(raw), "1 (1).jpg")["exif_frame"] == "ambiguous"
    assert record(build(raw, exif_frame="stored"), "1 (1).jpg")["exif_frame"] == "stored"

"""What a data set's labels say of the lengths of its objects, and at which input they are large
enough.
"""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from PIL import Image

from yolo_seg_ddp.data import label_shapes
from yolo_seg_ddp.data.images import upright_size, write_jpeg
from yolo_seg_ddp.data.label_shapes import (
    WINDOWS_ADVICE,
    LabelledPhoto,
    class_bends,
    label_lengths,
    median_sizes,
    rectangular_classes,
    sample_labels,
    sizes_on_disk,
    small_labels_hint,
    thin_classes,
)
from yolo_seg_ddp.data.labels import Photo


def test_labels_say_how_long_objects_are() -> None:
    # their spread is the square root of 12 / 10
    logarithms = np.array([-2, -1, -1, 0, 0, 0, 0, 0, 1, 1, 2])
    lengths = np.concatenate(
        [100 * np.e ** (0.8 * logarithms), np.ones(9), np.full(10, 40.0), 90 * np.e**logarithms]
    )
    found = label_lengths(np.array([3] * 11 + [1] * 9 + [0] * 10 + [2] * 11), lengths)
    assert found == [0, 40.0, 0.5, 3, 100.0, pytest.approx(0.8 * np.sqrt(12 / 10), abs=1e-3)]
    assert label_lengths(np.zeros(0, int), np.zeros(0)) == []


def test_compact_objects_have_their_whole_width_and_classes_of_rectangles_are_named() -> None:
    """Squares of 100 px were written as 100 x 50."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = 50 + 50 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    arc = 100 + 80 * np.stack([np.cos(angles[:20]), np.sin(angles[:20])], axis=1)
    strip = np.concatenate([arc, 100 + (arc[::-1] - 100) * 0.9])  # bends by half a turn
    corners = np.array([[0, 0], [100, 0], [100, 100], [0, 100]])
    turned = 90 + corners @ np.array([[0.8, 0.6], [-0.6, 0.8]]) * (1, 1)
    quadrangle = corners * (1, 0.9) + [[0, 0], [0, 0], [9, 9], [0, 0]]
    outlines = [corners, circle, turned, corners * (1, 0.3), strip, quadrangle]
    photos = [
        LabelledPhoto(np.array([n]), [one], (400, 200), lambda: corners)
        for n, one in enumerate(outlines)
    ]
    widths = {number: width for number, (width, _) in median_sizes(photos, 640).items()}
    assert widths == pytest.approx({0: 100, 1: 100, 2: 100, 3: 30, 4: 8, 5: 99}, abs=2)
    assert rectangular_classes(photos * 12) == (0, 3)
    assert not rectangular_classes([photos[0]] * 4)  # too few to say anything
    boxed = replace(photos[1], class_ids=np.zeros(1, int), boxed=[0])
    assert rectangular_classes([photos[0], boxed] * 12) == (0,)  # of one without outline it says
    round_ones = replace(boxed, boxed=[])
    assert not rectangular_classes([photos[0], round_ones] * 12)


def test_boxes_around_wires_left_their_class_neither_thin_nor_straight() -> None:
    corners = np.array([[0, 0], [400, 0], [400, 3], [0, 3]])
    wire = LabelledPhoto(np.zeros(1, int), [corners], (400, 300), lambda: corners)
    box = replace(wire, outlines=[corners * (1, 100)], boxed=[0])
    assert thin_classes([wire, box, box]) == thin_classes([wire]) == (0,)
    assert class_bends([wire, box], (0,)) == class_bends([wire], (0,))


def test_small_objects_need_a_larger_input_and_thin_or_tiny_ones_windows(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "a.jpg", np.zeros((1200, 1600, 3), np.uint8))

    def hint(width: int, length: int) -> tuple[str, list[str]]:
        corners = 100 + np.array([[0, 0], [length, 0], [length, width], [0, width]])
        photo = Photo(tmp_path / "a.jpg", np.zeros(1, int), [corners / (1600, 1200)])
        return small_labels_hint(sample_labels([photo]), ("cell",), 640)

    line, words = hint(20, 20)
    assert line.endswith(
        "labels of cell are at most 8 px long at an input of 640 px; train with --img-size 960"
    )
    assert words == ["--img-size", "960"]
    for width, length in ((9, 9), (5, 800)):  # they would take an input of 2144 px; a wire
        line, words = hint(width, length)
        assert line.endswith(WINDOWS_ADVICE)
        assert words == ["--windows", "8"]
    assert hint(40, 60) == ("", [])


def test_the_size_of_a_large_photograph_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading whole files cost 10 GB for a thousand photographs of 20 megapixels, on every rank at
    every start.
    """
    noise = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(noise).save(tmp_path / "0.jpg", quality=98, exif=turned)
    Image.fromarray(noise).save(tmp_path / "1.png")
    cv2.imwrite(str(tmp_path / "2.tiff"), noise, (cv2.IMWRITE_TIFF_COMPRESSION, 1))
    files = sorted(tmp_path.iterdir())
    assert all(file.stat().st_size > 2**20 for file in files)
    size_of = sizes_on_disk([Photo(file, np.zeros(0, np.int64), []) for file in files])
    assert [size_of(number) for number in range(3)] == [(900, 1200), (1200, 900), (1200, 900)]
    used = Mock(wraps=upright_size)
    monkeypatch.setattr(label_shapes, "upright_size", used)
    sizes_on_disk([Photo(file, np.zeros(0, np.int64), []) for file in files[:2]])(0)
    assert [len(call.args[0]) for call in used.call_args_list] == [label_shapes.HEADER_BYTES]

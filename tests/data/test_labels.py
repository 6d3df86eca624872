"""YOLO-seg label text: written, read, and refused by file and line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from utils.data.labels import LabelError, format_yolo_label, read_yolo_label


def read_text(folder: Path, text: str) -> tuple[np.ndarray, list[np.ndarray]]:
    (folder / "a.txt").write_text(text)
    return read_yolo_label(folder / "a.txt", 8)


def test_yolo_text_round_trip(tmp_path: Path) -> None:
    triangle = np.array([[0.1, 0.2], [0.3, 0.4], [1.2, -0.1]])
    text = format_yolo_label([(3, triangle), (0, triangle[::-1])])
    assert text.splitlines()[0] == "3 0.100000 0.200000 0.300000 0.400000 1.000000 0.000000"
    class_ids, polygons = read_text(tmp_path, text)
    assert class_ids.tolist() == [3, 0]
    assert class_ids.dtype == np.int64
    assert polygons[0].dtype == np.float32
    np.testing.assert_allclose(polygons[0], np.clip(triangle, 0, 1), atol=1e-6)


def test_empty_label_has_no_objects(tmp_path: Path) -> None:
    class_ids, polygons = read_text(tmp_path, "\n  \n")
    assert class_ids.shape == (0,)
    assert polygons == []


def test_box_row_becomes_four_corners(tmp_path: Path) -> None:
    _, (polygon,) = read_text(tmp_path, "1 0.5 0.5 0.2 0.4")
    np.testing.assert_allclose(polygon, [[0.4, 0.3], [0.6, 0.3], [0.6, 0.7], [0.4, 0.7]], atol=1e-6)


def test_rounding_past_the_edge_is_clipped(tmp_path: Path) -> None:
    _, (polygon,) = read_text(tmp_path, "1 -0.0005 0 1.0005 0 1 1")
    assert polygon.min() == 0
    assert polygon.max() == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("8 0 0 1 0 1 1", "class 8 is not one of 0..7"),
        ("-1 0 0 1 0 1 1", "class -1"),
        ("1.5 0 0 1 0 1 1", "class 1.5"),
        ("nan 0 0 1 0 1 1", "class nan"),
        ("1 0 0 1 0 1", "5 coordinates"),
        ("1 0 0", "2 coordinates"),
        ("1", "0 coordinates"),
        ("1 0 0 x 0 1 1", "not a number"),
        ("1 0 0 1.01 0 1 1", "coordinate 1.01 is outside"),
        ("1 0 0 nan 0 1 1", "coordinate nan"),
        ("1 0.5 0.5 0 0.1", "box of width 0"),
    ],
)
def test_wrong_yolo_rows_are_named_by_file_and_line(tmp_path: Path, row: str, reason: str) -> None:
    with pytest.raises(LabelError, match=rf"a\.txt:2: .*{reason}"):
        read_text(tmp_path, f"0 0 0 1 0 1 1\n{row}\n")


def test_files_that_are_no_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("binary.txt", "missing.txt"):
        with pytest.raises(LabelError, match=name):
            read_yolo_label(tmp_path / name, 8)

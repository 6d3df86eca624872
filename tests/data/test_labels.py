"""YOLO-seg label text: written, read, and refused by file and line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from utils.data.labels import LabelError, format_yolo_label, read_yolo_label

TRIANGLE = "0 0.1 0.1 0.5 0.1 0.5 0.5\n"
BOM = "\ufeff"
READ: dict[str, tuple[str, int]] = {
    "empty": ("", 0),
    "blank": ("\n  \n", 0),
    "byte-order mark": (BOM + TRIANGLE, 1),
    "windows line ends": (TRIANGLE.strip() + "\r\n" + TRIANGLE.strip() + "\r\n", 2),
    "tabs": (TRIANGLE.replace(" ", "\t"), 1),
    "class as a float": ("0.0 0.1 0.1 0.5 0.1 0.5 0.5\n", 1),
    "exponents": ("0 1e-1 1e-1 5e-1 1e-1 5e-1 5e-1", 1),
}
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "latin-1": ("0 0.1 0.1 0.5 0.1 0.5 0.5 # für\n".encode("latin-1"), "1: byte 0xfc is not UTF-8"),
    "utf-16": (TRIANGLE.encode("utf-16"), "1: UTF-16"),
    "utf-16 without mark": (TRIANGLE.encode("utf-16-le"), "1: UTF-16"),
    "binary": (b"\xff\xfe\x00\x80", ""),
    "commas": (TRIANGLE.replace(" ", ","), "1: not a number"),
    "decimal commas": (TRIANGLE.replace(".", ","), "1: not a number"),
    "names": ("pole 0.1 0.1 0.5 0.1 0.5 0.5\n", "1: not a number"),
    "json": ('{"objects": []}', "1: not a number"),
    "word": (TRIANGLE + "1 0 0 x 0 1 1\n", "2: not a number"),
    "pixels": (TRIANGLE + "0 10 10 50 10 50 50\n", "2: coordinate 10 is outside"),
    "just outside": (TRIANGLE + "1 0 0 1.01 0 1 1\n", r"2: coordinate 1\.01 is outside"),
    "no number": (TRIANGLE + "1 0 0 nan 0 1 1\n", "2: coordinate nan"),
    "class too large": (TRIANGLE + "2 0 0 1 0 1 1\n", r"2: class 2 is not one of 0\.\.1"),
    "class below 0": ("-1 0 0 1 0 1 1\n", "1: class -1"),
    "class and a half": ("1.5 0 0 1 0 1 1\n", r"1: class 1\.5"),
    "class nan": ("nan 0 0 1 0 1 1\n", "1: class nan"),
    "odd": ("1 0 0 1 0 1\n", "1: 5 coordinates"),
    "point": ("1 0 0\n", "1: 2 coordinates"),
    "class alone": ("1\n", "1: 0 coordinates"),
    "flat box": ("1 0.5 0.5 0 0.1\n", "1: box of width 0"),
}  # fmt: skip


def read(folder: Path, text: str | bytes) -> tuple[np.ndarray, list[np.ndarray]]:
    (folder / "a.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yolo_label(folder / "a.txt", 2)


@pytest.mark.parametrize("case", READ)
def test_label_files_as_users_write_them_are_read(case: str, tmp_path: Path) -> None:
    text, expected = READ[case]
    class_ids, polygons = read(tmp_path, text)
    assert class_ids.tolist() == [0] * expected
    assert class_ids.dtype == np.int64
    assert len(polygons) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_label_files_are_named_by_file_and_line(case: str, tmp_path: Path) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(LabelError, match=rf"a\.txt:{expected}") as error:
        read(tmp_path, text)
    assert str(error.value).isprintable()


def test_a_missing_label_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabelError, match=r"missing\.txt"):
        read_yolo_label(tmp_path / "missing.txt", 8)


def test_yolo_text_round_trip(tmp_path: Path) -> None:
    triangle = np.array([[0.1, 0.2], [0.3, 0.4], [1.2, -0.1]])
    text = format_yolo_label([(1, triangle), (0, triangle[::-1])])
    assert text.splitlines()[0] == "1 0.100000 0.200000 0.300000 0.400000 1.000000 0.000000"
    class_ids, polygons = read(tmp_path, text)
    assert class_ids.tolist() == [1, 0]
    assert polygons[0].dtype == np.float32
    np.testing.assert_allclose(polygons[0], np.clip(triangle, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1 0.5 0.5 0.2 0.4", [[0.4, 0.3], [0.6, 0.3], [0.6, 0.7], [0.4, 0.7]]),  # a box
        ("1 -0.0005 0 1.0005 0 1 1", [[0, 0], [1, 0], [1, 1]]),  # rounding past the edge
    ],
)
def test_rows_become_outlines_inside_the_photograph(tmp_path: Path, row: str, expected: list[list[float]]) -> None:
    _, (polygon,) = read(tmp_path, row)
    np.testing.assert_allclose(polygon, expected, atol=1e-6)
    assert polygon.min() >= 0
    assert polygon.max() <= 1

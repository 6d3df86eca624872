"""What a data set's labels say of the lengths of its objects, and at which input they are large enough."""

from pathlib import Path

import numpy as np
import pytest

from utils.data.images import write_jpeg
from utils.data.label_shapes import WINDOWS_ADVICE, label_lengths, small_labels_hint
from utils.data.labels import Photo


def test_labels_say_how_long_objects_are() -> None:
    logarithms = np.array([-2, -1, -1, 0, 0, 0, 0, 0, 1, 1, 2])  # their spread is the square root of 12 / 10
    lengths = np.concatenate([100 * np.e ** (0.8 * logarithms), np.ones(9), np.full(10, 40.0), 90 * np.e**logarithms])
    found = label_lengths(np.array([3] * 11 + [1] * 9 + [0] * 10 + [2] * 11), lengths)
    assert found == [0, 40.0, 0.5, 3, 100.0, pytest.approx(0.8 * np.sqrt(12 / 10), abs=1e-3)]
    assert label_lengths(np.zeros(0, int), np.zeros(0)) == []


def test_small_objects_need_a_larger_input_and_thin_or_tiny_ones_windows(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "a.jpg", np.zeros((1200, 1600, 3), np.uint8))

    def hint(width: int, length: int) -> tuple[str, list[str]]:
        corners = 100 + np.array([[0, 0], [length, 0], [length, width], [0, width]])
        photo = Photo(tmp_path / "a.jpg", np.zeros(1, int), [corners / (1600, 1200)])
        return small_labels_hint([photo], ("cell",), 640)

    line, words = hint(20, 20)
    assert line.endswith("labels of cell are at most 8 px long at an input of 640 px; train with --img-size 960")
    assert words == ["--img-size", "960"]
    for width, length in ((9, 9), (5, 800)):  # they would take an input of 2144 px; a wire
        line, words = hint(width, length)
        assert line.endswith(WINDOWS_ADVICE)
        assert words == ["--windows", "8"]
    assert hint(40, 60) == ("", [])

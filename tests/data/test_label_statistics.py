"""What a data set's labels say of the lengths of its objects."""

import numpy as np
import pytest

from utils.data.label_shapes import label_lengths


def test_labels_say_how_long_objects_are() -> None:
    logarithms = np.array([-2, -1, -1, 0, 0, 0, 0, 0, 1, 1, 2])  # their spread is the square root of 12 / 10
    lengths = np.concatenate([100 * np.e ** (0.8 * logarithms), np.ones(9), np.full(10, 40.0), 90 * np.e**logarithms])
    found = label_lengths(np.array([3] * 11 + [1] * 9 + [0] * 10 + [2] * 11), lengths)
    assert found == [0, 40.0, 0.5, 3, 100.0, pytest.approx(0.8 * np.sqrt(12 / 10), abs=1e-3)]
    assert label_lengths(np.zeros(0, int), np.zeros(0)) == []

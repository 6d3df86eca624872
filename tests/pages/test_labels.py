"""The figure of label statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.pages.drawn import BLUE, NAMES, share_of, spoken_texts
from utils.data.images import read_image
from utils.pages import plot_label_statistics


@pytest.mark.parametrize("num_classes", [2, 40])
def test_label_statistics_name_the_classes_and_count_their_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_classes: int
) -> None:
    texts = spoken_texts(monkeypatch)
    class_ids = np.array([0] * 1234 + [num_classes - 1] * 7)
    boxes = np.tile(np.array([[0.1, 0.2, 0.3, 0.25]]), (len(class_ids), 1))
    names = [f"class {number}" for number in range(num_classes)]
    plot_label_statistics(class_ids, boxes, np.array([0, 600, 641]), names, tmp_path / "labels.png")
    assert {"class 0", f"class {num_classes - 1}", "1,234", "7"} <= set(texts)
    assert "1,241 objects in 3 photographs, 1 of them without any" in texts
    assert ("10 more" in texts) == (num_classes == 40)
    assert share_of(read_image(tmp_path / "labels.png"), BLUE) > 0.001


def test_labels_without_an_object_are_drawn_too(tmp_path: Path) -> None:
    nothing = np.zeros((0, 4))
    plot_label_statistics(np.zeros(0, np.int64), nothing, np.zeros(3, np.int64), NAMES, tmp_path / "labels.png")
    plot_label_statistics(np.zeros(0, np.int64), nothing, np.zeros(0, np.int64), NAMES, tmp_path / "none.png")
    assert read_image(tmp_path / "none.png").shape[0] > 400

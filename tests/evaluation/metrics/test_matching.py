"""Overlap, matching, confusion and sizes on one image."""

from __future__ import annotations

import numpy as np
import pytest

from utils.evaluation.metrics import SIZES, box_iou, confusion_pairs, hit_targets, size_classes, sizes_of_predictions
from utils.evaluation.metrics.matching import IOU_THRESHOLDS


def test_box_iou_of_known_boxes() -> None:
    first = np.array([[0, 0, 10, 10], [5, 5, 5, 5]])
    second = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 30], [5, 5, 5, 5]])
    np.testing.assert_allclose(box_iou(first, second), [[1.0, 1 / 3, 0.0, 0.0], [0.0] * 4])
    assert box_iou(np.zeros((0, 4)), np.zeros((3, 4))).shape == (0, 3)


def test_thresholds_are_hit_by_an_iou_equal_to_them() -> None:
    assert IOU_THRESHOLDS.tolist() == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95])
    for position, percent in enumerate(range(50, 100, 5)):
        hits = hit_targets(np.array([[percent / 100]]), np.array([0]), np.array([0])) >= 0
        assert hits.sum() == position + 1


def test_each_target_is_matched_once_and_the_more_confident_prediction_chooses_first() -> None:
    iou = np.array([[0.62, 0.91], [0.0, 0.55]])
    hits = hit_targets(iou, np.array([3, 3]), np.array([3, 3]))
    # 0.62 takes the first target at 0.50, 0.55 and 0.60. Where it is gone, the second prediction takes the other target,
    # if it overlaps enough.
    assert hits.tolist() == [[0, 0, 0, *[-1] * 7], [1, 1, -1, *[0] * 6, -1]]


def test_a_prediction_of_another_class_hits_nothing_but_is_counted_as_confused() -> None:
    iou = np.array([[0.9]])
    assert not (hit_targets(iou, np.array([1]), np.array([2])) >= 0).any()
    assert confusion_pairs(iou, np.array([1]), np.array([2]), np.array([0.8]), 5).tolist() == [[2, 1]]


def test_confusion_pairs_name_misses_and_false_alarms() -> None:
    iou = np.array([[0.9, 0.0, 0.8, 0.9], [0.1, 0.45, 0.0, 0.0]])
    scores = np.array([0.9, 0.8, 0.7, 0.25])  # the last is not above 0.25
    pairs = confusion_pairs(iou, np.array([0, 1]), np.array([0, 1, 0, 0]), scores, 5)
    assert sorted(pairs.tolist()) == [[0, 0], [0, 5], [1, 5], [5, 1]]  # an IoU of 0.45 is not above 0.45
    assert confusion_pairs(np.zeros((0, 1)), np.zeros(0), np.array([4]), np.array([0.5]), 5).tolist() == [[4, 5]]
    assert confusion_pairs(np.zeros((1, 0)), np.array([4]), np.zeros(0), np.zeros(0), 5).tolist() == [[5, 4]]


def test_sizes_begin_at_32_and_96_pixels_squared() -> None:
    areas = np.array([0, 32**2 - 1, 32**2, 96**2 - 1, 96**2, 1e8])
    assert [SIZES[number] for number in size_classes(areas)] == ["small"] * 2 + ["medium"] * 2 + ["large"] * 2


def test_a_hit_counts_where_its_target_does_and_a_false_alarm_by_its_own_size() -> None:
    hits = np.full((2, 10), -1)
    hits[0, :3] = 1
    sizes = sizes_of_predictions(hits, np.array([0, 2], np.uint8), np.array([1, 0], np.uint8))
    assert sizes.tolist() == [[2] * 3 + [1] * 7, [0] * 10]
    assert sizes_of_predictions(hits, np.zeros(0, np.uint8), np.array([1, 0])).tolist() == [[1] * 10, [0] * 10]

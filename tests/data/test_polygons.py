"""Outlines: clipped, measured, joined and ordered."""

from __future__ import annotations

import math

import numpy as np
import pytest
from shapely.geometry import Polygon, box

from utils.data.polygons import clip_outlines, join_outlines, large_to_small, polygon_boxes, visible_outlines


def star_polygon(rng: np.random.Generator) -> np.ndarray:
    """Return a simple polygon around a random centre, most of the time partly outside [0, 100]²."""
    count = int(rng.integers(3, 15))
    angles = np.sort(rng.uniform(0, 2 * math.pi, count))
    radii = rng.uniform(5, rng.choice([25, 90]), count)
    points = rng.uniform(-20, 120, 2) + np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None]
    return points if rng.random() < 0.5 else points[::-1]


def area(points: np.ndarray) -> float:
    x, y = points.T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def clip_polygon(points: np.ndarray, size_px: float) -> np.ndarray:
    """Clip one polygon (N, 2); the result may be empty (0, 2)."""
    return clip_outlines(points, np.zeros(len(points), np.int64), size_px)[0]


def test_clipping_agrees_with_shapely() -> None:
    rng = np.random.default_rng(0)
    square = box(0, 0, 100, 100)
    seen = {"inside": 0, "outside": 0, "cut": 0}
    for _ in range(400):
        points = star_polygon(rng)
        shape = Polygon(points)
        if not shape.is_valid:
            continue
        clipped = clip_polygon(points, 100)
        expected = shape.intersection(square).area
        assert (area(clipped) if len(clipped) else 0.0) == pytest.approx(expected, abs=1e-6)
        assert clipped.shape[1] == 2
        if len(clipped):
            assert clipped.min() >= -1e-9
            assert clipped.max() <= 100 + 1e-9
        seen["outside" if expected == 0 else "inside" if expected == pytest.approx(shape.area) else "cut"] += 1
    assert min(seen.values()) >= 10, seen


def test_a_polygon_inside_is_untouched_and_one_around_becomes_the_square() -> None:
    inside = np.array([[0.0, 0], [100, 0], [50, 100]])
    assert clip_polygon(inside, 100) is inside
    around = np.array([[-50.0, -50], [150, -50], [150, 150], [-50, 150]])
    assert sorted(map(tuple, clip_polygon(around, 100))) == [(0, 0), (0, 100), (100, 0), (100, 100)]


def test_a_wire_that_leaves_the_picture_keeps_its_slope() -> None:
    wire = np.array([[10.0, 10], [300, 155], [300, 159], [10, 14]])
    clipped = clip_polygon(wire, 100)
    edge = clipped[np.isclose(clipped[:, 0], 100)]
    assert sorted(edge[:, 1]) == pytest.approx([55, 59])


def test_outlines_are_clipped_together_as_they_are_alone() -> None:
    rng = np.random.default_rng(1)
    polygons = [star_polygon(rng) for _ in range(200)]
    tiny = np.array([[50.0, 50], [51, 50], [51, 51]])
    class_ids, together = visible_outlines(np.arange(201), *join_outlines([*polygons, tiny]), 100)
    alone = [clip_polygon(polygon, 100) for polygon in polygons]
    for class_id, outline in zip(class_ids, together, strict=True):
        np.testing.assert_array_equal(outline, alone[class_id])
    missing = set(range(200)) - set(class_ids)
    assert 10 < len(missing) < 100
    for class_id in missing:
        whole, rest = polygons[class_id], alone[class_id]
        is_small = len(rest) and np.ptp(rest, axis=0).prod() < 0.0101 * np.ptp(whole, axis=0).prod()
        assert len(rest) < 3 or is_small or np.ptp(rest, axis=0).max() <= 2
    assert 200 not in class_ids


def test_order_and_boxes_of_joined_outlines_are_those_of_each() -> None:
    rng = np.random.default_rng(2)
    polygons = [star_polygon(rng) for _ in range(50)]
    areas = [area(polygons[position]) for position in large_to_small(polygons)]
    assert areas == sorted(areas, reverse=True)
    assert polygon_boxes(polygons).tolist() == [[*polygon.min(0), *polygon.max(0)] for polygon in polygons]
    assert polygon_boxes([]).shape == (0, 4)
    assert large_to_small([]).tolist() == []


def test_copies_of_one_object_keep_their_order() -> None:
    polygon = star_polygon(np.random.default_rng(3))
    copies = [polygon * (-1, 1) + (shift / 3, shift / 7) for shift in range(40)]
    assert large_to_small(copies).tolist() == list(range(40))

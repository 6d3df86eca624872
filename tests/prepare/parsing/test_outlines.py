"""Outlines: lines become strips, polygons are clipped to the photograph."""

from typing import Literal

import cv2
import numpy as np
import pytest

from yolo_seg_ddp.prepare.parsing.outlines import MAX_RINGS, OutlineError, object_ring

SIZE = (400, 300)


def points(*pairs: tuple[float, float]) -> np.ndarray:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def fill(ring: np.ndarray, scale: int = 4) -> float:
    """Return the area, in pixels of the photograph, that cv2.fillPoly paints for a ring."""
    canvas = np.zeros((SIZE[1] * scale, SIZE[0] * scale), np.uint8)
    cv2.fillPoly(canvas, [np.round(ring * scale).astype(np.int32)], 1)
    return float(canvas.sum()) / scale**2


def test_polygon_stays_as_drawn() -> None:
    square = points((10, 10), (50, 10), (50, 40), (10, 40))
    ring = object_ring("polygon", np.concatenate([square, square[:1]]), SIZE, 6, 1)
    assert {tuple(vertex) for vertex in ring} == {tuple(vertex) for vertex in square}


def test_line_ends_are_flat_and_its_width_exact() -> None:
    ring = object_ring("line", points((100, 100), (200, 100)), SIZE, 6, 1)
    assert sorted(ring.tolist()) == [[100, 97], [100, 103], [200, 97], [200, 103]]


LOOP = ((50, 50), (250, 50), (250, 250), (50, 250), (50, 50))
TWICE = ((50, 50), (150, 50), (150, 150), (50, 150), (50, 30), (80, 30), (80, 80), (50, 80))
WAVE = ((50, 50), (100, -200), (150, 50), (200, -200), (250, 50))


@pytest.mark.parametrize(
    ("kind", "pairs", "area", "tolerance"),
    [
        pytest.param(
            "line", LOOP[:3], 6 * 400, 0.05, id="a line is a strip and not the area it encloses"
        ),
        pytest.param("line", LOOP, 6 * 4 * 200, 0.06, id="a closed wire encloses nothing"),
        pytest.param(
            "line",
            WAVE,
            6 * 4 * np.hypot(50, 250) / 5,
            0.12,
            id="a wire that leaves and returns is one",
        ),
        pytest.param(
            "polygon",
            ((-9, -9), (99, -9), (99, 99), (-9, 99)),
            99 * 99,
            0.03,
            id="clipped at the edge",
        ),
        pytest.param(
            "polygon",
            ((50, 50), (250, 250), (250, 50), (50, 250)),
            20_000,
            0.03,
            id="both halves of a bow tie",
        ),
        pytest.param(
            "polygon", TWICE, 100 * 100 + 30 * 20, 0.03, id="what is covered twice is no hole"
        ),
    ],
)
def test_the_area_inside_the_photograph_is_kept(
    kind: Literal["polygon", "line"],
    pairs: tuple[tuple[float, float], ...],
    area: float,
    tolerance: float,
) -> None:
    ring = object_ring(kind, points(*pairs), SIZE, 6, 1)
    assert fill(ring) == pytest.approx(area, rel=tolerance)
    assert ring.min() >= 0
    assert len(ring) == 6 or pairs != LOOP[:3]


def test_dense_outline_is_thinned_without_moving() -> None:
    angles = np.linspace(0, 2 * np.pi, 5000, endpoint=False)
    circle = 200 + 100 * np.column_stack([np.cos(angles), np.sin(angles)]) * (1, 0.9)
    ring = object_ring("polygon", circle, SIZE, 6, tolerance_px=0.5)
    assert len(ring) < 100
    assert fill(ring) == pytest.approx(np.pi * 100 * 90, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "pairs", "reason"),
    [
        ("polygon", (), "0 different points"),
        ("polygon", ((5, 5), (5, 5), (9, 9), (5, 5)), "2 different points"),
        ("polygon", ((5, 5), (9, 9), (13, 13)), "no area"),
        ("polygon", ((500, 5), (900, 5), (900, 90)), "outside the photograph of 400x300"),
        ("polygon", ((0, 0), (1e300, 0), (1e300, 1e300)), "far outside"),
        ("line", ((5, 5),), "1 different points"),
        ("line", ((5, 5), (5, 5)), "1 different points"),
        ("line", ((5, -50), (300, -50)), "outside the photograph"),
    ],
)
def test_objects_without_a_visible_area_are_refused(
    kind: Literal["polygon", "line"], pairs: tuple[tuple[float, float], ...], reason: str
) -> None:
    with pytest.raises(OutlineError, match=reason):
        object_ring(kind, points(*pairs), SIZE, 6, 1)


def test_random_scribbles_give_rings_inside_the_photograph() -> None:
    generator = np.random.default_rng(3)
    num_rings = 0
    for _ in range(100):
        scribble = generator.normal(
            0.5, 0.6, (int(generator.integers(3, 40)), 2)
        ) * generator.choice([10, 400, 4000])
        for kind in ("polygon", "line"):
            try:
                ring = object_ring(kind, scribble, SIZE, 6, 1)
            except OutlineError:
                continue
            num_rings += 1
            assert len(ring) >= 3
            assert (ring >= -1e-6).all()
            assert (ring <= np.array(SIZE) + 1e-6).all()
    assert num_rings > 100


def test_scribble_with_many_holes_stays_bounded() -> None:
    scribble = np.random.default_rng(0).random((300, 2)) * SIZE
    assert len(object_ring("polygon", scribble, SIZE, 6, 1)) < 100 * MAX_RINGS

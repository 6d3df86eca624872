"""The sample at the size of a drone's photographs: wires of exact width, labels on them, the same bytes everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.conftest import must_run
from tests.sources.test_sample import files_of, objects_of, rows_of
from utils.data.images import read_image
from utils.sources.parsing.outlines import object_ring
from utils.sources.sample import parts, write_sample
from utils.sources.sample.canvas import Canvas, Colour
from utils.sources.sample.full_size import draw_full_scene
from utils.sources.sample.parts import paint_thin_wire
from utils.sources.sample.texture import Ground, clouds, pyramid

SIZE_PX = 1600


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "raw"
    write_sample(folder, 1, seed=2, long_side_px=SIZE_PX)
    return folder


def test_the_same_bytes_on_one_thread_and_on_a_processor_without_avx2(sample: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"OPENCV_CPU_DISABLE": "AVX2,AVX512-SKX,FMA3"}
    plain["NPY_DISABLE_CPU_FEATURES"] = "AVX512F AVX512_SKX AVX2 FMA3"
    plain = plain if os.uname().machine == "x86_64" else {}
    command = f"""
import os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
from pathlib import Path
from utils.sources.sample import write_sample
write_sample(Path({str(tmp_path)!r}), 1, seed=2, long_side_px={SIZE_PX})
"""
    must_run("python", "-c", command, **plain)
    assert files_of(tmp_path) == files_of(sample)


def test_photographs_have_the_size_asked_for_wires_are_lines_and_all_else_polygons(sample: Path) -> None:
    for path in sample.glob("Circuit*/*"):
        assert sorted(read_image(path).shape[:2]) == [1067, SIZE_PX]
    entries = [entry for row in rows_of(sample) for entry in objects_of(row)]
    assert {"pole", "insulator", "conductor"} <= {entry["value"] for entry in entries}
    assert all(("line" in entry) == (entry["value"] in ("conductor", "other_wire", "other-wire")) for entry in entries)


@pytest.mark.parametrize("width_px", [4.0, 6.5, 10.0])
@pytest.mark.parametrize("end", [(680.0, 110.0), (690.0, 400.0), (180.0, 560.0)])
def test_a_wire_covers_its_width_times_its_length(width_px: float, end: tuple[float, float]) -> None:
    """On black, a white wire's pixels add up to its area, at any slope."""
    canvas = Canvas(700, 600, 1)
    path = np.array([(100.3, 100.2), end])
    paint_thin_wire(canvas, path, (1e4, 1e4, 1e4), width_px, True)
    area = canvas.image[..., 0].sum() / 255
    assert area == pytest.approx(width_px * np.linalg.norm(path[1] - path[0]), rel=0.03)


def test_labels_of_the_asked_width_cover_the_wires() -> None:
    """Where two drawings differ that differ in the wires' width alone, there is the wider label, and not more."""
    thin, wide = (draw_full_scene(2, 1, SIZE_PX, width_px) for width_px in (4, 9))
    assert [one.name for one in thin.annotations] == [one.name for one in wide.annotations]
    differs = (np.abs(thin.image.astype(int) - wide.image.astype(int)).max(axis=2) > 24).astype(np.uint8)
    size = (thin.image.shape[1], thin.image.shape[0])
    labels = []
    for width_px in (4.0, 9.0):
        mask = np.zeros(size[::-1], np.uint8)
        for wire in (one for one in thin.annotations if one.is_line):
            ring = object_ring("line", wire.points, size, width_px, 0.25)
            cv2.fillPoly(mask, [np.rint(ring * 16).astype(np.int32) - 8], 1, cv2.LINE_8, 4)
        labels.append(mask)
    inner = np.asarray(cv2.erode(labels[0], np.ones((3, 3), np.uint8)))
    label = labels[1] * (1 - inner)
    near = cv2.dilate(labels[1], np.ones((5, 5), np.uint8))
    assert (differs * near).sum() / differs.sum() > 0.97
    assert (differs * label).sum() / label.sum() > 0.5  # a branch or the hardware covers the rest


def test_unasked_wires_are_4_to_10_pixels_wide_and_parts_as_large_as_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[float] = []

    def paint(canvas: Canvas, path: np.ndarray, colour: Colour, width_px: float, is_stranded: bool) -> None:
        widths.append(width_px)
        paint_thin_wire(canvas, path, colour, width_px, is_stranded)

    monkeypatch.setattr(parts, "paint_thin_wire", paint)
    heights = {"insulator": (40, 150), "transformers": (200, 500), "crossarm": (50, 500)}
    for index in (0, 1):
        for drawn in draw_full_scene(2, index, SIZE_PX).annotations:
            low, high = heights.get(drawn.name, (0, SIZE_PX * 2))
            assert low <= np.ptp(drawn.points[:, 1]) <= high, drawn.name
    assert len(widths) > 5
    assert all(4 <= width_px <= 10 for width_px in widths)


def test_tiles_repeat_without_a_seam() -> None:
    for tile in (pyramid("soil")[0], clouds()[..., None]):
        steps = np.abs(np.diff(tile.astype(int), axis=1)).mean()
        seam = np.abs(tile[:, 0].astype(int) - tile[:, -1].astype(int)).mean()
        assert seam < 1.5 * steps


def test_straight_lines_on_the_ground_are_straight_in_the_photograph() -> None:
    ground = Ground((800, 1200), -500.0, 0.7, 3000.0)
    points = ground.photo_points(np.linspace((-3, 0.2), (2, 6), 20))
    start, end = points[0], points[-1]
    across = (end - start)[::-1] * (1, -1) / np.linalg.norm(end - start)
    assert np.abs((points - start) @ across).max() < 1.5

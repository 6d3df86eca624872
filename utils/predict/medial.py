"""The line of a mask that bends more than a parabola, such as a jumper's loop: its medial axis."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np

from utils.predict.regions import Region
from utils.predict.shapes import Line, centreline

MIN_LENGTH = 4.0  # of a line, in widths: shorter ones have no direction
BAND, MAX_TURN = 0.9, 0.5  # the least share of the mask's pixels; radians in two widths, at most


def medial_line(region: Region, width: float) -> Line | None:
    """Return the medial axis of a mask that is one band without corners; None: it has branches, parts or corners."""
    path = _longest_path(centreline(region)) + 0.5
    reach = max(1, round(2 * width))
    if len(path) < MIN_LENGTH * reach:
        return None
    kernel = np.ones(2 * reach + 1) / (2 * reach + 1)
    padded = np.pad(path, ((reach, reach), (0, 0)), mode="reflect", reflect_type="odd")
    smooth = np.stack([np.convolve(axis, kernel, mode="valid") for axis in padded.T], axis=1)
    points = smooth[np.unique(np.linspace(0, len(smooth) - 1, 2 + len(smooth) // reach).round().astype(int))]
    steps = np.diff(points, axis=0)
    turns = np.abs(np.angle(np.exp(1j * np.diff(np.arctan2(steps[:, 1], steps[:, 0])))))
    aside = np.ones(region.mask.shape, np.uint8)
    aside[*(path - (region.left, region.top)).astype(int).T[::-1]] = 0
    near = cv2.distanceTransform(aside, cv2.DIST_L2, 3)[region.mask] <= max(width, 2.0)
    if turns.max(initial=0) > MAX_TURN or np.count_nonzero(near) < BAND * len(near):
        return None
    line = Line(points, np.zeros(len(points)), np.zeros((0, 2, 2)))
    return replace(line, widths=np.full(len(points), np.count_nonzero(near) / line.length_px))


def _longest_path(pixels: np.ndarray) -> np.ndarray:
    """Return the pixels (N, 2) xy on the shortest way between the two of a thin line that are farthest apart."""
    from scipy.sparse import coo_array  # takes 0.2 s, and few masks bend
    from scipy.sparse.csgraph import dijkstra
    from scipy.spatial import cKDTree

    pairs = cKDTree(pixels).query_pairs(1.5, output_type="ndarray")
    lengths = np.hypot(*(pixels[pairs[:, 0]] - pixels[pairs[:, 1]]).T)
    graph = coo_array((lengths, pairs.T), shape=(len(pixels),) * 2).tocsr()
    start = 0
    for _ in range(2):  # from any pixel to the farthest one, and from there
        distances, before = dijkstra(graph, directed=False, indices=start, return_predecessors=True)
        first, start = start, int(np.where(np.isfinite(distances), distances, -1).argmax())
    path = [start]
    while path[-1] != first:
        path.append(int(before[path[-1]]))
    return pixels[path].astype(np.float64)

"""Measures photographs and finds those that look wrong: size, shape, exposure, content, blur, EXIF orientation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils.data.images import ImageError, decode_image, exif_orientation, fit_long_side, upright_size
from utils.sources.checks.findings import Finding, View
from utils.sources.near_duplicates import MEASURED_PX, UNIFORM_CONTRAST, small_grey, thumbnail

MIN_PHOTOS = 8  # below that, no photograph is unlike the others
RARE_SHARE = 0.02  # a photograph is unlike the others if no more than these are like it
LIKE_SIZE, FAR_SIZE = 1.5, 2.0  # factors between the numbers of pixels' square roots
LIKE_SHAPE, FAR_SHAPE = 1.1, 1.25  # factors between width / height
DARK_P95 = 45  # grey value of 0-255 below which 95 % of a dark photograph lie
WHITE_P25 = 250  # grey value above which 75 % of an overexposed photograph lie
COARSE = 8  # how many times smaller the picture is whose detail counts as coarse
NO_DETAIL = 0.2  # added to the variances: less is noise
BLUR_DEVIATIONS, BLUR_OCTAVES = 3.5, 1.5  # below the median, both; a deviation is 1.4826 median absolute deviations


@dataclass(frozen=True)
class Picture:
    """What is kept of a photograph: its upright size in pixels, its measures, and a thumbnail uint8 (64, 64)."""

    width: int
    height: int
    orientation: int  # EXIF, 1 to 8
    digest: bytes
    p25: float  # percentiles of the grey values, 0-255
    p95: float
    contrast: float
    sharpness: float
    thumb: np.ndarray

    @property
    def shape(self) -> float:
        """Width divided by height."""
        return self.width / self.height


def measure(file: Path) -> Picture:
    """Read and measure a photograph, decoded at a reduced size where the format can. Raises ImageError and OSError."""
    data = file.read_bytes()
    width, height = upright_size(data)
    grey = small_grey(decode_image(data, MEASURED_PX))
    p25, p95 = np.percentile(grey, (25, 95)).tolist()
    return Picture(
        width,
        height,
        exif_orientation(data),
        hashlib.blake2b(data, digest_size=16).digest(),
        p25,
        p95,
        float(grey.std()),
        sharpness(grey),
        thumbnail(grey),
    )


def sharpness(grey: np.ndarray) -> float:
    """Return the ratio of fine to coarse detail in octaves: log2 of the Laplacian's variance here and at an eighth.

    Photographs have a similar ratio whatever they show (their spectra fall alike with frequency: Field, "Relations
    between the statistics of natural images", 1987). Blur lowers it.
    """
    coarse = fit_long_side(grey, max(max(grey.shape) // COARSE, 1))
    fine, rough = (float(cv2.Laplacian(one, cv2.CV_32F).var()) for one in (grey, coarse))
    return math.log2((fine + NO_DETAIL) / (rough + NO_DETAIL))


def check_pictures(pictures: Sequence[tuple[str, Path, Picture]]) -> list[Finding]:
    """Return what looks wrong with photographs, given as (split, file, measures)."""
    findings: list[Finding] = []

    def add(kind: str, position: int, text: str, weight: float) -> None:
        split, file, _ = pictures[position]
        findings.append(Finding(kind, split, file, text, None, weight, views=(View(file, file.name),)))

    for position, (_, _, one) in enumerate(pictures):
        if one.p95 < DARK_P95:
            add("dark", position, f"95 % of the pixels are at most {one.p95:.0f} of 255", -one.p95)
        elif one.p25 >= WHITE_P25:
            add("overexposed", position, f"75 % of the pixels are at least {one.p25:.0f} of 255", one.p25)
        elif one.contrast < UNIFORM_CONTRAST:
            add("uniform", position, f"almost one colour (contrast {one.contrast:.1f} of 255)", -one.contrast)
        if one.orientation != 1:
            add("turned", position, f"EXIF orientation {one.orientation}", 0)
    kept = [one for _, _, one in pictures]
    size = np.array([math.sqrt(one.width * one.height) for one in kept])
    for position in unlike_others(size, LIKE_SIZE, FAR_SIZE):
        text = f"{kept[position].width} x {kept[position].height} pixels"
        add("odd_size", position, text, _distance(size, position))
    shape = np.array([one.shape for one in kept])
    for position in unlike_others(shape, LIKE_SHAPE, FAR_SHAPE):
        text = f"{kept[position].width} x {kept[position].height} pixels, width / height {shape[position]:.2f}"
        add("odd_shape", position, text, _distance(shape, position))
    _check_blur(kept, add)
    return findings


def _check_blur(pictures: Sequence[Picture], add: Callable[[str, int, str, float], None]) -> None:
    usable = [number for number, one in enumerate(pictures) if one.contrast >= UNIFORM_CONTRAST]
    if len(usable) < MIN_PHOTOS:
        return
    values = np.array([pictures[number].sharpness for number in usable])
    median = float(np.median(values))
    limit = max(BLUR_DEVIATIONS * 1.4826 * float(np.median(np.abs(values - median))), BLUR_OCTAVES)
    for number, value in zip(usable, values.tolist(), strict=True):
        if median - value > limit:
            times = 2 ** (median - value)
            add("blurred", number, f"1/{times:.0f} of the others' share of fine detail", times)


def unlike_others(values: np.ndarray, like: float, far: float) -> list[int]:
    """Return the positions of positive values that few others are within a factor `like` of, and `far` from the median."""
    if len(values) < MIN_PHOTOS:
        return []
    logs = np.log(values)
    ordered = np.sort(logs)
    num_like = np.searchsorted(ordered, logs + np.log(like)) - np.searchsorted(ordered, logs - np.log(like))
    is_rare = num_like <= max(1, RARE_SHARE * len(values))
    return np.flatnonzero(is_rare & (np.abs(logs - np.median(logs)) > np.log(far))).tolist()


def _distance(values: np.ndarray, position: int) -> float:
    return abs(math.log(values[position] / float(np.median(values))))


def unreadable(split: str, file: Path, error: ImageError | OSError) -> Finding:
    """Return the finding about a photograph that cannot be read."""
    reason = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return Finding("unreadable_photo", split, file, reason.removeprefix(f"{file}: "))


def usable(pictures: Iterable[tuple[str, Path, Picture | None]]) -> list[tuple[str, Path, Picture]]:
    """Return the photographs that could be measured."""
    return [(split, file, one) for split, file, one in pictures if one is not None]

"""Measures photographs and finds those that look wrong (size, shape, exposure, content, blur, EXIF)
or show the same picture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np

from yolo_seg_ddp.data.images import decode_image, exif_orientation, fit_long_side, upright_size
from yolo_seg_ddp.extras.check.findings import Finding, View, shown_path
from yolo_seg_ddp.prepare.near_duplicates import (
    MEASURED_PX,
    UNIFORM_CONTRAST,
    likeness,
    same_pictures,
    signature,
    small_grey,
    thumbnail,
)
from yolo_seg_ddp.prepare.parsing.rows import digest_of

MIN_PHOTOS = 8  # below that, no photograph is unlike the others
RARE_SHARE = 0.02  # a photograph is unlike the others if no more than these are like it
LIKE_SIZE, FAR_SIZE = 1.5, 2.0  # factors between the numbers of pixels' square roots
LIKE_SHAPE, FAR_SHAPE = 1.1, 1.25  # factors between width / height
DARK_P95 = 45  # grey value of 0-255 below which 95 % of a dark photograph lie
WHITE_P25 = 250  # grey value above which 75 % of an overexposed photograph lie
COARSE = 8  # how many times smaller the picture is whose detail counts as coarse
NO_DETAIL = 0.2  # added to the variances: less is noise
# below the median, both; a deviation is 1.4826 median absolute deviations
BLUR_DEVIATIONS, BLUR_OCTAVES = 3.5, 1.5
# of a picture; more are photographs of a texture or a still scene, and one finding names them
# together
MOST_COPIES = 8
MAX_COMPARED = 32  # photographs of a split among which the most similar one is named


@dataclass(frozen=True)
class Picture:
    """What is kept of a photograph: its upright size in pixels, its measures, and a thumbnail."""

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


Measured = tuple[str, Path, Picture]  # a photograph's split, file and measures


def measure(file: Path) -> Picture:
    """Read and measure a photograph, decoded at a reduced size where the format can.

    Raises ImageError and OSError.
    """
    data = file.read_bytes()
    width, height = upright_size(data)
    grey = small_grey(decode_image(data, MEASURED_PX))
    p25, p95 = np.percentile(grey, (25, 95)).tolist()
    return Picture(
        width,
        height,
        exif_orientation(data),
        digest_of(data),
        p25,
        p95,
        float(grey.std()),
        sharpness(grey),
        thumbnail(grey),
    )


def sharpness(grey: np.ndarray) -> float:
    """Return the ratio of fine to coarse detail in octaves: log2 of the Laplacian's variance here
    and at an eighth.

    Photographs have a similar ratio whatever they show (their spectra fall alike with frequency:
    Field, "Relations between the statistics of natural images", 1987). Blur lowers it.
    """
    coarse = fit_long_side(grey, max(max(grey.shape) // COARSE, 1))
    fine, rough = (float(cv2.Laplacian(one, cv2.CV_32F).var()) for one in (grey, coarse))
    return math.log2((fine + NO_DETAIL) / (rough + NO_DETAIL))


def check_pictures(pictures: Sequence[Measured]) -> list[Finding]:
    """Return findings about photographs that look wrong."""
    findings: list[Finding] = []

    def add(kind: str, position: int, text: str, weight: float) -> None:
        split, file, _ = pictures[position]
        findings.append(
            Finding(kind, split, file, text, None, weight, views=(View(file, file.name),))
        )

    for position, (_, _, one) in enumerate(pictures):
        if one.p95 < DARK_P95:
            add("dark", position, f"95 % of the pixels are at most {one.p95:.0f} of 255", -one.p95)
        elif one.p25 >= WHITE_P25:
            add(
                "overexposed",
                position,
                f"75 % of the pixels are at least {one.p25:.0f} of 255",
                one.p25,
            )
        elif one.contrast < UNIFORM_CONTRAST:
            add(
                "uniform",
                position,
                f"almost one colour (contrast {one.contrast:.1f} of 255)",
                -one.contrast,
            )
        if one.orientation != 1:
            add("turned", position, f"EXIF orientation {one.orientation}", 0)
    kept = [one for _, _, one in pictures]
    size = np.array([math.sqrt(one.width * one.height) for one in kept])
    shape = np.array([one.shape for one in kept])
    for kind, values, like, far in (
        ("odd_size", size, LIKE_SIZE, FAR_SIZE),
        ("odd_shape", shape, LIKE_SHAPE, FAR_SHAPE),
    ):
        for position, weight in unlike_others(values, like, far):
            more = f", width / height {shape[position]:.2f}" if kind == "odd_shape" else ""
            add(
                kind,
                position,
                f"{kept[position].width} x {kept[position].height} pixels{more}",
                weight,
            )
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


def unlike_others(values: np.ndarray, like: float, far: float) -> list[tuple[int, float]]:
    """Return the positions of unusual positive values, each with its distance from the median, as a
    logarithm.

    Few other values are within a factor `like` of such a value, and it is more than a factor `far`
    from the median.
    """
    if len(values) < MIN_PHOTOS:
        return []
    logs = np.log(values)
    ordered = np.sort(logs)
    num_like = np.searchsorted(ordered, logs + np.log(like)) - np.searchsorted(
        ordered, logs - np.log(like)
    )
    distances = np.abs(logs - np.median(logs))
    is_odd = (num_like <= max(1, RARE_SHARE * len(values))) & (distances > np.log(far))
    return [(position, float(distances[position])) for position in np.flatnonzero(is_odd).tolist()]


def same_measured(pictures: Sequence[Picture]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the numbers and neighbours of `same_pictures`."""
    return same_pictures(
        [one.digest for one in pictures],
        [signature(one.thumb) if one.contrast >= UNIFORM_CONTRAST else b"" for one in pictures],
        lambda positions: np.stack([pictures[position].thumb for position in positions]),
    )


def find_duplicates(entries: Sequence[Measured]) -> list[Finding]:
    """Return findings about photographs that show the same picture as another, or overlap one of
    another split.

    A finding is about the later of two photographs, in the order of `entries`.
    """
    groups, neighbours = same_measured([picture for _, _, picture in entries])
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order], prepend=-1, append=-1))
    findings = [
        _finding("overlap", entries, later, [earlier])
        for earlier, later in sorted(neighbours)
        if entries[earlier][0] != entries[later][0] and groups[earlier] != groups[later]
    ]
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        seen: dict[str, list[int]] = {}
        first = len(findings)
        for later in order[start:end].tolist():
            split = entries[later][0]
            others = [
                one
                for name, earlier in seen.items()
                if name != split
                for one in earlier[:MAX_COMPARED]
            ]
            if others:
                findings.append(_finding("leak", entries, later, others))
            if split in seen:
                findings.append(_finding("repeated", entries, later, seen[split][:1]))
            seen.setdefault(split, []).append(later)
        if end - start > MOST_COPIES:
            copies = findings[first:]
            findings[first:] = [
                _together(copies, kind) for kind in sorted({one.kind for one in copies})
            ]
    return findings


def _together(findings: Sequence[Finding], kind: str) -> Finding:
    """Return one finding for all of a kind, with three examples."""
    of_kind = [one for one in findings if one.kind == kind]
    names = [shown_path(one.file) for one in of_kind]
    if len(of_kind) == 1:
        return of_kind[0]
    text = (
        f"{len(of_kind):,} photographs look like another, as those of a texture or a still scene "
        f"do: {', '.join(names[:3])}"
    )
    return replace(
        of_kind[0], text=f"{text} and others", details={**of_kind[0].details, "files": names}
    )


def _finding(kind: str, entries: Sequence[Measured], later: int, earlier: Sequence[int]) -> Finding:
    alike = [likeness(entries[position][2].thumb, entries[later][2].thumb) for position in earlier]
    similarity = np.array([one.similarity for one in alike])
    nearest = int(similarity.argmax())
    is_same_file = any(entries[one][2].digest == entries[later][2].digest for one in earlier)
    if is_same_file:
        nearest = next(
            number
            for number, one in enumerate(earlier)
            if entries[one][2].digest == entries[later][2].digest
        )
    split, file, _ = entries[later]
    other_split, other, _ = entries[earlier[nearest]]
    likeness_text = "the same file" if is_same_file else f"similarity {similarity[nearest]:.2f}"
    value = 1.0 if is_same_file else round(float(similarity[nearest]), 3)
    views = (View(file, f"{split}: {file.name}"), View(other, f"{other_split}: {other.name}"))
    what = "overlaps with" if kind == "overlap" else "shows the same as"
    details = {"other_split": other_split, "other_file": shown_path(other), "similarity": value}
    return Finding(
        kind,
        split,
        file,
        f"{what} {shown_path(other)} of {other_split} ({likeness_text})",
        None,
        value,
        details,
        views,
    )

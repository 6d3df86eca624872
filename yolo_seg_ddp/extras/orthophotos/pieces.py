"""Cuts an orthophoto and its labels into photographs with YOLO labels, which parse_labels.py then
reads.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry
from shapely.geometry.polygon import orient

from yolo_seg_ddp.data.images import FILL, write_jpeg
from yolo_seg_ddp.data.labels import format_yolo_label
from yolo_seg_ddp.data.mask_rings import join_rings
from yolo_seg_ddp.extras.orthophotos.raster import Orthophoto
from yolo_seg_ddp.extras.orthophotos.vector_labels import SWAPPED, MapLabel
from yolo_seg_ddp.prepare.parsing.outlines import MAX_RINGS, MIN_PART_AREA_PX
from yolo_seg_ddp.prepare.parsing.photograph import JPEG_QUALITY
from yolo_seg_ddp.prepare.parsing.split import TRAIN, VAL
from yolo_seg_ddp.utils.errors import UserError, print_warning
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.text import counted

MAX_PIECE_PX = 4096
FEWEST = 3  # photographs along the longer side: for training, left out, for validation


def cut_raster(
    raster: Orthophoto,
    labels: Sequence[MapLabel],
    folder: Path,
    side_px: int,
    line_width_px: float,
    line_width_m: float | None,
    val_fraction: float,
) -> str:
    """Write {train,val}/{images,labels} and classes.txt into a folder; return one line about it.

    Photographs have sides of at most `side_px` and do not overlap. Their names hold the column and
    the row of their first pixel. The last ones along the raster's longer side are for validation.
    Those between training and validation are left out, so that none of one split touches one of the
    other. A label's own width comes first, then `line_width_m`, then `line_width_px`.

    Raises UserError if there are too few photographs to divide.
    """
    metre_px = 1 / raster.pixel_m()
    width_px = line_width_px if line_width_m is None else line_width_m * metre_px
    shapes = [
        _in_pixels(raster, label, label.width_m * metre_px if label.width_m else width_px)
        for label in labels
    ]
    _count_outside(raster, labels, shapes)
    names = sorted({label.name for label in labels})
    tree = shapely.STRtree(shapes)
    columns, rows = (
        _edges(length, min(side_px, MAX_PIECE_PX)) for length in (raster.width, raster.height)
    )
    for split in (TRAIN, VAL):
        for kind in ("images", "labels"):
            (folder / split / kind).mkdir(parents=True)
    write_text_atomic(folder / "classes.txt", "".join(f"{name}\n" for name in names))
    splits = _splits(raster, columns, rows, val_fraction)
    counts = dict.fromkeys((TRAIN, VAL, ""), 0)
    for left, top, right, bottom in Progress("photographs cut", len(splits))(splits):
        split = splits[left, top, right, bottom]
        photo = raster.read((left, top, right, bottom)) if split else np.zeros(0)
        if split and (photo == FILL).all():
            continue
        counts[split] += 1
        if split:
            name = f"{raster.file.stem}_x{left:06d}_y{top:06d}"
            near = np.sort(tree.query(shapely.box(left, top, right, bottom)))
            outlines = [
                (names.index(labels[number].name), ring)
                for number in near.tolist()
                for ring in _rings(shapes[number], left, top, right, bottom)
            ]
            write_jpeg(folder / split / "images" / f"{name}.jpg", photo, JPEG_QUALITY)
            write_text_atomic(
                folder / split / "labels" / f"{name}.txt", format_yolo_label(outlines)
            )
    if not (counts[TRAIN] and counts[VAL]):
        raise UserError(
            f"{raster.file}: no photograph for {VAL if counts[TRAIN] else TRAIN}; change "
            "--val-fraction"
        )
    return (
        f"{counted(len(labels), 'label')}; photographs: {counts[TRAIN]} train, {counts[VAL]} val, "
        f"{counts['']} between them left out"
    )


def _edges(length: int, side_px: int) -> list[int]:
    """Return the edges between photographs of about equal length, with 0 and the end."""
    edges: list[int] = (
        np.linspace(0, length, -(-length // side_px) + 1).round().astype(int).tolist()
    )
    return edges


def _splits(
    raster: Orthophoto, columns: list[int], rows: list[int], val_fraction: float
) -> dict[tuple[int, int, int, int], str]:
    """Return the split of each photograph, row by row; empty for those between the splits."""
    along_x = len(columns) >= len(rows)
    number = max(len(columns), len(rows)) - 1
    if number < FEWEST:
        raise UserError(
            f"{raster.file}: {raster.width} x {raster.height} pixels are fewer than {FEWEST} "
            f"photographs along a side, one each for {TRAIN} and {VAL} and one left out between "
            "them; choose a smaller --long-side"
        )
    num_val = min(max(round(val_fraction * (number - 1)), 1), number - 2)
    kinds = [TRAIN] * (number - 1 - num_val) + [""] + [VAL] * num_val
    return {
        (columns[x], rows[y], columns[x + 1], rows[y + 1]): kinds[x if along_x else y]
        for y in range(len(rows) - 1)
        for x in range(len(columns) - 1)
    }


def _in_pixels(raster: Orthophoto, label: MapLabel, width_px: float) -> BaseGeometry:
    """Return a label's area in pixels of the raster: a polygon, repaired, or a line drawn with flat
    ends.
    """
    shape = shapely.transform(label.shape, raster.to_pixels)
    if "LineString" in shape.geom_type:
        return shape.buffer(width_px / 2, cap_style="flat", join_style="mitre", mitre_limit=2.0)
    return shapely.make_valid(shape, method="structure", keep_collapsed=False)


def _count_outside(
    raster: Orthophoto, labels: Sequence[MapLabel], shapes: Sequence[BaseGeometry]
) -> None:
    """Warn of labels outside the raster. Raises UserError if no label lies on it."""
    away_px = shapely.distance(
        shapely.box(0, 0, raster.width, raster.height), np.array(shapes, object)
    )
    # also shapes without an area, whose distance is not a number
    num_outside = int((~(away_px <= 0)).sum())
    advice = f"; {SWAPPED}" if sum(label.fits_swapped for label in labels) * 2 > num_outside else ""
    if num_outside == len(labels):
        away_m = np.fmin.reduce(away_px, initial=np.inf) * raster.pixel_m()
        away = f", the nearest is {away_m / 1000:,.1f} km away" if np.isfinite(away_m) else ""
        raise UserError(
            f"--labels: none of {len(labels)} objects lies on "
            f"{raster.file}{away}{advice or '; name labels of this place'}"
        )
    if num_outside:
        print_warning(
            f"--labels: {num_outside} of {len(labels)} objects lie outside {raster.file}{advice}"
        )


def _rings(shape: BaseGeometry, left: int, top: int, right: int, bottom: int) -> list[np.ndarray]:
    """Return the part of an area in a photograph as one ring (V, 2) in 0..1, or none."""
    parts = shapely.get_parts(shapely.intersection(shape, shapely.box(left, top, right, bottom)))
    polygons = [
        orient(part)
        for part in parts
        if part.geom_type == "Polygon" and part.area >= MIN_PART_AREA_PX
    ]
    polygons = sorted(polygons, key=lambda part: -part.area)[:MAX_RINGS]
    rings = [
        np.asarray(ring.coords)[:-1]
        for part in polygons
        for ring in (part.exterior, *part.interiors)
    ]
    return [(join_rings(rings) - (left, top)) / (right - left, bottom - top)] if rings else []

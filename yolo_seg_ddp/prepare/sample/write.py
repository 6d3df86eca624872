"""Writes the sample in EPRI's raw layout: a folder per circuit and one CSV, with the irregularities
of EPRI's files.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from yolo_seg_ddp.data.images import encode_jpeg, one_opencv_thread
from yolo_seg_ddp.prepare.parsing.label_csv import LABEL_CSV
from yolo_seg_ddp.prepare.sample.drone import TURNS, in_flight
from yolo_seg_ddp.prepare.sample.scene import Scene, clip, draw_scene
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import make_plain_folder, write_bytes_atomic
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.text import csv_text
from yolo_seg_ddp.utils.threads import ordered_map

_DATASET_NAME = "Built-in sample"
_CIRCUITS = ("Circuit1", "Circuit10")
MAX_THREADS = 16  # each takes about 300 MB for a photograph of 20 megapixels
_COLUMNS = ("Label", "External ID", "Dataset Name")
Row = tuple[str, str, str]
_PAST_EDGE_PX = 40.0
# (index % 12, class) -> another spelling of the class
_SPELLINGS = {
    (2, "transformers"): "transformer",
    (4, "background_structure"): "Background Structure",
    (7, "other_wire"): "other-wire",
}


def write_sample(
    output_dir: Path,
    num_photos: int = 240,
    seed: int = 0,
    wire_width_px: float | None = None,
    long_side_px: int | None = None,
) -> None:
    """Write labelled drawn photographs of a distribution line in EPRI's raw layout.

    Photograph i, its name, row and irregularities depend only on (seed, i): the same call gives the
    same bytes, and a larger `num_photos` extends a smaller one. Wires are about `wire_width_px`
    wide, by default 14, in a photograph of 1280 pixels. With `long_side_px` photographs are as
    large as a drone camera's and wires by default 4 to 10 pixels wide. Points are pixels of the
    upright photograph, also if its file has an EXIF orientation. EXIF and XMP are those of
    `in_flight`. Irregularities of EPRI's files, by index:

    - every 8th from 0: polygons extend up to 40 pixels beyond the edges (in others they end there)
    - 0, 120, …: a pole's outline touches itself; 1, 121, …: another pole with only two points
    - 3, 123, …: another row, whose photograph does not exist; 6, 246, …: a photograph without a row
    - 2, 5, 7 of every 40: EXIF orientation 6, 8, 3

    Raises UserError for a seed or a width of wires out of range, or when the folder holds other
    photographs or labels.
    """
    if seed < 0:
        raise UserError(f"seed: {seed}; must not be negative")
    if wire_width_px is not None and not 1 <= wire_width_px <= 40:
        raise UserError(f"wire_width_px: {wire_width_px}; wires can be drawn 1 to 40 pixels wide")
    paths = [output_dir / photo_path(index) for index in range(num_photos)]
    labels_file = output_dir / LABEL_CSV
    _refuse_other_data(output_dir, labels_file, set(paths))
    # Old rows must not describe new photographs: no label file until the new one is complete.
    labels_file.unlink(missing_ok=True)

    def write(index: int) -> list[Row]:  # those of photograph `index` in the label file
        scene = draw_scene(seed, index, long_side_px, wire_width_px)
        make_plain_folder(paths[index].parent)
        _write_photo(paths[index], scene, seed, index)
        label = repr({"objects": _objects(scene, index), "classifications": []})
        names = [] if index % 240 == 6 else [paths[index].name]
        names += [f"10 ({90_000 + index}).JPG"] if index % 120 == 3 else []
        return [(label, name, _DATASET_NAME) for name in names]

    with one_opencv_thread():
        rows = ordered_map(write, range(len(paths)), min(usable_cpu_count(), MAX_THREADS))
        every = [
            row for of_photo in Progress("photographs drawn", len(paths))(rows) for row in of_photo
        ]
    write_bytes_atomic(labels_file, csv_text(_COLUMNS, every).encode("utf-8-sig"))


def photo_path(index: int) -> Path:
    """Return the path of photograph `index`, such as `Circuit10/10 (4).jpg`; every fourth belongs
    to circuit 10.
    """
    circuit = "10" if index % 4 == 3 else "1"
    suffix = ".jpg" if index % 5 == 2 else ".JPEG" if index % 16 == 9 else ".JPG"
    return Path(f"Circuit{circuit}") / f"{circuit} ({index + 1}){suffix}"


def _refuse_other_data(output_dir: Path, labels_file: Path, expected: set[Path]) -> None:
    """Raise UserError if the folder holds anything but a sample of at most this size."""
    present = {
        file for circuit in _CIRCUITS for file in (output_dir / circuit).glob("*") if file.is_file()
    }
    if not labels_file.exists():
        strangers = present
    elif _DATASET_NAME.encode() not in labels_file.read_bytes():
        strangers = {labels_file}
    else:
        strangers = {file for file in present - expected if not file.name.endswith(".part")}
    if strangers:
        raise UserError(
            f"{min(strangers)}: not part of the sample to be written; choose an empty folder"
        )


def _write_photo(path: Path, scene: Scene, seed: int, index: int) -> None:
    quality = 85 + int(np.random.default_rng((seed, index, 1)).integers(0, 9))
    orientation = {2: 6, 5: 8, 7: 3}.get(index % 40, 1)
    turned = io.BytesIO()  # another encoder writes these: its pixels differ a little
    if orientation != 1:
        stored = np.ascontiguousarray(np.rot90(scene.image, TURNS[orientation]))
        Image.fromarray(stored).save(turned, "JPEG", quality=quality)
    jpeg = turned.getvalue() or encode_jpeg(scene.image, quality)
    poles = (annotation.points for annotation in scene.annotations if annotation.name == "pole")
    # its corners 0 and 3 are at the top
    nearest = max(poles, key=lambda outline: outline[3, 0] - outline[0, 0])
    x_px, y_px = nearest[[0, 3]].mean(axis=0) - np.array(scene.image.shape[1::-1]) / 2
    write_bytes_atomic(path, in_flight(jpeg, index, (x_px, y_px), orientation))


def _objects(scene: Scene, index: int) -> list[dict[str, Any]]:
    """Return the annotations with the irregularities of photograph `index`, in Labelbox's format:
    `repr` is a Python literal.
    """
    height_px, width_px = scene.image.shape[:2]
    objects = []
    for name, points, is_line in scene.annotations:
        if index % 120 == 0 and name == "pole":  # notch its left side up to its right side
            left_top, left_bottom, right_bottom, right_top = points
            touch, down = right_top + (right_bottom - right_top) * 0.4, left_bottom - left_top
            left = [left_top, left_top + down * 0.39, touch, left_top + down * 0.41, left_bottom]
            points = np.array([*left, right_bottom, touch, right_top])
        if not is_line:
            points = clip(points, (width_px, height_px), _PAST_EDGE_PX if index % 8 == 0 else 0.0)
        objects.append(_entry(name, points, is_line, index))
    if index % 120 == 1:  # the pole again, with only two points
        objects.append(
            _entry(
                "pole",
                next(points for name, points, _ in scene.annotations if name == "pole")[:2],
                False,
                index,
            )
        )
    return objects


def _entry(name: str, points: np.ndarray, is_line: bool, index: int) -> dict[str, Any]:
    corners = [{"x": round(float(x), 1), "y": round(float(y), 1)} for x, y in points]
    return {
        "value": _SPELLINGS.get((index % 12, name), name),
        "line" if is_line else "polygon": corners,
    }

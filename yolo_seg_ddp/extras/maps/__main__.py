"""Put the detections of inference.py on a map: their positions, the assets that they show, changes
since an earlier flight.

    python -m yolo_seg_ddp maps --predictions outputs/predictions

Reads predictions.json and the photographs, writes its files beside them:
yolo_seg_ddp/extras/maps/README.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.images import ImageError, read_image
from yolo_seg_ddp.extras.maps.asset_files import write_asset_files
from yolo_seg_ddp.extras.maps.assets import read_assets
from yolo_seg_ddp.extras.maps.changes import read_before
from yolo_seg_ddp.extras.maps.findings import Site
from yolo_seg_ddp.extras.maps.map_files import write_map_files
from yolo_seg_ddp.extras.maps.page import build_page
from yolo_seg_ddp.extras.maps.thumbnails import save_thumbnails
from yolo_seg_ddp.predict.prediction_files import ABOUT, read_predictions
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.contents import read_back
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import UserError, printable, run_script
from yolo_seg_ddp.utils.files import claimed_output, write_text_atomic
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.threads import ordered_map


@dataclass(frozen=True)
class MapsConfig(Options):
    """Options of `python -m yolo_seg_ddp maps`."""

    predictions: str = option(
        "outputs/predictions", "the --output of inference.py; the map goes there", metavar="DIR"
    )
    assets: str | None = option(
        None, "GeoJSON file of points, such as poles, to assign detections to"
    )
    asset_range: float = option(
        100.0,
        "metres from the camera within which an asset is looked for",
        above=0,
        at_most=10_000,
        needs="assets",
    )
    before: str | None = option(
        None, "assets.geojson of an earlier flight; also write what has changed since"
    )
    ground_height: float = option(
        0.0,
        "metres of the ground at the objects above the take-off point",
        at_least=-10_000,
        at_most=10_000,
    )
    ground_sigma: float = option(
        7.0,
        "standard deviation in metres of the objects' heights from that ground; 7: anywhere on a "
        "12 m pole",
        at_least=0,
        at_most=1000,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the map; return the exit code."""
    config = parse_config(MapsConfig, __doc__, argv)
    assets = read_assets(Path(config.assets)) if config.assets is not None else None
    before = read_before(Path(config.before)) if config.before is not None else None
    site = Site(config.ground_height, config.ground_sigma, assets, config.asset_range)
    with claimed_output(config.predictions, "--predictions") as folder:
        if not (folder / ABOUT).is_file():
            raise UserError(
                f"{folder / ABOUT}: no such file; name the --output of inference.py, run with "
                "this version"
            )
        names, made_with = read_back(folder / ABOUT, _about, "run inference.py again")
        num_photos = sum(1 for _ in read_predictions(folder))
        photos = ordered_map(_with_photo, read_predictions(folder), usable_cpu_count())
        for entry, photo in Progress("photographs", num_photos, True)(photos):
            if photo is not None:
                class_ids = [item["class_id"] for item in entry["detections"]]
                boxes = np.array([item["box_xyxy"] for item in entry["detections"]])
                save_thumbnails(folder, entry["key"], photo, class_ids, boxes)
        tables = write_asset_files(folder, site, names, before)
        lines = write_map_files(folder, site, tables.of_detection, tables.turned)
        write_text_atomic(folder / "assets.html", build_page(tables, names, made_with, num_photos))
    print("\n".join([*lines, *tables.lines]))
    return 0


def _about(content: Any) -> tuple[list[str], list[str]]:
    """Return the names of the classes, and the model's file with the notes of its predictions."""
    classes = content["classes"]
    texts = [content["model"], *content["notes"]]
    if not all(isinstance(text, str) for text in [*classes, *texts]):
        raise TypeError("model, classes and notes must be texts")
    return classes, texts


def _with_photo(entry: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return an entry of predictions.json with its photograph (H, W, 3); None if it has no
    detections.
    """
    try:
        return entry, read_image(Path(entry["file"])) if entry["detections"] else None
    except (ImageError, OSError) as error:
        file = printable(entry["file"], 400)
        raise UserError(
            f"{file}: {error}; the map needs the photographs where inference.py found them"
        ) from error


if __name__ == "__main__":
    cv2.setNumThreads(0)
    run_script(main)

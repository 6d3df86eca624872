"""Cut an orthophoto and its labels, polygons and lines on a map, into photographs with YOLO labels.

    python -m yolo_seg_ddp orthophotos.cut --input ortho.tif --labels a.geojson --output data/raw

The next command is parse_labels.py, as for any labels in YOLO's format.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from yolo_seg_ddp.extras.orthophotos.pieces import cut_raster
from yolo_seg_ddp.extras.orthophotos.raster import open_orthophoto
from yolo_seg_ddp.extras.orthophotos.vector_labels import read_map_labels
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError, print_warning, run_script
from yolo_seg_ddp.utils.files import claimed_output
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.text import next_command


@dataclass(frozen=True)
class CutConfig(Options):
    """Options of `python -m yolo_seg_ddp orthophotos.cut`."""

    input: str = option(None, "GeoTIFF with a place on the map", required=True, metavar="FILE")
    labels: tuple[str, ...] = option(
        None, "polygons and lines: GeoJSON or GeoPackage", required=True, metavar="FILE"
    )
    output: str = option(
        None,
        "folder for the photographs and labels; empty, or not there yet",
        required=True,
        metavar="DIR",
    )
    long_side: int = option(1280, "longest side of a photograph in pixels", at_least=16)
    line_width: float = option(6.0, "width of lines in pixels", above=0, at_most=1000)
    line_width_m: float | None = option(
        None,
        "width in metres of lines without a width_m of their own; unset: --line-width",
        above=0,
        at_most=100,
        metavar="METRES",
    )
    val_fraction: float = option(
        0.2, "share of the photographs for validation, between 0 and 1", above=0, below=1
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Cut the orthophoto; return the exit code."""
    config = parse_config(CutConfig, __doc__, argv)
    with claimed_output(config.output) as folder:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--output {folder}: is not empty; name a new folder")
        raster = open_orthophoto(Path(config.input))
        labels, num_skipped = read_map_labels([Path(file) for file in config.labels], raster)
        if num_skipped:
            print_warning(
                f"--labels: {num_skipped} features are neither polygons nor lines and are left out"
            )
        widths = (config.line_width, config.line_width_m)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as parent:
            part = Path(parent) / "cut"
            print(
                cut_raster(raster, labels, part, config.long_side, *widths, config.val_fraction),
                flush=True,
            )
            # All of it or nothing.
            os.replace(part, folder)
    print(
        next_command(
            "python", "parse_labels.py", "--input", folder, "--long-side", str(config.long_side)
        )
    )
    return 0


if __name__ == "__main__":
    run_script(main)

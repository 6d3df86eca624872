"""Find objects in an orthophoto, a GeoTIFF of any size; write them as GeoPackage and GeoJSON.

    python -m yolo_seg_ddp orthophotos --model best.pt --source ortho.tif --output outputs/ortho

Started with torchrun, the ranks share the blocks. A killed command continues:
yolo_seg_ddp/extras/orthophotos/README.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2

from yolo_seg_ddp.extras.orthophotos.map_layers import GEOJSON, GEOPACKAGE, write_orthophoto
from yolo_seg_ddp.extras.orthophotos.raster import open_orthophoto
from yolo_seg_ddp.predict.opening import open_predictor
from yolo_seg_ddp.predict.options import PredictOptions
from yolo_seg_ddp.predict.tiles import Tiling
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.distributed import cleanup_ddp, setup_ddp
from yolo_seg_ddp.utils.errors import UsageError, run_script
from yolo_seg_ddp.utils.files import claimed_output
from yolo_seg_ddp.utils.options import option
from yolo_seg_ddp.utils.signals import die_with_parent


@dataclass(frozen=True)
class OrthophotoConfig(PredictOptions):
    """Options of `python -m yolo_seg_ddp orthophotos`."""

    source: str = option(None, "GeoTIFF with a place on the map", required=True, metavar="FILE")
    output: str = option(
        "outputs/predictions", f"folder for {GEOPACKAGE} and {GEOJSON}", metavar="DIR"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Predict in blocks, which the ranks share; write map layers; return the exit code."""
    config = parse_config(OrthophotoConfig, __doc__, argv)
    die_with_parent()
    if config.tiles == "off":
        raise UsageError(
            f"--tiles off: --source {config.source} is an orthophoto, which is always cut into "
            "tiles"
        )
    if config.thresholds not in (None, "off"):
        raise UsageError(
            "--thresholds: is for photographs; the guarantee does not hold for an orthophoto"
        )
    ranks = distributed.read_rank_environment()
    with claimed_output(config.output):
        raster = open_orthophoto(Path(config.source))
        predictor, names = open_predictor(replace(config, thresholds="off"), ranks)
        predictor = replace(
            predictor, tiling=predictor.tiling or Tiling(predictor.size_px, config.overlap)
        )
        setup_ddp(predictor.device, ranks)
        counts = write_orthophoto(
            predictor, raster, Path(config.model), names, Path(config.output), ranks
        )
        if ranks.is_main:
            words = (
                f"{counts[number]} {name}" for number, name in enumerate(names) if counts[number]
            )
            print(
                f"{raster.width:,} x {raster.height:,} pixels; found "
                f"{', '.join(words) or 'nothing'}"
            )
            print(
                f"Results in {config.output}: {GEOPACKAGE} (reference system of the raster), "
                f"{GEOJSON} (WGS84)"
            )
        cleanup_ddp()
    return 0


if __name__ == "__main__":
    cv2.setNumThreads(0)
    run_script(main)

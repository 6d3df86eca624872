"""Predicts on an orthophoto and writes its objects for maps: a GeoPackage in the raster's reference
system, GeoJSON in WGS84.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import shapely
from shapely.geometry import LineString, MultiPolygon, mapping

from yolo_seg_ddp.data.mask_rings import outline_of
from yolo_seg_ddp.extras.orthophotos.blocks import (
    BlockPiece,
    FinishedBlocks,
    cut_blocks,
    join_blocks,
    lines_of,
    predict_block,
)
from yolo_seg_ddp.extras.orthophotos.raster import WGS84, Orthophoto, transformer
from yolo_seg_ddp.predict.merge_tiles import MergedInstance
from yolo_seg_ddp.predict.regions import Corners
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import ADVICE, UserError, one_line, print_warning, printable
from yolo_seg_ddp.utils.files import new_text_file
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.text import plain_text

GEOPACKAGE, GEOJSON, BLOCKS = "detections.gpkg", "detections.geojson", ".orthophoto-blocks"
LAYERS = {"polygons": ("MultiPolygon", "area_m2"), "lines": ("LineString", "length_m", "width_m")}
DEGREE_DECIMALS, METRE_DECIMALS = 8, 3  # both are millimetres


def write_orthophoto(
    predictor: Predictor,
    raster: Orthophoto,
    model: Path,
    names: Sequence[str],
    folder: Path,
    ranks: distributed.RankInfo,
) -> Counter[int]:
    """Predict on a raster in blocks and write both files; return on rank 0 how many objects of each
    class there are.

    `predictor` needs a tiling. Every rank must reach this: the ranks share the blocks, and rank 0
    joins them. Blocks that an earlier, killed run finished are used again if raster, model and
    options are the same.
    """
    assert predictor.tiling is not None
    rows = cut_blocks(raster.width, raster.height, predictor.tiling)
    blocks = [block for row in rows for block in row]
    done = FinishedBlocks(folder / BLOCKS, _block_settings(predictor, raster, model))
    finished = (
        distributed.broadcast_from_main(distributed.run_on_main(lambda: done.prepare(len(blocks))))
        or []
    )
    if finished and ranks.is_main:
        print(
            f"{len(finished)} of {len(blocks)} blocks are there from a run that was stopped",
            flush=True,
        )
    mine = sorted(set(range(len(blocks))) - set(finished))[ranks.rank :: ranks.world_size]
    for number in distributed.apart(Progress("blocks", len(mine), ranks.is_main)(mine)):
        done.save(
            number, predict_block(predictor, raster.read(blocks[number]), number, blocks[number])
        )
    most = predictor.max_detections
    return (
        distributed.run_on_main(lambda: _join(rows, done, MapLayers(folder, raster, names), most))
        or Counter()
    )


def _join(
    rows: list[list[Corners]], done: FinishedBlocks, layers: MapLayers, most: int
) -> Counter[int]:
    """Write the objects of all blocks; return their number by class.

    Warns of blocks with `most` detections: some may be lost.
    """
    counts: Counter[int] = Counter()
    full: list[int] = []

    def load(number: int) -> list[BlockPiece]:
        pieces = done.load(number)
        if len(pieces) >= most:
            full.append(number)
        return pieces

    with layers:
        for objects in join_blocks(rows, load):
            counts += layers.add(objects)
    done.remove()
    if full:
        print_warning(
            f"{len(full)} blocks have more than {most} detections: raise --max-detections"
        )
    return counts


def _block_settings(predictor: Predictor, raster: Orthophoto, model: Path) -> str:
    """Return as text everything on which a block's detections depend."""
    digest = hashlib.sha256()
    for file in sorted(model.rglob("*")) if model.is_dir() else [model]:
        if file.is_file():
            digest.update(file.read_bytes())
    status = raster.file.stat()
    has_no_nms = getattr(predictor.model, "end2end", None)
    settings = (
        predictor.size_px,
        predictor.batch_size,
        predictor.max_detections,
        predictor.thin,
        has_no_nms,
    )
    where = (str(raster.file.resolve()), status.st_size, status.st_mtime_ns)
    hardware = (predictor.device.type, str(predictor.autocast_dtype))
    parts = (
        where,
        digest.hexdigest(),
        settings,
        hardware,
        predictor.tiling,
        sorted(predictor.limits.items()),
    )
    return "\n".join(map(repr, parts))


class MapLayers:
    """Writes both files under temporary names; an error removes them. `names`: of the classes.

    Areas and lengths are measured on the ellipsoid of WGS84, whatever the reference system. In
    Mercator's projection, for example, a metre of the map at 60 degrees north is half a metre on
    the ground.
    """

    def __init__(self, folder: Path, raster: Orthophoto, names: Sequence[str]) -> None:
        from pyproj import Geod

        self.raster = raster
        self.names = [plain_text(name) for name in names]
        self._targets = [folder / GEOPACKAGE, folder / GEOJSON]
        self._parts = [target.with_name(f".part-{target.name}") for target in self._targets]
        for part in self._parts:
            part.unlink(missing_ok=True)
        self._to_degrees = transformer(raster.crs, WGS84)
        self._ellipsoid = Geod(ellps="WGS84")
        self._json = new_text_file(self._parts[1])
        self._json.write('{"type": "FeatureCollection", "features": [')
        self._separator = "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.unlink, missing_ok=True)
            if kind is None:
                self._json.write("\n]}\n")
            self._json.close()
            if kind is None:
                for part, target in zip(self._parts, self._targets, strict=True):
                    os.replace(part, target)

    def add(self, objects: Sequence[MergedInstance]) -> Counter[int]:
        """Write objects; a wire of several lines becomes several. Return their number by class."""
        rows: dict[str, list[tuple[Any, list[Any]]]] = {}
        counts: Counter[int] = Counter()
        for detected in objects:
            properties = {
                "class": self.names[detected.class_id],
                "confidence": round(detected.score, 5),
            }
            for layer, pixels, width_px in _shapes(detected):
                on_map = shapely.transform(pixels, self.raster.to_map)
                degrees = shapely.transform(
                    on_map, lambda points: np.stack(self._to_degrees.transform(*points.T), axis=1)
                )
                degrees = shapely.orient_polygons(degrees)
                sizes = [
                    round(size, METRE_DECIMALS) for size in self._sizes(pixels, degrees, width_px)
                ]
                rows.setdefault(layer, []).append((on_map, [*properties.values(), *sizes]))
                self._write_json(
                    degrees, properties | dict(zip(LAYERS[layer][1:], sizes, strict=True))
                )
                counts[detected.class_id] += 1
        self._add_rows(rows)
        return counts

    def _sizes(self, pixels: Any, degrees: Any, width_px: float) -> list[float]:
        """Return the area in square metres, or the length and the width in metres."""
        if not width_px:
            return [abs(self._ellipsoid.geometry_area_perimeter(degrees)[0])]
        length_m = self._ellipsoid.geometry_length(degrees)
        return [length_m, width_px * length_m / pixels.length]

    def _write_json(self, degrees: Any, properties: dict[str, Any]) -> None:
        parts = shapely.get_parts(degrees)
        shape = parts[0] if len(parts) == 1 else degrees
        geometry = mapping(shapely.transform(shape, lambda points: points.round(DEGREE_DECIMALS)))
        feature = {"type": "Feature", "geometry": geometry, "properties": properties}
        self._json.write(self._separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
        self._separator = ",\n"

    def _add_rows(self, rows: dict[str, list[tuple[Any, list[Any]]]]) -> None:
        """Append features to the GeoPackage's layers; the first call creates them."""
        from pyogrio.raw import write

        path = self._parts[0]
        kinds = (object, np.float64, np.float64, np.float64)
        is_new = not path.exists()
        for layer, (geometry_type, *sizes) in LAYERS.items():
            features = rows.get(layer, [])
            if features or is_new:
                fields = ["class", "confidence", *sizes]
                columns = [
                    np.array([row[at] for _, row in features], kinds[at])
                    for at in range(len(fields))
                ]
                shapes = np.array([shapely.to_wkb(geometry) for geometry, _ in features], object)
                where = {"layer": layer, "driver": "GPKG", "append": not is_new}
                try:
                    write(
                        path,
                        shapes,
                        columns,
                        fields,
                        geometry_type=geometry_type,
                        crs=self.raster.crs,
                        **where,
                    )
                # GDAL's texts do not say which.
                except RuntimeError as error:
                    reason = f"the disk is full, or GDAL cannot write there ({one_line(error, 80)})"
                    name = printable(str(self._targets[0]), 400)
                    raise UserError(f"{name}: {reason}; {ADVICE[errno.ENOSPC]}") from error


def _shapes(detected: MergedInstance) -> Iterator[tuple[str, Any, float]]:
    """Yield layer, geometry and width, both in pixels, of each line of an object; without lines, of
    its outline, width 0.
    """
    lines = lines_of(detected)
    for points, width_px in lines:
        yield "lines", LineString(points), width_px
    if not lines:
        parts = [
            outline_of(piece.mask.crop(piece.mask.corners), *piece.mask.corners[:2])
            for piece in detected.pieces
        ]
        yield "polygons", MultiPolygon(shapely.get_parts(shapely.union_all(parts)).tolist()), 0.0

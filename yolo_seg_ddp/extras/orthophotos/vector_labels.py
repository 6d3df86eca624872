"""Reads labels on a map, polygons and lines with a class, from GeoJSON and GeoPackage files,
without GDAL.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import shapely
from shapely.geometry.base import BaseGeometry

from yolo_seg_ddp.extras.orthophotos.raster import WGS84, Orthophoto, plain_crs, transformer
from yolo_seg_ddp.prepare.parsing.label_file import read_json
from yolo_seg_ddp.prepare.parsing.outlines import MAX_POINTS
from yolo_seg_ddp.utils.errors import UserError, one_line, printable

CLASS_COLUMNS = ("class", "label", "name", "type")  # the first that there is
WIDTH_COLUMN = "width_m"
MAX_FEATURES = 1_000_000
MAX_VALUE_BYTES = 32_000_000  # of a cell of a GeoPackage
SWAPPED = "latitude and longitude look swapped: GeoJSON has longitude first"
KINDS = ("Polygon", "MultiPolygon", "LineString", "MultiLineString")
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    sqlite3.Error,
    shapely.errors.ShapelyError,
)
_ENVELOPE_BYTES = (0, 32, 48, 48, 64)  # GeoPackage 1.3, 2.1.3: by the third bits of the flags
_EPSG = re.compile(r"EPSG:(?:[\d.]*:)?(\d+)$")


@dataclass(frozen=True)
class MapLabel:
    """An object on the map: its class, a polygon or line, and its width in metres if the file says
    it.

    fits_swapped: it lies outside the raster, but with its axes swapped it would lie on it.
    """

    name: str
    shape: BaseGeometry
    width_m: float | None
    fits_swapped: bool = False


def read_map_labels(files: Sequence[Path], raster: Orthophoto) -> tuple[list[MapLabel], int]:
    """Return all objects in the raster's reference system, and the number of features that are
    neither polygon nor line.

    Raises UserError for a file that cannot be read, and for a feature without a class.
    """
    labels: list[MapLabel] = []
    num_skipped = 0
    for file in files:
        try:
            with file.open("rb") as stream:
                is_database = stream.read(16) == b"SQLite format 3\0"
            for source, shape, properties in _geopackage(file) if is_database else _geojson(file):
                if shape is None or shape.geom_type not in KINDS or shape.is_empty:
                    num_skipped += 1
                    continue
                labels.append(
                    _label(*_moved(shape, transformer(source, raster.crs), raster), properties)
                )
                if len(labels) > MAX_FEATURES:
                    raise ValueError(f"more than {MAX_FEATURES:,} objects")
        except UNREADABLE as error:
            raise UserError(
                f"{printable(str(file), 400)}: {one_line(error)}; export it again from your map"
            ) from error
    return labels, num_skipped


def _label(shape: BaseGeometry, fits_swapped: bool, properties: dict[str, Any]) -> MapLabel:
    properties = {str(name).lower(): value for name, value in properties.items()}
    name = next((properties[column] for column in CLASS_COLUMNS if properties.get(column)), None)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(
            f"a feature without a class: it needs a text in the column `{CLASS_COLUMNS[0]}`"
        )
    width = properties.get(WIDTH_COLUMN)
    is_width = isinstance(width, int | float) and 0 < width < 1000
    return MapLabel(printable(name.strip()), shape, width if is_width else None, fits_swapped)


def _moved(shape: BaseGeometry, to_raster: Any, raster: Orthophoto) -> tuple[BaseGeometry, bool]:
    """Return a shape in the raster's reference system, and whether it lies on the raster only if
    its axes are swapped.
    """
    if shapely.get_num_coordinates(shape) > MAX_POINTS:
        raise ValueError(
            f"a feature of {shapely.get_num_coordinates(shape):,} points, more than {MAX_POINTS:,}"
        )
    flat = shapely.force_2d(shape)
    moved = shapely.transform(flat, lambda points: np.stack(to_raster.transform(*points.T), axis=1))
    if _meets(moved, raster):
        return moved, False
    fits_swapped = _meets(
        shapely.transform(
            flat, lambda points: np.stack(to_raster.transform(*points.T[::-1]), axis=1)
        ),
        raster,
    )
    if not np.isfinite(shapely.get_coordinates(moved)).all():
        raise ValueError(
            f"a point that the raster's reference system cannot hold{f'; {SWAPPED}' * fits_swapped}"
        )
    return moved, fits_swapped


def _meets(shape: BaseGeometry, raster: Orthophoto) -> bool:
    corners = raster.to_pixels(np.reshape(shape.bounds, (2, 2)))
    is_beside = (corners.max(axis=0) < 0) | (corners.min(axis=0) > (raster.width, raster.height))
    return bool(np.isfinite(shapely.get_coordinates(shape)).all() and not is_beside.any())


def _geojson(file: Path) -> Iterator[tuple[str, BaseGeometry | None, dict[str, Any]]]:
    """Yield reference system, geometry and properties.

    WGS84 (RFC 7946), or what QGIS wrote as `crs`.
    """
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError("a list, not a FeatureCollection")
    source = _named_crs(content.get("crs"))
    for feature in content.get("features", ()):
        properties, geometry = feature.get("properties"), feature.get("geometry")
        shape = shapely.from_geojson(json.dumps(geometry)) if geometry else None
        yield source, shape, properties if isinstance(properties, dict) else {}


def _named_crs(value: Any) -> str:
    properties = value.get("properties") if isinstance(value, dict) else None
    name = str(properties.get("name", "")) if isinstance(properties, dict) else ""
    if match := _EPSG.search(name):
        return f"EPSG:{match[1]}"
    if value is None or name.endswith("CRS84"):
        return WGS84
    raise ValueError(
        f"reference system {printable(name or json.dumps(value))}: export with EPSG:4326"
    )


def _geopackage(file: Path) -> Iterator[tuple[str, BaseGeometry | None, dict[str, Any]]]:
    """Yield the features of all tables.

    Only plain tables are read: a view could compute anything.
    """
    address = f"file:{quote(str(file.resolve()))}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True)) as base:
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        base.execute("PRAGMA trusted_schema = OFF")
        systems = {
            row["srs_id"]: str(row["definition"]) for row in _rows(base, "gpkg_spatial_ref_sys")
        }
        for layer in _rows(base, "gpkg_geometry_columns"):
            source = plain_crs(file, systems.get(layer["srs_id"], ""))
            for row in _rows(base, str(layer["table_name"])):
                data = row.pop(layer["column_name"])
                yield source, _geometry(data) if data else None, row


def _rows(base: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    kind = base.execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    if kind is None or kind[0] != "table" or "VIRTUAL" in kind[1].upper().split("(")[0]:
        raise ValueError(f"not a GeoPackage with a plain table {printable(table)}")
    rows = base.execute('SELECT * FROM "{}"'.format(table.replace('"', '""')))
    names = [column[0] for column in rows.description]
    return (dict(zip(names, row, strict=True)) for row in rows)


def _geometry(data: bytes) -> BaseGeometry:
    is_geometry = isinstance(data, bytes) and data[:2] == b"GP" and len(data) > 8
    if not is_geometry or (envelope := data[3] >> 1 & 7) >= len(_ENVELOPE_BYTES):
        raise ValueError("a geometry that is not a GeoPackage's")
    return shapely.from_wkb(data[8 + _ENVELOPE_BYTES[envelope] :])

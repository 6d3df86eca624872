"""The assets of a GeoJSON file, such as poles."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from yolo_seg_ddp.extras.maps.wgs84 import geocentric, offsets_m
from yolo_seg_ddp.utils.contents import mapping, read_back
from yolo_seg_ddp.utils.errors import UserError, printable

MAX_ID_CHARACTERS = 200
# looked up in this order, in any case, if a feature has no id
ID_PROPERTIES = ("asset_id", "pole_id", "id", "name")
# What the `crs` of files from before RFC 7946 may name: a name, a URN, an address of OGC; or EPSG's
# number alone.
WGS84 = re.compile(
    r"((urn:ogc:def:crs:|https?://www\.opengis\.net/def/crs/)?(OGC|EPSG)[:/\d.]*[:/])?(CRS84h?|"
    r"4326)",
    re.I,
)
ASSET_SIGMA_M = 2.0  # of the assets' own positions; an assumption, few registers state theirs


@dataclass(frozen=True)
class Assets:
    """Assets with their positions: degrees (n,), and geocentric metres (n, 3). rows: the numbers of
    their features, from 1.
    """

    ids: tuple[str, ...]
    latitudes: np.ndarray
    longitudes: np.ndarray
    points: np.ndarray
    properties: tuple[dict[str, Any], ...]
    rows: tuple[int, ...]

    @cached_property
    def _tree(self) -> cKDTree:
        return cKDTree(self.points)

    def near(
        self, latitude: float, longitude: float, range_m: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the assets within a range of a position: their numbers (k,) and metres north and
        east of it (k, 2).
        """
        numbers = np.sort(
            self._tree.query_ball_point(geocentric(latitude, longitude), range_m)
        ).astype(int)
        return numbers, offsets_m(latitude, longitude, self.points[numbers])


def read_assets(path: Path, flag: str = "--assets") -> Assets:
    """Read a GeoJSON FeatureCollection of points. Features without geometry are left out.

    Raises UserError that names the file and the feature, counted from 1.
    """
    name = f"{flag} {printable(str(path), 400)}"
    try:
        loaded = read_back(path, mapping, "export it as a GeoJSON FeatureCollection")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{flag} {error}") from error
    features = loaded.get("features")
    if not isinstance(features, list) or loaded.get("type") != "FeatureCollection":
        raise UserError(f"{name}: not a GeoJSON FeatureCollection")
    crs = loaded.get("crs")
    if crs is not None and not _is_wgs84(crs):
        raise UserError(f"{name}: crs {printable(json.dumps(crs))}: export it in WGS84 (EPSG:4326)")
    assets = list(_read_features(features, name))
    if not assets:
        raise UserError(f"{name}: no points in it")
    rows, ids, points, properties = zip(*assets, strict=True)
    longitudes, latitudes = np.array(points, np.float64).T
    return Assets(ids, latitudes, longitudes, geocentric(latitudes, longitudes), properties, rows)


def _is_wgs84(crs: Any) -> bool:
    """Return whether a `crs` names WGS84: as a text, or as GeoJSON 2008, section 3, in its
    properties `name` or `code`.
    """
    properties = crs.get("properties", crs) if isinstance(crs, dict) else {"name": crs}
    return isinstance(properties, dict) and bool(
        WGS84.fullmatch(str(properties.get("name", properties.get("code"))))
    )


def _read_features(
    features: list[Any], name: str
) -> Iterator[tuple[int, str, tuple[float, float], dict[str, Any]]]:
    """Yield the assets' numbers, ids, longitudes and latitudes, and properties."""
    for number, feature in enumerate(features, start=1):
        place = f"{name}: feature {number}"
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise UserError(f"{place}: not a GeoJSON Feature")
        if feature.get("geometry") is not None:
            properties = feature.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            yield number, _id_of(feature, place), _point_of(feature["geometry"], place), properties


def _point_of(geometry: Any, place: str) -> tuple[float, float]:
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    point = geometry.get("coordinates") if isinstance(geometry, dict) else None
    if kind == "MultiPoint" and isinstance(point, list) and len(point) == 1:
        point = point[0]
    elif kind != "Point":
        raise UserError(f"{place}: geometry {printable(repr(kind))}: a Point is expected")
    numbers = point[:2] if isinstance(point, list) else []
    if len(numbers) != 2 or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in numbers
    ):
        raise UserError(
            f"{place}: coordinates {printable(repr(point))}: longitude and latitude are expected"
        )
    longitude, latitude = numbers
    if not (-180 <= longitude <= 180 and -90 <= latitude <= 90):
        raise UserError(
            f"{place}: {printable(f'{longitude}, {latitude}')} are not longitude and latitude in "
            "degrees: export it in WGS84 (EPSG:4326)"
        )
    return float(longitude), float(latitude)


def _id_of(feature: dict[str, Any], place: str) -> str:
    properties = feature.get("properties")
    lower = (
        {key.lower(): value for key, value in properties.items()}
        if isinstance(properties, dict)
        else {}
    )
    for value in (feature.get("id"), *(lower.get(key) for key in ID_PROPERTIES)):
        if (
            isinstance(value, str | int | float)
            and not isinstance(value, bool)
            and str(value).strip()
        ):
            return str(value)[:MAX_ID_CHARACTERS]
    raise UserError(f"{place}: no id, nor a property {', '.join(ID_PROPERTIES)}")

"""The assets of a GeoJSON file, such as poles, and which of them an object in a photograph belongs to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.common.errors import UserError, printable
from utils.common.files import read_text
from utils.predict.maps.wgs84 import geocentric, offsets_m

MAX_FILE_BYTES = 200_000_000  # about a million poles
MAX_ID_CHARACTERS = 200
ID_PROPERTIES = ("asset_id", "pole_id", "id", "name")  # looked up in this order, in any case, if a feature has no id
# What the `crs` of files from before RFC 7946 may name: a name, a URN, an address of OGC; or EPSG's number alone.
WGS84 = re.compile(
    r"((urn:ogc:def:crs:|https?://www\.opengis\.net/def/crs/)?(OGC|EPSG)[:/\d.]*[:/])?(CRS84h?|4326)", re.I
)
TOLERANCE_DEG = 5.0
TOLERANCE_SIGMAS = 2.0
ASSET_SIGMA_M = 2.0  # of the assets' own positions; an assumption, few registers state theirs


@dataclass(frozen=True)
class Assets:
    """Assets with their positions: degrees (n,), and geocentric metres (n, 3)."""

    ids: tuple[str, ...]
    latitudes: np.ndarray
    longitudes: np.ndarray
    points: np.ndarray

    def near(self, latitude: float, longitude: float, range_m: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the assets within a range of a position: their numbers (k,) and metres north and east of it (k, 2)."""
        away = np.linalg.norm(self.points - geocentric(latitude, longitude), axis=1)
        numbers = np.flatnonzero(away <= range_m)
        return numbers, offsets_m(latitude, longitude, self.points[numbers])


@dataclass(frozen=True)
class Sight:
    """What is known of an object's place seen from the camera. `ground_m`: north and east of the camera (2,)."""

    bearing_deg: float | None
    bearing_sigma_deg: float
    camera_sigma_m: float
    ground_m: np.ndarray | None = None
    ground_sigma_m: float = 0.0


@dataclass(frozen=True)
class Match:
    """The asset an object is taken to belong to: its place among those given, and how well it fits."""

    position: int
    beside_m: float  # how far the line of sight passes beside it; without bearing: how far the ground point is from it
    sigma_m: float  # the standard deviation of that
    num_candidates: int


def match_asset(sight: Sight, offsets: np.ndarray) -> Match | None:
    """Choose the asset nearest to the camera of those along the line of sight; None if there is none.

    An asset is along the line of sight if the line passes it within 5 degrees or two standard deviations, whichever is
    more. With a ground point it must also lie within two standard deviations of that point's distance. `offsets` (k, 2)
    are metres north and east of the camera.
    """
    away = np.linalg.norm(offsets, axis=1)
    ground_sigma_m = np.hypot(sight.ground_sigma_m, ASSET_SIGMA_M)
    if sight.bearing_deg is None:  # straight down
        if sight.ground_m is None:
            return None
        beside = away = np.linalg.norm(offsets - sight.ground_m, axis=1)
        sigmas = np.full(len(offsets), ground_sigma_m)
        fits = beside <= TOLERANCE_SIGMAS * sigmas
    else:
        bearing = np.radians(sight.bearing_deg)
        along = offsets @ (np.cos(bearing), np.sin(bearing))
        beside = np.abs(offsets @ (-np.sin(bearing), np.cos(bearing)))
        slope = np.tan(np.radians(min(sight.bearing_sigma_deg, 45.0)))
        sigmas = np.hypot(np.hypot(sight.camera_sigma_m, ASSET_SIGMA_M), np.abs(along) * slope)
        widths = np.maximum(np.abs(along) * np.tan(np.radians(TOLERANCE_DEG)), TOLERANCE_SIGMAS * sigmas)
        fits = beside <= widths
        if sight.ground_m is None:
            fits &= along > 0
        else:
            distance = np.linalg.norm(sight.ground_m)
            fits &= np.abs(along - distance) <= TOLERANCE_SIGMAS * ground_sigma_m
    if not fits.any():
        return None
    best = int(np.flatnonzero(fits)[np.argmin(away[fits])])
    return Match(best, float(beside[best]), float(sigmas[best]), int(fits.sum()))


def read_assets(path: Path) -> Assets:
    """Read a GeoJSON FeatureCollection of points. Features without geometry are left out.

    Raises UserError that names the file and the feature, counted from 1.
    """
    name = printable(str(path), 400)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"--assets {name}: larger than {MAX_FILE_BYTES // 10**6} MB")
        loaded = json.loads(read_text(path))
    except OSError as error:
        raise UserError(f"--assets {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
        raise UserError(f"--assets {name}: not valid JSON: {reason}") from error
    features = loaded.get("features") if isinstance(loaded, dict) else None
    if not isinstance(features, list) or loaded.get("type") != "FeatureCollection":
        raise UserError(f"--assets {name}: not a GeoJSON FeatureCollection")
    crs = loaded.get("crs")
    if crs is not None and not _is_wgs84(crs):
        raise UserError(f"--assets {name}: crs {printable(json.dumps(crs))}: export it in WGS84 (EPSG:4326)")
    found = list(_read_features(features, name))
    if not found:
        raise UserError(f"--assets {name}: no points in it")
    longitudes, latitudes = np.array([point for _, point in found], np.float64).T
    return Assets(tuple(asset_id for asset_id, _ in found), latitudes, longitudes, geocentric(latitudes, longitudes))


def _is_wgs84(crs: Any) -> bool:
    """Return whether a `crs` names WGS84: as a text, or as GeoJSON 2008, section 3, in its properties `name` or `code`."""
    facts = crs.get("properties", crs) if isinstance(crs, dict) else {"name": crs}
    return isinstance(facts, dict) and bool(WGS84.fullmatch(str(facts.get("name", facts.get("code")))))


def _read_features(features: list[Any], name: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the assets' ids and their longitudes and latitudes."""
    for number, feature in enumerate(features, start=1):
        place = f"--assets {name}: feature {number}"
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise UserError(f"{place}: not a GeoJSON Feature")
        if feature.get("geometry") is not None:
            yield _id_of(feature, place), _point_of(feature["geometry"], place)


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
        raise UserError(f"{place}: coordinates {printable(repr(point))}: longitude and latitude are expected")
    longitude, latitude = numbers
    if not (-180 <= longitude <= 180 and -90 <= latitude <= 90):
        raise UserError(
            f"{place}: {printable(f'{longitude}, {latitude}')} are not longitude and latitude in degrees: "
            "export it in WGS84 (EPSG:4326)"
        )
    return float(longitude), float(latitude)


def _id_of(feature: dict[str, Any], place: str) -> str:
    properties = feature.get("properties")
    lower = {key.lower(): value for key, value in properties.items()} if isinstance(properties, dict) else {}
    for value in (feature.get("id"), *(lower.get(key) for key in ID_PROPERTIES)):
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value)[:MAX_ID_CHARACTERS]
    raise UserError(f"{place}: no id, nor a property {', '.join(ID_PROPERTIES)}")

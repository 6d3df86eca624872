"""The assets that the photographs of a folder show: one for all detections of a pole, with position, views and confidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from utils.predict.maps.assets import ASSET_SIGMA_M, Assets
from utils.predict.maps.association import place_flight
from utils.predict.maps.camera import Camera, rotation
from utils.predict.maps.findings import Site, stored_pixels
from utils.predict.maps.matching import GATE, Places, match, misfit
from utils.predict.maps.metadata import PhotoMetadata
from utils.predict.maps.rays import Rays, sight_lines
from utils.predict.maps.wgs84 import geocentric, moved, offsets_m

FLIGHT_GAP_S = 600  # between two photographs of different flights: a changed battery, another place to take off
WORST_SIGMA_M = 30.0  # an asset that is known less exactly has no position
EDGE_SHARE = 0.05  # of the photograph along its edge, where an asset may be cut
LEAST_VIEWS, LEAST_SHARE = 2, 0.5  # a sure asset is in so many photographs, and in more than this share of its looks


@dataclass(frozen=True)
class View:
    """A photograph with a position and a direction, and its detections: boxes (n, 4) xyxy in pixels of its stored frame."""

    file: str
    time: str
    latitude: float
    longitude: float
    up_m: float | None
    sigma_m: float
    camera: Camera
    boxes: np.ndarray
    class_ids: np.ndarray
    numbers: list[int]  # of the detections in the photograph's entry


@dataclass
class Asset:
    """An asset. covariance (2, 2): of its position north and east, in square metres. views: (photograph, detection).

    up_m: height above take-off of its middle. looks: photographs that look at it. known: its
    row in the user's list, beside_m: its distance to that.
    """

    class_id: int
    latitude: float
    longitude: float
    covariance: np.ndarray
    up_m: float
    views: list[tuple[str, int]]
    looks: int = 0
    known: int | None = None
    candidates: int = 0
    beside_m: float | None = None
    asset_id: str = ""

    @property
    def sigma_m(self) -> float:
        """The standard deviation in the worst direction."""
        return float(np.sqrt(np.linalg.eigvalsh(self.covariance)[-1]))

    @property
    def is_placed(self) -> bool:
        """Whether its position is known."""
        return self.sigma_m <= WORST_SIGMA_M

    @property
    def is_sure(self) -> bool:
        """Whether enough photographs show it."""
        return len(self.views) >= LEAST_VIEWS and len(self.views) > LEAST_SHARE * self.looks


@dataclass
class Survey:
    """All assets, the error of position that they share, and the flights: their photographs."""

    assets: list[Asset]
    common_m: float
    flights: list[list[View]]
    site: Site

    def places(self, chosen: Sequence[Asset]) -> Places:
        """Return the positions of some of the assets."""
        return places_of(chosen, self.common_m)

    def looks(self, latitude: np.ndarray, longitude: np.ndarray, up_m: np.ndarray, class_ids: np.ndarray) -> np.ndarray:
        """Return how many photographs look at points (n,), from no farther than an object of the class was seen."""
        points, count = geocentric(latitude, longitude), np.zeros(len(class_ids), int)
        reach = self._reach(class_ids)
        for view in (view for flight in self.flights for view in flight if view.up_m is not None):
            level = offsets_m(view.latitude, view.longitude, points)
            offset = np.column_stack([level, view.up_m - up_m])
            body = offset @ view.camera.attitude
            ahead = np.maximum(body[:, 0], 1e-6)
            place = view.camera.focal_px * body[:, 1:] / ahead[:, None] / (view.camera.width_px, view.camera.height_px)
            is_inside = (np.abs(place) < 0.5 - EDGE_SHARE).all(axis=1) & (body[:, 0] > 0)
            count += is_inside & (np.linalg.norm(offset, axis=1) <= reach)
        return count

    def _reach(self, class_ids: np.ndarray) -> np.ndarray:
        """Return how far from the camera 95 % of the objects of the classes were seen that several photographs show."""
        seen: dict[int, list[float]] = {}
        views = {view.file: view for flight in self.flights for view in flight}
        for asset in self.assets:
            point = geocentric(np.array([asset.latitude]), np.array([asset.longitude]))
            for file, _ in asset.views if len(asset.views) > 1 else ():
                level = offsets_m(views[file].latitude, views[file].longitude, point)[0]
                away = np.hypot(np.linalg.norm(level), (views[file].up_m or asset.up_m) - asset.up_m)
                seen.setdefault(asset.class_id, []).append(float(away))
        limits = {class_id: float(np.quantile(away, 0.95)) for class_id, away in seen.items()}
        usual = float(np.median(list(limits.values()) or [0.0]))
        return np.array([limits.get(int(class_id), usual) for class_id in class_ids])


def places_of(chosen: Sequence[Asset], common_m: float) -> Places:
    """Return the positions of assets of which a part of the error, common_m, is the same for all."""
    return Places(
        np.array([asset.class_id for asset in chosen], int),
        np.array([asset.latitude for asset in chosen], float),
        np.array([asset.longitude for asset in chosen], float),
        np.array([asset.covariance for asset in chosen]).reshape(-1, 2, 2) - common_m**2 * np.eye(2),
        common_m,
    )


def view_of(photo: PhotoMetadata, entry: dict[str, Any]) -> View | None:
    """Return a photograph as the survey needs it; None without position or direction. entry: of predictions.json."""
    angles, focal = photo.gimbal_deg, photo.focal_px
    if photo.position is None or photo.direction_problem is not None or angles is None or focal is None:
        return None
    found = [item for item in entry["detections"] if not item.get("centreline")]  # a wire is at no place
    points = np.array([item["box_xyxy"] for item in found], np.float64).reshape(-1, 2)
    corners = stored_pixels(points, entry["width"], entry["height"], photo).reshape(-1, 2, 2)
    boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    class_ids = np.array([item["class_id"] for item in found], int)
    numbers = [number for number, item in enumerate(entry["detections"]) if not item.get("centreline")]
    camera = Camera(*focal, photo.width, photo.height, rotation(*angles))
    sigma_m = photo.position_sigma_m
    return View(
        entry["file"],
        photo.time or "",
        *photo.position,
        photo.above_take_off_m,
        sigma_m,
        camera,
        boxes,
        class_ids,
        numbers,
    )


def survey(views: Iterable[View], site: Site) -> Survey:
    """Make assets of the detections of photographs, in any order of these."""
    ordered = sorted(views, key=lambda view: (view.time, view.file))
    result = Survey([], 0.0, [], site)
    for flight in _flights(ordered):
        result.flights.append(flight)
        _add_flight(result, *_place(flight, site))
    placed = [asset for asset in result.assets if asset.is_placed]
    if placed:
        facts = [(asset.latitude, asset.longitude, asset.up_m, asset.class_id) for asset in placed]
        latitude, longitude, up_m, class_ids = np.array(facts).T
        for asset, looks in zip(placed, result.looks(latitude, longitude, up_m, class_ids), strict=True):
            asset.looks = max(int(looks), len(asset.views))
    if site.assets is not None:
        _know(result, site.assets, site.asset_range_m)
    return result


def _flights(ordered: list[View]) -> list[list[View]]:
    """Divide photographs, sorted by time, into flights."""
    flights: list[list[View]] = []
    for view in ordered:
        last = flights[-1][-1].time if flights else ""
        gap_s = (_clock(view.time) - _clock(last)).total_seconds() if last and view.time else 0
        if not flights or gap_s > FLIGHT_GAP_S:
            flights.append([])
        flights[-1].append(view)
    return flights


def _clock(time: str) -> datetime:
    return datetime.fromisoformat(time[:19])


def _place(flight: list[View], site: Site) -> tuple[list[Asset], float]:
    """Return a flight's assets and the standard deviation of the error of position that they share."""
    first, errors = flight[0], site.errors
    parts: list[Rays] = []
    members: list[tuple[str, int]] = []
    for number, view in enumerate(flight):
        if len(view.boxes):
            north, east = offsets_m(first.latitude, first.longitude, geocentric(view.latitude, view.longitude)[None])[0]
            at = np.array([north, east, -(view.up_m or 0.0)])
            sigmas_m = view.sigma_m, errors.height_m if view.up_m is not None else np.inf
            parts.append(
                sight_lines(view.camera, at, sigmas_m, view.boxes, view.class_ids, number, site.ground_height_m, errors)
            )
            members += [(view.file, detection) for detection in view.numbers]
    common_m = float(np.sqrt(errors.common_shares[0]) * np.median([view.sigma_m for view in flight]))
    if not parts:
        return [], common_m
    rays = Rays.joined(parts)
    height_sigma_m = float(np.hypot(site.ground_sigma_m, errors.height_m))
    labels, placed = place_flight(rays, site.ground_height_m, max(height_sigma_m, 0.1))
    assets = []
    for number, (position, covariance) in enumerate(zip(placed.positions, placed.covariances, strict=True)):
        rows = np.flatnonzero(labels == number)
        latitude, longitude = moved(first.latitude, first.longitude, position[:2])
        full = covariance[:2, :2] + common_m**2 * np.eye(2)
        views = [members[row] for row in rows]
        assets.append(Asset(int(rays.class_id[rows[0]]), latitude, longitude, full, -position[2], views))
    return assets, common_m


def _add_flight(result: Survey, assets: list[Asset], common_m: float) -> None:
    """Join a flight's assets to those of the flights before it."""
    if not assets:
        return
    if not result.assets:
        result.assets, result.common_m = assets, common_m
        return
    old = [asset for asset in result.assets if asset.is_placed]
    new = [asset for asset in assets if asset.is_placed]
    pairs = match(result.places(old), places_of(new, common_m))
    for i, j in pairs:
        one, other = old[i], new[j]
        weights = np.linalg.inv(one.covariance), np.linalg.inv(other.covariance)
        covariance = np.linalg.inv(weights[0] + weights[1])
        point = geocentric(np.array([other.latitude]), np.array([other.longitude]))
        step = covariance @ weights[1] @ offsets_m(one.latitude, one.longitude, point)[0]
        one.latitude, one.longitude = moved(one.latitude, one.longitude, step)
        one.covariance = covariance
        one.views += other.views
    joined = {id(new[j]) for _, j in pairs}
    result.assets += [asset for asset in assets if id(asset) not in joined]
    result.common_m = float(1 / np.hypot(1 / result.common_m, 1 / common_m))


def _know(result: Survey, known: Assets, range_m: float) -> None:
    """Find for each asset the nearest of the known ones, in standard deviations."""
    views = [view for flight in result.flights for view in flight]
    close = {view.file: known.near(view.latitude, view.longitude, range_m)[0] for view in views if len(view.boxes)}
    for asset in result.assets:
        numbers = np.unique(np.concatenate([close[file] for file, _ in asset.views]))
        offsets = offsets_m(asset.latitude, asset.longitude, known.points[numbers])
        squares = misfit(offsets, asset.covariance + ASSET_SIGMA_M**2 * np.eye(2))
        if (squares <= GATE).any():
            best = int(np.argmin(squares))
            asset.known, asset.candidates = int(numbers[best]), int((squares <= GATE).sum())
            asset.beside_m = float(np.linalg.norm(offsets[best]))

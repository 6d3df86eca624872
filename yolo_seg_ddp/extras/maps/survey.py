"""Finds the assets in the photographs of a folder: all detections of a pole become one asset with a
position and views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from yolo_seg_ddp.extras.maps.assets import ASSET_SIGMA_M
from yolo_seg_ddp.extras.maps.association import Placed, best_pairs, near, place_flight
from yolo_seg_ddp.extras.maps.camera import (
    LEAST_DEPRESSION_DEG,
    Camera,
    Rays,
    rotation,
    sight_lines,
)
from yolo_seg_ddp.extras.maps.findings import Site, stored_pixels
from yolo_seg_ddp.extras.maps.metadata import PhotoMetadata
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, moved, offsets_m

# between two photographs of different flights: a changed battery, another place to take off
FLIGHT_GAP_S = 600
WORST_SIGMA_M = 30.0  # an asset with a larger error has no position
EDGE_SHARE = 0.05  # of the photograph along its edge, where an asset may be cut
# a sure asset has so many views, and was found in more than this share of its looks
LEAST_VIEWS, LEAST_SHARE = 2, 0.5
GATE = 13.82  # 0.999 quantile of the chi-squared distribution with 2 degrees of freedom
ROUNDS = 5
NUM_NEIGHBOURS, FAR_M = 16, 1e4  # places compared with a detection's, and the distance of none
# of the height: the least distance, beside 1 m, of two places of one asset from two photographs
USUAL_SHARE = 0.05
MEDIAN_BY_QUARTILE = 2.4  # of squared distances in the plane
NO_MATCH = 9.0  # squared distance, in the usual squared distances, of places that are not the same


@dataclass(frozen=True)
class Places:
    """Positions (n,) in degrees and their covariances (n, 2, 2) in square metres north and east.

    common_m: standard deviation, in each direction, of a further error that all share; it is not in
    the covariances.
    """

    class_ids: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    covariances: np.ndarray
    common_m: float

    def __len__(self) -> int:
        return len(self.class_ids)

    def rows(self, chosen: np.ndarray) -> Places:
        """Return some of the places."""
        return Places(
            self.class_ids[chosen],
            self.latitude[chosen],
            self.longitude[chosen],
            self.covariances[chosen],
            self.common_m,
        )

    def without_class(self) -> Places:
        """Return the places with one class for all."""
        return replace(self, class_ids=np.zeros(len(self), int))

    def around(self, latitude: float, longitude: float) -> np.ndarray:
        """Return metres north and east of a position (n, 2)."""
        return offsets_m(latitude, longitude, geocentric(self.latitude, self.longitude))


def misfit(difference: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the squared distances in standard deviations of differences (..., 2) with covariances
    (..., 2, 2).
    """
    return np.einsum("...i,...ij,...j->...", difference, np.linalg.inv(covariance), difference)


def match(one: Places, other: Places) -> np.ndarray:
    """Return the likeliest pairs (k, 2) of places of one class that are the same place. Each place
    is in at most one pair.

    The shift between the surveys, common to all places, is estimated from the pairs.
    """
    return compare(one, other, *shift_between(one, other))


def shift_between(one: Places, other: Places) -> tuple[np.ndarray, np.ndarray]:
    """Return the shift from `one` to `other` in metres north and east, (2,), and its covariance (2,
    2).
    """
    spread = (one.common_m**2 + other.common_m**2) * np.eye(2)
    shift = np.zeros(2)
    information = np.linalg.inv(spread + 1e-9 * np.eye(2))
    for _ in range(ROUNDS):
        first, second = compare(one, other, shift, spread).T
        if not len(first):
            break
        weights = np.linalg.inv(one.covariances[first] + other.covariances[second])
        difference = other.around(*_origin(one))[second] - one.around(*_origin(one))[first]
        spread = np.linalg.inv(information + weights.sum(axis=0))
        shift = spread @ np.einsum("nij,nj->i", weights, difference)
    return shift, spread


def compare(one: Places, other: Places, shift: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return the pairs (k, 2) of places of one class within the gate, for a known shift."""
    if not len(one) or not len(other):
        return np.zeros((0, 2), int)
    here = one.around(*_origin(one))
    there = other.around(*_origin(one)) - shift
    wide = other.covariances + spread
    first, second = near(
        Placed(here, one.covariances), Placed(there, wide), one.class_ids, other.class_ids
    )
    squares = misfit(there[second] - here[first], one.covariances[first] + wide[second])
    return best_pairs(first, second, GATE - squares)


def _origin(places: Places) -> tuple[float, float]:
    return float(places.latitude[0]), float(places.longitude[0])


@dataclass(frozen=True)
class View:
    """A photograph with a position and a direction, and its detections: boxes (n, 4) xyxy in pixels
    of its stored frame.
    """

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
    """An asset. covariance (2, 2): of its position north and east, in square metres. views:
    (photograph, detection).

    up_m: height of its middle above take-off. looks: number of photographs that show its place.
    known: its row in the user's list. beside_m: its distance to the position there.
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
    """All assets, the position error that they share, and the photographs of each flight without
    the turned ones.
    """

    assets: list[Asset]
    common_m: float
    flights: list[list[View]]
    site: Site
    turned: set[str] = field(default_factory=set)  # files

    def places(self, chosen: Sequence[Asset]) -> Places:
        """Return the positions of some of the assets."""
        return places_of(chosen, self.common_m)

    def looks(
        self, latitude: np.ndarray, longitude: np.ndarray, up_m: np.ndarray, class_ids: np.ndarray
    ) -> np.ndarray:
        """Return how many photographs show points (n,), from a distance at which objects of the
        class were found.
        """
        points = geocentric(latitude, longitude)
        count = np.zeros(len(class_ids), int)
        reach = self._reach(class_ids)
        tree = cKDTree(points)
        furthest_m = 1.001 * reach.max(initial=0)
        for view in (view for flight in self.flights for view in flight if view.up_m is not None):
            close = np.array(
                tree.query_ball_point(geocentric(view.latitude, view.longitude), furthest_m), int
            )
            level = offsets_m(view.latitude, view.longitude, points[close])
            offset = np.column_stack([level, view.up_m - up_m[close]])
            body = offset @ view.camera.attitude
            ahead = np.maximum(body[:, 0], 1e-6)
            place = (
                view.camera.focal_px
                * body[:, 1:]
                / ahead[:, None]
                / (view.camera.width_px, view.camera.height_px)
            )
            is_inside = (np.abs(place) < 0.5 - EDGE_SHARE).all(axis=1) & (body[:, 0] > 0)
            count[close] += is_inside & (np.linalg.norm(offset, axis=1) <= reach[close])
        return count

    def _reach(self, class_ids: np.ndarray) -> np.ndarray:
        """Return for each class the distance within which 95 % of its objects with several
        photographs were found.
        """
        seen: dict[int, list[float]] = {}
        views = {view.file: view for flight in self.flights for view in flight}
        for asset in self.assets:
            point = geocentric(np.array([asset.latitude]), np.array([asset.longitude]))
            for file, _ in asset.views if len(asset.views) > 1 else ():
                level = offsets_m(views[file].latitude, views[file].longitude, point)[0]
                away = np.hypot(
                    np.linalg.norm(level), (views[file].up_m or asset.up_m) - asset.up_m
                )
                seen.setdefault(asset.class_id, []).append(float(away))
        limits = {class_id: float(np.quantile(away, 0.95)) for class_id, away in seen.items()}
        usual = float(np.median(list(limits.values()) or [0.0]))
        return np.array([limits.get(int(class_id), usual) for class_id in class_ids])


def places_of(chosen: Sequence[Asset], common_m: float) -> Places:
    """Return the positions of assets. The part common_m of their errors is the same for all."""
    return Places(
        np.array([asset.class_id for asset in chosen], int),
        np.array([asset.latitude for asset in chosen], float),
        np.array([asset.longitude for asset in chosen], float),
        np.array([asset.covariance for asset in chosen]).reshape(-1, 2, 2)
        - common_m**2 * np.eye(2),
        common_m,
    )


def view_of(photo: PhotoMetadata, entry: dict[str, Any]) -> View | None:
    """Return a photograph as the survey sees it; None without position or direction.

    entry: of predictions.json.
    """
    angles, focal = photo.gimbal_deg, photo.focal_px
    if (
        photo.position is None
        or photo.direction_problem is not None
        or angles is None
        or focal is None
    ):
        return None
    # a wire is at no place
    detections = [item for item in entry["detections"] if not item.get("centreline")]
    points = np.array([item["box_xyxy"] for item in detections], np.float64).reshape(-1, 2)
    corners = stored_pixels(points, entry["width"], entry["height"], photo).reshape(-1, 2, 2)
    boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    class_ids = np.array([item["class_id"] for item in detections], int)
    numbers = [
        number for number, item in enumerate(entry["detections"]) if not item.get("centreline")
    ]
    camera = Camera(*focal, photo.width, photo.height, rotation(*angles))
    where = *photo.position, photo.above_take_off_m, photo.position_sigma_m
    return View(entry["file"], photo.time or "", *where, camera, boxes, class_ids, numbers)


def survey(views: Iterable[View], site: Site) -> Survey:
    """Find the assets in photographs with detections.

    The order of the photographs does not matter.
    """
    ordered = sorted(views, key=lambda view: (view.time, view.file))
    result = Survey([], 0.0, [], site)
    for every in _flights(ordered):
        result.turned |= find_turned(every, site)
        flight = [view for view in every if view.file not in result.turned]
        result.flights.append(flight)
        _add_flight(result, *_place(flight, site))
    placed = [asset for asset in result.assets if asset.is_placed]
    if placed:
        columns = [
            (asset.latitude, asset.longitude, asset.up_m, asset.class_id) for asset in placed
        ]
        latitude, longitude, up_m, class_ids = np.array(columns).T
        for asset, looks in zip(
            placed, result.looks(latitude, longitude, up_m, class_ids), strict=True
        ):
            asset.looks = max(int(looks), len(asset.views))
    if site.assets is not None:
        shown = [view for flight in result.flights for view in flight if len(view.boxes)]
        known, range_m = site.assets, site.asset_range_m
        close = {view.file: known.near(view.latitude, view.longitude, range_m)[0] for view in shown}
        for asset in result.assets:  # the nearest known asset, in standard deviations
            numbers = np.unique(np.concatenate([close[file] for file, _ in asset.views]))
            offsets = offsets_m(asset.latitude, asset.longitude, known.points[numbers])
            squares = misfit(offsets, asset.covariance + ASSET_SIGMA_M**2 * np.eye(2))
            if (squares <= GATE).any():
                best = int(np.argmin(squares))
                asset.known = int(numbers[best])
                asset.candidates = int((squares <= GATE).sum())
                asset.beside_m = float(np.linalg.norm(offsets[best]))
    return result


def find_turned(flight: Sequence[View], site: Site) -> set[str]:
    """Return the files whose detections lie where other photographs show the same class only if
    they are turned by 180 degrees.

    Viewers turn pixels and keep the gimbal's angles. The clearest one is turned back first: its
    places mislead the others.
    """
    parts: list[np.ndarray] = [
        np.zeros((0, 6))
    ]  # a row for each detection: view, class, place as it is, place if turned
    for number, view in enumerate(flight):
        above_m = (view.up_m or 0.0) - site.ground_height_m
        if view.up_m is not None and above_m > 0 and len(view.boxes):
            camera = replace(view.camera, above_ground_m=above_m)
            centres = (view.boxes[:, :2] + view.boxes[:, 2:]) / 2
            both = centres, np.array([camera.width_px, camera.height_px]) - centres
            start = offsets_m(
                flight[0].latitude,
                flight[0].longitude,
                geocentric(view.latitude, view.longitude)[None],
            )
            is_steep = (
                np.min([camera.depressions(pixels) for pixels in both], axis=0)
                > LEAST_DEPRESSION_DEG
            )
            places = [start + camera.ground_offsets(pixels[is_steep]) for pixels in both]
            parts.append(
                np.column_stack(
                    [np.full(is_steep.sum(), number), view.class_ids[is_steep], *places]
                )
            )
    rows = np.concatenate(parts)
    turned_files: set[str] = set()
    least = (USUAL_SHARE * float(np.median([view.up_m or 0.0 for view in flight]))) ** 2 + 1.0
    for _ in range(len(flight) if len(rows) > 1 else 0):
        tree = cKDTree(rows[:, 2:4])
        squares = []
        for where in (rows[:, 2:4], rows[:, 4:]):
            away_m, neighbours = tree.query(where, k=min(NUM_NEIGHBOURS, len(rows)))
            is_other = (rows[neighbours, 0] != rows[:, :1]) & (rows[neighbours, 1] == rows[:, 1:2])
            squares.append(np.where(is_other, away_m, FAR_M).min(axis=1) ** 2)
        # also if most do not match
        usual = max(float(np.quantile(squares[0], 0.25)) * MEDIAN_BY_QUARTILE, least)
        as_it_is, turned = (
            np.bincount(rows[:, 0].astype(int), (one / usual).clip(max=NO_MATCH)) for one in squares
        )
        gains = np.where(turned < as_it_is / 2, as_it_is - turned, 0)
        clearest = int(np.argmax(gains))
        if gains[clearest] <= GATE:
            break
        turned_files ^= {flight[clearest].file}
        is_clearest = rows[:, 0] == clearest
        rows[is_clearest, 2:] = rows[is_clearest][:, [4, 5, 2, 3]]
    return turned_files


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
    """Return a flight's assets and the standard deviation of the position error that they share."""
    first = flight[0]
    errors = site.errors
    parts: list[Rays] = []
    members: list[tuple[str, int]] = []
    headings = np.array([view.camera.heading for view in flight])
    # its strips are quarter turns apart
    strip_heading = float(np.angle(np.exp(4j * headings).sum())) / 4
    for number, view in enumerate(flight):
        if len(view.boxes):
            north, east = offsets_m(
                first.latitude, first.longitude, geocentric(view.latitude, view.longitude)[None]
            )[0]
            at = np.array([north, east, -(view.up_m or 0.0)])
            sigmas_m = view.sigma_m, errors.height_m if view.up_m is not None else np.inf
            place = (
                view.camera,
                at,
                sigmas_m,
                view.boxes,
                view.class_ids,
                number,
                site.ground_height_m,
            )
            parts.append(sight_lines(*place, errors, strip_heading))
            members += [(view.file, detection) for detection in view.numbers]
    common_m = float(
        np.sqrt(errors.common_shares[0]) * np.median([view.sigma_m for view in flight])
    )
    if not parts:
        return [], common_m
    rays = Rays.joined(parts)
    height_sigma_m = float(np.hypot(site.ground_sigma_m, errors.height_m))
    labels, placed = place_flight(rays, site.ground_height_m, max(height_sigma_m, 0.1))
    assets = []
    of_asset = np.split(np.argsort(labels, kind="stable"), np.bincount(labels).cumsum()[:-1])
    for rows, position, covariance in zip(
        of_asset, placed.positions, placed.covariances, strict=True
    ):
        latitude, longitude = moved(first.latitude, first.longitude, position[:2])
        full = covariance[:2, :2] + common_m**2 * np.eye(2)
        views = [members[row] for row in rows]
        assets.append(
            Asset(int(rays.class_id[rows[0]]), latitude, longitude, full, -position[2], views)
        )
    return assets, common_m


def _add_flight(result: Survey, assets: list[Asset], common_m: float) -> None:
    """Merge a flight's assets with those of earlier flights."""
    if not assets:
        return
    if not result.assets:
        result.assets = assets
        result.common_m = common_m
        return
    old = [asset for asset in result.assets if asset.is_placed]
    new = [asset for asset in assets if asset.is_placed]
    pairs = match(result.places(old), places_of(new, common_m))
    for first, second in pairs:
        one, other = old[first], new[second]
        weights = np.linalg.inv(one.covariance), np.linalg.inv(other.covariance)
        covariance = np.linalg.inv(weights[0] + weights[1])
        point = geocentric(np.array([other.latitude]), np.array([other.longitude]))
        step = covariance @ weights[1] @ offsets_m(one.latitude, one.longitude, point)[0]
        one.latitude, one.longitude = moved(one.latitude, one.longitude, step)
        one.covariance = covariance
        one.views += other.views
    joined = {id(new[second]) for _, second in pairs}
    result.assets += [asset for asset in assets if id(asset) not in joined]
    result.common_m = float(1 / np.hypot(1 / result.common_m, 1 / common_m))

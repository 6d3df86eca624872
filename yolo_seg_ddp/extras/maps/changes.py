"""Finds changes since an earlier flight: assets that are new, gone, moved or of another class, with
the chance of an error.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from shapely import MultiPoint, Point

from yolo_seg_ddp.extras.maps.assets import read_assets
from yolo_seg_ddp.extras.maps.association import best_pairs
from yolo_seg_ddp.extras.maps.survey import Asset, Places, Survey, compare, misfit, shift_between
from yolo_seg_ddp.extras.maps.wgs84 import moved
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.text import plain_text

NEW, GONE, MOVED, CLASS = "new", "gone", "moved", "class"
MOST_CHANCE = 0.05  # a change that errors alone may cause with a higher probability is not reported
FARTHEST_M = 10.0  # longest move of an asset; an asset farther away is another one
MARGIN_M = 50.0  # around the earlier assets: there the earlier flight is assumed to have looked
TO_95 = float(np.sqrt(-2 * np.log(0.05)))  # half axes of the 95 % ellipse in standard deviations
RATES = 0.5, 0.98  # bounds of the share of looks that find an asset
MOST_M = 1e5
DIGITS_M = 0.01  # the file's digits end here


@dataclass(frozen=True)
class Before:
    """The assets of an earlier flight. is_sure (n,): seen often enough. looks: photographs that
    show an asset's place (median).

    places: their class_ids are positions in `classes`, the different names.
    """

    ids: tuple[str, ...]
    classes: tuple[str, ...]
    places: Places
    is_sure: np.ndarray
    looks: float


@dataclass(frozen=True)
class Change:
    """A change: the asset now and its number before, each None if there is none, and the distance
    that it moved, in metres.

    chance: the probability that errors of position, or detections missing by chance, look like this
    change.
    """

    kind: str
    chance: float
    asset: Asset | None
    before: int | None
    moved_m: float | None = None
    looks: int | None = None


def ellipse_of(covariance: np.ndarray) -> tuple[float, float, float]:
    """Return the half axes of the 95 % ellipse in metres, and the bearing of the longer one in
    degrees, 0 to 180.
    """
    (small, large), axes = np.linalg.eigh(covariance)
    bearing = float(np.degrees(np.arctan2(axes[1, 1], axes[0, 1])) % 180)
    return TO_95 * float(np.sqrt(large)), TO_95 * float(np.sqrt(max(small, 0))), bearing


def covariance_of(major_m: float, minor_m: float, bearing_deg: float) -> np.ndarray:
    """Return the covariance (2, 2), north and east, of a 95 % ellipse."""
    angle = np.radians(bearing_deg)
    axes = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return axes @ np.diag([(major_m / TO_95) ** 2, (minor_m / TO_95) ** 2]) @ axes.T


def read_before(file: Path) -> Before:
    """Read the assets.geojson of an earlier flight.

    Raises UserError that names the file, the feature, counted from 1, and what is wrong.
    """
    assets = read_assets(file, "--before")
    ids = tuple(plain_text(one) for one in assets.ids)
    name = f"--before {printable(str(file), 400)}"
    again = next((one for one, number in Counter(ids).items() if number > 1), None)
    if again is not None:
        raise UserError(f"{name}: two features have the id {printable(again)}")
    classes = []
    covariances = []
    common = []
    for properties, row in zip(assets.properties, assets.rows, strict=True):
        place = f"{name}: feature {row}"
        if not isinstance(properties.get("class"), str):
            raise UserError(
                f"{place}: no property class: pass an assets.geojson of python -m yolo_seg_ddp maps"
            )
        major, minor = (
            _number(properties, key, 1e-3, place) for key in ("ellipse_major_m", "ellipse_minor_m")
        )
        bearing = _number(properties, "ellipse_bearing_deg", 0, place)
        shared = _number(properties, "common_sigma_m", 0, place)
        if minor > major or shared * TO_95 > minor + 0.03:
            raise UserError(
                f"{place}: ellipse_minor_m is above ellipse_major_m or below what common_sigma_m "
                "gives"
            )
        classes.append(properties["class"])
        covariances.append(covariance_of(major, minor, bearing))
        common.append(shared)
    every = list(dict.fromkeys(classes))
    shared = min(common)
    rest = np.array(covariances) - shared**2 * np.eye(2)
    values, axes = np.linalg.eigh(rest)
    rest = axes * np.maximum(values, DIGITS_M**2)[:, None] @ axes.mT
    class_ids = np.array([every.index(name) for name in classes])
    places = Places(class_ids, assets.latitudes, assets.longitudes, rest, shared)
    is_sure = np.array([properties.get("sure") is True for properties in assets.properties])
    looks = [properties.get("looks") for properties in assets.properties]
    usual = float(
        np.median(
            [value for value in looks if isinstance(value, int) and 0 < value <= MOST_M] or [1]
        )
    )
    return Before(ids, tuple(every), places, is_sure, usual)


def _number(properties: dict[str, Any], key: str, least: float, place: str) -> float:
    value = properties.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= MOST_M
    ):
        raise UserError(
            f"{place}: {key} {printable(repr(value))}: a number from {least:g} is expected, as in "
            "an assets.geojson"
        )
    return float(value)


def find_changes(survey: Survey, before: Before, names: Sequence[str]) -> list[Change]:
    """Compare a survey with an earlier one.

    Assets that were there before take over the earlier ids.
    """
    now = [asset for asset in survey.assets if asset.is_placed]
    if not now:
        return []
    # the model's classes, then those that it does not know
    every = list(dict.fromkeys([*names, *before.classes]))
    numbers = np.array([every.index(name) for name in before.classes])
    places = replace(before.places, class_ids=numbers[before.places.class_ids])
    work = _Comparison(places, survey.places(now))
    same = compare(work.before, work.here, work.shift, work.spread)
    for earlier, later in same:
        now[later].asset_id = before.ids[earlier]
    looks = work.looks(survey)
    seen = [
        now[later] for earlier, later in same if before.is_sure[earlier] and now[later].looks > 1
    ]
    num_views, num_looks = (
        np.array([(len(asset.views), asset.looks) for asset in seen]).reshape(-1, 2).T[..., None]
    )
    # shares of looks that find an asset; assets that no look found are unknown
    rates = np.linspace(*RATES, 50)
    expected = (num_looks * rates / (1 - (1 - rates) ** num_looks)).sum(axis=0)
    miss = 1 - float(rates[np.argmin(np.abs(expected - num_views.sum()))])
    missed = miss**looks
    missed_before = float(miss**before.looks)
    old = np.setdiff1d(np.flatnonzero(before.is_sure), same[:, 0])
    new = np.setdiff1d(
        [number for number, asset in enumerate(now) if asset.is_sure], same[:, 1]
    ).astype(int)
    changes = []
    for kind, pairs in ((CLASS, work.changed_class), (MOVED, work.moved)):
        for earlier, later in pairs(old, new):
            now[later].asset_id = before.ids[earlier]
            chance = float(missed[earlier] if kind == CLASS else work.chances(earlier, later))
            changes.append(
                Change(
                    kind,
                    chance,
                    now[later],
                    int(earlier),
                    float(work.away(earlier, later)),
                    int(looks[earlier]),
                )
            )
        old = np.setdiff1d(old, [change.before for change in changes])
        new = np.array(
            [later for later in new if all(change.asset is not now[later] for change in changes)],
            int,
        )
    for earlier in old[looks[old] > 0]:
        chance = max(
            float(missed[earlier]), float(work.chances(earlier, np.arange(len(now))).max())
        )
        changes.append(Change(GONE, chance, None, int(earlier), None, int(looks[earlier])))
    area = MultiPoint(work.old).convex_hull.buffer(MARGIN_M)
    for later in new:
        if not area.contains(Point(work.new[later])):
            continue
        chance = max(missed_before, float(work.chances(np.arange(len(before.ids)), later).max()))
        changes.append(Change(NEW, chance, now[later], None))
    return [change for change in changes if change.chance <= MOST_CHANCE]


class _Comparison:
    """The places of two surveys in metres north and east of the first place, without the shift
    between the surveys.
    """

    def __init__(self, before: Places, here: Places) -> None:
        self.before = before
        self.here = here
        self.origin = float(self.before.latitude[0]), float(self.before.longitude[0])
        self.shift, self.spread = shift_between(self.before, here)
        self.old = self.before.around(*self.origin)
        self.new = here.around(*self.origin) - self.shift

    def away(self, earlier: np.ndarray | int, later: np.ndarray | int) -> np.ndarray:
        """Return the distances of earlier places to new ones in metres."""
        return np.linalg.norm(self.new[later] - self.old[earlier], axis=-1)

    def chances(self, earlier: np.ndarray | int, later: np.ndarray | int) -> np.ndarray:
        """Return the probability that position errors alone put two places of one class this far
        apart; 0 for different classes.
        """
        errors = self.before.covariances[earlier] + self.here.covariances[later] + self.spread
        is_same = self.before.class_ids[earlier] == self.here.class_ids[later]
        return np.where(
            is_same, np.exp(-misfit(self.new[later] - self.old[earlier], errors) / 2), 0.0
        )

    def changed_class(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Return the pairs of places that differ only in their classes."""
        blind = self.before.rows(old).without_class(), self.here.rows(new).without_class()
        pairs = compare(*blind, self.shift, self.spread)
        return np.stack([old[pairs[:, 0]], new[pairs[:, 1]]], axis=1)

    def moved(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Return the pairs of places of one class that are near each other but not the same."""
        earlier, later = (side.ravel() for side in np.meshgrid(old, new, indexing="ij"))
        is_same = self.before.class_ids[earlier] == self.here.class_ids[later]
        return best_pairs(
            earlier, later, np.where(is_same, FARTHEST_M - self.away(earlier, later), 0)
        )

    def looks(self, survey: Survey) -> np.ndarray:
        """Return how many photographs show each earlier place."""
        there = np.array([moved(*self.origin, point) for point in self.old + self.shift])
        height_m = np.full(len(there), survey.site.ground_height_m)
        return survey.looks(there[:, 0], there[:, 1], height_m, self.before.class_ids)

"""Measures on simulated flights how often assets are found exactly once, their position errors, and
if the ellipses are right.

    python -m yolo_seg_ddp maps.simulated_flights --flights 100

A flight photographs 60 poles along a line from both sides. 10 % of the detections are missing and 5
% are false. The errors of the satellite position and of the gimbal have a part for the whole flight
and a part for each photograph, with the shares of yolo_seg_ddp/extras/maps/camera.py or
--true-shares. The gimbal's are turns about axes that turn with it, and the common error of its
heading has the other sign on the way back. Positions are compared with those from single
photographs. Then each flight is repeated without changes, and with ten changes: 3 poles new, 3
gone, 2 moved by 4 m, 2 of another class.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from yolo_seg_ddp.extras.maps.camera import COMMON_SHARES, Camera, Errors, rotation
from yolo_seg_ddp.extras.maps.changes import Before, find_changes
from yolo_seg_ddp.extras.maps.findings import Site
from yolo_seg_ddp.extras.maps.survey import Survey, View, survey
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, moved, offsets_m
from yolo_seg_ddp.utils.text import format_table

HOME = (47.3769, 8.5417)
NUM_POLES, POLE_SPACING_M, BESIDE_M, HEIGHT_M = 60, 50.0, 25.0, 30.0
# terrain; the middle of a pole; length of a pole
GROUND_SIGMA_M = 3.7
MIDDLE_M = 6.0
POLE_M = (9.0, 14.0)
WIDTH_PX, HEIGHT_PX, FOCAL_PX = 4000, 3000, 2700.0
MISSED, FALSE = 0.1, 0.05
SPACINGS_M = (45.0, 15.0, 7.5)  # between photographs: 2, 6 and 12 of them show a pole
LIMIT_95 = -2 * np.log(0.05)  # quantile of the chi-squared distribution with 2 degrees of freedom
CLASSES = ("pole", "tower")


@dataclass(frozen=True)
class Setting:
    """The errors of a flight as the survey assumes them. true_shares: the true common shares of the
    variances of position and of angles.
    """

    gps_m: float
    gimbal_deg: float
    spacing_m: float
    true_shares: tuple[float, float] = COMMON_SHARES

    @property
    def site(self) -> Site:
        """The prior knowledge of the survey."""
        return Site(MIDDLE_M, 4.0, errors=Errors(self.gimbal_deg, self.gimbal_deg, 1.0))


def draw_poles(rng: np.random.Generator, number: int = NUM_POLES) -> np.ndarray:
    """Return poles along a line (n, 5): metres north, east and down of the foot, length, class."""
    north = np.cumsum(rng.uniform(0.8, 1.2, number)) * POLE_SPACING_M
    beside = rng.normal(0, 2, number)
    ground = -rng.normal(0, GROUND_SIGMA_M, number)
    return np.stack([north, beside, ground, rng.uniform(*POLE_M, number), np.zeros(number)], axis=1)


def fly(
    poles: np.ndarray, setting: Setting, rng: np.random.Generator
) -> tuple[list[View], list[np.ndarray], np.ndarray]:
    """Photograph poles from two lines beside them.

    Returns the photographs with their detections; the pole of each detection (-1: none); and an
    array (n, 2) with a row for each detection of a pole: the error of a position from that
    photograph alone, and its standard deviation.
    """
    share = np.repeat(setting.true_shares, 3)
    # North, east, down; turns about ahead, right, down.
    sigmas = np.array([setting.gps_m] * 2 + [1.0] + [setting.gimbal_deg] * 3)
    common = np.sqrt(share) * sigmas * rng.normal(size=6)
    independent = np.sqrt(1 - share) * sigmas
    focal_px = FOCAL_PX * (1 + 0.01 * rng.normal())
    views: list[View] = []
    shown, single = [], []
    start = poles[0, 0] - 20 + rng.uniform(0, 10)
    for side in (-1, 1):
        level = rotation(-90 * side, 0, 0)
        believed = Camera(
            FOCAL_PX, 0.01 * FOCAL_PX, WIDTH_PX, HEIGHT_PX, level @ rotation(0, -45, 0)
        )
        common[5] *= -1
        for north in np.arange(start, poles[:, 0].max() + 20, setting.spacing_m):
            wrong = common + independent * rng.normal(size=6)
            at = np.array([north, side * BESIDE_M, -HEIGHT_M])
            # about down, right, ahead: small turns, in any order
            turn = level @ rotation(*wrong[5:2:-1]) @ level.T
            true = replace(believed, attitude=turn @ believed.attitude, focal_px=focal_px)
            boxes, class_ids, pole = _boxes(poles, true, at, rng)
            place = at + wrong[:3]
            number = len(views)
            time = f"2026-05-04T{10 + number // 3600}:{number // 60 % 60:02d}:{number % 60:02d}"
            position = (*moved(*HOME, place[:2]), -place[2])
            detections = (boxes, class_ids, list(range(len(boxes))))
            views.append(
                View(f"{number:04d}.jpg", time, *position, setting.gps_m, believed, *detections)
            )
            shown.append(pole)
            real = pole >= 0
            flat = replace(
                believed, above_ground_m=-place[2] - MIDDLE_M, above_ground_sigma_m=np.hypot(1, 4)
            )
            centres = ((boxes[:, :2] + boxes[:, 2:]) / 2)[real]
            off = np.linalg.norm(
                flat.ground_offsets(centres) + place[:2] - poles[pole[real], :2], axis=1
            )
            single.append(np.column_stack([off, flat.ground_sigmas(centres, setting.gps_m)]))
    return views, shown, np.concatenate(single)


def _boxes(
    poles: np.ndarray, camera: Camera, at: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Return a photograph's boxes (n, 4) xyxy in pixels, their classes, and the pole of each, -1:
    false.
    """
    size = np.array([WIDTH_PX, HEIGHT_PX])
    ends = np.stack([poles[:, :3], poles[:, :3] - np.outer(poles[:, 3], (0, 0, 1))], axis=1) - at
    body = ends @ camera.attitude
    pixels = camera.focal_px * body[..., 1:] / np.maximum(body[..., :1], 1) + size / 2
    low = pixels.min(axis=1) - 15
    high = pixels.max(axis=1) + 15
    middle = (low + high) / 2
    is_seen = (body[..., 0] > 1).all(axis=1) & ((middle > 0) & (middle < size)).all(axis=1)
    shown = np.flatnonzero(is_seen & (rng.random(len(poles)) > MISSED))
    boxes = np.concatenate([low, high], axis=1)[shown]
    boxes += (
        rng.normal(size=boxes.shape)
        * np.sqrt(2)
        * np.hypot(1.0, 0.02 * np.tile(boxes[:, 2:] - boxes[:, :2], 2))
    )
    corners = rng.uniform((0, 0), size - (60, 600), (rng.binomial(max(len(shown), 1), FALSE), 2))
    boxes = np.concatenate([boxes, np.tile(corners, 2) + np.array([0, 0, 60, 600])])
    boxes = np.clip(boxes, 0, np.tile(size, 2))
    pole = np.concatenate([shown, np.full(len(corners), -1)]).astype(int)
    keep = ((boxes[:, 2:] - boxes[:, :2]) > 3).all(axis=1)
    class_ids = np.where(pole >= 0, poles[pole, 4], 0).astype(int)
    return boxes[keep], class_ids[keep], pole[keep]


def judge(poles: np.ndarray, shown: list[np.ndarray], surveyed: Survey) -> dict[str, np.ndarray]:
    """Compare the assets of a survey with the poles that were seen."""
    owners, rows = [], []
    for asset in surveyed.assets:
        votes = Counter(int(shown[int(file[:4])][number]) for file, number in asset.views)
        owner, number = votes.most_common(1)[0]
        if owner >= 0 and 2 * number > len(asset.views):
            owners.append(owner)
            rows.append(asset)
    times = np.bincount(owners, minlength=len(poles))
    seen = np.bincount(np.concatenate([one[one >= 0] for one in shown]), minlength=len(poles))
    several = [
        (asset, owner) for asset, owner in zip(rows, owners, strict=True) if len(asset.views) > 1
    ]
    points = geocentric(*np.array([(asset.latitude, asset.longitude) for asset, _ in several]).T)
    errors = offsets_m(*HOME, points) - poles[[owner for _, owner in several], :2]
    inverse = np.linalg.inv(np.array([asset.covariance for asset, _ in several]))
    return {
        "times": times[seen > 0],
        "error": np.linalg.norm(errors, axis=1),
        "is_covered": np.einsum("ni,nij,nj->n", errors, inverse, errors) <= LIMIT_95,
        "views": np.array([len(asset.views) for asset, _ in several]),
    }


def changed(poles: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, set[int]]]:
    """Return the poles after ten changes, and the poles by their kind of change; new ones are the
    last three.
    """
    chosen = rng.permutation(np.arange(2, NUM_POLES - 2))[:10]
    gone = chosen[:3]
    shifted = chosen[3:5]
    other = chosen[5:7]
    beside = chosen[7:]
    after = poles.copy()
    angle = rng.uniform(0, 2 * np.pi, 2)
    after[shifted, :2] += 4 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    after[other, 4] = 1
    added = poles[beside] + (POLE_SPACING_M / 2, 0, 0, 0, 0)
    after[gone, 2] = 1e4  # out of sight
    kinds = {
        "gone": set(gone),
        "moved": set(shifted),
        "class": set(other),
        "new": set(range(NUM_POLES, NUM_POLES + 3)),
    }
    return np.concatenate([after, added]), kinds


def count_changes(
    before: Survey, now: Survey, poles: np.ndarray, kinds: dict[str, set[int]]
) -> tuple[int, int]:
    """Return the number of planted changes that were found, and of other reported changes."""
    hits = set()
    others = 0
    assets = [asset for asset in before.assets if asset.is_placed]
    sure = np.array([asset.is_sure for asset in assets])
    looks = np.median([asset.looks for asset in assets])
    # as in an earlier flight's assets.geojson
    ids = tuple(str(number) for number in range(len(assets)))
    earlier = Before(ids, CLASSES, before.places(assets), sure, float(looks))
    old = earlier.places.around(*HOME)
    for change in find_changes(now, earlier, CLASSES):
        if change.asset is None:
            place = old[change.before]
        else:
            place = offsets_m(
                *HOME, geocentric(change.asset.latitude, change.asset.longitude)[None]
            )[0]
        nearest = int(np.argmin(np.linalg.norm(poles[:, :2] - place, axis=1)))
        if nearest in kinds.get(change.kind, ()):
            hits.add(nearest)
        else:
            others += 1
    return len(hits), others


def simulate(
    setting: Setting, num_flights: int, seed: int, num_poles: int = NUM_POLES
) -> dict[str, np.ndarray]:
    """Fly a number of times; return the values of `judge` and those of single photographs and
    changes, all together.

    Changes need NUM_POLES.
    """
    results: list[dict[str, np.ndarray]] = []
    for number in range(num_flights):
        varied = (setting.gps_m, setting.gimbal_deg, setting.spacing_m)
        rng = np.random.default_rng((seed, number, *(round(100 * value) for value in varied)))
        poles = draw_poles(rng, num_poles)
        views, shown, single = fly(poles, setting, rng)
        now = survey(views, setting.site)
        values = judge(poles, shown, now) | {
            "single": single[:, 0],
            "is_within": single[:, 0] <= 2 * single[:, 1],
        }
        if num_poles == NUM_POLES:
            again = survey(fly(poles, setting, rng)[0], setting.site)
            after, kinds = changed(poles, rng)
            later = survey(fly(after, setting, rng)[0], setting.site)
            places = np.concatenate([poles, after[NUM_POLES:]])
            hits, others = count_changes(now, later, places, kinds)
            values |= {"false": np.array([count_changes(now, again, poles, {})[1]])}
            values |= {"hits": np.array([hits]), "others": np.array([others])}
        results.append(values)
    return {name: np.concatenate([one[name] for one in results]) for name in results[0]}


def main() -> None:
    """Print the tables of yolo_seg_ddp/extras/maps/research.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flights", type=int, default=100, help="for each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--true-shares", type=float, nargs=2, default=COMMON_SHARES, help="common to a flight"
    )
    args = parser.parse_args()
    rows = []
    for gps_m, gimbal_deg, spacing_m in itertools.product((1.5, 0.03), (0.5, 2.0), SPACINGS_M):
        results = simulate(
            Setting(gps_m, gimbal_deg, spacing_m, tuple(args.true_shares)), args.flights, args.seed
        )
        row = (
            f"{gps_m:g} m, {gimbal_deg:g}°",
            f"{results['views'].mean():.1f}",
            f"{100 * (results['times'] == 1).mean():.1f}",
            f"{100 * (results['times'] - 1).clip(0).mean():.1f}",
            *(f"{np.quantile(results['error'], share):.2f}" for share in (0.5, 0.95)),
            f"{100 * results['is_covered'].mean():.1f}",
            *(f"{np.quantile(results['single'], share):.2f}" for share in (0.5, 0.95)),
            f"{100 * results['is_within'].mean():.1f}",
            f"{100 * results['false'].mean() / NUM_POLES:.2f}",
            f"{results['hits'].mean():.1f}",
            f"{100 * results['others'].mean() / NUM_POLES:.2f}",
        )
        rows.append(row)
        print("  ".join(row), flush=True)
    head = ["GPS, gimbal", "views", "once %", "twice %", "median m", "95 % m", "in ellipse %"]
    head += ["alone: median m", "95 % m", "in 2 sigma %", "false/100", "found of 10", "others/100"]
    print(format_table(head, rows, right_from=1))


if __name__ == "__main__":
    main()

"""How often assets are found once, how exact their positions are and how honest, on simulated flights with known truth.

    python benchmarks/assets.py --flights 100

A flight photographs 60 poles along a line from both sides. Of the detections 10 % are missing and 5 % are false. The errors of
the satellite position and of the gimbal are drawn once for the flight and once for each photograph, with the shares of
utils/predict/maps/rays.py, or with --common-share. Positions are compared with those of single photographs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import chi2

from utils.common.text import format_table
from utils.predict.maps.association import Placed, place_flight
from utils.predict.maps.camera import Camera, rotation
from utils.predict.maps.rays import COMMON_SHARE, Errors, Rays, sight_lines

NUM_POLES, POLE_SPACING_M, BESIDE_M, HEIGHT_M = 60, 50.0, 25.0, 30.0
GROUND_SIGMA_M, MIDDLE_M, POLE_M = 3.7, 6.0, (9.0, 14.0)  # terrain; the middle of a pole; length of a pole
WIDTH_PX, HEIGHT_PX, FOCAL_PX = 4000, 3000, 2700.0
MISSED, FALSE = 0.1, 0.05
SPACINGS_M = (45.0, 15.0, 7.5)  # between photographs: two, six, and twelve photographs of a pole
LIMIT_95 = chi2.ppf(0.95, 2)


@dataclass(frozen=True)
class Setting:
    """The true errors of a flight."""

    gps_m: float
    gimbal_deg: float
    spacing_m: float
    common_share: float = COMMON_SHARE


@dataclass(frozen=True)
class Flight:
    """A flight: its lines of sight, the pole that each shows (-1: none), the positions by one photograph with their errors."""

    rays: Rays
    pole: np.ndarray
    ground: np.ndarray
    ground_sigma_m: np.ndarray


def draw_poles(rng: np.random.Generator) -> np.ndarray:
    """Return foot and length of poles along a line (n, 4): north, east, down, length."""
    north = np.cumsum(rng.uniform(0.8, 1.2, NUM_POLES)) * POLE_SPACING_M
    return np.stack(
        [
            north,
            rng.normal(0, 2, NUM_POLES),
            -rng.normal(0, GROUND_SIGMA_M, NUM_POLES),
            rng.uniform(*POLE_M, NUM_POLES),
        ],
        axis=1,
    )


def fly(poles: np.ndarray, setting: Setting, rng: np.random.Generator) -> Flight:
    """Photograph poles from two flight lines; return what was detected."""
    share = setting.common_share
    sigmas = np.array([setting.gps_m] * 2 + [1.0] + [setting.gimbal_deg] * 3)  # north, east, down; turns about these
    common, own = np.sqrt(share) * sigmas * rng.normal(size=6), np.sqrt(1 - share) * sigmas
    errors = Errors(setting.gimbal_deg, setting.gimbal_deg, 1.0)
    focal_px = FOCAL_PX * (1 + 0.01 * rng.normal())
    parts, truth, single = [], [], []
    for side in (-1, 1):
        for north in np.arange(poles[0, 0] - 20 + rng.uniform(0, 10), poles[-1, 0] + 20, setting.spacing_m):
            wrong = common + own * rng.normal(size=6)
            at = np.array([north, side * BESIDE_M, -HEIGHT_M])
            believed = Camera(FOCAL_PX, 0.01 * FOCAL_PX, WIDTH_PX, HEIGHT_PX, rotation(-90 * side, -45, 0))
            turn = rotation(*wrong[5:2:-1])  # about down, east, north; small, so that the order does not matter
            true = replace(believed, attitude=turn @ believed.attitude, focal_px=focal_px)
            boxes, shown = _boxes(poles, true, at, rng)
            number = len(truth)
            lines = sight_lines(
                believed, at + wrong[:3], (setting.gps_m, 1.0), boxes, np.zeros(len(boxes), int), number, MIDDLE_M, errors
            )
            parts.append(lines)
            truth.append(shown)
            above = replace(believed, above_ground_m=HEIGHT_M - wrong[2] - MIDDLE_M, above_ground_sigma_m=np.hypot(1, 4))
            centres = (boxes[:, :2] + boxes[:, 2:]) / 2
            single.append(
                np.c_[above.ground_offsets(centres) + (at + wrong[:3])[:2], above.ground_sigmas(centres, setting.gps_m)]
            )
    ground = np.concatenate(single)
    return Flight(Rays.joined(parts), np.concatenate(truth), ground[:, :2], ground[:, 2])


def _boxes(
    poles: np.ndarray, camera: Camera, at: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return a photograph's boxes (n, 4) xyxy in pixels, and the pole of each, -1: false."""
    ends = np.stack([poles[:, :3], poles[:, :3] - np.outer(poles[:, 3], (0, 0, 1))], axis=1) - at
    body = ends @ camera.attitude
    in_front = (body[..., 0] > 1).all(axis=1)
    pixels = camera.focal_px * body[..., 1:] / np.maximum(body[..., :1], 1) + (WIDTH_PX / 2, HEIGHT_PX / 2)
    low, high = pixels.min(axis=1) - 15, pixels.max(axis=1) + 15
    middle, size = (low + high) / 2, np.array([WIDTH_PX, HEIGHT_PX])
    is_seen = in_front & ((middle > 0) & (middle < size)).all(axis=1) & (rng.random(len(poles)) > MISSED)
    shown = np.flatnonzero(is_seen)
    boxes = np.concatenate([low, high], axis=1)[shown]
    sides = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    boxes = boxes + rng.normal(size=boxes.shape) * np.sqrt(2) * np.hypot(1.0, 0.02 * sides)
    num_false = rng.binomial(max(len(shown), 1), FALSE)
    corners = rng.uniform((0, 0), size - (60, 600), (num_false, 2))
    boxes = np.concatenate([boxes, np.concatenate([corners, corners + (60, 600)], axis=1)])
    boxes = np.clip(boxes, 0, np.tile(size, 2))
    keep = ((boxes[:, 2:] - boxes[:, :2]) > 3).all(axis=1)
    return boxes[keep], np.r_[shown, np.full(num_false, -1)][keep]


def judge(poles: np.ndarray, setting: Setting, flight: Flight, labels: np.ndarray, placed: Placed) -> dict[str, np.ndarray]:
    """Compare the assets of a flight with its poles."""
    num = len(placed.positions)
    votes = np.zeros((num, len(poles) + 1), int)
    np.add.at(votes, (labels, flight.pole), 1)  # the last column: false
    views = votes.sum(axis=1)
    owner = np.where(2 * votes.max(axis=1) > views, votes.argmax(axis=1), -1)
    is_visible = np.isin(np.arange(len(poles)), flight.pole)
    times = np.array([((owner == pole) & (views > 1)).sum() or (owner == pole).any() for pole in range(len(poles))])
    extra = np.array([(owner == pole).sum() - 1 for pole in range(len(poles))])
    real = np.flatnonzero((owner >= 0) & (owner < len(poles)))
    covariance = placed.covariances[real, :2, :2] + setting.common_share * setting.gps_m**2 * np.eye(2)
    error = placed.positions[real, :2] - poles[owner[real], :2]
    misfit = np.einsum("ni,nij,nj->n", error, np.linalg.inv(covariance), error)
    is_true = flight.pole >= 0
    wrong = np.linalg.norm(flight.ground[is_true] - poles[flight.pole[is_true], :2], axis=1)
    return {
        "once": (times == 1)[is_visible] & (extra[is_visible] == 0),
        "duplicates": extra[is_visible],
        "error": np.linalg.norm(error, axis=1)[views[real] > 1],
        "is_covered": (misfit <= LIMIT_95)[views[real] > 1],
        "views": views[real],
        "single_error": wrong,
        "single_within": wrong <= 2 * flight.ground_sigma_m[is_true],
        "single_sigma": flight.ground_sigma_m[is_true],
    }


def simulate(setting: Setting, num_flights: int, seed: int) -> dict[str, np.ndarray]:
    """Fly and place a number of flights; return the values of `judge`, all flights together."""
    found = []
    for number in range(num_flights):
        rng = np.random.default_rng((seed, number))
        poles = draw_poles(rng)
        flight = fly(poles, setting, rng)
        found.append(judge(poles, setting, flight, *place_flight(flight.rays, MIDDLE_M, 4.0)))
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def main() -> None:
    """Print the table of docs/map.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flights", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--common-share", type=float, default=COMMON_SHARE)
    args = parser.parse_args()
    rows = []
    for gps_m in (1.5, 0.03):
        for gimbal_deg in (0.5, 2.0):
            for spacing_m in SPACINGS_M:
                found = simulate(Setting(gps_m, gimbal_deg, spacing_m, args.common_share), args.flights, args.seed)
                error, single = found["error"], found["single_error"]
                rows.append([
                    gps_m, gimbal_deg, f"{found['views'][found['views']>1].mean():.1f}", f"{100 * found['once'].mean():.1f} %",
                    f"{100 * found['duplicates'].mean():.1f}", f"{np.median(error):.2f}", f"{np.quantile(error, .95):.2f}",
                    f"{100 * found['is_covered'].mean():.1f} %", f"{np.median(single):.2f}", f"{np.quantile(single, .95):.2f}",
                    f"{100 * found['single_within'].mean():.1f} %",
                ])
    print(format_table(("GPS", "gimbal", "views", "once", "dup/100", "median", "95%", "coverage", "single median", "95%", "within 2 sigma"), rows))


if __name__ == "__main__":
    main()

"""Which places of two surveys are the same: each at most once, by their distance in standard deviations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from utils.predict.maps.association import Placed, best_pairs, near
from utils.predict.maps.wgs84 import geocentric, offsets_m

GATE = 13.82  # 0.999 quantile of the chi-squared distribution with 2 degrees of freedom
ROUNDS = 5


@dataclass(frozen=True)
class Places:
    """Positions (n,) in degrees and their covariances (n, 2, 2) in square metres north and east.

    common_m: standard deviation, in each direction, of a further error that all share; it is not in the covariances.
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
        facts = self.class_ids[chosen], self.latitude[chosen], self.longitude[chosen], self.covariances[chosen]
        return Places(*facts, self.common_m)

    def without_class(self) -> Places:
        """Return the places as though all were of one class."""
        return replace(self, class_ids=np.zeros(len(self), int))

    def around(self, latitude: float, longitude: float) -> np.ndarray:
        """Return metres north and east of a position (n, 2)."""
        return offsets_m(latitude, longitude, geocentric(self.latitude, self.longitude))


def misfit(difference: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the squared distances in standard deviations of differences (..., 2) with covariances (..., 2, 2)."""
    return np.einsum("...i,...ij,...j->...", difference, np.linalg.inv(covariance), difference)


def match(one: Places, other: Places) -> np.ndarray:
    """Return the pairs (k, 2) of places of one class that are the same: each at most once, and all together the likeliest.

    The shift between the surveys, which all places have in common, is estimated from the pairs.
    """
    return compare(one, other, *shift_between(one, other))


def shift_between(one: Places, other: Places) -> tuple[np.ndarray, np.ndarray]:
    """Return by how many metres north and east `other` lies off `one`, (2,), and the covariance of that (2, 2)."""
    spread = (one.common_m**2 + other.common_m**2) * np.eye(2)
    shift, information = np.zeros(2), np.linalg.inv(spread + 1e-9 * np.eye(2))
    for _ in range(ROUNDS):
        i, j = compare(one, other, shift, spread).T
        if not len(i):
            break
        weights = np.linalg.inv(one.covariances[i] + other.covariances[j])
        difference = other.around(*_origin(one))[j] - one.around(*_origin(one))[i]
        spread = np.linalg.inv(information + weights.sum(axis=0))
        shift = spread @ np.einsum("nij,nj->i", weights, difference)
    return shift, spread


def compare(one: Places, other: Places, shift: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return the pairs (k, 2) of places of one class within the gate, for a known shift."""
    if not len(one) or not len(other):
        return np.zeros((0, 2), int)
    here, there = one.around(*_origin(one)), other.around(*_origin(one)) - shift
    wide = other.covariances + spread
    i, j = near(Placed(here, one.covariances), Placed(there, wide), one.class_ids, other.class_ids)
    squares = misfit(there[j] - here[i], one.covariances[i] + wide[j])
    return best_pairs(i, j, GATE - squares)


def _origin(places: Places) -> tuple[float, float]:
    return float(places.latitude[0]), float(places.longitude[0])

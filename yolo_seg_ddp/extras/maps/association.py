"""Finds which detections of a flight show the same asset, and the positions of the assets.

An asset has at most one detection in each photograph; all its detections have one class. Two groups
of detections are joined under two conditions: one asset is likelier than two, and the smaller
group's squared Mahalanobis distance from the larger one is not larger than errors alone cause.
Between equal choices the order of the detections decides. The caller sorts them, so the result does
not depend on the order of the photographs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree
from scipy.special import chdtri

from yolo_seg_ddp.extras.maps.camera import Rays

RARE = 1e-4  # probability that detections of one asset misfit by more than the gate
# chance to miss a detection; counted at most so often, against two assets at one place
MISSED, MOST_MISSED = 0.3, 10
ASSET_AREA_M2 = 900.0  # on which one asset of a class is expected
FLAT_HEIGHT_SIGMA_M = 50.0
REACH_SIGMAS, MOST_REACH_M = 3.5, 60.0
ROUNDS, PASSES = 8, 4
TRUST = 50.0  # in the assumed errors: they count like so many equations
CHECKED_VIEWS = 3  # least views of an asset whose lines of sight check the assumed errors
PAIRS_AT_ONCE = 20_000
MOST_LIMITS = 1000  # detections of an asset for which the gate is known


@dataclass(frozen=True)
class Placed:
    """Assets of a flight: positions (m, 3) and covariances (m, 3, 3), without the position error
    that all of them share.
    """

    positions: np.ndarray
    covariances: np.ndarray


@dataclass(frozen=True)
class Expected:
    """Prior knowledge: the height of the objects (down is positive), and the common errors as an
    information matrix.

    matrix (size, size) and right (size,), with size = 3 + the number of common errors, are those of
    the common errors, in standard deviations; their parts for the position are 0.
    """

    height_m: float
    height_sigma_m: float
    matrix: np.ndarray
    right: np.ndarray

    @property
    def square(self) -> float:
        """Return the squared sum of the common errors."""
        return float(self.right[3:] @ np.linalg.pinv(self.matrix[3:, 3:]) @ self.right[3:])

    @classmethod
    def before(cls, ground_height_m: float, sigma_m: float, num_common: int) -> Expected:
        """Return the knowledge before any detection."""
        size = 3 + num_common
        return cls(
            -ground_height_m, sigma_m, np.diag([0.0] * 3 + [1.0] * num_common), np.zeros(size)
        )


class Groups:
    """Sums of information over groups of lines of sight (k, ...). number (k, 2): of steep lines in
    each group, and of all.
    """

    def __init__(
        self, matrix: np.ndarray, right: np.ndarray, square: np.ndarray, number: np.ndarray
    ) -> None:
        self.matrix = matrix
        self.right = right
        self.square = square
        self.number = number

    @classmethod
    def of(cls, labels: np.ndarray, rays: Rays, information: tuple[np.ndarray, ...]) -> Groups:
        """Sum information over equal labels, which count from 0."""
        num_groups = int(labels.max(initial=-1)) + 1
        sums = []
        for values in (*information, np.stack([rays.is_steep, np.ones(len(rays))], axis=1)):
            total = np.zeros((num_groups, *values.shape[1:]))
            np.add.at(total, labels, values)
            sums.append(total)
        return cls(*sums)

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.matrix, self.right, self.square, self.number

    def __getitem__(self, rows: np.ndarray) -> Groups:
        return Groups(*(part[rows] for part in self.parts))

    def __add__(self, other: Groups) -> Groups:
        return Groups(
            *(mine + others for mine, others in zip(self.parts, other.parts, strict=True))
        )

    def __sub__(self, other: Groups) -> Groups:
        return Groups(
            *(mine - others for mine, others in zip(self.parts, other.parts, strict=True))
        )

    def height_sigmas(self, expected: Expected) -> np.ndarray:
        """Return the prior standard deviations of the objects' heights (k,); those of objects
        without a steep line are large.
        """
        return np.where(self.number[:, 0] > 0, expected.height_sigma_m, FLAT_HEIGHT_SIGMA_M)

    def equations(self, expected: Expected) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the normal equations with the prior knowledge: (k, size, size), (k, size), squared
        sums (k,).
        """
        weight = 1 / self.height_sigmas(expected) ** 2
        matrix, right = self.matrix + expected.matrix, self.right + expected.right
        matrix[:, 2, 2] += weight
        right[:, 2] += weight * expected.height_m
        return matrix, right, self.square + weight * expected.height_m**2 + expected.square

    def misfit(self, expected: Expected) -> tuple[np.ndarray, np.ndarray]:
        """Return the squared misfit of the best position (k,), and -2 times the logarithm of the
        likelihood (k,).
        """
        matrix, right, square = self.equations(expected)
        root = np.linalg.cholesky(matrix)
        misfit = square - (np.linalg.solve(root, right[:, :, None])[:, :, 0] ** 2).sum(axis=1)
        volume = 2 * np.log(np.diagonal(root, axis1=1, axis2=2)).sum(axis=1)
        volume += 2 * np.log(self.height_sigmas(expected))
        constant = (
            2 * np.log(2 * np.pi / ASSET_AREA_M2) + np.linalg.slogdet(expected.matrix[3:, 3:])[1]
        )
        return misfit, misfit + volume - constant

    def placed(self, expected: Expected) -> Placed:
        """Return the best positions."""
        matrix, right, _ = self.equations(expected)
        inverse = np.linalg.inv(matrix)
        return Placed(np.einsum("kij,kj->ki", inverse, right)[:, :3], inverse[:, :3, :3])


def place_flight(
    rays: Rays, ground_height_m: float, height_sigma_m: float
) -> tuple[np.ndarray, Placed]:
    """Return the asset of each line of sight of a flight (n,), counted from 0, and the assets'
    positions.

    The photographs' common errors are estimated from all assets together; each asset's own lines of
    sight count once. If lines of sight to an asset miss each other by more than the assumed errors,
    larger errors are assumed.
    """
    # of directions that were flown
    rays = replace(rays, common=rays.common[:, :, rays.common.any(axis=(0, 1))])
    expected = Expected.before(ground_height_m, height_sigma_m, rays.common.shape[2])
    labels = np.arange(len(rays))
    distance = rays.distance
    if not len(rays):
        return labels, Placed(np.zeros((0, 3)), np.zeros((0, 3, 3)))
    known = expected
    for _ in range(PASSES):
        # Merge groups, then assign each photograph's detections to groups again, until nothing
        # changes.
        information = rays.information(distance)
        for _ in range(ROUNDS):
            before = labels
            labels = _assign(_merge(labels, rays, information, known), rays, information, known)
            if np.array_equal(labels, before):
                break

        groups = Groups.of(labels, rays, information)
        is_shared = (groups.number[:, 1] > 1)[labels]
        away = np.einsum(
            "ni,ni->n", groups.placed(known).positions[labels] - rays.camera, rays.direction
        )
        distance = np.where(is_shared, np.clip(away, 1.0, None), rays.distance)
        known = _learnt(labels, rays, distance, expected)[0]
        groups = Groups.of(labels, rays, rays.information(distance))
        is_checked = groups.number[:, 1] >= CHECKED_VIEWS
        # equations, less what the position takes
        spare = (2 * groups.number[is_checked, 1] - 2).sum()
        excess = float((groups.misfit(known)[0][is_checked].sum() + TRUST) / (spare + TRUST))
        rays = rays.scaled(max(1.0, excess))
    known, matrices, rights = _learnt(labels, rays, distance, expected)
    groups = Groups.of(labels, rays, rays.information(distance))
    # for each asset the common errors are estimated from the other assets
    groups.matrix[:, 3:, 3:] -= matrices
    groups.right[:, 3:] -= rights
    return labels, groups.placed(known)


def _learnt(
    labels: np.ndarray, rays: Rays, distance: np.ndarray, expected: Expected
) -> tuple[Expected, np.ndarray, np.ndarray]:
    """Return the knowledge of the common errors after all assets, and each asset's contribution to
    it, as matrices and right sides.

    All detections of a photograph together have the weight of one, because they share the
    photograph's own errors.
    """
    weight = 1 / np.bincount(rays.photo)[rays.photo]
    groups = Groups.of(labels, rays, rays.information(distance, weight))
    zeros = np.zeros_like(expected.matrix), np.zeros_like(expected.right)
    nothing = Expected(expected.height_m, expected.height_sigma_m, *zeros)
    matrix, right, _ = groups.equations(nothing)
    gain = np.linalg.solve(matrix[:, :3, :3], matrix[:, :3, 3:]).mT
    matrices = matrix[:, 3:, 3:] - gain @ matrix[:, :3, 3:]
    rights = right[:, 3:] - np.einsum("kij,kj->ki", gain, right[:, :3])
    total, target = expected.matrix.copy(), expected.right.copy()
    total[3:, 3:] += matrices.sum(axis=0)
    target[3:] += rights.sum(axis=0)
    return Expected(expected.height_m, expected.height_sigma_m, total, target), matrices, rights


def _merge(
    labels: np.ndarray, rays: Rays, information: tuple[np.ndarray, ...], expected: Expected
) -> np.ndarray:
    """Join the groups that are each other's best partner; repeat until there are none."""
    while True:
        labels = np.unique(labels, return_inverse=True)[1]
        groups = Groups.of(labels, rays, information)
        num_groups = len(groups.square)
        # in which photographs each group is
        seen = csr_array((np.ones(len(labels), bool), (labels, rays.photo)))
        apart = groups.misfit(expected)
        class_ids = np.zeros(num_groups, int)
        class_ids[labels] = rays.class_id
        first, second = near(groups.placed(expected), None, class_ids, class_ids)
        gain = np.zeros(len(first))
        for part in _parts(len(first)):
            is_free = seen[first[part]].multiply(seen[second[part]]).sum(axis=1) == 0
            one, other = first[part][is_free], second[part][is_free]
            alone = [[values[rows] for values in apart] for rows in (one, other)]
            gain[part][is_free] = _gains(groups[one], groups[other], alone[0], alone[1], expected)
        # No two pairs are equally good.
        rank = np.argsort(np.argsort(gain, kind="stable"))
        best = np.full(num_groups, -1)
        np.maximum.at(best, first, rank)
        np.maximum.at(best, second, rank)
        is_best = (gain > 0) & (rank == best[first]) & (rank == best[second])
        if not is_best.any():
            return labels
        target = np.arange(num_groups)
        target[second[is_best]] = first[is_best]
        labels = target[labels]


def _assign(
    labels: np.ndarray, rays: Rays, information: tuple[np.ndarray, ...], expected: Expected
) -> np.ndarray:
    """Assign each photograph's detections to the groups of other photographs' detections, or to new
    groups.
    """
    groups = Groups.of(labels, rays, information)
    singles = Groups.of(np.arange(len(labels)), rays, information)
    class_ids = np.zeros(len(groups.square), int)
    class_ids[labels] = rays.class_id
    num_members = np.bincount(labels)
    num_groups = len(num_members)
    row, group = near(singles.placed(expected), groups.placed(expected), rays.class_id, class_ids)
    taken = rays.photo * num_groups + labels
    order = np.argsort(taken)
    wanted = rays.photo[row] * num_groups + group
    at = np.minimum(np.searchsorted(taken[order], wanted), len(taken) - 1)
    # The group's detection in this photograph, which is taken out.
    member = np.where(taken[order][at] == wanted, order[at], -1)
    has_others = num_members[group] > (member >= 0)
    row = row[has_others]
    group = group[has_others]
    member = member[has_others]
    gain = np.zeros(len(row))
    alone = singles.misfit(expected)
    for part in _parts(len(row)):
        one = row[part]
        others = groups[group[part]]
        is_in = np.flatnonzero(member[part] >= 0)
        without = others[is_in] - singles[member[part][is_in]]
        for mine, changed in zip(others.parts, without.parts, strict=True):
            mine[is_in] = changed
        each = [values[one] for values in alone]
        gain[part] = _gains(singles[one], others, each, others.misfit(expected), expected)
    result = num_groups + np.arange(len(labels))
    # each group once in each photograph
    detections, chosen = best_pairs(row, rays.photo[row] * num_groups + group, gain).T
    result[detections] = chosen % num_groups
    _, first, inverse = np.unique(result, return_index=True, return_inverse=True)
    # groups from 0 in the order of their first members
    return np.argsort(np.argsort(first))[inverse]


def best_pairs(first: np.ndarray, second: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Choose the pairs (k, 2) with the largest sum of gains.

    A member is in at most one pair. Only gains above 0 count.
    """
    first = first[gain > 0]
    second = second[gain > 0]
    gain = gain[gain > 0]
    one, other = (np.unique(side, return_inverse=True)[1] for side in (first, second))
    size = len(first) + 1
    graph = coo_array((gain, (one, size + other)), shape=(2 * size, 2 * size))
    island = connected_components(graph, directed=False)[1][one]
    order = np.argsort(island, kind="stable")
    chosen = []
    for part in np.split(order, np.flatnonzero(np.diff(island[order])) + 1):
        if len(part) > 1:
            rows, columns = (
                np.unique(side[part], return_inverse=True)[1] for side in (first, second)
            )
            shape = rows.max() + 1, columns.max() + 1
            gains = np.zeros(shape)
            place = np.zeros(shape, int)
            gains[rows, columns], place[rows, columns] = gain[part], part
            best = linear_sum_assignment(-gains)
            part = place[best][gains[best] > 0]
        chosen.append(part)
    rows = np.concatenate(chosen)
    return np.stack([first[rows], second[rows]], axis=1)


def near(
    one: Placed, other: Placed | None, one_class: np.ndarray, other_class: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of equal class that may lie at the same place; without `other` the pairs within
    `one`, each once.
    """
    reaches = [
        np.minimum(
            REACH_SIGMAS * np.sqrt(np.linalg.eigvalsh(placed.covariances[:, :2, :2])[:, -1]),
            MOST_REACH_M,
        )
        for placed in (one, other or one)
    ]
    trees = [cKDTree(placed.positions[:, :2]) for placed in (one, other or one)]
    most = reaches[0].max() + reaches[1].max()
    if other is None:
        first, second = trees[0].query_pairs(most, output_type="ndarray").T
    else:
        lists = trees[1].query_ball_point(
            one.positions[:, :2], reaches[0] + reaches[1].max(), return_sorted=True
        )
        first = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
        second = np.concatenate(lists).astype(int)
    away = np.linalg.norm((one.positions[first] - (other or one).positions[second])[:, :2], axis=1)
    is_near = (one_class[first] == other_class[second]) & (
        away <= reaches[0][first] + reaches[1][second]
    )
    return first[is_near], second[is_near]


def _gains(
    one: Groups,
    other: Groups,
    one_alone: Sequence[np.ndarray],
    other_alone: Sequence[np.ndarray],
    expected: Expected,
) -> np.ndarray:
    """Return the logarithm of how much likelier one asset is than two for each pair of groups; 0
    beyond the gate.

    one_alone, other_alone: the misfit of each group, and -2 times the logarithm of its likelihood.
    """
    limits = chdtri(2 * np.arange(MOST_LIMITS), RARE)
    joint, likelihood = (one + other).misfit(expected)
    sizes = np.stack([one.number[:, 1], other.number[:, 1]]).astype(int)
    larger = np.where(sizes[0] > sizes[1], one_alone[0], other_alone[0])
    fits = joint - larger <= limits[np.minimum(sizes.min(axis=0), MOST_LIMITS - 1)]
    missed = -np.log(MISSED) * np.minimum(sizes.sum(axis=0), MOST_MISSED)
    gain = missed - (likelihood - one_alone[1] - other_alone[1]) / 2
    return np.where(fits, np.maximum(gain, 0), 0)


def _parts(total: int) -> Iterator[slice]:
    return (slice(start, start + PAIRS_AT_ONCE) for start in range(0, total, PAIRS_AT_ONCE))

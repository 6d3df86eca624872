"""A pinhole camera on a gimbal, and its lines of sight to objects, with their errors.

DJI's convention: the axes of the gimbal are forward, right, down. Yaw, pitch and roll rotate them
from north-east-down in the order Z-Y-X. Yaw counts from north to east, pitch is negative below the
horizon, roll rotates about the optical axis. Source: user manual of the DJI Mavic 3E/3T, "Photo
file".

Positions are metres north, east and down of the flight's origin at the height of take-off. Without
errors a line of sight passes through its object. Errors that all photographs of a flight share
(compass, tilt, focal length) do not average out, so they are kept apart from the errors of each
photograph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

# No source gives these for all drones. The heading comes from the compass; users report errors of 5
# degrees.
HEADING_SIGMA_DEG = 3.0  # about the vertical
TILT_SIGMA_DEG = 1.0  # about each horizontal axis
CAMERA_HEIGHT_SIGMA_M = 1.0  # of RelativeAltitude, which drifts with the air pressure
STRAIGHT_DOWN_DEG = 89.0  # steeper lines of sight have no useful bearing
# flatter lines of sight say nothing about the distance of an object near the ground
LEAST_DEPRESSION_DEG = 15.0
# assumed common share of the variance: of position and height, of heading and tilt
COMMON_SHARES = 0.8, 0.5
# error of a box's centre along a side: a constant, and a share of the side
EDGE_SIGMA_PX, EDGE_SIGMA_SHARE = 1.0, 0.02
# error as a share of a box's longer side: its middle shows another point in each photograph
MIDDLE_SHARE = 0.01
# in steeper views the middle between the ends of a vertical object is not defined
STEEPEST_DEG = 78.0
DISTANCE_M, DISTANCE_SIGMA_M = 50.0, 50.0  # assumed if only the direction of an object is known
# Common errors: turns about the level directions ahead of the gimbal and to its right, about down
# for each direction of the flight's strips, and the focal length.
NUM_STRIP_DIRECTIONS = 4  # a quarter turn apart
NUM_COMMON = 2 + NUM_STRIP_DIRECTIONS + 1


@dataclass(frozen=True)
class Camera:
    """Focal length and size in pixels of the stored frame, attitude, and height above the plane of
    the objects.

    attitude: as `rotation` returns it.
    """

    focal_px: float
    focal_sigma_px: float
    width_px: float
    height_px: float
    attitude: np.ndarray
    above_ground_m: float = 1.0
    above_ground_sigma_m: float = 0.0

    @property
    def heading(self) -> float:
        """Return the gimbal's heading in radians from north over east: that of the optical axis, or
        of the frame's upper edge.
        """
        ahead = (
            self.attitude[:2, 0] if np.hypot(*self.attitude[:2, 0]) > 0.5 else -self.attitude[:2, 2]
        )
        return float(np.arctan2(ahead[1], ahead[0]))

    def rays(self, pixels: np.ndarray) -> np.ndarray:
        """Return the unit vectors (n, 3), north-east-down, in which pixels (n, 2) x, y of the
        stored frame look.
        """
        right, down = (pixels - (self.width_px / 2, self.height_px / 2)).T
        body = np.stack([np.full(len(pixels), self.focal_px), right, down], axis=1)
        rays = body @ self.attitude.T
        return rays / np.linalg.norm(rays, axis=1, keepdims=True)

    def ground_offsets(self, pixels: np.ndarray) -> np.ndarray:
        """Return the points where the lines of sight meet the plane: metres north and east of the
        camera (n, 2).

        Every line of sight must point below the horizon.
        """
        rays = self.rays(pixels)
        return rays[:, :2] / rays[:, 2:] * self.above_ground_m

    def bearings(self, pixels: np.ndarray) -> np.ndarray:
        """Return the directions in degrees from north over east, 0 to 360 (n,)."""
        rays = self.rays(pixels)
        return np.degrees(np.arctan2(rays[:, 1], rays[:, 0])) % 360

    def depressions(self, pixels: np.ndarray) -> np.ndarray:
        """Return the angles of the lines of sight below the horizon, in degrees (n,)."""
        return np.degrees(np.arcsin(self.rays(pixels)[:, 2]))

    def bearing_sigmas(self, pixels: np.ndarray) -> np.ndarray:
        """Return the standard deviations of the bearings in degrees, at most 180 (n,)."""
        changes = self._changes(
            lambda camera: camera.bearings(pixels), lambda turned: (turned + 180) % 360 - 180
        )
        return np.minimum(np.sqrt((changes**2).sum(axis=0)), 180.0)

    def ground_sigmas(self, pixels: np.ndarray, camera_sigma_m: float) -> np.ndarray:
        """Return the standard deviations of the points on the ground in their worst direction, in
        metres (n,).

        That is the larger half-axis of the error ellipse. The errors of angles, focal length,
        height and the camera's position are independent and propagate linearly.
        """
        changes = self._changes(lambda camera: camera.ground_offsets(pixels))
        covariance = np.einsum("kni,knj->nij", changes, changes) + camera_sigma_m**2 * np.eye(2)
        return np.sqrt(np.linalg.eigvalsh(covariance)[:, -1])

    def _changes(
        self,
        measure: Callable[[Camera], np.ndarray],
        wrapped: Callable[[np.ndarray], np.ndarray] = lambda change: change,
    ) -> np.ndarray:
        """Return the change of a measure when an input is wrong by its standard deviation, for each
        input (inputs, ...).
        """
        step = 1e-3  # of a standard deviation: the slope at this point
        pairs = zip(self._wrong_by(step), self._wrong_by(-step), strict=True)
        return np.stack(
            [wrapped(measure(more) - measure(less)) / (2 * step) for more, less in pairs]
        )

    def _wrong_by(self, sigmas: float) -> list[Camera]:
        """Return a camera for each input: this one with the input wrong by a number of its standard
        deviations.
        """
        # about down, east, north
        turns = [(HEADING_SIGMA_DEG, 0, 0), (0, TILT_SIGMA_DEG, 0), (0, 0, TILT_SIGMA_DEG)]
        return [
            *(
                replace(self, attitude=rotation(*(sigmas * np.array(turn))) @ self.attitude)
                for turn in turns
            ),
            replace(self, focal_px=self.focal_px + sigmas * self.focal_sigma_px),
            replace(self, above_ground_m=self.above_ground_m + sigmas * self.above_ground_sigma_m),
        ]


def rotation(yaw_deg: float, pitch_deg: float, roll_deg: float) -> np.ndarray:
    """Return the matrix (3, 3) from the gimbal's forward-right-down to north-east-down (order
    Z-Y-X).
    """
    (cy, cp, cr), (sy, sp, sr) = (
        wave(np.radians([yaw_deg, pitch_deg, roll_deg])) for wave in (np.cos, np.sin)
    )
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    about_y = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    about_x = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    return about_z @ about_y @ about_x


@dataclass(frozen=True)
class Errors:
    """Standard deviations of a flight's photographs, and the shares of the variances that they have
    in common.
    """

    heading_deg: float = HEADING_SIGMA_DEG
    tilt_deg: float = TILT_SIGMA_DEG
    height_m: float = CAMERA_HEIGHT_SIGMA_M
    common_shares: tuple[float, float] = COMMON_SHARES


@dataclass(frozen=True)
class Rays:
    """The lines of sight to n detections. All arrays have n rows.

    camera, direction (n, 3): where the line begins, and its unit vector. across (n, 2, 3): two unit
    vectors across it. angle_covariance (n, 2, 2): of the direction along these, in radians.
    camera_covariance (n, 2, 2): of the camera's position along these, without the flight's common
    errors. common (n, 2, NUM_COMMON or less): the rotation of the direction, in radians, by a
    common error of one standard deviation. is_steep (n,): whether the height of the ground gives
    the distance.
    """

    photo: np.ndarray
    class_id: np.ndarray
    camera: np.ndarray
    direction: np.ndarray
    across: np.ndarray
    angle_covariance: np.ndarray
    camera_covariance: np.ndarray
    common: np.ndarray
    distance: np.ndarray
    is_steep: np.ndarray

    def __len__(self) -> int:
        return len(self.photo)

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the lines of sight of several photographs as one object."""
        return cls(
            *(
                np.concatenate([getattr(part, field.name) for part in parts])
                for field in fields(cls)
            )
        )

    def scaled(self, factor: float) -> Self:
        """Return the lines of sight with variances multiplied by a factor; common errors stay as
        they are.
        """
        variances = self.angle_covariance * factor, self.camera_covariance * factor
        return replace(self, angle_covariance=variances[0], camera_covariance=variances[1])

    def information(
        self, distance: np.ndarray, weight: np.ndarray | float = 1.0
    ) -> tuple[np.ndarray, ...]:
        """Return the weighted normal equations of each line of sight, for its object's position and
        the common errors.

        distance (n,): from the camera to the object, which turns angles into metres. Returns, with
        size = 3 + the number of common errors, the matrices (n, size, size), the right sides (n,
        size) and the squared sums (n,). Information of one object's lines of sight adds up.
        """
        design = np.concatenate([self.across, distance[:, None, None] * self.common], axis=2)
        spread = distance[:, None, None] ** 2 * self.angle_covariance + self.camera_covariance
        weights = np.linalg.inv(spread) * np.reshape(weight, (-1, 1, 1))
        target = np.einsum("nij,nj->ni", self.across, self.camera)
        weighted = np.einsum("nki,nkl->nil", design, weights)
        along = np.concatenate(
            [self.direction, np.zeros((len(self), self.common.shape[2]))], axis=1
        )
        ahead = np.einsum("ni,ni->n", self.direction, self.camera) + self.distance
        return (
            weighted @ design + along[:, :, None] * along[:, None] / DISTANCE_SIGMA_M**2,
            np.einsum("nik,nk->ni", weighted, target)
            + along * ahead[:, None] / DISTANCE_SIGMA_M**2,
            np.einsum("ni,nij,nj->n", target, weights, target) + (ahead / DISTANCE_SIGMA_M) ** 2,
        )


def sight_lines(
    camera: Camera,
    at: np.ndarray,
    sigmas_m: tuple[float, float],
    boxes: np.ndarray,
    class_ids: np.ndarray,
    photo: int,
    ground_height_m: float,
    errors: Errors,
    strip_heading: float = 0.0,
) -> Rays:
    """Return the lines of sight to the centres of a photograph's boxes (n, 4) xyxy in pixels of its
    stored frame.

    at (3,): the camera's position. sigmas_m: its standard deviations, horizontal and vertical; the
    latter is infinite if the height is unknown. strip_heading: of the flight's strips in radians,
    or of a quarter turn from them.
    """
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    sides = boxes[:, 2:] - boxes[:, :2]
    direction = _middles(camera, centres, sides)
    across = _across(direction)

    def turned(rays: np.ndarray) -> np.ndarray:
        return np.einsum("nij,nj->ni", across, rays)

    start = camera.rays(centres)

    is_cut = (boxes[:, :2] <= 2) | (
        boxes[:, 2:] >= np.array([camera.width_px, camera.height_px]) - 2
    )
    pixel_sigmas = np.where(is_cut, sides, np.hypot(EDGE_SIGMA_PX, EDGE_SIGMA_SHARE * sides))
    one_pixel = [turned(camera.rays(centres + step) - start) for step in np.eye(2)]
    by_pixels = np.stack(one_pixel, axis=2) * pixel_sigmas[:, None]
    middle = (
        MIDDLE_SHARE
        * sides.max(axis=1)
        * np.linalg.norm(by_pixels, axis=1).max(axis=1)
        / pixel_sigmas.max(axis=1)
    )
    axes = rotation(np.degrees(camera.heading), 0, 0).T  # level ahead, level to the right, down
    turns = np.radians([errors.tilt_deg, errors.tilt_deg, errors.heading_deg])[:, None] * axes
    by_turns = np.stack([turned(np.cross(turn, direction)) for turn in turns], axis=2)
    focal = turned(
        replace(camera, focal_px=camera.focal_px + camera.focal_sigma_px).rays(centres) - start
    )
    of_position, of_angles = errors.common_shares
    angle_covariance = by_pixels @ by_pixels.mT + (1 - of_angles) * by_turns @ by_turns.mT
    angle_covariance[:, 1, 1] += middle**2
    level, height = sigmas_m
    independent_sigmas = np.sqrt(1 - of_position) * np.array([level, level, min(height, 1e4)])
    by_camera = across * independent_sigmas
    drop = -at[2] - ground_height_m  # of the line of sight from the camera to the ground
    is_steep = (
        (direction[:, 2] > np.sin(np.radians(LEAST_DEPRESSION_DEG)))
        & (drop > 0)
        & np.isfinite(height)
    )
    distance = np.where(is_steep, drop / np.where(is_steep, direction[:, 2], 1), DISTANCE_M)
    line = np.broadcast_to(at, direction.shape), direction, across
    strip = (
        round((camera.heading - strip_heading) / (2 * np.pi / NUM_STRIP_DIRECTIONS))
        % NUM_STRIP_DIRECTIONS
    )
    common = np.zeros((len(boxes), 2, NUM_COMMON))
    common[:, :, [0, 1, 2 + strip]] = np.sqrt(of_angles) * by_turns
    common[:, :, -1] = focal
    spread = angle_covariance, by_camera @ by_camera.mT, common
    return Rays(np.full(len(boxes), photo), class_ids, *line, *spread, distance, is_steep)


def _middles(camera: Camera, centres: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return the directions (n, 3) to the middles of upright objects that fill boxes.

    The nearer half of a pole takes more than half of its box. Both ends have the same horizontal
    distance from the camera, so the tangent of the depression of the middle is the mean of the
    ends' tangents.
    """
    right, down = (centres - (camera.width_px / 2, camera.height_px / 2)).T
    ahead, to_right, to_down = camera.attitude[2]  # the vertical in the frame
    lean = np.stack(
        [to_right * camera.focal_px - right * ahead, to_down * camera.focal_px - down * ahead],
        axis=1,
    )
    lean *= (sides / 2 / np.maximum(np.abs(lean), 1e-9)).min(axis=1, keepdims=True)
    ends = np.stack([camera.rays(centres - lean), camera.rays(centres + lean)])
    level = np.linalg.norm(ends[..., :2], axis=2)
    direction = camera.rays(centres)
    is_flat = level.min(axis=0) > np.cos(np.radians(STEEPEST_DEG))
    tangent = (ends[..., 2] / np.maximum(level, 1e-9)).mean(axis=0)
    away = np.linalg.norm(direction[:, :2], axis=1)
    middle = np.stack([direction[:, 0], direction[:, 1], tangent * away], axis=1)
    middle /= np.maximum(np.linalg.norm(middle, axis=1, keepdims=True), 1e-9)
    return np.where(is_flat[:, None], middle, direction)


def _across(direction: np.ndarray) -> np.ndarray:
    """Return two unit vectors perpendicular to each direction (n, 3): a horizontal one and one in
    its vertical plane, (n, 2, 3).
    """
    level = np.stack([-direction[:, 1], direction[:, 0], np.zeros(len(direction))], axis=1)
    length = np.linalg.norm(level, axis=1, keepdims=True)
    level = np.where(length > 1e-6, level / np.maximum(length, 1e-6), (0.0, 1.0, 0.0))
    return np.stack([level, np.cross(direction, level)], axis=1)

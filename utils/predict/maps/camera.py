"""A pinhole camera on a gimbal: in which direction an object lies, where its line of sight meets the ground, how exactly.

DJI's convention: the gimbal's frame is forward, right, down; yaw, pitch and roll turn it from north-east-down in the order
Z-Y-X. Yaw counts from north to east, pitch is negative below the horizon, roll turns about the optical axis.
Source: user manual of the DJI Mavic 3E/3T, "Photo file".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

# No source gives these for all drones. The heading comes from the compass; users report errors of 5 degrees.
HEADING_SIGMA_DEG = 3.0  # about the vertical
TILT_SIGMA_DEG = 1.0  # about each horizontal axis
CAMERA_HEIGHT_SIGMA_M = 1.0  # of RelativeAltitude, which drifts with the air pressure
STRAIGHT_DOWN_DEG = 89.0  # steeper lines of sight have no useful bearing


@dataclass(frozen=True)
class Camera:
    """Focal length and size in pixels of the stored frame, attitude, and height above the plane of the objects.

    attitude: as `rotation` returns it.
    """

    focal_px: float
    focal_sigma_px: float
    width_px: float
    height_px: float
    attitude: np.ndarray
    above_ground_m: float = 1.0
    above_ground_sigma_m: float = 0.0

    def rays(self, pixels: np.ndarray) -> np.ndarray:
        """Return the unit vectors (n, 3), north-east-down, in which pixels (n, 2) x, y of the stored frame look."""
        right, down = (pixels - (self.width_px / 2, self.height_px / 2)).T
        body = np.stack([np.full(len(pixels), self.focal_px), right, down], axis=1)
        rays = body @ self.attitude.T
        return rays / np.linalg.norm(rays, axis=1, keepdims=True)

    def ground_offsets(self, pixels: np.ndarray) -> np.ndarray:
        """Return where the lines of sight meet the plane: metres north and east of the camera (n, 2).

        Every line of sight must point below the horizon.
        """
        rays = self.rays(pixels)
        return rays[:, :2] / rays[:, 2:] * self.above_ground_m

    def bearings(self, pixels: np.ndarray) -> np.ndarray:
        """Return the directions in degrees from north over east, 0 to 360 (n,)."""
        rays = self.rays(pixels)
        return np.degrees(np.arctan2(rays[:, 1], rays[:, 0])) % 360

    def depressions(self, pixels: np.ndarray) -> np.ndarray:
        """Return by how many degrees the lines of sight point below the horizon (n,)."""
        return np.degrees(np.arcsin(self.rays(pixels)[:, 2]))

    def bearing_sigmas(self, pixels: np.ndarray) -> np.ndarray:
        """Return the standard deviations of the bearings in degrees, at most 180 (n,)."""
        changes = self._changes(lambda camera: camera.bearings(pixels), lambda turned: (turned + 180) % 360 - 180)
        return np.minimum(np.sqrt((changes**2).sum(axis=0)), 180.0)

    def ground_sigmas(self, pixels: np.ndarray, camera_sigma_m: float) -> np.ndarray:
        """Return the standard deviations of the points on the ground in their worst direction, in metres (n,).

        That is the larger half-axis of the error ellipse. The errors of angles, focal length, height and the camera's
        position are independent and propagate linearly.
        """
        changes = self._changes(lambda camera: camera.ground_offsets(pixels))
        covariance = np.einsum("kni,knj->nij", changes, changes) + camera_sigma_m**2 * np.eye(2)
        return np.sqrt(np.linalg.eigvalsh(covariance)[:, -1])

    def _changes(
        self,
        measure: Callable[[Camera], np.ndarray],
        wrapped: Callable[[np.ndarray], np.ndarray] = lambda change: change,
    ) -> np.ndarray:
        """Return by how much a measure changes when each input is wrong by its standard deviation (inputs, ...)."""
        step = 1e-3  # of a standard deviation: the slope at this point
        return np.stack(
            [
                wrapped(measure(more) - measure(less)) / (2 * step)
                for more, less in zip(self._wrong_by(step), self._wrong_by(-step), strict=True)
            ]
        )

    def _wrong_by(self, sigmas: float) -> list[Camera]:
        """Return this camera with one input after the other wrong by a number of its standard deviations."""
        turns = [(HEADING_SIGMA_DEG, 0, 0), (0, TILT_SIGMA_DEG, 0), (0, 0, TILT_SIGMA_DEG)]  # about down, east, north
        return [
            *(replace(self, attitude=rotation(*(sigmas * np.array(turn))) @ self.attitude) for turn in turns),
            replace(self, focal_px=self.focal_px + sigmas * self.focal_sigma_px),
            replace(self, above_ground_m=self.above_ground_m + sigmas * self.above_ground_sigma_m),
        ]


def rotation(yaw_deg: float, pitch_deg: float, roll_deg: float) -> np.ndarray:
    """Return the matrix (3, 3) that turns forward-right-down of the gimbal into north-east-down: Z-Y-X."""
    (cy, cp, cr), (sy, sp, sr) = (wave(np.radians([yaw_deg, pitch_deg, roll_deg])) for wave in (np.cos, np.sin))
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    about_y = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    about_x = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    return about_z @ about_y @ about_x

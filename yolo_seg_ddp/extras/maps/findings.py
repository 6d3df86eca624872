"""Locates each detection of a photograph: the properties of its feature on the map."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from yolo_seg_ddp.data.images import points_upright
from yolo_seg_ddp.extras.maps.assets import Assets
from yolo_seg_ddp.extras.maps.camera import (
    CAMERA_HEIGHT_SIGMA_M,
    STRAIGHT_DOWN_DEG,
    Camera,
    Errors,
    rotation,
)
from yolo_seg_ddp.extras.maps.metadata import PhotoMetadata
from yolo_seg_ddp.extras.maps.wgs84 import moved

# Nearer to the horizon a small error of an angle may shift the point on the ground by its whole
# distance.
HIGHEST_PITCH_DEG = -15.0
ON_GROUND, AT_CAMERA, AT_ASSET = "ground", "camera", "asset"
INVERSE_ORIENTATION = {6: 8, 8: 6}  # the others are their own inverse


@dataclass(frozen=True)
class Site:
    """Facts that are not in the photographs' metadata: the ground's height above the take-off
    point, and the assets.

    ground_sigma_m: standard deviation of the objects' heights from it. errors: of the photographs,
    for positions of assets.
    """

    ground_height_m: float = 0.0
    ground_sigma_m: float = 7.0
    assets: Assets | None = None
    asset_range_m: float = 100.0
    errors: Errors = field(default_factory=Errors)


def locate(photo: PhotoMetadata, entry: dict[str, Any], site: Site) -> list[dict[str, Any]]:
    """Return the map properties of a photograph's detections, in their order; unknown values are
    None.

    entry: the photograph's entry of predictions.json: boxes in pixels of the upright picture, which
    may be smaller than the photograph's. The point of an object is the centre of its box.
    """
    boxes = np.array([item["box_xyxy"] for item in entry["detections"]], np.float64).reshape(-1, 4)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    camera, problem = _camera_of(photo, site)
    pixels = stored_pixels(centres, entry["width"], entry["height"], photo) if camera else centres
    located = [_blank(entry, number, photo, problem) for number in range(len(entry["detections"]))]
    if camera is not None and len(located):
        directions = (
            camera.depressions(pixels),
            camera.bearings(pixels),
            camera.bearing_sigmas(pixels),
        )
        for item, depression, bearing, sigma in zip(located, *directions, strict=True):
            item["depression_deg"] = float(depression)
            if depression < STRAIGHT_DOWN_DEG:
                item["bearing_deg"] = float(bearing)
                item["bearing_sigma_deg"] = float(sigma)
            if problem is None and depression < -HIGHEST_PITCH_DEG:
                item["reason"] = (
                    f"line of sight less than {-HIGHEST_PITCH_DEG:g} degrees below the horizon"
                )
    if camera is not None and problem is None:
        steep = [number for number, item in enumerate(located) if item["reason"] is None]
        offsets = camera.ground_offsets(pixels[steep])
        sigmas = camera.ground_sigmas(pixels[steep], photo.position_sigma_m)
        assert photo.position is not None
        for number, offset, sigma in zip(steep, offsets, sigmas, strict=True):
            latitude, longitude = moved(*photo.position, offset)
            where = {"latitude": latitude, "longitude": longitude, "sigma_m": float(sigma)}
            located[number] |= where | {f"ground_{name}": value for name, value in where.items()}
            located[number] |= {
                "position_kind": ON_GROUND,
                "distance_m": float(np.linalg.norm(offset)),
            }
            if points := entry["detections"][number].get("centreline"):
                line = stored_pixels(
                    np.array(points, np.float64), entry["width"], entry["height"], photo
                )
                located[number] |= _ground_line(camera, line, photo)
    return located


def stored_pixels(points: np.ndarray, width: int, height: int, photo: PhotoMetadata) -> np.ndarray:
    """Convert points (n, 2) of an upright picture of width x height to pixels of the stored frame,
    without lens distortion.
    """
    is_turned = photo.orientation >= 5
    stored_width, stored_height = (height, width) if is_turned else (width, height)
    inverse = INVERSE_ORIENTATION.get(photo.orientation, photo.orientation)
    stored = points_upright(points, inverse, stored_width, stored_height)
    return photo.pinhole_pixels(stored * (photo.width / stored_width, photo.height / stored_height))


def _camera_of(photo: PhotoMetadata, site: Site) -> tuple[Camera | None, str | None]:
    """Return the camera, None if its direction is unknown, and the reason why there is no ground
    point, None if there is one.
    """
    angles, focal = photo.gimbal_deg, photo.focal_px
    if photo.direction_problem is not None or angles is None or focal is None:
        return None, photo.direction_problem if photo.position else _no_position(photo)
    camera = Camera(*focal, photo.width, photo.height, rotation(*angles))
    if photo.position is None:
        return camera, _no_position(photo)
    if angles[1] > HIGHEST_PITCH_DEG:
        return camera, f"gimbal pitch above {HIGHEST_PITCH_DEG:g} degrees"
    if photo.above_take_off_m is None:
        return camera, "no RelativeAltitude in XMP"
    above_ground_m = photo.above_take_off_m - site.ground_height_m
    if above_ground_m <= 0:
        return camera, "camera not above the ground height"
    sigma_m = float(np.hypot(CAMERA_HEIGHT_SIGMA_M, site.ground_sigma_m))
    return replace(camera, above_ground_m=above_ground_m, above_ground_sigma_m=sigma_m), None


def _no_position(photo: PhotoMetadata) -> str:
    return photo.problem or "no position in EXIF or XMP"


def _blank(
    entry: dict[str, Any], number: int, photo: PhotoMetadata, problem: str | None
) -> dict[str, Any]:
    """Return a detection's properties that are known from the photograph alone; the others are
    None.
    """
    detection = entry["detections"][number]
    latitude, longitude = photo.position or (None, None)
    return {
        "photograph": entry["file"],
        "detection": number,
        "class": detection["class"],
        "confidence": detection["confidence"],
        "latitude": latitude,
        "longitude": longitude,
        "position_kind": AT_CAMERA if photo.position else None,
        **dict.fromkeys(
            ("sigma_m", "bearing_deg", "bearing_sigma_deg", "depression_deg", "distance_m")
        ),
        "reason": problem,
        "camera_latitude": latitude,
        "camera_longitude": longitude,
        "camera_sigma_m": photo.position_sigma_m if photo.position else None,
        "camera_altitude_m": photo.altitude_m,
        "camera_altitude_reference": photo.altitude_reference,
        "camera_above_take_off_m": photo.above_take_off_m,
        **dict.fromkeys(("ground_latitude", "ground_longitude", "ground_sigma_m")),
        **dict.fromkeys(
            ("asset", "asset_id", "asset_beside_m", "asset_candidates", "centreline", "length_m")
        ),
        "time": photo.time,
    }


def _ground_line(camera: Camera, pixels: np.ndarray, photo: PhotoMetadata) -> dict[str, Any]:
    """Return a wire on the ground plane: longitude and latitude of its points (n, 2), and its
    length; {} if the view is too flat.
    """
    if (camera.depressions(pixels) < -HIGHEST_PITCH_DEG).any():
        return {}
    assert photo.position is not None
    offsets = camera.ground_offsets(pixels)
    places = [moved(*photo.position, offset) for offset in offsets]
    line = [[round(longitude, 7), round(latitude, 7)] for latitude, longitude in places]
    return {
        "centreline": line,
        "length_m": float(np.linalg.norm(np.diff(offsets, axis=0), axis=1).sum()),
    }

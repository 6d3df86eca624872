"""Positions on the map: the ellipsoid and the camera's ray."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.support.drone_photos import HOME, dji
from yolo_seg_ddp.extras.maps.camera import (
    CAMERA_HEIGHT_SIGMA_M,
    HEADING_SIGMA_DEG,
    TILT_SIGMA_DEG,
    Camera,
    rotation,
)
from yolo_seg_ddp.extras.maps.findings import Site, locate, stored_pixels
from yolo_seg_ddp.extras.maps.metadata import PhotoMetadata, read_metadata
from yolo_seg_ddp.extras.maps.survey import view_of
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, moved, offsets_m
from yolo_seg_ddp.prepare.sample import write_sample
from yolo_seg_ddp.prepare.sample.scene import draw_scene

# --- the ellipsoid --------------------------------------------------------------------------------


A, F = 6378137.0, 1 / 298.257223563


def radii_m(latitude_deg: float) -> tuple[float, float]:
    """Return the radii of curvature along the meridian and across it."""
    e2 = F * (2 - F)
    root = np.sqrt(1 - e2 * np.sin(np.radians(latitude_deg)) ** 2)
    return A * (1 - e2) / root**3, A / root


@pytest.mark.parametrize("latitude", [0.0, 30.0, -47.5, 71.0])
def test_a_hundred_metres_are_the_degrees_that_the_radii_of_curvature_give(latitude: float) -> None:
    meridian, normal = radii_m(latitude)
    there = moved(latitude, 8.0, np.array([100.0, -60.0]))
    assert np.radians(there[0] - latitude) * meridian == pytest.approx(100, abs=0.01)
    assert np.radians(there[1] - 8.0) * normal * np.cos(np.radians(latitude)) == pytest.approx(
        -60, abs=0.01
    )


@pytest.mark.parametrize(
    "place", [(12.0, 179.9999), (-12.0, -179.9999), (89.9999, 50.0), (-89.9999, -3.0), (90.0, 0.0)]
)
def test_points_beyond_the_180th_meridian_and_the_poles_are_where_they_belong(
    place: tuple[float, float],
) -> None:
    for offset in (np.array([30.0, 40.0]), np.array([-200.0, 90.0]), np.array([0.0, -50.0])):
        latitude, longitude = moved(*place, offset)
        assert -180 <= longitude <= 180
        back = offsets_m(*place, geocentric(np.array([latitude]), np.array([longitude])))
        assert back[0] == pytest.approx(offset, abs=1e-3)


# --- the camera -----------------------------------------------------------------------------------


SIZE = np.array([600, 400])


def project(point: np.ndarray, focal_px: float, angles: tuple[float, float, float]) -> np.ndarray:
    """Return the pixel of a point north, east, down of the camera: the axis first, then what is
    right and down of it.
    """
    yaw, pitch, roll = np.radians(angles)
    axis = np.array([np.cos(pitch) * np.cos(yaw), np.cos(pitch) * np.sin(yaw), -np.sin(pitch)])
    level_right = np.array([-np.sin(yaw), np.cos(yaw), 0])
    level_down = np.cross(axis, level_right)
    right = np.cos(roll) * level_right + np.sin(roll) * level_down
    down = np.cos(roll) * level_down - np.sin(roll) * level_right
    return SIZE / 2 + focal_px * np.array([point @ right, point @ down]) / (point @ axis)


def entry(*points: np.ndarray, size: tuple[int, int] = (600, 400)) -> dict[str, object]:
    """Return a photograph's predictions: boxes of 4 x 4 pixels around points."""
    boxes = [[x - 2, y - 2, x + 2, y + 2] for x, y in points]
    found = [{"class": "pole", "confidence": 0.9, "box_xyxy": box} for box in boxes]
    return {"file": "a.jpg", "width": size[0], "height": size[1], "detections": found}


@pytest.mark.parametrize(
    "angles",
    [(0, -90, 0), (30, -40, 0), (200, -60, 12), (-75, -30, -25), (110, -89, 180), (10, -50, 90)],
)
def test_a_point_on_the_ground_is_found_again_within_5_centimetres(
    angles: tuple[float, float, float],
) -> None:
    height, ground = 42.0, 5.0
    yaw, pitch, _ = np.radians(angles)
    ahead = (height - ground) / np.tan(-pitch)
    point = np.array([ahead * np.cos(yaw) + 3, ahead * np.sin(yaw) - 4, height - ground])
    pixel = project(point, 500.0, angles)
    fields = dict(
        zip(
            ("GimbalYawDegree", "GimbalPitchDegree", "GimbalRollDegree"),
            map(str, angles),
            strict=True,
        )
    )
    (found,) = locate(
        PhotoMetadata(600, 400, dji=dji(RelativeAltitude=str(height), **fields)),
        entry(pixel),
        Site(ground),
    )
    meridian, normal = radii_m(HOME[0])
    north = np.radians(found["latitude"] - HOME[0]) * meridian
    east = np.radians(found["longitude"] - HOME[1]) * normal * np.cos(np.radians(HOME[0]))
    assert found["position_kind"] == "ground"
    assert (north, east) == pytest.approx(tuple(point[:2]), abs=0.05)
    assert found["distance_m"] == pytest.approx(np.hypot(*point[:2]), abs=0.05)
    if found["bearing_deg"] is not None:
        assert found["bearing_deg"] == pytest.approx(
            np.degrees(np.arctan2(point[1], point[0])) % 360, abs=0.1
        )


@pytest.mark.parametrize(
    ("pitch", "pixel"), [(-90, (300, 200)), (-45, (420, 310)), (-30, (100, 250))]
)
def test_standard_deviations_are_those_of_drawn_errors(
    pitch: float, pixel: tuple[float, float]
) -> None:
    sigma_m = float(np.hypot(CAMERA_HEIGHT_SIGMA_M, 2))
    camera = Camera(
        500, 5, 600, 400, rotation(50, pitch, 0), above_ground_m=40, above_ground_sigma_m=sigma_m
    )
    rng = np.random.default_rng(3)
    pixels = np.array([pixel], float)
    drawn = []
    for heading, tilt_north, tilt_east, focal, height, north, east in rng.normal(size=(4000, 7)):
        turn = np.array(
            [tilt_north * TILT_SIGMA_DEG, tilt_east * TILT_SIGMA_DEG, heading * HEADING_SIGMA_DEG]
        )
        wrong = replace(
            camera,
            attitude=cv2.Rodrigues(np.radians(turn))[0] @ camera.attitude,
            focal_px=500 + 5 * focal,
            above_ground_m=40 + sigma_m * height,
        )
        drawn.append(wrong.ground_offsets(pixels)[0] + (0.5 * north, 0.5 * east))
    expected = np.sqrt(np.linalg.eigvalsh(np.cov(np.array(drawn).T))[-1])
    assert camera.ground_sigmas(pixels, 0.5)[0] == pytest.approx(expected, rel=0.06)


def test_the_bearings_deviation_is_the_gimbals_yaw_far_from_the_nadir_and_more_near_it() -> None:
    camera = Camera(500, 5, 600, 400, rotation(0, -20, 0))
    assert camera.bearing_sigmas(np.array([[300.0, 200.0]]))[0] == pytest.approx(
        HEADING_SIGMA_DEG, rel=0.1
    )
    near, straight_down = (
        replace(camera, attitude=rotation(0, pitch, 0)).bearing_sigmas(np.array([[300.0, 200.0]]))[
            0
        ]
        for pitch in (-85, -90)
    )
    assert near > 10
    assert straight_down == 180


def test_the_cameras_of_the_drawn_sample_look_at_the_tops_of_its_poles(tmp_path: Path) -> None:
    write_sample(tmp_path, 8, seed=3)
    by_number = {
        int(path.stem.split("(")[1][:-1]): path for path in tmp_path.rglob("*.[jJ][pP]*[gG]")
    }
    for index in (2, 5, 7):  # turned in their files
        scene = draw_scene(3, index)
        tops = np.array(
            [one.points[[0, 3]].mean(axis=0) for one in scene.annotations if one.name == "pole"]
        )
        photo = read_metadata(by_number[index + 1])
        view = view_of(photo, {"file": "", "width": 1, "height": 1, "detections": []})
        assert view is not None
        rays = view.camera.rays(
            stored_pixels(tops, scene.image.shape[1], scene.image.shape[0], photo)
        )
        place = geocentric(view.latitude, view.longitude)[None]
        seen = offsets_m(38.52, -98.31, place) + rays[:, :2] / rays[:, 2:] * 12
        pole = 40 * (index // 3) * np.array([np.cos(np.radians(74)), np.sin(np.radians(74))])
        assert np.abs(seen - pole).max(axis=1).min() < 0.3

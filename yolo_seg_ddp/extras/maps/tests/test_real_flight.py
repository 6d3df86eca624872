"""A real flight with five surveyed marks on the ground: the errors of their positions, and whether
the ellipses hold.

Photographs and marks: github.com/pierotofy/drone_dataset_sheffield_cross, public domain
(Unlicense), gcp_file.txt. A DJI FC300S flew 63.6 m above the ground without RTK. Prints the table
of yolo_seg_ddp/extras/maps/research.md:

    python -m pytest -s -n 0 yolo_seg_ddp/extras/maps/tests/test_real_flight.py
"""

import numpy as np

from yolo_seg_ddp.extras.maps.findings import Site, locate
from yolo_seg_ddp.extras.maps.metadata import FOCAL_LENGTH_35_MM, FOCAL_LENGTH_MM, PhotoMetadata
from yolo_seg_ddp.extras.maps.survey import survey, view_of
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, offsets_m

HEIGHT_M = "63.6"
LIMIT_95 = 5.991  # quantile of the chi-squared distribution with 2 degrees of freedom
# Control points: latitude, longitude, of UTM zone 17 north.
POINTS = np.array(
    [
        (28.041090321, -82.697387614),
        (28.041439429, -82.697093835),
        (28.041444120, -82.696838388),
        (28.041008922, -82.696875907),
        (28.041063555, -82.697070540),
    ]
)
# Photograph: latitude, longitude, gimbal yaw and pitch; its marks of the control points, pixels x,
# y of 4000 x 3000.
PHOTOS = {
    "DJI_0065": (
        (28.041247306, -82.697557167, 89.3, -75.1),
        (2699, 1669, 1435, 704, 1525, 58, 2946, 207, 2771, 665),
    ),
    "DJI_0066": (
        (28.041249056, -82.697475250, 89.5, -75.1),
        (2707, 1960, 1401, 933, 1494, 249, 2955, 409, 2774, 888),
    ),
    "DJI_0067": (
        (28.041250611, -82.697394111, 89.6, -75.1),
        (2724, 2267, 1373, 1170, 1470, 441, 2973, 609, 2793, 1125),
    ),
    "DJI_0068": (
        (28.041248417, -82.697309389, 89.4, -75.1),
        (2719, 2616, 1327, 1427, 1436, 649, 2991, 838, 2801, 1389),
    ),
    "DJI_0081": (
        (28.041445028, -82.697509194, 90.9, -75.0),
        (3491, 1862, 2099, 862, 2123, 184, 3586, 340, 3458, 817),
    ),
}


def test_the_ellipses_of_a_real_flight_hold_its_control_points() -> None:
    views, errors, sigmas = [], [], []
    for name, ((latitude, longitude, yaw, pitch), pixels) in PHOTOS.items():
        where = {
            "GpsLatitude": f"{latitude}",
            "GpsLongitude": f"{longitude}",
            "RelativeAltitude": HEIGHT_M,
        }
        gimbal = {
            "GimbalYawDegree": f"{yaw}",
            "GimbalPitchDegree": f"{pitch}",
            "GimbalRollDegree": "0",
        }
        photo = PhotoMetadata(
            4000, 3000, exif={FOCAL_LENGTH_MM: 3.61, FOCAL_LENGTH_35_MM: 20}, dji=where | gimbal
        )
        boxes = np.tile(np.reshape(pixels, (5, 2)), 2) + np.array([-10, -10, 10, 10])
        found = [
            {"class_id": 0, "class": "mark", "confidence": 1.0, "box_xyxy": box}
            for box in boxes.tolist()
        ]
        entry = {"file": name, "width": 4000, "height": 3000, "detections": found}
        views.append(view_of(photo, entry))
        for point, item in zip(POINTS, locate(photo, entry, Site()), strict=True):
            errors.append(
                np.linalg.norm(
                    offsets_m(item["latitude"], item["longitude"], geocentric(*point)[None])
                )
            )
            sigmas.append(item["sigma_m"])
    assets = survey([view for view in views if view is not None], Site()).assets
    shown = [sorted({number for _, number in asset.views}) for asset in assets]
    assert sorted(shown) == [[0], [1], [2], [3], [4]]
    pairs = [(asset, POINTS[number]) for asset, (number,) in zip(assets, shown, strict=True)]
    offsets = np.array(
        [
            offsets_m(asset.latitude, asset.longitude, geocentric(*point)[None])[0]
            for asset, point in pairs
        ]
    )
    inverse = np.linalg.inv([asset.covariance for asset in assets])
    is_inside = np.einsum("ni,nij,nj->n", offsets, inverse, offsets) <= LIMIT_95
    is_within = np.array(errors) <= 2 * np.array(sigmas)
    off = np.linalg.norm(offsets, axis=1)
    for what, metres, sigmas_m, inside in (
        ("mark in one photograph", errors, sigmas, is_within),
        ("asset", off, [asset.sigma_m for asset in assets], is_inside),
    ):
        numbers = (
            f"{np.median(metres):.1f} m | {np.max(metres):.1f} m | {np.median(sigmas_m):.1f} m"
        )
        print(f"| {what} | {numbers} | {inside.sum()} of {len(inside)} |")
    assert is_within.all()
    assert is_inside.all()
    assert np.median(errors) < 5
    assert off.max() < 6

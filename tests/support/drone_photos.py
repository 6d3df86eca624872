"""Photographs with the metadata of a drone, made by Pillow."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from yolo_seg_ddp.prepare.sample.drone import exif_of as exif_of
from yolo_seg_ddp.prepare.sample.drone import xmp_of as xmp_of

SIZE = (600, 400)
HOME = (47.3769, 8.5417)
POSITION = {"GpsLatitude": "+47.376900000", "GpsLongitude": "+8.541700000", "RtkFlag": "50"}
HEIGHT = {"AbsoluteAltitude": "+450.00", "RelativeAltitude": "+50.00"}
GIMBAL = {"GimbalYawDegree": "+0.00", "GimbalPitchDegree": "-90.00", "GimbalRollDegree": "+0.00"}
CENTRE = {"CalibratedOpticalCenterX": "300.0", "CalibratedOpticalCenterY": "200.0"}
DJI = {
    **POSITION,
    **HEIGHT,
    **GIMBAL,
    "FlightYawDegree": "+77.00",
    "CalibratedFocalLength": "500.00",
    **CENTRE,
}
GPS = {1: "S", 2: (33.0, 51.0, 25.2), 3: "W", 4: (70.0, 30.0, 0.0), 5: b"\0", 6: 80.5}


def dji(**changes: str | None) -> dict[str, str]:
    """Return DJI's fields with changes; None leaves one out."""
    return {name: value for name, value in {**DJI, **changes}.items() if value is not None}


def write_photo(
    path: Path,
    picture: np.ndarray | None = None,
    *,
    exif: Image.Exif | None = None,
    xmp: bytes | None = b"",
) -> Path:
    """Write a JPEG, by default grey with all of DJI's fields and without EXIF; `xmp=None`: without
    XMP.
    """
    pixels = np.full((SIZE[1], SIZE[0], 3), 114, np.uint8) if picture is None else picture
    options: dict[str, Any] = {"exif": exif} if exif is not None else {}
    if xmp is not None:
        options["xmp"] = xmp or xmp_of(DJI)
    Image.fromarray(pixels).save(path, "JPEG", quality=95, subsampling=0, **options)
    return path

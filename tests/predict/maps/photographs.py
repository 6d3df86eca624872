"""Photographs with the metadata of a drone, made by Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from utils.data.images import EXIF_IFD, EXIF_TIME_TAG
from utils.predict.maps.metadata import FOCAL_LENGTH_35_MM, GPS_IFD, PhotoMetadata

SIZE = (600, 400)
HOME = (47.3769, 8.5417)
POSITION = {"GpsLatitude": "+47.376900000", "GpsLongitude": "+8.541700000", "RtkFlag": "50"}
HEIGHT = {"AbsoluteAltitude": "+450.00", "RelativeAltitude": "+50.00"}
GIMBAL = {"GimbalYawDegree": "+0.00", "GimbalPitchDegree": "-90.00", "GimbalRollDegree": "+0.00"}
CENTRE = {"CalibratedOpticalCenterX": "300.0", "CalibratedOpticalCenterY": "200.0"}
DJI = {**POSITION, **HEIGHT, **GIMBAL, "FlightYawDegree": "+77.00", "CalibratedFocalLength": "500.00", **CENTRE}


def dji(**changes: str | None) -> dict[str, str]:
    """Return DJI's fields with changes; None leaves one out."""
    return {name: value for name, value in {**DJI, **changes}.items() if value is not None}


def metadata(*, size: tuple[int, int] = SIZE, orientation: int = 1, **changes: str | None) -> PhotoMetadata:
    """Return what a photograph with DJI's fields tells."""
    return PhotoMetadata(*size, orientation=orientation, dji=dji(**changes))


def packet(fields: Mapping[str, str], *, before: str = "", as_elements: bool = False, namespace: str = "dji") -> bytes:
    """Return an XMP packet. `before` stands in front of the root element."""
    attributes = "" if as_elements else "".join(f' drone-dji:{name}="{value}"' for name, value in fields.items())
    elements = "".join(f"<drone-dji:{n}>{v}</drone-dji:{n}>" for n, v in fields.items()) if as_elements else ""
    return (
        f'<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>{before}<x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about=""'
        f' xmlns:drone-dji="http://www.{namespace}.com/drone-dji/1.0/"{attributes}>{elements}</rdf:Description>'
        '</rdf:RDF></x:xmpmeta>\n<?xpacket end="w"?>'
    ).encode()


def exif_of(
    gps: Mapping[int, Any] | None = None, tags: Mapping[int, Any] | None = None, orientation: int = 1
) -> Image.Exif:
    """Return EXIF with a GPS directory, tags of the EXIF directory, and an orientation."""
    exif = Image.Exif()
    exif[274] = orientation
    exif.get_ifd(GPS_IFD).update(gps or {})
    exif.get_ifd(EXIF_IFD).update({EXIF_TIME_TAG: "2026:05:04 10:11:12", **(tags or {})})
    return exif


GPS = {1: "S", 2: (33.0, 51.0, 25.2), 3: "W", 4: (70.0, 30.0, 0.0), 5: b"\0", 6: 80.5}
FOCAL_TAGS = {FOCAL_LENGTH_35_MM: 30}


def write_photo(
    path: Path, picture: np.ndarray | None = None, *, exif: Image.Exif | None = None, xmp: bytes | None = b""
) -> Path:
    """Write a JPEG, by default grey with all of DJI's fields and without EXIF; `xmp=None`: without XMP."""
    pixels = np.full((SIZE[1], SIZE[0], 3), 114, np.uint8) if picture is None else picture
    options: dict[str, Any] = {"exif": exif} if exif is not None else {}
    if xmp is not None:
        options["xmp"] = xmp or packet(DJI)
    Image.fromarray(pixels).save(path, "JPEG", quality=95, subsampling=0, **options)
    return path

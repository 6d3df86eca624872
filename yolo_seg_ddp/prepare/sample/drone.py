"""What a drone writes beside its pixels, EXIF and DJI's fields in XMP: for the sample, those of one
flight along a line.
"""

import cmath
import math
from datetime import datetime, timedelta
from typing import Any

from PIL import Image
from PIL.ExifTags import IFD, Base

# EXIF orientation: counterclockwise quarter turns from upright to stored
TURNS = {1: 0, 3: 2, 6: 1, 8: 3}
_START, _START_TIME = (38.52, -98.31), datetime(2026, 5, 4, 10, 11, 12)
# top of a pole, camera; camera above the sea
_FOCAL_PX, _TOP_M, _FLIGHT_M, _ALTITUDE_M = 3000.0, 12.0, 24.0, 474.0
# between poles; of the camera; photographs of each pole
_SPAN_M, _BESIDE_M, _STEP_M, _SHOTS = 40.0, 18.0, 9.0, 3
_LINE, _METRES_PER_DEGREE = math.radians(74), 111_195  # bearing from north over east; of latitude


def xmp_of(fields: dict[str, str]) -> bytes:
    """Return an XMP packet with DJI's fields."""
    attributes = "".join(f' drone-dji:{name}="{value}"' for name, value in fields.items())
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta '
        'xmlns:x="adobe:ns:meta/"><rdf:RDF'
        ' xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
        "xmlns:drone-dji="
        f'"http://www.dji.com/drone-dji/1.0/"{attributes}></rdf:Description></rdf:RDF></x:xmpmeta>'
        '\n<?xpacket end="w"?>'
    ).encode()


def exif_of(
    gps: dict[int, Any] | None = None,
    tags: dict[int, Any] | None = None,
    orientation: int = 1,
    seconds: int = 0,
) -> Image.Exif:
    """Return EXIF with a GPS directory, tags of the EXIF directory, an orientation, and a time
    after the start of the flight.
    """
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    exif.get_ifd(IFD.GPSInfo).update(gps or {})
    time = f"{_START_TIME + timedelta(seconds=seconds):%Y:%m:%d %H:%M:%S}"
    exif.get_ifd(IFD.Exif).update({Base.DateTimeOriginal: time, **(tags or {})})
    return exif


def in_flight(jpeg: bytes, index: int, top_px: tuple[float, float], orientation: int) -> bytes:
    """Insert into a JPEG without metadata those of the sample's photograph `index`; the pixels keep
    their bytes.

    Poles stand 40 m apart in a line, and three photographs show each. The camera is turned so that
    its line of sight through top_px, the top of the drawn pole, x and y from the middle of the
    upright photograph, meets the pole's top.
    """
    pole, shot = divmod(index, _SHOTS)
    # from the pole to the camera: along the line, to its right
    beside = complex((shot - 1) * _STEP_M, _BESIDE_M)
    offset = (pole * _SPAN_M + beside) * cmath.rect(1 / _METRES_PER_DEGREE, _LINE)  # north, east
    latitude, longitude = (
        _START[0] + offset.real,
        _START[1] + offset.imag / math.cos(math.radians(_START[0])),
    )
    (right, down), depression = top_px, math.atan2(_FLIGHT_M - _TOP_M, abs(beside))
    upright, slant = math.hypot(_FOCAL_PX, down), math.hypot(_FOCAL_PX, down, right)
    pitch = math.atan2(down, _FOCAL_PX) - math.asin(math.sin(depression) * slant / upright)
    yaw = _LINE + cmath.phase(-beside) - math.asin(right / math.cos(depression) / slant)
    angles = {"Yaw": yaw, "Pitch": pitch, "Roll": TURNS[orientation] * math.pi / 2}
    fields = {
        f"Gimbal{name}Degree": f"{math.degrees(angle):+.2f}" for name, angle in angles.items()
    }
    fields |= {
        "GpsLatitude": f"{latitude:+.9f}",
        "GpsLongitude": f"{longitude:+.9f}",
        "RtkFlag": "50",
    }
    fields |= {"RelativeAltitude": f"{_FLIGHT_M:+.2f}", "AbsoluteAltitude": f"{_ALTITUDE_M:+.2f}"}
    xmp = xmp_of(fields | {"CalibratedFocalLength": f"{_FOCAL_PX}"})
    gps = {
        1: "N",
        2: (latitude, 0.0, 0.0),
        3: "W",
        4: (-longitude, 0.0, 0.0),
        5: b"\0",
        6: _ALTITUDE_M,
    }
    blocks = (
        exif_of(gps, None, orientation, 5 * index).tobytes(),
        b"http://ns.adobe.com/xap/1.0/\0" + xmp,
    )
    return (
        jpeg[:2]
        + b"".join(b"\xff\xe1" + (len(block) + 2).to_bytes(2) + block for block in blocks)
        + jpeg[2:]
    )

"""Reads the camera's position and direction from a photograph's header: EXIF, and DJI's fields in
XMP.

A field that is missing, not a number or out of range is None. Only JPEG files are read: drones
write these.
"""

import io
import math
import re
import struct
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, JpegImagePlugin

from yolo_seg_ddp.data.images import (
    EXIF_ERRORS,
    EXIF_IFD,
    EXIF_TIME_TAG,
    orientation_of,
    parse_exif_time,
)
from yolo_seg_ddp.extras.maps.xmp import XmpError, read_dji_fields
from yolo_seg_ddp.utils.errors import printable

NOT_JPEG = "not a JPEG: positions are read from JPEG files only"
# everything before the pixels; thermal photographs keep some MB there
MAX_HEADER_BYTES = 32_000_000
GPS_IFD = 0x8825  # this and the tags below: EXIF 2.32 (CIPA DC-008-2019), 4.6
LATITUDE_REF, LATITUDE, LONGITUDE_REF, LONGITUDE, ALTITUDE_REF, ALTITUDE = 1, 2, 3, 4, 5, 6
TIME_OFFSET, SOFTWARE, TIME_WRITTEN, MAKER_NOTE = 0x9011, 0x0131, 0x0132, 0x927C
WIDTH = 0xA002
HEIGHT = 0xA003
DIGITAL_ZOOM = 0xA404
FOCAL_LENGTH_MM = 0x920A
FOCAL_LENGTH_35_MM = 0xA405
# CIPA DCG-001: the 35 mm equivalent has the same diagonal angle of view
DIAGONAL_35_MM = math.hypot(36, 24)
# Sensors of one inch (16 mm diagonal), APS-C (28) and 35 mm have sides of 3 to 2; the others of
# drones 4 to 3.
INCH_SENSOR_MM = (14, 17)
LEAST_APS_SENSOR_MM = 25
WIDEST_SENSOR = 1.55
# shares; the equivalent is rounded to whole millimetres
CALIBRATED_FOCAL_SIGMA, FOCAL_35_MM_SIGMA = 0.01, 0.03
MOST_FOCAL_DIFFERENCE = 0.15  # between the two
MOST_ASPECT_DIFFERENCE = 0.02
SIGMA_WITHOUT_RTK_M = 5.0  # ordinary satellite navigation
# Standard deviation of the position for DJI's RtkFlag: centimetres, decimetres, metres (its user
# manuals). 0 means that RTK gave no position, also in drones without RTK. The position is then that
# of ordinary satellite navigation.
RTK_SIGMAS_M: dict[float, float] = {
    50: 0.05,
    **dict.fromkeys(range(32, 50), 0.5),
    16: 2.0,
    0: SIGMA_WITHOUT_RTK_M,
}
SIGMA_UNKNOWN_FLAG_M = 10.0
GIMBAL_FIELDS = ("GimbalYawDegree", "GimbalPitchDegree", "GimbalRollDegree")
# The first entry of DJI's MakerNote: tag 1, a text of four bytes. The other tags are those that
# ExifTool lists.
_DJI_ENTRY = struct.pack("<HHI4s", 1, 2, 4, b"DJI")
_NOTE_YAW, _NOTE_PITCH, _NOTE_ROLL = 10, 9, 11
_MAKERS_SOFTWARE = re.compile(r"(v?\d|DJI).*|", re.IGNORECASE)
MOST_WRITING_S = 60  # between the shot and the writing of a photograph that nobody changed
# to invert a lens; the most that it moves a point, as a share of the focal length
LENS_ROUNDS, MOST_BENT = 50, 1.0
_NUMBER = re.compile(r"[+-]?\d{1,9}(\.\d{0,18})?")


@dataclass(frozen=True)
class PhotoMetadata:
    """The metadata in a photograph's header.

    `width`, `height`: of the stored frame, before the EXIF orientation is applied.
    """

    width: int = 0
    height: int = 0
    orientation: int = 1  # as yolo_seg_ddp/data/images.py applies it
    exif: dict[int, Any] = field(default_factory=dict)
    gps: dict[int, Any] = field(default_factory=dict)
    dji: dict[str, str] = field(default_factory=dict)
    problem: str | None = None  # why the header, or its XMP, was not used
    is_turned: bool = False  # the flight shows that the pixels were turned by 180 degrees

    @cached_property
    def position(self) -> tuple[float, float] | None:
        """Latitude and longitude in degrees: DJI's, which have more digits, else EXIF's.

        Exactly 0, 0 is no position.
        """
        longitude = self._dji("GpsLongitude", -180, 180)
        if longitude is None:
            # Older firmware spells it like this.
            longitude = self._dji("GpsLongtitude", -180, 180)
        coordinates = (self._dji("GpsLatitude", -90, 90), longitude)
        if None in coordinates:
            coordinates = (
                _degrees(self.gps.get(LATITUDE), self.gps.get(LATITUDE_REF), "N", "S", 90),
                _degrees(self.gps.get(LONGITUDE), self.gps.get(LONGITUDE_REF), "E", "W", 180),
            )
        latitude, longitude = coordinates
        is_missing = latitude is None or longitude is None or latitude == longitude == 0
        is_missing = is_missing or self.dji.get("GpsStatus") == "Invalid"
        return None if is_missing else (latitude, longitude)  # type: ignore[return-value]

    @property
    def position_sigma_m(self) -> float:
        """Standard deviation of the position north and east, each."""
        flag = self._dji("RtkFlag", 0, 99)
        return SIGMA_WITHOUT_RTK_M if flag is None else RTK_SIGMAS_M.get(flag, SIGMA_UNKNOWN_FLAG_M)

    @property
    def altitude_m(self) -> float | None:
        """The absolute altitude.

        Its zero may be the ellipsoid or the sea level, 20 to 30 m apart and more.
        """
        altitude_m = self._dji("AbsoluteAltitude", -1000, 20_000)
        if altitude_m is None:
            altitude_m = _number(self.gps.get(ALTITUDE), -1000, 20_000)
            below = self.gps.get(ALTITUDE_REF) in (1, b"\1")
            altitude_m = -altitude_m if altitude_m is not None and below else altitude_m
        return altitude_m

    @property
    def altitude_reference(self) -> str | None:
        """`ellipsoid` when an RTK receiver measured the altitude, else `unknown`; None without
        altitude.
        """
        if self.altitude_m is None:
            return None
        return "ellipsoid" if self.dji.get("AltitudeType") == "RtkAlt" else "unknown"

    @property
    def above_take_off_m(self) -> float | None:
        """Height above the take-off point, which says nothing about the ground below the drone."""
        return self._dji("RelativeAltitude", -2000, 20_000)

    @property
    def gimbal_deg(self) -> tuple[float, float, float] | None:
        """Yaw, pitch and roll of the gimbal, never of the aircraft: of XMP, else of DJI's
        MakerNote.
        """
        angles = [self._dji(name, -360, 360) for name in GIMBAL_FIELDS]
        if None in angles:
            note = self.exif.get(MAKER_NOTE)
            # not another maker's
            note = note if isinstance(note, bytes) and note[2:14] == _DJI_ENTRY else b"\0\0"
            num_entries = min(int.from_bytes(note[:2], "little"), (len(note) - 2) // 12)
            entries = struct.iter_unpack("<HHIf", note[2 : 2 + 12 * num_entries])
            floats = {tag: value for tag, kind, count, value in entries if (kind, count) == (11, 1)}
            angles = [
                _number(floats.get(tag), -360, 360) for tag in (_NOTE_YAW, _NOTE_PITCH, _NOTE_ROLL)
            ]
        yaw, pitch, roll = angles
        return None if yaw is None or pitch is None or roll is None else (yaw, pitch, roll)

    @property
    def written_by(self) -> str | None:
        """The program that wrote the photograph after the drone did, and so may have turned its
        pixels; None without a trace.
        """
        for name in (self.exif.get(SOFTWARE), self.dji.get("CreatorTool")):
            text = str(name or "").strip("\0 ")
            if not _MAKERS_SOFTWARE.fullmatch(text):
                return printable(text, 80)
        taken, written = (
            parse_exif_time(self.exif.get(tag)) for tag in (EXIF_TIME_TAG, TIME_WRITTEN)
        )
        late_s = (written - taken).total_seconds() if taken and written else 0
        # one of them in another time zone
        is_zone = min(late_s % 900, -late_s % 900) <= MOST_WRITING_S
        return None if is_zone else f"an unknown program at {written}"

    @cached_property
    def focal_px(self) -> tuple[float, float] | None:
        """Focal length and its standard deviation in pixels of the stored frame."""
        calibrated = self._dji("CalibratedFocalLength", 1, 1e6)
        if calibrated is not None:
            focal = calibrated * self.width / self._original_size[0]
            return focal, CALIBRATED_FOCAL_SIGMA * focal
        equivalent = self._equivalent_focal_px
        return None if equivalent is None else (equivalent, FOCAL_35_MM_SIGMA * equivalent)

    @property
    def _equivalent_focal_px(self) -> float | None:
        """The 35 mm equivalent in pixels.

        It holds for the whole sensor, from which photographs of 16:9 are cropped.
        """
        equivalent_mm = _number(self.exif.get(FOCAL_LENGTH_35_MM), 1, 10_000)
        if equivalent_mm is None:
            return None
        short, long = sorted((self.width, self.height))
        focal_mm = _number(self.exif.get(FOCAL_LENGTH_MM), 0.1, 1000) or 0.0
        sensor_mm = focal_mm / equivalent_mm * DIAGONAL_35_MM
        aspect = 4 / 3 if long / short > WIDEST_SENSOR else long / short
        if INCH_SENSOR_MM[0] < sensor_mm < INCH_SENSOR_MM[1] or sensor_mm > LEAST_APS_SENSOR_MM:
            aspect = 3 / 2
        sensor_width_px = max(long, short * aspect)
        return (
            equivalent_mm * math.hypot(sensor_width_px, sensor_width_px / aspect) / DIAGONAL_35_MM
        )

    def pinhole_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Return where a camera without lens distortion shows what is at pixels (n, 2) x, y of the
        stored frame.

        DJI's DewarpData: a date, then fx, fy, cx, cy in pixels, cx and cy from the calibrated
        centre, then k1, k2, p1, p2, k3 of OpenCV's model. DewarpFlag 1: the drone has already
        corrected the photograph.
        """
        texts = self.dji.get("DewarpData", "").rpartition(";")[2].split(",")
        values = [_number(text.strip(), -1e6, 1e6) for text in texts]
        if (
            len(values) != 9
            or None in values
            or self._dji("DewarpFlag", 0, 9)
            or self.focal_px is None
        ):
            return pixels
        fx, fy, cx, cy, *lens = np.array(values, np.float64)
        if min(fx, fy) < 1:
            return pixels
        size = np.array([self.width, self.height])
        scale = self.width / self._original_size[0]
        seen = ((pixels - size / 2) / scale - (cx, cy)) / (fx, fy)
        k1, k2, p1, p2, k3 = lens
        ideal = seen
        with np.errstate(all="ignore"):
            for _ in range(LENS_ROUNDS):
                x, y = ideal.T
                r2 = x * x + y * y
                bent = (
                    2 * p1 * x * y + p2 * (r2 + 2 * x * x),
                    2 * p2 * x * y + p1 * (r2 + 2 * y * y),
                )
                ideal = (seen - np.stack(bent, axis=1)) / (1 + r2 * (k1 + r2 * (k2 + r2 * k3)))[
                    :, None
                ]
        # False for what is not a number
        is_lens = np.abs(ideal - seen).max(axis=1, keepdims=True) < MOST_BENT
        return size / 2 + self.focal_px[0] * np.where(is_lens, ideal, seen)

    @property
    def direction_problem(self) -> str | None:
        """Why the direction of an object is not known; None if it is."""
        if self.gimbal_deg is None:
            missing = [name for name in GIMBAL_FIELDS if self._dji(name, -360, 360) is None]
            return self.problem or f"no {', '.join(missing)} in XMP"
        # Some drones write 0 for an unknown direction.
        if not any(self.gimbal_deg):
            return f"{', '.join(GIMBAL_FIELDS)} in XMP are all 0: the direction is not known"
        if self.is_turned:
            return (
                "its ground is that of other photographs only if it is turned by 180 degrees: use "
                "the drone's file"
            )
        if self.written_by:
            return (
                f"written again by {self.written_by}, which may have turned it: use the file that "
                "the drone wrote"
            )
        for name in ("CamReverse", "GimbalReverse"):
            if self._dji(name, 0, 1):
                return f"camera mounted upside down ({name})"
        if self.focal_px is None:
            return "no CalibratedFocalLength in XMP and no 35 mm equivalent focal length in EXIF"
        if (_number(self.exif.get(DIGITAL_ZOOM), 0, 1000) or 1) > 1.01:
            return "digital zoom"
        width, height = self._original_size
        if abs(width / height / (self.width / self.height) - 1) > MOST_ASPECT_DIFFERENCE:
            return "cropped or rotated after it was taken"
        expected = self._equivalent_focal_px or self.focal_px[0]
        if abs(self.focal_px[0] / expected - 1) > MOST_FOCAL_DIFFERENCE:
            return (
                "CalibratedFocalLength in XMP and the 35 mm equivalent in EXIF contradict each "
                "other"
            )
        return None

    @property
    def time(self) -> str | None:
        """When the photograph was taken, ISO 8601: local time, with its offset from UTC if EXIF has
        it.
        """
        taken = parse_exif_time(self.exif.get(EXIF_TIME_TAG))
        offset = str(self.exif.get(TIME_OFFSET, "")).strip("\0 ")
        if taken is None:
            return None
        return taken.isoformat() + (offset if re.fullmatch(r"[+-]\d\d:\d\d", offset) else "")

    @property
    def _original_size(self) -> tuple[float, float]:
        """The size of the calibrated frame.

        A photograph that was shrunk often keeps the EXIF and XMP of its original.
        """
        half = (
            self._dji("CalibratedOpticalCenterX", 1, 1e6),
            self._dji("CalibratedOpticalCenterY", 1, 1e6),
        )
        if half[0] is not None and half[1] is not None:
            return 2 * half[0], 2 * half[1]
        size = _number(self.exif.get(WIDTH), 1, 1e6), _number(self.exif.get(HEIGHT), 1, 1e6)
        return (
            (size[0], size[1])
            if size[0] is not None and size[1] is not None
            else (self.width, self.height)
        )

    def _dji(self, name: str, least: float, most: float) -> float | None:
        return _number(self.dji.get(name), least, most)


def read_metadata(path: Path) -> PhotoMetadata:
    """Read a JPEG's header, not its pixels. Unusable parts are left out; `problem` says why."""
    try:
        with warnings.catch_warnings(), _Header(path) as file:
            warnings.simplefilter("ignore")  # Pillow's, about damaged EXIF
            start = file.read(3)
            if start != b"\xff\xd8\xff":
                return PhotoMetadata(problem=NOT_JPEG)
            file.seek(0)
            picture = JpegImagePlugin.JpegImageFile(file)  # reads up to the pixels
            block = picture.info.get("exif", b"")
            packet = picture.info.get("xmp", b"")
            exif, gps = _read_exif(block)
            frame = (*picture.size, orientation_of(block))
    except EXIF_ERRORS as error:
        return PhotoMetadata(problem=f"header not readable ({type(error).__name__})")
    try:
        dji = read_dji_fields(packet) if packet else {}
        problem = None
    except XmpError as error:
        dji = {}
        problem = f"XMP refused: {error}"
    return PhotoMetadata(*frame, exif, gps, dji, problem)


class _Header(io.FileIO):
    """A file of which only the first MAX_HEADER_BYTES can be read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or self.tell() + size > MAX_HEADER_BYTES:
            raise OSError(f"header longer than {MAX_HEADER_BYTES} bytes")
        return super().read(size)


def _read_exif(data: bytes) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the tags of the EXIF and the GPS directory; none if they are damaged."""
    exif = Image.Exif()
    try:
        exif.load(data)
        written = {tag: exif[tag] for tag in (SOFTWARE, TIME_WRITTEN) if tag in exif}
        return written | dict(exif.get_ifd(EXIF_IFD)), dict(exif.get_ifd(GPS_IFD))
    except EXIF_ERRORS:
        return {}, {}


def _number(value: Any, least: float, most: float) -> float | None:
    """Return a number from EXIF, or from the text of XMP, if it is within the bounds; else None."""
    if isinstance(value, str):
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
    else:
        try:
            number = float(value)
        except (TypeError, ValueError, ArithmeticError):
            return None
    return number if least <= number <= most else None


def _degrees(value: Any, reference: Any, positive: str, negative: str, most: float) -> float | None:
    """Return degrees of EXIF's degrees, minutes and seconds and a hemisphere's letter."""
    if not isinstance(value, tuple) or len(value) != 3 or reference not in (positive, negative):
        return None
    parts = [_number(part, 0, bound) for part, bound in zip(value, (most, 60, 60), strict=True)]
    if None in parts:
        return None
    degrees = sum(part / 60**power for power, part in enumerate(parts) if part is not None)
    return None if degrees > most else degrees if reference == positive else -degrees

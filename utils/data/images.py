"""The one way a photograph is decoded, turned upright, made smaller and written.

Every picture in memory is RGB uint8 of shape (height, width, 3).
"""

from __future__ import annotations

import io
import re
import stat
import struct
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from utils.common.files import write_bytes_atomic

MAX_IMAGE_PIXELS = 400_000_000  # a drone photograph has 20 million; more than this is an error or an image bomb
# A few kB can hold an even area of any size. Photographs have 1 to 20 pixels a byte, at most 100 in all-blue sky.
UNSUSPICIOUS_PIXELS = 25_000_000
MAX_PIXELS_PER_BYTE = 200
MAX_IMAGE_BYTES = 2_000_000_000
LETTERBOX_FILL = 114  # YOLO's grey: what pretrained weights saw around photographs
_ORIENTATION_TAG = 274
# What Pillow's header readers raise on damaged bytes, besides UnidentifiedImageError (an OSError).
_HEADER_ERRORS = (OSError, ValueError, SyntaxError, struct.error, EOFError, LookupError, TypeError, ImportError)
_JPEG_START = b"\xff\xd8\xff"
# The kinds that are read. Their first bytes also make Pillow, which reads the header, and OpenCV, which decodes, agree.
_KINDS = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|BM|RIFF....WEBP|II[*+]\0|MM\0[*+]", re.DOTALL)
_TIFF_STARTS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
# What libjpeg-turbo says of kinds that it cannot convert; every other complaint means missing or wrong bytes.
_EXOTIC_WORDS = ("subsampling level", "color conversion", "data precision", "sof type")


# Kept from before Ultralytics, once imported, replaces it by one that looks for further packages.
_open_picture = Image.open


class ImageError(ValueError):
    """A picture that cannot be used. The message is a short reason."""


def decode_image(data: bytes, min_long_side_px: int | None = None) -> np.ndarray:
    """Decode a picture to upright RGB uint8 (height, width, 3).

    `min_long_side_px`: the long side that the caller will shrink to. A JPEG is then decoded at the smallest scale of
    1, 1/2, 1/4, 1/8 that leaves at least twice as many pixels, so that `resize_area` still has something to average
    (43-46 dB against the full decode; with only 1.07x left it is 34-36 dB).
    Raises ImageError for what is truncated, corrupt, not a picture or larger than MAX_IMAGE_PIXELS.
    """
    _, _, orientation = _read_header(data)
    image = _decode_jpeg(data, min_long_side_px) if is_jpeg(data) else None
    return _upright(_decode_other(data) if image is None else image, orientation)


def read_image(path: Path, min_long_side_px: int | None = None) -> np.ndarray:
    """Read a picture file as `decode_image` does. Raises ImageError naming the file."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe would wait for ever, a device may never end
            raise ImageError("not a regular file")
        if facts.st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"{facts.st_size / 1e9:.1f} GB, more than any photograph")
        return decode_image(path.read_bytes(), min_long_side_px)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror or error}") from error
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error


def upright_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) after the EXIF orientation is applied; reads the header only. Raises ImageError."""
    width, height, orientation = _read_header(data)
    return (height, width) if orientation >= 5 else (width, height)


def exif_orientation(data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8; 1 when there is none or it is unreadable. Raises ImageError.

    A TIFF is always 1: its decoders apply the tag themselves.
    """
    return _read_header(data)[2]


def is_jpeg(data: bytes) -> bool:
    """Tell a JPEG by its first bytes, whatever its file is called."""
    return data.startswith(_JPEG_START)


def points_upright(points: np.ndarray, orientation: int, width: int, height: int) -> np.ndarray:
    """Move (V, 2) pixel coordinates x, y from the stored picture to the upright one of `width` x `height`."""
    if orientation in (5, 6, 7, 8):
        points = points[:, ::-1]
    if orientation in (2, 3, 6, 7):
        points = points * (-1, 1) + (width, 0)
    if orientation in (3, 4, 7, 8):
        points = points * (1, -1) + (0, height)
    return points


def resize_area(image: np.ndarray, width_px: int, height_px: int) -> np.ndarray:
    """Resize with an area average when shrinking and linearly when growing; the same array when nothing changes.

    Thin wires survive: shrunk from 5472 to 640 pixels, wires one to three pixels wide keep 100 % of their length,
    but only about 50 % with INTER_LINEAR, which skips source pixels. Training, validation and prediction must all
    shrink this way.
    """
    height, width = image.shape[:2]
    smaller = (min(width, width_px), min(height, height_px))
    if smaller != (width, height):
        image = cv2.resize(image, smaller, interpolation=cv2.INTER_AREA)
    if smaller != (width_px, height_px):
        image = cv2.resize(image, (width_px, height_px), interpolation=cv2.INTER_LINEAR)
    return image


def fit_long_side(image: np.ndarray, long_side_px: int) -> np.ndarray:
    """Shrink so that the longer side is `long_side_px`; never enlarge."""
    height, width = image.shape[:2]
    scale = long_side_px / max(height, width)
    return image if scale >= 1 else resize_area(image, *_scaled_size(width, height, scale))


def letterbox(
    image: np.ndarray, size_px: int, fill: int = LETTERBOX_FILL, *, scale_up: bool = True
) -> tuple[np.ndarray, float, tuple[int, int]]:
    """Fit a picture into a square of `size_px` and pad it, centred, with grey `fill`.

    Returns (canvas (size_px, size_px, 3), scale, (pad_left, pad_top)): a point (x, y) of the picture lies at
    (x * scale + pad_left, y * scale + pad_top). An odd pixel of padding goes right and below, as in YOLO.
    """
    height, width = image.shape[:2]
    scale = size_px / max(height, width)
    if not scale_up:
        scale = min(scale, 1.0)
    new_width, new_height = _scaled_size(width, height, scale)
    left = round((size_px - new_width) / 2 - 0.1)
    top = round((size_px - new_height) / 2 - 0.1)
    canvas = np.full((size_px, size_px, *image.shape[2:]), fill, dtype=image.dtype)
    canvas[top : top + new_height, left : left + new_width] = resize_area(image, new_width, new_height)
    return canvas, scale, (left, top)


def encode_jpeg(image: np.ndarray, quality: int = 95) -> bytes:
    """Encode RGB uint8 as JPEG with 4:2:0 colour and no EXIF; the same picture always gives the same bytes."""
    pixels = np.ascontiguousarray(image)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
    return encoded


def write_jpeg(path: Path, image: np.ndarray, quality: int = 95) -> None:
    """Write RGB uint8 as JPEG; the file appears complete or not at all."""
    write_bytes_atomic(path, encode_jpeg(image, quality))


def _scaled_size(width: int, height: int, scale: float) -> tuple[int, int]:
    return max(1, round(width * scale)), max(1, round(height * scale))


def _read_header(data: bytes) -> tuple[int, int, int]:
    """Return (width, height, orientation) as stored, and refuse an image bomb before any pixel is decoded."""
    # Pillow refuses 179 megapixels by itself; raise that, for the whole process, to the limit checked below.
    if Image.MAX_IMAGE_PIXELS is not None and Image.MAX_IMAGE_PIXELS < MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = MAX_IMAGE_PIXELS
    if not data:
        raise ImageError("empty file")
    if not _KINDS.match(data):
        raise ImageError("not a picture, or of a kind that is not read (JPEG, PNG, BMP, TIFF and WebP are)")
    try:
        with _open_picture(io.BytesIO(data)) as header:
            width, height = header.size
            exif = header.info.get("exif")
    except Image.DecompressionBombError as error:
        raise ImageError(f"more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels") from error
    except _HEADER_ERRORS as error:
        raise ImageError("not a picture, or its header is damaged") from error
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(f"{width}x{height} is more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels")
    if width * height > max(UNSUSPICIOUS_PIXELS, MAX_PIXELS_PER_BYTE * len(data)):
        raise ImageError(f"{width}x{height} pixels in {len(data)} bytes: an image bomb, not a photograph")
    is_tiff = data.startswith(_TIFF_STARTS)
    return width, height, 1 if is_tiff or not isinstance(exif, bytes) else _orientation_of(exif)


def _orientation_of(exif_bytes: bytes) -> int:
    exif = Image.Exif()
    try:
        exif.load(exif_bytes)
        orientation = exif.get(_ORIENTATION_TAG, 1)
    except _HEADER_ERRORS:
        return 1  # damaged EXIF says nothing about the pixels
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _decode_jpeg(data: bytes, min_long_side_px: int | None) -> np.ndarray | None:
    """Return the pixels as stored, or None for a kind of JPEG that libjpeg-turbo cannot convert."""
    try:
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        divisor = 1
        while min_long_side_px and divisor < 8 and max(width, height) / (2 * divisor) >= 2 * min_long_side_px:
            divisor *= 2
        # A scaled JPEG has ceil(side / divisor) pixels a side: asking for that many selects exactly this scale.
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, colorspace="RGB", min_height=-(-height // divisor), min_width=-(-width // divisor)
        )
    except ValueError as error:
        if any(word in str(error).lower() for word in _EXOTIC_WORDS):
            return None
        raise ImageError(f"truncated or corrupt JPEG ({error})") from error
    return pixels


def _decode_other(data: bytes) -> np.ndarray:
    try:
        # Orientation is applied in one place, `_upright`; IMREAD_COLOR makes three 8-bit channels of anything.
        bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise ImageError(f"cannot be decoded ({' '.join(str(error.err).split())})") from error
    if bgr is None:
        raise ImageError("truncated, corrupt or of a kind that cannot be decoded")
    return cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation (EXIF 2.32, tag 0x0112): 5 to 8 swap width and height."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)

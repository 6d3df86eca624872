"""Decodes, rotates upright, shrinks and writes photographs, the same way for all scripts.

Images in memory are RGB uint8 (height, width, 3).
"""

import functools
import io
import os
import re
import stat
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    Image,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from yolo_seg_ddp.utils.errors import printable
from yolo_seg_ddp.utils.files import write_bytes_atomic

MAX_IMAGE_PIXELS = 400_000_000  # a drone photograph has 20 million
# A uniform image of any size needs only a few kB. Photographs have 1 to 20 pixels a byte, at most
# 100 (blue sky).
UNSUSPICIOUS_PIXELS = 25_000_000
MAX_PIXELS_PER_BYTE = 200
# the longest side that libjpeg writes: shrinking to it keeps every JPEG's size
NATIVE_LONG_SIDE_PX = 65_500
MAX_IMAGE_BYTES = 2_000_000_000
STRETCH_PERCENT = (1, 99)  # of values of more than 8 bits, which become 0 and 255
FILL = 114  # the grey padding that pretrained YOLO weights were trained with
EXIF_ORIENTATION_TAG = 274  # EXIF 2.32, tag 0x0112
# the directory of the picture's facts, and its DateTimeOriginal
EXIF_IFD, EXIF_TIME_TAG = 0x8769, 0x9003
# Errors of Pillow's header readers on damaged bytes (UnidentifiedImageError is an OSError).
HEADER_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    struct.error,
    EOFError,
    LookupError,
    TypeError,
    ImportError,
)
EXIF_ERRORS = (*HEADER_ERRORS, ArithmeticError, AttributeError)
# The supported formats by their first bytes, with Pillow's class for each, so that Pillow (header)
# and OpenCV (pixels) read the same format. Not with `Image.open`: Ultralytics replaces it by a
# function that tries to install more packages.
_KINDS: tuple[tuple[re.Pattern[bytes], type[ImageFile.ImageFile]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), JpegImagePlugin.JpegImageFile),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), PngImagePlugin.PngImageFile),
    (re.compile(rb"BM"), BmpImagePlugin.BmpImageFile),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), WebPImagePlugin.WebPImageFile),
    (re.compile(rb"II[*+]\0|MM\0[*+]"), TiffImagePlugin.TiffImageFile),
    (re.compile(rb"\0\0\0\x0cjP  \r\n\x87\n"), Jpeg2KImagePlugin.Jpeg2KImageFile),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), AvifImagePlugin.AvifImageFile),
)
# libjpeg-turbo's messages for JPEG variants it does not support; any other message means damaged
# data.
_UNSUPPORTED_WORDS = ("subsampling level", "color conversion", "data precision", "sof type")


Stretch = tuple[float, float]  # the values of a picture of more than 8 bits that become 0 and 255


class ImageError(ValueError):
    """An image cannot be used. The message is a short reason."""


def decode_image(
    data: bytes,
    min_long_side_px: int | None = None,
    full_above_px: int | None = None,
    stretch: Stretch | None = None,
) -> np.ndarray:
    """Decode an image to upright RGB uint8 (height, width, 3).

    `min_long_side_px` is the long side to which the caller will shrink the image. A JPEG is then
    decoded at the smallest scale of 1, 1/2, 1/4, 1/8 with a long side of at least twice that, so
    that `resize_area` has pixels to average (43-46 dB PSNR against the full decode; 34-36 dB at
    1.07x). An image with a side longer than `full_above_px` is decoded at full size. `stretch` is
    for PNG and TIFF of more than 8 bits; without it white is their largest possible value. Raises
    ImageError for data that is truncated, corrupt, not an image or larger than MAX_IMAGE_PIXELS.
    """
    width, height, orientation = _read_header(data)
    if full_above_px is not None and max(width, height) > full_above_px:
        min_long_side_px = None
    image = _decode_jpeg(data, min_long_side_px) if is_jpeg(data) else None
    return _upright(_decode_other(data, stretch) if image is None else image, orientation)


def read_image(
    path: Path,
    min_long_side_px: int | None = None,
    full_above_px: int | None = None,
    stretch: Stretch | None = None,
) -> np.ndarray:
    """Read an image file with `decode_image`. Raises ImageError with the file's name."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe would block, a device may be endless
            raise ImageError("not a regular file")
        if facts.st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"{facts.st_size / 1e9:.1f} GB, more than any photograph")
        return decode_image(path.read_bytes(), min_long_side_px, full_above_px, stretch)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror or error}") from error
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error


def upright_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of the upright image; reads the header only. Raises ImageError."""
    width, height, orientation = _read_header(data)
    return (height, width) if orientation >= 5 else (width, height)


def exif_orientation(data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or unreadable. Raises ImageError.

    Always 1 for TIFF: its decoders apply the tag themselves.
    """
    return _read_header(data)[2]


def time_taken(data: bytes) -> datetime | None:
    """Return the local time of EXIF at which a photograph was taken; None if it is missing or
    damaged. Raises ImageError.
    """
    with _open_picture(data) as header:
        block = header.info.get("exif")
    if not isinstance(block, bytes):
        return None
    exif = Image.Exif()
    try:
        exif.load(block)
        return parse_exif_time(exif.get_ifd(EXIF_IFD).get(EXIF_TIME_TAG))
    except EXIF_ERRORS:
        return None


def parse_exif_time(value: object) -> datetime | None:
    """Return a time as EXIF writes it, `2023:04:03 13:26:37`; None for anything else, such as
    zeros.
    """
    try:
        return datetime.strptime(str(value).strip("\0 "), "%Y:%m:%d %H:%M:%S")
    except ValueError:
        return None


def is_jpeg(data: bytes) -> bool:
    """Return whether the data is a JPEG, by its first bytes."""
    return data.startswith(b"\xff\xd8\xff")


def points_upright(points: np.ndarray, orientation: int, width: int, height: int) -> np.ndarray:
    """Convert pixel coordinates (V, 2) x, y from the stored image to the upright one of `width` x
    `height`.
    """
    if orientation in (5, 6, 7, 8):
        points = points[:, ::-1]
    if orientation in (2, 3, 6, 7):
        points = points * (-1, 1) + (width, 0)
    if orientation in (3, 4, 7, 8):
        points = points * (1, -1) + (0, height)
    return points


def resize_area(image: np.ndarray, width_px: int, height_px: int) -> np.ndarray:
    """Shrink by area averaging, enlarge linearly; return the same array if the size does not
    change.

    Area averaging keeps thin wires: from 5472 to 640 pixels, wires one to three pixels wide keep
    100 % of their length, but only about 50 % with INTER_LINEAR, which skips source pixels. Train,
    validate and predict with it.
    """
    height, width = image.shape[:2]
    smaller = (min(width, width_px), min(height, height_px))
    if smaller != (width, height):
        image = cv2.resize(image, smaller, interpolation=cv2.INTER_AREA)
    if smaller != (width_px, height_px):
        image = cv2.resize(image, (width_px, height_px), interpolation=cv2.INTER_LINEAR)
    return image


def fit_long_side(image: np.ndarray, long_side_px: int) -> np.ndarray:
    """Shrink so that the longer side is at most `long_side_px`; never enlarge."""
    height, width = image.shape[:2]
    scale = long_side_px / max(height, width)
    return image if scale >= 1 else resize_area(image, *scaled_size(width, height, scale))


def letterbox(
    image: np.ndarray, size_px: int
) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
    """Resize an image to fit a square of `size_px`, centre it and pad with grey.

    Returns (canvas (size_px, size_px, 3), (inner width, inner height), (pad_left, pad_top)): a
    point (x, y) of the image is at (x / width * inner width + pad_left, y / height * inner height +
    pad_top). An odd pixel of padding goes right and below, as in YOLO.
    """
    height, width = image.shape[:2]
    new_width, new_height = scaled_size(width, height, size_px / max(height, width))
    left = round((size_px - new_width) / 2 - 0.1)
    top = round((size_px - new_height) / 2 - 0.1)
    canvas = np.full((size_px, size_px, *image.shape[2:]), FILL, dtype=image.dtype)
    canvas[top : top + new_height, left : left + new_width] = resize_area(
        image, new_width, new_height
    )
    return canvas, (new_width, new_height), (left, top)


def encode_jpeg(image: np.ndarray, quality: int = 95, chroma: str = "420") -> bytes:
    """Encode RGB uint8 as JPEG without EXIF, by default with 4:2:0 chroma; equal images give equal
    bytes.
    """
    pixels = np.ascontiguousarray(image)
    encoded: bytes = simplejpeg.encode_jpeg(
        pixels, quality=quality, colorspace="RGB", colorsubsampling=chroma
    )
    return encoded


def write_jpeg(path: Path, image: np.ndarray, quality: int = 95) -> None:
    """Write RGB uint8 as JPEG, atomically."""
    write_bytes_atomic(path, encode_jpeg(image, quality))


def scaled_size(width: int, height: int, scale: float) -> tuple[int, int]:
    """Return (width, height) times `scale`, rounded, at least 1."""
    return max(1, round(width * scale)), max(1, round(height * scale))


def _read_header(data: bytes) -> tuple[int, int, int]:
    """Return (width, height, orientation) as stored.

    Raises ImageError for an image bomb, before decoding it.
    """
    with _open_picture(data) as header:
        width, height = header.size
        exif = header.info.get("exif")
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"{width}x{height} is more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels"
        )
    if width * height > max(UNSUSPICIOUS_PIXELS, MAX_PIXELS_PER_BYTE * len(data)):
        raise ImageError(
            f"{width}x{height} pixels in {len(data)} bytes: an image bomb, not a photograph"
        )
    is_tiff = isinstance(header, TiffImagePlugin.TiffImageFile)
    return width, height, 1 if is_tiff or not isinstance(exif, bytes) else orientation_of(exif)


def _open_picture(data: bytes) -> ImageFile.ImageFile:
    """Read a picture's header. Raises ImageError."""
    if not data:
        raise ImageError("empty file")
    reader = next((reader for start, reader in _KINDS if start.match(data)), None)
    if reader is None:
        raise ImageError(
            "not a picture of a supported format (JPEG, PNG, BMP, TIFF, WebP, JPEG 2000 or AVIF)"
        )
    _silence_decoders()
    try:
        return reader(io.BytesIO(data))
    except HEADER_ERRORS as error:
        raise ImageError("not a picture, or its header is damaged") from error


def orientation_of(exif_bytes: bytes) -> int:
    """Return the orientation that an EXIF block holds, 1 to 8; 1 if it is missing or unreadable."""
    exif = Image.Exif()
    try:
        exif.load(exif_bytes)
        orientation = exif.get(EXIF_ORIENTATION_TAG, 1)
    except HEADER_ERRORS:
        return 1  # the pixels may be fine
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _decode_jpeg(data: bytes, min_long_side_px: int | None) -> np.ndarray | None:
    """Return the pixels as stored, or None for a JPEG variant that
    libjpeg-turbo does not support.
    """
    try:
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        divisor = 1
        while (
            min_long_side_px
            and divisor < 8
            and max(width, height) / (2 * divisor) >= 2 * min_long_side_px
        ):
            divisor *= 2
        # A scaled JPEG has ceil(side / divisor) pixels a side: this minimum selects exactly this
        # scale.
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, colorspace="RGB", min_height=-(-height // divisor), min_width=-(-width // divisor)
        )
    except ValueError as error:
        if any(word in str(error).lower() for word in _UNSUPPORTED_WORDS):
            return None
        raise ImageError(f"truncated or corrupt JPEG ({error})") from error
    return pixels


def stretch_of(values: np.ndarray) -> Stretch:
    """Return the values of STRETCH_PERCENT; NaN and infinity do not count."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, STRETCH_PERCENT).tolist() if len(finite) else (0.0, 65_535.0)
    return low, max(high, low + 1)


def stretched(values: np.ndarray, stretch: Stretch) -> np.ndarray:
    """Return values of any type as bytes: `stretch` become 0 and 255."""
    low, high = stretch
    scaled = (np.nan_to_num(values.astype(np.float32)) - low) * (255 / (high - low))
    return scaled.round().clip(0, 255).astype(np.uint8)


def is_deep(picture: Image.Image, data: bytes) -> bool:
    """Return whether an opened PNG or TIFF has values of more than 8 bits."""
    if isinstance(picture, TiffImagePlugin.TiffImageFile):
        return int(np.max(picture.tag_v2.get(258, 8))) > 8  # BitsPerSample
    return isinstance(picture, PngImagePlugin.PngImageFile) and data[24] > 8


def deep_values(data: bytes) -> np.ndarray | None:
    """Return the values of a PNG or TIFF of more than 8 bits, (H, W) or BGR (H, W, 3); None for
    another picture. Raises ImageError.
    """
    _read_header(data)
    with _open_picture(data) as picture:
        if not is_deep(picture, data):
            return None
    kept = cv2.IMREAD_ANYDEPTH | cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    values = cv2.imdecode(np.frombuffer(data, np.uint8), kept)
    if values is None:  # of 32 bits
        values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    return None if values is None or values.dtype == np.uint8 else values


def _decode_other(data: bytes, stretch: Stretch | None) -> np.ndarray:
    try:
        with _open_picture(data) as picture:
            picture.verify()  # the checksums of a PNG: libpng itself would print what is wrong
    except HEADER_ERRORS as error:
        raise ImageError("truncated or corrupt") from error
    if stretch and (values := deep_values(data)) is not None:
        values = stretched(values if values.ndim == 3 else np.stack([values] * 3, axis=2), stretch)
        return np.ascontiguousarray(values[..., 2::-1])
    try:
        # `_upright` applies the orientation. IMREAD_COLOR converts every format to three 8-bit
        # channels.
        bgr = cv2.imdecode(
            np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        )
    except cv2.error as error:
        raise ImageError(f"cannot be decoded ({' '.join(str(error.err).split())})") from error
    if bgr is None:
        raise ImageError("truncated, corrupt or of an unsupported format")
    return cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)


@functools.cache
def _silence_decoders() -> None:
    """Keep OpenCV and Pillow from printing warnings about damaged files; each gets one line from
    who reads it.
    """
    if "OPENCV_LOG_LEVEL" not in os.environ:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    warnings.filterwarnings("ignore", module=r"PIL\.")


@contextmanager
def one_opencv_thread() -> Iterator[None]:
    """Let OpenCV use one thread while a photograph is worked on per thread: more would only compete
    for cores.
    """
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation; 5 to 8 swap width and height."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def load_photo(file: Path, long_side_px: int) -> np.ndarray:
    """Read one photograph as RGB uint8 (H, W, 3) with its long side at most `long_side_px`,
    anti-aliased.
    """
    return fit_long_side(read_image(file, long_side_px), long_side_px)


def unreadable_message(file: Path, error: ImageError) -> str:
    """Return a one-line message about a photograph that cannot be read."""
    reason = str(error).removeprefix(f"{file}: ")
    return (
        f"{printable(str(file), 4096)}: unreadable photograph ({reason}); remove it or run python "
        "parse_labels.py again"
    )

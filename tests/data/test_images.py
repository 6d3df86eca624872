"""Decoding, orientation, shrinking and writing of photographs."""

import io
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from tests.support.plugin import run_script
from yolo_seg_ddp.data.images import (
    ImageError,
    decode_image,
    encode_jpeg,
    exif_orientation,
    fit_long_side,
    letterbox,
    load_photo,
    points_upright,
    read_image,
    resize_area,
    upright_size,
    write_jpeg,
)
from yolo_seg_ddp.prepare.parsing.photograph import build_image


def encode(pixels: np.ndarray, kind: str, orientation: int | None = None) -> bytes:
    stream = io.BytesIO()
    exif = Image.Exif()
    if orientation is not None:
        exif[274] = orientation
    Image.fromarray(pixels).save(stream, kind, exif=exif)
    return stream.getvalue()


def textured(height: int, width: int) -> np.ndarray:
    noise = np.random.default_rng(7).integers(
        0, 255, (height // 20, width // 20, 3), dtype=np.uint8
    )
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)


def test_scaled_decode_equals_the_full_decode_once_shrunk() -> None:
    data = simplejpeg.encode_jpeg(textured(3000, 4000), quality=92)
    full, scaled = decode_image(data), decode_image(data, 640)
    assert full.shape == (3000, 4000, 3)
    assert scaled.shape == (1500, 2000, 3)
    assert cv2.PSNR(resize_area(full, 640, 480), resize_area(scaled, 640, 480)) > 40


@pytest.mark.parametrize(
    ("min_long_side_px", "width"), [(None, 4000), (2001, 4000), (1000, 2000), (500, 1000), (9, 500)]
)
def test_scaled_decode_leaves_twice_the_pixels_asked_for(
    min_long_side_px: int | None, width: int
) -> None:
    data = encode_jpeg(np.zeros((300, 4000, 3), np.uint8))
    assert decode_image(data, min_long_side_px).shape[1] == width


def test_thin_wires_survive_shrinking() -> None:
    image = np.zeros((1600, 1600, 3), np.uint8)
    cv2.line(image, (0, 200), (1599, 650), (255, 255, 255), 1)

    def share_of_columns_with_the_wire(small: np.ndarray) -> float:
        return float((small.max(axis=2).max(axis=0) > 8).mean())

    assert share_of_columns_with_the_wire(resize_area(image, 200, 200)) == 1.0
    linear = cv2.resize(image, (200, 200), interpolation=cv2.INTER_LINEAR)
    assert share_of_columns_with_the_wire(linear) < 0.8


def test_resize_area_handles_growing_and_mixed_sizes() -> None:
    image = textured(60, 80)
    assert resize_area(image, 80, 60) is image
    assert resize_area(image, 160, 120).shape == (120, 160, 3)
    assert resize_area(image, 40, 120).shape == (120, 40, 3)
    assert fit_long_side(image, 200) is image
    assert fit_long_side(image, 40).shape == (30, 40, 3)
    assert fit_long_side(np.zeros((1, 4000, 3), np.uint8), 100).shape == (1, 100, 3)


@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 77])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "AVIF"])
def test_orientation_is_applied_as_other_programs_do(orientation: int, kind: str) -> None:
    data = encode(textured(40, 60), kind, orientation)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    image = decode_image(data)
    assert exif_orientation(data) == (orientation if orientation in range(1, 9) else 1)
    assert upright_size(data) == (expected.shape[1], expected.shape[0])
    assert image.shape == expected.shape
    assert cv2.PSNR(image, expected) > 40 if kind == "JPEG" else np.array_equal(image, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_points_move_with_the_pixels(orientation: int) -> None:
    stored = np.zeros((40, 60, 3), np.uint8)
    stored[10, 50] = 255
    upright = decode_image(encode(stored, "PNG", orientation))
    height, width = upright.shape[:2]
    ((x, y),) = points_upright(np.array([[50.5, 10.5]]), orientation, width, height)
    assert upright[int(y), int(x)].tolist() == [255, 255, 255]


QUIET_JOB = """
import sys
from yolo_seg_ddp.utils.environment import prepare_environment
prepare_environment()
import ultralytics.utils  # first: it replaces Image.open
from pathlib import Path
from yolo_seg_ddp.data.images import ImageError, decode_image, exif_orientation, upright_size
for file in sorted(Path(sys.argv[1]).iterdir()):
    answers = []
    for function in (decode_image, upright_size, exif_orientation):
        try:
            function(file.read_bytes())
            answers.append("read")
        except ImageError as error:
            assert str(error).isprintable()
            answers.append("refused")
    print(file.name, *answers)
"""


HEADLESS = {
    "empty": b"",
    "text": b"hello",
    "zeros": bytes(1000),
    "jpeg-start": b"\xff\xd8\xff",
    "jpeg-zeros": b"\xff\xd8\xff\xe0" + bytes(100),
    "heic": b"\0\0\0\x18ftypheic" + bytes(90),
    "png-alone": b"\x89PNG\r\n\x1a\n",
}


def pictures() -> dict[str, bytes]:
    """Return noise as every kind of file, whole and damaged in several ways."""
    noise = np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)
    files: dict[str, bytes] = {}
    for kind in ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "JPEG2000", "AVIF"):
        data = encode(noise, kind)
        files |= {f"{kind}-whole": data, f"{kind}-head": data[:20]}
        files |= {f"{kind}-{share}": data[: int(len(data) * share)] for share in (0.02, 0.5, 0.99)}
        # in the other formats nothing tells wrong pixels from right ones
        if kind in ("JPEG", "PNG"):
            third = len(data) // 3
            wrong = bytes(byte ^ 0x5A for byte in data[third : third + 400])
            files[f"{kind}-other-bytes"] = data[:third] + wrong + data[third + 400 :]
    return files | HEADLESS


PICTURES = pictures()


def test_photographs_are_read_or_refused_in_one_line_and_no_library_prints_or_seeks_a_package(
    tmp_path: Path,
) -> None:
    for name, data in PICTURES.items():
        (tmp_path / name).write_bytes(data)
    done = run_script("python", "-c", QUIET_JOB, tmp_path)
    assert done.stderr == ""
    answers = {
        name: answer for name, *answer in (line.split() for line in done.stdout.splitlines())
    }
    assert answers.keys() == PICTURES.keys(), "nobody else may print"
    for name, (decoded, *headers) in answers.items():
        assert (decoded == "read") == name.endswith("-whole"), name
        assert name not in HEADLESS or headers == ["refused"] * 2, name


@pytest.mark.parametrize("missing", [1, 2, 500])
def test_a_jpeg_without_its_last_bytes_is_refused_by_parsing_training_and_inference(
    missing: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(encode_jpeg(textured(800, 800))[:-missing])
    readers = (
        read_image,
        lambda file: load_photo(file, 100),
        lambda file: build_image(file.read_bytes(), 640),
    )
    for read in readers:
        with pytest.raises(ImageError, match="truncated"):
            read(file)


def test_grey_alpha_and_16_bit_become_rgb() -> None:
    rgb = textured(40, 60)
    alpha = encode(np.dstack([rgb, np.full((40, 60), 9, np.uint8)]), "PNG")
    assert np.array_equal(decode_image(alpha), rgb)
    grey = decode_image(encode(rgb[..., 0], "PNG"))
    assert np.array_equal(grey, np.repeat(rgb[..., :1], 3, axis=2))
    assert decode_image(encode(rgb[..., 0], "JPEG")).shape == (40, 60, 3)
    _, wide = cv2.imencode(".png", rgb[..., 0].astype(np.uint16) * 257)
    assert np.array_equal(decode_image(wide.tobytes()), grey)


def test_cmyk_jpeg_keeps_its_colours() -> None:
    stream = io.BytesIO()
    Image.new("CMYK", (64, 48), (20, 200, 90, 30)).save(stream, "JPEG", quality=95)
    expected = np.asarray(Image.open(io.BytesIO(stream.getvalue())).convert("RGB"))
    assert np.abs(decode_image(stream.getvalue()).astype(int) - expected).max() <= 4


def test_unusual_colour_sampling_is_decoded_another_way() -> None:
    _, encoded = cv2.imencode(".jpg", textured(96, 96))
    data = bytearray(encoded.tobytes())
    # luma sampled 3x1, which libjpeg-turbo's converter does not know
    data[data.find(b"\xff\xc0") + 11] = 0x31
    with pytest.raises(ValueError, match="subsampling level"):
        simplejpeg.decode_jpeg(bytes(data))
    assert decode_image(bytes(data)).shape == (96, 96, 3)


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return data + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(20_001, 20_000), (60_000, 60_000)])
def test_image_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="megapixels"):
        decode_image(png_header(*size))
    panorama = (20_000, 19_999)
    assert upright_size(png_header(*panorama) + bytes(2_000_000)) == panorama


def test_read_image_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    for name in ("bad.jpg", "missing.jpg"):
        with pytest.raises(ImageError, match=name):
            read_image(tmp_path / name)


@pytest.mark.parametrize(
    ("height", "width", "size_px", "shape", "padding"),
    [
        (60, 80, 160, (120, 160), (0, 20)),
        (81, 100, 100, (81, 100), (0, 9)),
        (100, 33, 64, (64, 21), (21, 0)),
    ],
)
def test_letterbox_centres_and_maps_points(
    height: int, width: int, size_px: int, shape: tuple[int, int], padding: tuple[int, int]
) -> None:
    canvas, inner_size, (left, top) = letterbox(np.full((height, width, 3), 200, np.uint8), size_px)
    assert canvas.shape == (size_px, size_px, 3)
    assert (left, top) == padding
    assert inner_size == shape[::-1]
    assert (canvas[top : top + shape[0], left : left + shape[1]] == 200).all()
    assert (canvas == 114).sum() == 3 * (size_px**2 - shape[0] * shape[1])


def test_write_jpeg_is_whole_or_absent(tmp_path: Path) -> None:
    image = textured(60, 80)
    write_jpeg(tmp_path / "a.jpg", image[:, ::-1][:, ::-1], quality=95)
    assert cv2.PSNR(read_image(tmp_path / "a.jpg"), image) > 35
    with pytest.raises(OSError, match="missing"):
        write_jpeg(tmp_path / "missing" / "a.jpg", image)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]

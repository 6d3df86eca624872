"""Orthophotos: which pixels are read, and which files are refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from yolo_seg_ddp.data.images import FILL
from yolo_seg_ddp.extras.orthophotos.raster import is_orthophoto, open_orthophoto
from yolo_seg_ddp.extras.orthophotos.tests.rasters import CRS, rasterio, write_raster
from yolo_seg_ddp.utils.errors import UserError

PIXELS = np.random.default_rng(0).integers(1, 255, (700, 600, 5), dtype=np.uint8)
SEEN = np.arange(700)[:, None] + np.arange(600) > 500
RGB = PIXELS[..., :3]
PADDED = np.where(SEEN[..., None], RGB, FILL)
WITHOUT = np.where(SEEN[..., None], RGB, 0).astype(np.uint8)
ALPHA = np.dstack([RGB, SEEN * np.uint8(255)])


@pytest.mark.parametrize(
    ("stored", "expected", "changes"),
    [
        pytest.param(RGB, RGB, {}, id="three bands"),
        pytest.param(RGB[..., :1], RGB[..., [0, 0, 0]], {}, id="one band"),
        pytest.param(ALPHA, PADDED, {"photometric": "RGB", "alpha": "yes"}, id="alpha"),
        pytest.param(WITHOUT, PADDED, {"nodata": 0}, id="nodata"),
        pytest.param(RGB, PADDED, {"mask": SEEN}, id="internal mask"),
        pytest.param(
            PIXELS,
            PIXELS[..., [2, 1, 0]],
            {"colorinterp": ["blue", "green", "red", "gray", "gray"]},
            id="five bands",
        ),
        pytest.param(
            RGB,
            RGB,
            {"tiled": False, "compress": "lzw", "BIGTIFF": "YES"},
            id="strips of a BigTIFF",
        ),
    ],
)
def test_windows_hold_the_photograph_and_padding(
    stored: np.ndarray, expected: np.ndarray, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = write_raster(tmp_path / "a.tif", stored, **changes)
    assert is_orthophoto(file)
    raster = open_orthophoto(file)
    for left, top, right, bottom in ((0, 0, 600, 700), (130, 90, 400, 690)):
        np.testing.assert_array_equal(
            raster.read((left, top, right, bottom)), expected[top:bottom, left:right]
        )


def test_16_bits_are_stretched_alike_in_all_windows(tmp_path: Path) -> None:
    values = (PIXELS[..., :3].astype(np.uint16) - 1) * 16 + 1000
    values[0, 0] = 65_535  # a flash of light does not make the rest dark
    raster = open_orthophoto(write_raster(tmp_path / "a.tif", values))
    assert raster.stretch is not None
    whole, part = raster.read((0, 0, 600, 700)), raster.read((200, 100, 300, 400))
    np.testing.assert_array_equal(part, whole[100:400, 200:300])
    assert (
        abs(whole.astype(float) - (RGB.astype(float) - 1) * 255 / 253).max(
            initial=0, where=values < 65_535
        )
        < 4
    )


def declare_more(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for tag in (256, 257):  # little endian: tag, type 3 or 4, number 1, value
        at = next(
            k
            for k in range(8, len(data))
            if data[k : k + 2] == tag.to_bytes(2, "little") and data[k + 4] == 1
        )
        data[at + 2 : at + 4], data[at + 8 : at + 12] = b"\4\0", (900_000).to_bytes(4, "little")
    file.write_bytes(data)


VRT = f'<VRTDataset rasterXSize="9" rasterYSize="9"><SRS>{CRS}</SRS></VRTDataset>'
TURNED = rasterio.Affine(0.03, 0.01, 5e5, 0.01, -0.03, 5e6)


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        (
            {},
            lambda file: file.write_bytes(file.read_bytes()[:-5000]),
            "truncated: .* bytes are there",
        ),
        ({}, declare_more, "declares 900,000 x 900,000 pixels"),
        ({}, lambda file: file.write_text(VRT), "a VRT names other files"),
        ({"crs": None}, None, "no coordinate reference system; gdal_translate -a_srs"),
        ({"transform": TURNED}, None, "turned or mirrored"),
        ({"crs": 'LOCAL_CS["here",UNIT["metre",1]]'}, None, "no coordinate reference system"),
        (
            {"transform": rasterio.Affine(0.03, 0, 5e5, 0, -0.03, np.nan)},
            None,
            "place on the map holds .*nan; gdal_translate",
        ),
        (
            {"transform": rasterio.Affine(np.inf, 0, 5e5, 0, -0.03, 5e6)},
            None,
            "place on the map holds inf",
        ),
        (
            {"transform": rasterio.Affine(1e-300, 0, 5e5, 0, -1e-300, 5e6)},
            None,
            "is none on the Earth",
        ),
        (
            {"transform": rasterio.Affine(1e300, 0, 5e5, 0, -1e300, 5e6)},
            None,
            "is none on the Earth",
        ),
        (
            {"transform": rasterio.Affine(0.03, 0, 1e300, 0, -0.03, 5e6)},
            None,
            "is none on the Earth",
        ),
        ({"transform": rasterio.Affine(0, 0, 5e5, 0, 0, 5e6)}, None, "turned or mirrored"),
        (
            {"crs": "EPSG:4326", "transform": rasterio.Affine(0.1, 0, 10, 0, -1.0, 95)},
            None,
            "is none on the Earth",
        ),
        ({"dtype": "float32"}, None, "values of float32"),
        ({"photometric": "palette"}, None, "colours from a palette"),
    ],
)
def test_rasters_that_cannot_be_used_are_refused_in_one_line(
    changes: dict[str, Any], damage: Callable[[Path], object] | None, message: str, tmp_path: Path
) -> None:
    bands = 1 if "photometric" in changes else 3
    pixels = RGB[..., :bands].astype(changes.pop("dtype", "uint8"))
    file = write_raster(tmp_path / "a.tif", pixels, **changes)
    if damage:
        damage(file)
    with pytest.raises(UserError, match=message) as caught:
        _ = is_orthophoto(file) and open_orthophoto(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_strip_too_large_for_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_raster(tmp_path / "a.tif", RGB, tiled=False, blockysize=700)
    monkeypatch.setattr("yolo_seg_ddp.extras.orthophotos.raster.MAX_STORED_BYTES", 1_000_000)
    with pytest.raises(UserError, match=r"one strip or tile of it takes .*TILED=YES"):
        open_orthophoto(file)


def test_a_tiff_without_a_place_is_a_photograph(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    Image.fromarray(RGB).save(file)
    (tmp_path / "b.tif").write_bytes(b"II*\0no tags")
    assert not is_orthophoto(file)
    assert not is_orthophoto(tmp_path / "b.tif")
    assert not is_orthophoto(tmp_path / "missing.tif")


def test_files_that_a_raster_names_or_that_lie_beside_it_are_not_opened(tmp_path: Path) -> None:
    secret = write_raster(tmp_path / "secret.tif", np.zeros_like(RGB), crs="EPSG:3857")
    file = write_raster(tmp_path / "a.tif", RGB, tags={"OVERVIEWS": str(secret)})
    source = (
        f"<SimpleSource><SourceFilename>{secret}</SourceFilename><SourceBand>1</SourceBand></"
        "SimpleSource>"
    )
    band = f'<VRTRasterBand dataType="Byte" band="1">{source}</VRTRasterBand>'
    flags = "".join(f'<MDI key="INTERNAL_MASK_FLAGS_{number}">2</MDI>' for number in (1, 2, 3))
    for suffix in (".ovr", ".msk"):
        facts = f"<Metadata>{flags}</Metadata>{band}"
        text = f'<VRTDataset rasterXSize="600" rasterYSize="700">{facts}</VRTDataset>'
        (tmp_path / f"a.tif{suffix}").write_text(text)
    (tmp_path / "a.tif.aux.xml").write_text("<PAMDataset><SRS>EPSG:3857</SRS></PAMDataset>")
    raster = open_orthophoto(file)
    np.testing.assert_array_equal(raster.read((0, 0, 600, 700)), RGB)
    assert "zone 33N" in raster.crs


def test_without_rasterio_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_raster(tmp_path / "a.tif", RGB)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(
        UserError, match=r"needs more packages: pip install -r requirements-geo.txt"
    ):
        open_orthophoto(file)

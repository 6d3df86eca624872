"""Reads orthophotos, GeoTIFF files of any size, window by window through rasterio, an optional
package.

A GeoTIFF from elsewhere can name other files: sidecars beside it, and overviews in its metadata,
which GDAL opens when it is asked for fewer pixels than there are. So only the GTiff driver reads
it, without sidecars, and always at full resolution.

Pixel coordinates are x to the right and y down; the raster covers 0..width and 0..height.
"""

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import TiffImagePlugin

from yolo_seg_ddp.data.images import FILL, HEADER_ERRORS, Stretch, stretch_of, stretched
from yolo_seg_ddp.utils.errors import UserError, one_line, printable

INSTALL = "pip install -r requirements-geo.txt"
WGS84 = "EPSG:4326"
MAX_SIDE_PX = 1_000_000
PIXEL_M = 1e-5, 1e6  # the shortest and the longest side of a pixel
# of a raster of more than UNSUSPICIOUS_PIXELS: where nothing was flown takes no bytes
MAX_PIXELS_PER_BYTE = 2_000
UNSUSPICIOUS_PIXELS = 25_000_000
MAX_STORED_BYTES = 300_000_000  # of what has to be decoded at once, a strip or a tile of the file
ROWS_AT_ONCE = 512
# patches a side, and their side: a look at all parts of the raster
STRETCH_PATCHES, STRETCH_PX = 24, 64
# first bytes, and those of the whole header
_TIFF = {b"II*\0": 8, b"MM\0*": 8, b"II+\0": 16, b"MM\0+": 16}
_STORED = ((273, 279), (324, 325))  # TIFF 6.0: places and sizes of strips, or of tiles
_PLACED = (33550, 33922, 34264, 34735)  # GeoTIFF 1.1: pixel scale, tie points, transformation, keys
PLACE_AGAIN = "gdal_translate -a_ullr LEFT TOP RIGHT BOTTOM in.tif out.tif"
_OPTIONS: dict[str, Any] = {
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
    "GDAL_PAM_ENABLED": "NO",
    "GDAL_CACHEMAX": 128,
}


def is_orthophoto(file: Path) -> bool:
    """Return whether a file is a TIFF with a place on the map.

    Raises UserError for GDAL's VRT, which names other files.
    """
    try:
        if not file.is_file():
            return False
        with file.open("rb") as stream:
            start = stream.read(1024)
        if start.lstrip().startswith(b"<VRT"):
            raise UserError(
                f"{_named(file)}: a VRT names other files, which are not opened; make a GeoTIFF "
                "of it: gdal_translate in.vrt out.tif"
            )
        return start[:4] in _TIFF and any(tag in _tags(file) for tag in _PLACED)
    except HEADER_ERRORS:
        return False


@dataclass(frozen=True)
class Orthophoto:
    """A checked raster. transform: (x, dx, y, dy), so that pixel (u, v) lies at x + u dx, y + v dy
    of `crs`, as WKT.

    bands: those read as red, green and blue. stretch: the values that become 0 and 255; None: 8-bit
    values stay.
    """

    file: Path
    width: int
    height: int
    crs: str
    transform: tuple[float, float, float, float]
    bands: tuple[int, int, int]
    stretch: Stretch | None

    def read(self, corners: tuple[int, int, int, int]) -> np.ndarray:
        """Return a window (left, top, right, bottom): RGB uint8 (H, W, 3), padding where there is
        no photograph.

        Raises UserError if the file cannot be read there.
        """
        left, top, right, bottom = corners
        photo = np.full((bottom - top, right - left, 3), FILL, np.uint8)
        with _opened(self.file) as raster:
            for row in range(top, bottom, ROWS_AT_ONCE):
                window = ((row, min(row + ROWS_AT_ONCE, bottom)), (left, right))
                is_seen = raster.dataset_mask(window=window) > 0
                if is_seen.any():
                    values = np.moveaxis(raster.read(self.bands, window=window), 0, -1)
                    seen = (
                        values[is_seen]
                        if self.stretch is None
                        else stretched(values[is_seen], self.stretch)
                    )
                    photo[row - top : window[0][1] - top][is_seen] = seen
        return photo

    def to_map(self, points: np.ndarray) -> np.ndarray:
        """Return points (V, 2) in pixels in the coordinates of `crs`."""
        x, dx, y, dy = self.transform
        return np.asarray(points, np.float64) * (dx, dy) + (x, y)

    def to_pixels(self, points: np.ndarray) -> np.ndarray:
        """Return points (V, 2) in the coordinates of `crs` in pixels."""
        x, dx, y, dy = self.transform
        return (np.asarray(points, np.float64) - (x, y)) / (dx, dy)

    def pixel_m(self) -> float:
        """Return the length in metres of a pixel's side along a row, in
        the middle of the raster.
        """
        from pyproj import Geod

        middle = np.array([self.width / 2, self.height / 2])
        ends = self.to_map(np.stack([middle, middle + np.array([1, 0])]))
        return float(
            Geod(ellps="WGS84").line_length(*transformer(self.crs, WGS84).transform(*ends.T))
        )


def open_orthophoto(file: Path) -> Orthophoto:
    """Check a raster and return how it is read.

    Raises UserError, one line, for one that cannot be used, and without rasterio.
    """
    _check_header(file)
    with _opened(file) as raster:
        transform = raster.transform
        if not np.isfinite(transform).all():
            _refuse(file, f"its place on the map holds {_numbers(transform[:6])}", PLACE_AGAIN)
        if raster.crs is None or not (raster.crs.is_projected or raster.crs.is_geographic):
            _refuse(
                file,
                "no coordinate reference system",
                "gdal_translate -a_srs EPSG:... in.tif out.tif",
            )
        if transform.b or transform.d or transform.a <= 0 or transform.e >= 0:
            _refuse(file, "turned or mirrored against its map", "gdalwarp in.tif out.tif")
        stored = max(int(np.prod(shape)) for shape in raster.block_shapes) * raster.count * 2
        if stored > MAX_STORED_BYTES:
            size = f"one strip or tile of it takes {stored / 1e9:.1f} GB"
            _refuse(file, size, "gdal_translate -co TILED=YES in.tif out.tif")
        kinds = set(raster.dtypes)
        if kinds not in ({"uint8"}, {"uint16"}):
            types = ", ".join(sorted(kinds))
            _refuse(
                file,
                f"values of {types}",
                "8 or 16 bit without sign: gdal_translate -ot Byte -scale",
            )
        names = [kind.name for kind in raster.colorinterp]
        if "palette" in names:
            _refuse(file, "colours from a palette", "gdal_translate -expand rgb in.tif out.tif")
        # As the file says, else its first three, or its first alone.
        bands = (1, 2, 3) if raster.count - names.count("alpha") >= 3 else (1, 1, 1)
        if {"red", "green", "blue"} <= set(names):
            bands = (names.index("red") + 1, names.index("green") + 1, names.index("blue") + 1)
        photo = Orthophoto(
            file,
            raster.width,
            raster.height,
            plain_crs(file, raster.crs.to_wkt()),
            (transform.c, transform.a, transform.f, transform.e),
            bands,
            _stretch(raster, bands) if kinds == {"uint16"} else None,
        )
        # pyproj raises it for numbers that are not finite.
        with suppress(ValueError):
            corners = photo.to_map(np.array([[0, 0], [photo.width, photo.height]]))
            degrees = transformer(photo.crs, WGS84).transform(*corners.T)
            if np.isfinite(degrees).all() and PIXEL_M[0] <= photo.pixel_m() <= PIXEL_M[1]:
                return photo
        _refuse(
            file,
            f"its place on the map, {_numbers(photo.transform)}, is none on the Earth",
            PLACE_AGAIN,
        )


def _stretch(raster: Any, bands: tuple[int, int, int]) -> Stretch:
    """Return the values of STRETCH_PERCENT in patches all over the raster, the same for all bands
    and tiles.
    """
    seen = [np.zeros(0, np.uint16)]
    for top in np.linspace(
        0, max(raster.height - STRETCH_PX, 0), STRETCH_PATCHES, dtype=int
    ).tolist():
        for left in np.linspace(
            0, max(raster.width - STRETCH_PX, 0), STRETCH_PATCHES, dtype=int
        ).tolist():
            window = (
                (top, min(top + STRETCH_PX, raster.height)),
                (left, min(left + STRETCH_PX, raster.width)),
            )
            is_seen = raster.dataset_mask(window=window) > 0
            if is_seen.any():
                seen.append(raster.read(bands, window=window)[:, is_seen].ravel()[::4])
    return stretch_of(np.concatenate(seen))


def _check_header(file: Path) -> None:
    """Raise UserError for a TIFF that declares more than it holds."""
    try:
        tags = _tags(file)
        size = file.stat().st_size
        width, height = int(tags[256]), int(tags[257])
        ends = [0]
        for places, sizes in _STORED:
            if places in tags and sizes in tags:
                stored = np.asarray([tags[places], tags[sizes]], np.float64).reshape(2, -1)
                ends.append(int((stored.sum(axis=0) * (stored[1] > 0)).max(initial=0)))
    except HEADER_ERRORS as error:
        raise UserError(
            f"{_named(file)}: truncated, or not a TIFF ({one_line(error, 80)}); copy it again"
        ) from error
    if not 0 < max(width, height) <= MAX_SIDE_PX or width * height > max(
        UNSUSPICIOUS_PIXELS, MAX_PIXELS_PER_BYTE * size
    ):
        _refuse(
            file,
            f"declares {width:,} x {height:,} pixels in {size:,} bytes",
            f"at most {MAX_SIDE_PX:,} a side",
        )
    if max(ends) > size:
        raise UserError(
            f"{_named(file)}: truncated: {size:,} of at least {max(ends):,} bytes are there; copy "
            "it again"
        )


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def plain_crs(file: Path, text: str) -> str:
    """Return the horizontal coordinate reference system of a file's, both as WKT.

    Raises UserError if it names files.
    """
    import pyproj

    try:
        crs = pyproj.CRS.from_wkt(text)
        crs = (crs.source_crs or crs) if crs.is_bound else crs
        plain: str = crs.to_2d().to_wkt()
    except pyproj.exceptions.CRSError as error:
        raise UserError(
            f"{_named(file)}: its coordinate reference system: {one_line(error)}"
        ) from error
    if "PARAMETERFILE" in plain.upper():
        _refuse(
            file,
            "its coordinate reference system names a file",
            "convert it to one with an EPSG number",
        )
    return plain


@functools.cache
def transformer(source: str, target: str) -> Any:
    """Return pyproj's transformer between coordinate reference systems, x before y; it uses no
    network. Raises ValueError for an unknown one.
    """
    import pyproj

    pyproj.network.set_network_enabled(False)
    try:
        return pyproj.Transformer.from_crs(source, target, always_xy=True)
    except pyproj.exceptions.ProjError as error:
        raise ValueError(f"reference system {printable(source)}: {one_line(error, 120)}") from error


def _tags(file: Path) -> Any:
    """Return the tags of a TIFF's first picture. Raises one of HEADER_ERRORS."""
    with file.open("rb") as stream:
        start = stream.read(4)
        tags = TiffImagePlugin.ImageFileDirectory_v2(start + stream.read(_TIFF[start] - 4))
        stream.seek(tags.next)
        tags.load(stream)
        return dict(tags)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a GeoTIFF without whatever lies beside it.

    Raises UserError, also where the block meets unreadable data.
    """
    try:
        import pyogrio  # noqa: F401 # what comes after hours must not be missing then
        import pyproj  # noqa: F401
        import rasterio
    except ImportError as error:
        raise UserError(f"{_named(file)}: an orthophoto needs more packages: {INSTALL}") from error
    # A path, because rasterio looks for `zip://` and `!` in texts.
    path = Path(os.path.abspath(file))
    try:
        with rasterio.Env(**_OPTIONS), rasterio.open(path, driver="GTiff") as raster:
            yield raster
    except rasterio.errors.RasterioError as error:
        raise UserError(
            f"{_named(file)}: cannot be read ({one_line(error.__cause__ or error, 120)}); copy it "
            "again"
        ) from error


def _named(file: Path) -> str:
    return printable(str(file), 400)


def _refuse(file: Path, fact: str, cure: str) -> NoReturn:
    raise UserError(f"{_named(file)}: {fact}; {cure}")

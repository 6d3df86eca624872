"""Small GeoTIFFs for tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

rasterio = pytest.importorskip("rasterio")  # requirements-geo.txt

CRS, ORIGIN, PIXEL_M = "EPSG:32633", (500_000.0, 5_300_000.0), 0.03


def write_raster(
    path: Path, pixels: np.ndarray, tags: dict[str, str] | None = None, **changes: Any
) -> Path:
    """Write pixels (H, W, bands) as a GeoTIFF in UTM zone 33 with pixels of 3 cm; `changes` are
    rasterio's options.
    """
    height, width, count = pixels.shape
    transform = rasterio.Affine(PIXEL_M, 0, ORIGIN[0], 0, -PIXEL_M, ORIGIN[1])
    options = {"crs": CRS, "transform": transform, "tiled": True, "compress": "deflate", **changes}
    mask = options.pop("mask", None)
    colours = options.pop("colorinterp", None)
    shape = {"width": width, "height": height, "count": count, "dtype": pixels.dtype}
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(path, "w", driver="GTiff", **shape, **options) as file,
    ):
        if colours:
            file.colorinterp = [rasterio.enums.ColorInterp[name] for name in colours]
        file.write(np.moveaxis(pixels, -1, 0))
        if mask is not None:
            file.write_mask(mask)
        for domain, text in (tags or {}).items():
            file.update_tags(ns=domain, OVERVIEW_FILE=text)
    return path

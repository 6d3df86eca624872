"""inference.py --geo on two flights along poles, with a stand-in for the network: one row for each asset, and what changed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geojson_pydantic import FeatureCollection

import inference
from tests.commands.test_inference_tiles import files_of, predict
from tests.conftest import run_main
from tests.predict.maps.photographs import HOME, dji, exif_of, packet, write_photo
from tests.support.browser import CHROMIUM, browser_page
from tests.yolo.colour_network import paint
from utils.common.errors import UserError
from utils.data.images import EXIF_TIME_TAG
from utils.predict.maps.camera import Camera, rotation
from utils.predict.maps.wgs84 import geocentric, moved, offsets_m

SIZE, FOCAL_PX, HEIGHT_M, BESIDE_M, LENGTH_M = (1000, 750), 700.0, 30.0, 22.0, 11.0
FLAGS = ("--geo", "--ground-height", "5.5", "--ground-sigma", "4", "--tiles", "off")
# North, east, class: a line of poles, of class 1.
BEFORE = [(30.0 * number, 1.5 * (number % 2), 1) for number in range(7)]
NOW = [*BEFORE[:2], (64.0, 5.0, 1), *BEFORE[3:5], (150.0, 1.5, 0), (165.0, 0.0, 1)]  # 2 moved, 5 another class, 6 gone


def fly(folder: Path, poles: list[tuple[float, float, int]], day: int, spacing_m: float = 15.0) -> Path:
    """Photograph poles from two lines beside them."""
    folder.mkdir()
    rng = np.random.default_rng(day)
    number = 0
    for side in (-1, 1):
        for north in np.arange(-12.0 + day, 195.0, spacing_m):
            pitch, yaw = -45.0, -90.0 * side
            camera = Camera(FOCAL_PX, 0, *SIZE, rotation(yaw, pitch, 0))
            masks = []
            for pole_north, pole_east, class_id in poles:
                ends = np.array([[0.0, 0, HEIGHT_M], [0, 0, HEIGHT_M - LENGTH_M]]) + (
                    pole_north - north,
                    pole_east - side * BESIDE_M,
                    0,
                )
                body = ends @ camera.attitude
                pixels = FOCAL_PX * body[:, 1:] / body[:, :1] + np.array(SIZE) / 2
                low, high = np.rint(pixels.min(axis=0) - 4).astype(int), np.rint(pixels.max(axis=0) + 4).astype(int)
                if (low > 2).all() and (high < np.array(SIZE) - 2).all():
                    mask = np.zeros(SIZE[::-1], bool)
                    mask[low[1] : high[1], low[0] : high[0]] = True
                    masks.append((class_id, mask))
            latitude, longitude = moved(*HOME, np.array([north, side * BESIDE_M]))
            facts = dji(
                GpsLatitude=f"{latitude:.9f}",
                GpsLongitude=f"{longitude:.9f}",
                RelativeAltitude=str(HEIGHT_M),
                GimbalYawDegree=str(yaw),
                GimbalPitchDegree=str(pitch),
                CalibratedFocalLength=str(FOCAL_PX),
                CalibratedOpticalCenterX=str(SIZE[0] / 2),
                CalibratedOpticalCenterY=str(SIZE[1] / 2),
            )
            picture = paint(masks, SIZE)
            picture = np.clip(picture + rng.integers(-9, 10, picture.shape[:2])[..., None], 0, 255).astype(np.uint8)
            time = f"2026:05:{day:02d} 10:{number // 20:02d}:{3 * (number % 20):02d}"
            # names out of order: the time decides
            file = folder / f"{(number * 7) % 29:02d}_{number}.jpg"
            write_photo(file, picture, exif=exif_of(tags={EXIF_TIME_TAG: time}), xmp=packet(facts))
            number += 1
    return folder

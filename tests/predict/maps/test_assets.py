from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import PROJECT
from utils.common.errors import UserError
from utils.predict.maps.assets import ASSET_SIGMA_M, Sight, match_asset, read_assets
from utils.predict.maps.wgs84 import moved


def feature(longitude: Any, latitude: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "Feature",
        "id": "P1",
        "geometry": {"type": "Point", "coordinates": [longitude, latitude]},
        "properties": None,
        **more,
    }


def write(path: Path, *features: Any, **more: Any) -> Path:
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features, **more}))
    return path


def test_ids_come_from_the_feature_or_its_properties(tmp_path: Path) -> None:
    file = write(
        tmp_path / "poles.geojson",
        feature(8, 47, id=12),
        feature(8, 47, id=None, properties={"Pole_ID": "A-7", "name": "no"}),
        feature(8, 47, geometry=None),
        feature(8, 47, id="B", geometry={"type": "MultiPoint", "coordinates": [[9, 48, 300]]}),
    )
    assets = read_assets(file)
    assert assets.ids == ("12", "A-7", "B")
    assert assets.longitudes.tolist() == [8, 8, 9]


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (feature(500123.5, 4649776.0), "feature 2: 500123.5, 4649776.0 are not longitude and latitude"),
        (feature("8", 47), "feature 2: coordinates"),
        (feature(float("nan"), 47), "feature 2: nan, 47 are not longitude and latitude"),
        (feature(8, 47, geometry={"type": "LineString", "coordinates": []}), "feature 2: geometry 'LineString'"),
        (feature(8, 47, geometry=[]), "feature 2: geometry None"),
        (feature(8, 47, id=None), "feature 2: no id"),
        (7, "feature 2: not a GeoJSON Feature"),
    ],
)
def test_a_bad_feature_is_named_with_its_file(broken: Any, complaint: str, tmp_path: Path) -> None:
    file = write(tmp_path / "poles.geojson", feature(8, 47), broken)
    with pytest.raises(UserError) as caught:
        read_assets(file)
    assert str(caught.value).startswith(f"--assets {file}: {complaint}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "not a GeoJSON FeatureCollection"),
        ('{"type": "FeatureCollection", "features": []}', "no points"),
        ('{"type": "FeatureCollection", "features": [], "crs": {"name": "EPSG:25832"}}', "export it in WGS84"),
        ('{"type": "FeatureCollection", "features": [], "crs": {"name": "EPSG:43260"}}', "export it in WGS84"),
        ('{"type": "FeatureCollection", "features": [], "crs": {"name": "EPSG:4326"}}', "no points"),
    ],
)
def test_a_bad_file_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "poles.geojson"
    file.write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_assets(file)
    with pytest.raises(UserError, match="No such file"):
        read_assets(PROJECT / "none.geojson")


def test_only_assets_in_range_are_near_also_across_the_180th_meridian(tmp_path: Path) -> None:
    home = (-16.5, 179.9999)
    places = [moved(*home, np.array(offset, float)) for offset in ((0, 40), (30, 0), (0, -120), (0, 2e7))]
    assets = read_assets(write(tmp_path / "p", *(feature(longitude, latitude) for latitude, longitude in places)))
    assert assets.longitudes[0] < 0 < assets.longitudes[1]
    numbers, offsets = assets.near(*home, 100)
    assert numbers.tolist() == [0, 1]
    assert offsets == pytest.approx(np.array([[0, 40], [30, 0]]), abs=1e-3)


EAST = Sight(90.0, 1.0, 0.05)


@pytest.mark.parametrize(
    ("sight", "offsets", "expected"),
    [
        (EAST, [(0, 90), (0, 40), (1, 42)], 1),  # the nearest along the bearing
        (EAST, [(0, -20), (20, 20), (0, 60)], 2),  # not behind, not beside
        (EAST, [(5.2, 60)], 0),  # within 5 degrees
        (EAST, [(5.4, 60)], None),
        (Sight(90.0, 1.0, 5.0), [(9.9, 60)], 0),  # within two standard deviations of the camera's position
        (Sight(90.0, 1.0, 0.05), [(3.9, 2)], 0),  # of the asset's position
        (Sight(90.0, 6.0, 0.05), [(12, 60)], 0),  # or of the bearing
        (Sight(90.0, 1.0, 0.05, np.array([0, 50.0]), 5.0), [(0, 30), (0, 61), (0, 45), (0, 52)], 2),
        (Sight(90.0, 1.0, 0.05, np.array([0, 50.0]), 5.0), [(0, 30), (0, 61)], None),
        (Sight(None, 0.0, 0.05, np.array([1, 1.0]), 2.0), [(-4, 0), (3, 1), (2, 1)], 2),  # straight down
        (Sight(None, 0.0, 0.05), [(0, 1)], None),  # nothing known of the direction
        (EAST, np.zeros((0, 2)), None),
    ],
)
def test_the_asset_is_the_nearest_one_along_the_line_of_sight(sight: Sight, offsets: Any, expected: int | None) -> None:
    match = match_asset(sight, np.array(offsets, float))
    assert (match.position if match else None) == expected


def test_a_match_says_how_well_it_fits() -> None:
    match = match_asset(EAST, np.array([(1.0, 60.0), (0.0, 90.0)]))
    assert match is not None
    assert match.beside_m == pytest.approx(1.0)
    assert match.sigma_m == pytest.approx(np.hypot(60 * np.tan(np.radians(1)), ASSET_SIGMA_M), rel=0.01)
    assert match.num_candidates == 2

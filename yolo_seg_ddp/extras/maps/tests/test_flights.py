"""`python -m yolo_seg_ddp maps` on two flights along poles, with a stand-in for the network: one
row for each asset, and what changed.
"""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geojson_pydantic import FeatureCollection

from tests.commands.test_inference_tiles import predict
from tests.support.browser import CHROMIUM, browser_page
from tests.support.drone_photos import HOME, dji, exif_of, write_photo, xmp_of
from tests.yolo.colour_network import paint
from yolo_seg_ddp.data.images import EXIF_TIME_TAG
from yolo_seg_ddp.extras.maps.__main__ import main
from yolo_seg_ddp.extras.maps.camera import Camera, rotation
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, moved, offsets_m

SIZE, FOCAL_PX, HEIGHT_M, BESIDE_M, LENGTH_M = (1000, 750), 700.0, 30.0, 22.0, 11.0
FLAGS = ("--ground-height", "5.5", "--ground-sigma", "4")
# North, east, class: a line of poles, of class 1; at its end an asset of class 0.
BEFORE = [(30.0 * number, 1.5 * (number % 2), int(number < 6)) for number in range(7)]
# 2 moved, 5 another class, 6 gone
NOW = [*BEFORE[:2], (64.0, 5.0, 1), *BEFORE[3:5], (150.0, 1.5, 0), (165.0, 0.0, 1)]


def fly(
    folder: Path, poles: list[tuple[float, float, int]], day: int, spacing_m: float = 15.0
) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(day)
    number = 0
    for side in (-1, 1):
        for north in np.arange(-12.0 + day, 195.0, spacing_m):
            pitch, yaw = -45.0, -90.0 * side
            camera = Camera(FOCAL_PX, 0, *SIZE, rotation(yaw, pitch, 0))
            masks = []
            for pole_north, pole_east, class_id in poles:
                ends = np.tile([pole_north - north, pole_east - side * BESIDE_M, HEIGHT_M], (2, 1))
                ends[1, 2] -= LENGTH_M
                body = ends @ camera.attitude
                pixels = FOCAL_PX * body[:, 1:] / body[:, :1] + np.array(SIZE) / 2
                low, high = (
                    np.rint(pixels.min(axis=0) - 4).astype(int),
                    np.rint(pixels.max(axis=0) + 4).astype(int),
                )
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
            picture = np.clip(
                picture + rng.integers(-9, 10, picture.shape[:2])[..., None], 0, 255
            ).astype(np.uint8)
            time = f"2026:05:{day:02d} 10:{number // 20:02d}:{3 * (number % 20):02d}"
            # names out of order: the time decides
            file = folder / f"{(number * 7) % 29:02d}_{number}.jpg"
            write_photo(file, picture, exif=exif_of(tags={EXIF_TIME_TAG: time}), xmp=xmp_of(facts))
            number += 1
    return folder


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two flights; between them a pole moved by 7 m, one became another class, one
    is gone and one is new.
    """
    folder = tmp_path_factory.mktemp("flights")
    for day, poles in ((1, BEFORE), (2, NOW)):
        fly(folder / f"photos {day}", poles, day)
    for number in ("1", "2"):
        assert predict(folder / f"photos {number}", folder / number, "--tiles", "off") == 0
        before = ("--before", str(folder / "1" / "assets.geojson")) if number == "2" else ()
        assert main(["--predictions", str(folder / number), *FLAGS, *before]) == 0
    return folder


def features_of(file: Path) -> list[dict[str, Any]]:
    FeatureCollection[Any].model_validate_json(file.read_bytes())
    found: list[dict[str, Any]] = json.loads(file.read_text())["features"]
    return found


def test_each_pole_is_one_row_at_its_place_with_all_its_views(flights: Path) -> None:
    features = features_of(flights / "1" / "assets.geojson")
    places = np.array([feature["geometry"]["coordinates"][::-1] for feature in features])
    metres = offsets_m(*HOME, geocentric(places[:, 0], places[:, 1]))
    expected = np.array([pole[:2] for pole in BEFORE])
    assert metres[np.argsort(metres[:, 0])] == pytest.approx(expected, abs=0.3)
    assert sum(feature["properties"]["photographs"] for feature in features) == 40
    assert {feature["id"] for feature in features} == {
        *(f"pole {number}" for number in range(1, 7)),
        "wire 1",
    }
    with (flights / "1" / "assets.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["asset"] for row in rows] == [feature["id"] for feature in features]
    for row, feature in zip(rows, features, strict=True):
        views = feature["properties"]["views"]
        assert (row["best_photograph"], row["sure"]) == (views[0]["photograph"], "True")
        assert len({view["photograph"] for view in views}) == len(views) == int(row["photographs"])
        assert all((flights / "1" / view["thumbnail"]).exists() for view in views)
    detections = features_of(flights / "1" / "detections.geojson")
    assert {item["properties"]["position_kind"] for item in detections} == {"asset"}
    assert {item["properties"]["asset"] for item in detections} == {
        feature["id"] for feature in features
    }


def test_changes_are_found_and_the_other_poles_keep_their_ids(flights: Path) -> None:
    before = {feature["id"]: feature for feature in features_of(flights / "1" / "assets.geojson")}
    now = {feature["id"]: feature for feature in features_of(flights / "2" / "assets.geojson")}
    changes = {
        item["properties"]["change"]: item
        for item in features_of(flights / "2" / "changes.geojson")
    }
    assert set(changes) == {"new", "gone", "moved", "class"}
    assert all(item["properties"]["chance_of_error"] < 0.01 for item in changes.values())
    assert changes["moved"]["properties"]["moved_m"] == pytest.approx(np.hypot(4, 5), abs=0.3)
    assert (
        changes["class"]["properties"]["class_before"],
        changes["class"]["properties"]["class"],
    ) == ("pole", "wire")
    assert set(before) - set(now) == {changes["gone"]["id"]}
    assert set(now) - set(before) == {changes["new"]["id"]}
    unchanged = [name for name in now if now[name]["properties"]["change"] is None]
    assert len(unchanged) == 4
    for name in unchanged:
        assert now[name]["geometry"]["coordinates"] == pytest.approx(
            before[name]["geometry"]["coordinates"], abs=4e-6
        )


def test_known_assets_give_their_ids(flights: Path, tmp_path: Path) -> None:
    known = json.loads((flights / "1" / "assets.geojson").read_text())
    for number, feature in enumerate(known["features"]):
        feature["id"] = f"P{number}"
    (tmp_path / "known.geojson").write_text(json.dumps(known))
    shutil.copytree(flights / "2", tmp_path / "alone")
    flags = (
        *FLAGS,
        "--assets",
        str(tmp_path / "known.geojson"),
        "--before",
        str(flights / "1" / "assets.geojson"),
    )
    assert main(["--predictions", str(tmp_path / "alone"), *flags]) == 0
    rows = features_of(tmp_path / "alone" / "assets.geojson")
    assert sorted(str(row["properties"]["asset_id"]) for row in rows) == [
        "None",
        *(f"P{n}" for n in range(6)),
    ]
    beside = {row["properties"]["asset_id"]: row["properties"]["asset_beside_m"] for row in rows}
    # within the gate of a list that is right within 2 m
    assert beside["P2"] == pytest.approx(6.4, abs=0.3)


def test_where_the_list_is_more_exact_its_places_count_with_the_error_that_the_flight_has_in_common(
    flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolo_seg_ddp.extras.maps.asset_files.ASSET_SIGMA_M", 0.02)
    known = {"P": [8.5417, 47.3769003]}  # 2 cm beside the first pole
    geometry = {"type": "Point", "coordinates": known["P"]}
    features = [{"type": "Feature", "id": "P", "geometry": geometry, "properties": None}]
    (tmp_path / "known.geojson").write_text(
        json.dumps({"type": "FeatureCollection", "features": features})
    )
    shutil.copytree(flights / "2", tmp_path / "now")
    assert (
        main(
            [
                "--predictions",
                str(tmp_path / "now"),
                *FLAGS,
                "--assets",
                str(tmp_path / "known.geojson"),
            ]
        )
        == 0
    )
    (row,) = [
        row
        for row in features_of(tmp_path / "now" / "assets.geojson")
        if row["properties"]["asset_id"] is not None
    ]
    assert row["geometry"]["coordinates"][:2] == known["P"]
    common_m = row["properties"]["common_sigma_m"]
    assert common_m > 0.03
    assert row["properties"]["sigma_m"] == pytest.approx(np.hypot(0.02, common_m), abs=0.006)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.parametrize("width_px", [1280, 400])
def test_the_page_shows_map_changes_and_best_views_without_the_network(
    flights: Path, tmp_path: Path, width_px: int
) -> None:
    with browser_page(tmp_path) as page:
        page.open(flights / "2" / "assets.html", width_px)
        page.assert_harmless()
        assert page.run("document.documentElement.scrollWidth") <= width_px
        assert page.run("document.querySelectorAll('#map svg a').length") == 7
        assert page.run("document.querySelector('#map svg').textContent").count("gone") == 1
        assert "✕ gone" in page.run("document.querySelector('#map').textContent")
        assert "28 photographs · taken 2026-05-02" in page.run(
            "document.querySelector('header').textContent"
        )
        page.run(
            "document.querySelectorAll('#views img').forEach(image => image.loading = 'eager')"
        )
        loaded = (
            "Promise.all([...document.querySelectorAll('#views img')].map(image => "
            "image.decode().then(() => 1)))"
        )
        assert page.run(loaded) == [1] * 7

"""Assets out of simulated flights with known truth: each once, honest ellipses, changes; and bad
files of an earlier flight.
"""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.plugin import PROJECT
from yolo_seg_ddp.extras.maps.assets import read_assets
from yolo_seg_ddp.extras.maps.association import place_flight
from yolo_seg_ddp.extras.maps.camera import Camera, Errors, rotation, sight_lines
from yolo_seg_ddp.extras.maps.changes import ellipse_of, read_before
from yolo_seg_ddp.extras.maps.findings import Site
from yolo_seg_ddp.extras.maps.simulated_flights import (
    HOME,
    NUM_POLES,
    Setting,
    draw_poles,
    fly,
    simulate,
)
from yolo_seg_ddp.extras.maps.survey import Places, Survey, View, match, places_of, survey, view_of
from yolo_seg_ddp.extras.maps.tests.photographs import metadata
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, moved, offsets_m
from yolo_seg_ddp.utils.errors import UserError

DRONE = Setting(0.03, 0.5, 15.0)
DRONE_CAMERA = Camera(2700, 0, 4000, 3000, rotation(0, 0, 0))


def flight(num_poles: int = 8, seed: int = 0, setting: Setting = DRONE) -> list[View]:
    rng = np.random.default_rng(seed)
    return fly(draw_poles(rng, num_poles), setting, rng)[0]


def facts_of(found: Survey) -> list[tuple[Any, ...]]:
    return [
        (asset.latitude, asset.longitude, asset.covariance.tolist(), asset.views, asset.looks)
        for asset in found.assets
    ]


@pytest.mark.parametrize("offset", [(20.0, 9.0), (25.0, -15.0), (30.0, 0.0)])
def test_the_line_of_sight_to_a_pole_passes_through_its_middle_although_its_nearer_end_looks_larger(
    offset: tuple[float, float],
) -> None:
    camera, at = Camera(2700, 0, 4000, 3000, rotation(0, -45, 0)), np.array([0.0, 0.0, -30.0])
    ends = np.array([[*offset, 0.0], [*offset, -12.0]]) - at
    body = ends @ camera.attitude
    pixels = 2700 * body[:, 1:] / body[:, :1] + (2000, 1500)
    box = np.concatenate([pixels.min(axis=0) - 8, pixels.max(axis=0) + 8])[None]
    ray = sight_lines(camera, at, (0.03, 1.0), box, np.zeros(1, int), 0, 6.0, Errors())
    middle = ends.mean(axis=0)
    assert np.linalg.norm(np.cross(ray.direction[0], middle)) < 0.15
    assert np.linalg.norm(np.cross(camera.rays(pixels.mean(axis=0)[None])[0], middle)) > 0.5
    assert ray.distance[0] == pytest.approx(np.linalg.norm(middle), abs=0.3)


@pytest.mark.parametrize(
    ("errors", "sides"), [(Errors(3.0, 0.1), (20, 20)), (Errors(0.0, 0.0), (400, 20))]
)
def test_a_direction_is_as_unsure_to_the_side_as_heading_and_box_are(
    errors: Errors, sides: tuple[int, int]
) -> None:
    box = np.array([[2000, 1500] * 2]) + np.array([-1, -1, 1, 1]) * np.tile(sides, 2) / 2
    ray = sight_lines(DRONE_CAMERA, np.zeros(3), (0.03, 1.0), box, np.zeros(1, int), 0, 6.0, errors)
    level, upright = np.sqrt(np.diagonal(ray.angle_covariance[0]))
    assert level > 1.5 * upright


def test_the_order_of_the_photographs_changes_nothing() -> None:
    views = flight()
    shuffled = [views[row] for row in np.random.default_rng(1).permutation(len(views))]
    assert facts_of(survey(shuffled, DRONE.site)) == facts_of(survey(views, DRONE.site))


def test_photographs_that_show_nothing_take_no_memory_in_the_search_for_one_asset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took an eighth of pairs x photographs in bytes, three times:
    64 GB for 15,000 photographs.
    """
    given: list[Any] = []

    def noted(*facts: Any) -> Any:
        given.append(facts)
        return place_flight(*facts)

    monkeypatch.setattr("yolo_seg_ddp.extras.maps.survey.place_flight", noted)
    survey(flight(num_poles=20), DRONE.site)
    ((rays, *heights),) = given
    labels, peaks = [], []
    for photographs in (rays.photo, 1000 * rays.photo):
        tracemalloc.start()
        labels.append(place_flight(replace(rays, photo=photographs), *heights)[0].tolist())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert labels[0] == labels[1]
    assert len(set(labels[0])) < len(labels[0]) / 4
    assert peaks[1] < 2 * peaks[0]


@pytest.mark.parametrize(
    ("setting", "num_flights"),
    [(Setting(1.5, 2.0, 45.0), 60), (Setting(0.03, 0.5, 15.0), 30), (Setting(0.03, 2.0, 7.5), 20)],
)
def test_each_pole_is_found_once_and_the_ellipses_hold_95_percent(
    setting: Setting, num_flights: int
) -> None:
    found = simulate(setting, num_flights, seed=1, num_poles=4)
    assert (found["times"] == 1).mean() > 0.97
    # The poles of a flight share errors: its flights are what is independent. Three standard
    # deviations, and 2 points.
    tolerance = 0.02 + 3 * np.sqrt(0.05 * 0.95 / num_flights)
    assert found["is_covered"].mean() == pytest.approx(0.95, abs=tolerance)
    assert np.median(found["error"]) < 0.6 * np.median(found["single"])


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_the_error_that_a_flight_has_in_common_has_its_share_of_the_variance(share: float) -> None:
    setting = replace(DRONE, gps_m=1.5)
    site = replace(setting.site, errors=replace(setting.site.errors, common_shares=(share, 0.5)))
    found = survey(flight(4, setting=setting), site)
    assert found.common_m == pytest.approx(1.5 * np.sqrt(share))
    assert all(
        np.linalg.eigvalsh(asset.covariance)[0] > found.common_m**2 for asset in found.assets
    )


def test_a_pitch_offset_and_another_heading_on_the_way_back_leave_no_ellipse_too_small() -> None:
    """RTK, and all errors of the gimbal are common: turns about north, east and down for the flight
    left 52 % inside.
    """
    found = simulate(Setting(0.03, 2.0, 7.5, (0.8, 1.0)), 6, seed=1, num_poles=8)
    assert found["is_covered"].mean() >= 0.95
    assert np.median(found["error"]) < 0.4  # 1.0 m with those


def test_ten_changes_are_found_and_without_changes_nothing_is_reported() -> None:
    found = simulate(Setting(1.5, 0.5, 10.0), 1, seed=2)
    assert found["hits"][0] >= 9
    assert found["others"][0] + found["false"][0] <= 1


def from_above(points: np.ndarray) -> list[View]:
    """Photograph points of the ground (n, 2), metres north and east, straight down on two strips,
    there and back.
    """
    views: list[View] = []
    for east, yaw in ((0.0, 0.0), (20.0, 180.0)):
        camera = replace(DRONE_CAMERA, attitude=rotation(yaw, -90, 0))
        for north in np.arange(0.0, 90.0, 15.0):
            body = (
                np.column_stack([points - (north, east), np.full(len(points), 40.0)])
                @ camera.attitude
            )
            pixels = 2700 * body[:, 1:] / body[:, :1] + (2000, 1500)
            seen = pixels[((pixels > 20) & (pixels < (3980, 2980))).all(axis=1)]
            facts = (
                f"{len(views):02d}.jpg",
                f"2026-05-04T10:00:{len(views):02d}",
                *moved(*HOME, np.array([north, east])),
            )
            boxes = np.concatenate([seen - 20, seen + 20], axis=1)
            ids = np.zeros(len(seen), int)
            views.append(View(*facts, 40.0, 5.0, camera, boxes, ids, list(range(len(seen)))))
    return views


@pytest.mark.parametrize("chosen", [set(), {3}, {6, 7, 8, 9}])
def test_photographs_turned_by_180_degrees_are_found_by_their_neighbours_and_left_out(
    chosen: set[int],
) -> None:
    views = from_above(np.random.default_rng(0).uniform((-10, -15), (90, 35), (60, 2)))
    size = np.array([4000, 3000] * 2)
    turned = [
        replace(view, boxes=(size - view.boxes)[:, [2, 3, 0, 1]]) if number in chosen else view
        for number, view in enumerate(views)
    ]
    found = survey(turned, Site())
    assert found.turned == {views[number].file for number in chosen}
    used = {file for asset in found.assets for file, _ in asset.views}
    assert used == {view.file for view in views} - found.turned


def beside(views: list[View], metres: float) -> list[View]:
    """Repeat each detection as an object at its right: two at one pole in each photograph."""
    pixels = metres * 2700 / 35
    step = np.array([pixels, 0, pixels, 0])
    return [
        replace(
            view,
            boxes=np.concatenate(
                [view.boxes, view.boxes + (step if view.longitude > HOME[1] else -step)]
            ),
            class_ids=np.tile(view.class_ids, 2),
            numbers=list(range(2 * len(view.boxes))),
        )
        for view in views
    ]


def later(views: list[View], hour: str = "04T12:0") -> list[View]:
    return [
        replace(view, file=f"b{view.file}", time=view.time.replace("04T10:0", hour))
        for view in views
    ]


def other_class(views: list[View]) -> list[View]:
    return [
        replace(view, class_ids=view.class_ids + number % 2) for number, view in enumerate(views)
    ]


@pytest.mark.parametrize(
    ("change", "gps_m", "times", "sigma"),
    [
        # two insulators 1.5 m apart stay two
        (lambda views: beside(views, 1.5), 0.03, 2, (0.8, 1.2)),
        # another flight: independent errors
        (lambda views: views + later(views), 1.5, 1, (0.65, 0.75)),
        # a day and ten minutes later
        (lambda views: views + later(views, "05T10:1"), 1.5, 1, (0.65, 0.75)),
        # the same flight: a common error stays
        (lambda views: views + later(views, "04T10:0"), 1.5, 1, (0.95, 1.0)),
        (other_class, 0.03, 2, (1.1, 2.0)),  # an asset has one class
    ],
)
def test_what_is_one_asset(
    change: Callable[[list[View]], list[View]], gps_m: float, times: int, sigma: tuple[float, float]
) -> None:
    quiet = flight(6, seed=3, setting=replace(DRONE, spacing_m=9.0, gps_m=gps_m))
    alone = [asset for asset in survey(quiet, DRONE.site).assets if asset.is_sure]
    found = survey(change(quiet), DRONE.site)
    # two may be a false detection and its copy
    several = [asset for asset in found.assets if len(asset.views) > 2]
    assert len(several) == pytest.approx(times * len(alone), abs=1)
    ratio = np.median([asset.sigma_m for asset in several]) / np.median(
        [asset.sigma_m for asset in alone]
    )
    assert sigma[0] < ratio < sigma[1]
    for asset in several:
        assert len({file for file, _ in asset.views}) == len(asset.views)


def test_of_two_flights_the_more_exact_one_says_where_assets_are() -> None:
    exact = flight(6, seed=3, setting=replace(DRONE, gps_m=0.03))
    # 2.2 m
    rough = [replace(view, latitude=view.latitude + 2e-5, sigma_m=3.0) for view in later(exact)]
    truth = places_of([asset for asset in survey(exact, DRONE.site).assets if asset.is_sure], 0.0)
    places = places_of(
        [asset for asset in survey(exact + rough, DRONE.site).assets if asset.is_sure], 0.0
    )
    offsets = truth.around(*HOME)[:, None] - places.around(*HOME)
    assert np.hypot(*np.moveaxis(offsets, -1, 0)).min(axis=1).max() < 0.3


def test_an_asset_counts_the_photographs_that_look_at_it() -> None:
    rng = np.random.default_rng(5)
    poles = draw_poles(rng, 6)
    views, shown, _ = fly(poles, DRONE, rng)
    found = [asset for asset in survey(views, DRONE.site).assets if asset.is_sure]
    rate = sum(len(asset.views) for asset in found) / sum(asset.looks for asset in found)
    assert rate == pytest.approx(0.9, abs=0.06)
    assert sum(len(one) for one in shown) > 20


def test_a_photograph_without_height_still_gives_a_direction_and_a_wire_is_no_asset() -> None:
    detections = [{"class_id": 0, "box_xyxy": [290, 190, 310, 210]} for _ in range(2)]
    detections[1]["centreline"] = [[0, 0], [600, 400]]  # type: ignore[assignment]
    entry = {"file": "a.jpg", "width": 600, "height": 400, "detections": detections}
    views = []
    for yaw in (0, -25, -50, -75):  # from the south to the east, 30 m from the pole
        away = -30 * np.array([np.cos(np.radians(yaw)), np.sin(np.radians(yaw))])
        north, east = moved(*HOME, away)
        at = {
            "GpsLatitude": f"{north:.9f}",
            "GpsLongitude": f"{east:.9f}",
            "RelativeAltitude": None,
        }
        photo = metadata(**at, GimbalYawDegree=str(yaw), GimbalPitchDegree="-20")  # type: ignore[arg-type]
        view = view_of(photo, {**entry, "file": f"{yaw}.jpg"})
        assert view is not None
        views.append(view)
    (asset,) = survey(views, Site()).assets
    offset = offsets_m(*HOME, geocentric(asset.latitude, asset.longitude)[None])[0]
    assert offset == pytest.approx([0, 0], abs=0.5)
    assert len(asset.views) == 4


def test_two_surveys_are_matched_whatever_the_shift_between_them() -> None:
    rng = np.random.default_rng(0)
    north_east = np.stack([40.0 * np.arange(12), rng.normal(0, 4, 12)], axis=1)

    def places(offset: np.ndarray, rows: np.ndarray) -> Places:
        latitude, longitude = np.array(
            [moved(*HOME, point + offset) for point in north_east[rows]]
        ).T
        return Places(
            np.zeros(len(rows), int),
            latitude,
            longitude,
            np.tile(0.04 * np.eye(2), (len(rows), 1, 1)),
            5.0,
        )

    rows = rng.permutation(12)[:9]
    pairs = match(places(np.zeros(2), np.arange(12)), places(np.array([6.0, -7.0]), rows))
    assert sorted((int(i), int(rows[j])) for i, j in pairs) == [
        (row, row) for row in sorted(rows.tolist())
    ]


def feature(longitude: Any, latitude: Any, **more: Any) -> dict[str, Any]:
    geometry = {"type": "Point", "coordinates": [longitude, latitude]}
    return {"type": "Feature", "id": "P1", "geometry": geometry, "properties": None, **more}


def write(path: Path, *features: Any, **more: Any) -> Path:
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features, **more}))
    return path


def measured(number: int, **changes: Any) -> dict[str, Any]:
    """Return an asset of an earlier survey."""
    ellipse = {
        "ellipse_major_m": 2.0,
        "ellipse_minor_m": 1.0,
        "ellipse_bearing_deg": 9.0,
        "common_sigma_m": 0.3,
    }
    properties = {
        key: value
        for key, value in {"class": "pole", **ellipse, **changes}.items()
        if value is not None
    }
    return feature(8.0, 47.0 + number / 1000, id=f"pole {number}", properties=properties)


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


BAD_ASSETS = [
    (feature(500123.5, 4649776.0), "feature 2: 500123.5, 4649776.0 are not longitude and latitude"),
    (feature("8", 47), "feature 2: coordinates"),
    (feature(float("nan"), 47), "feature 2: nan, 47 are not longitude and latitude"),
    (
        feature(8, 47, geometry={"type": "LineString", "coordinates": []}),
        "feature 2: geometry 'LineString'",
    ),
    (feature(8, 47, geometry=[]), "feature 2: geometry None"),
    (feature(8, 47, id=None), "feature 2: no id"),
    (7, "feature 2: not a GeoJSON Feature"),
]
BAD_EARLIER_ASSETS = [
    (
        measured(2, **{"class": None}),
        "feature 2: no property class: pass an assets.geojson of python -m yolo_seg_ddp maps",
    ),
    (
        measured(2, ellipse_major_m=None),
        "feature 2: ellipse_major_m None: a number from 0.001 is expected",
    ),
    (measured(2, ellipse_minor_m="1"), "feature 2: ellipse_minor_m '1': a number"),
    (measured(2, ellipse_minor_m=float("nan")), "feature 2: ellipse_minor_m nan: a number"),
    (measured(2, common_sigma_m=-1), "feature 2: common_sigma_m -1: a number from 0"),
    (
        measured(2, common_sigma_m=0.9),
        "feature 2: ellipse_minor_m is above ellipse_major_m or below",
    ),
    (
        measured(2, ellipse_minor_m=3),
        "feature 2: ellipse_minor_m is above ellipse_major_m or below",
    ),
    (measured(1), "two features have the id pole 1"),
    ({**measured(2), "id": None}, "feature 2: no id"),
    (
        {**measured(2), "geometry": {"type": "Polygon", "coordinates": []}},
        "feature 2: geometry 'Polygon'",
    ),
]


@pytest.mark.parametrize(
    ("option", "read", "broken", "complaint"),
    [
        *(("--assets", read_assets, *case) for case in BAD_ASSETS),
        *(("--before", read_before, *case) for case in BAD_EARLIER_ASSETS),
    ],
)
def test_a_bad_feature_is_named_with_its_file(
    option: str, read: Callable[[Path], object], broken: Any, complaint: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "assets.geojson", measured(1), broken)
    with pytest.raises(UserError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{option} {file}: {complaint}")
    assert "\n" not in str(caught.value)


def test_only_some_assets_have_sizes_that_fit(tmp_path: Path) -> None:
    file = write(
        tmp_path / "assets.geojson", measured(1, looks=10**401), measured(2, sure=True, looks=4)
    )
    before = read_before(file)
    assert before.is_sure.tolist() == [False, True]
    assert before.looks == 4
    assert (read_assets(file).rows, NUM_POLES) == ((1, 2), 60)
    everything = before.places.covariances + 0.09 * np.eye(2)
    assert ellipse_of(everything[0]) == pytest.approx((2.0, 1.0, 9.0), abs=0.01)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "export it as a GeoJSON FeatureCollection"),
        ('{"type": "FeatureCollection", "features": []}', "no points"),
        (
            '{"type": "FeatureCollection", "features": [], "crs": {"name": "EPSG:25832"}}',
            "export it in WGS84",
        ),
        (
            '{"type": "FeatureCollection", "features": [], "crs": {"name": "EPSG:43260"}}',
            "export it in WGS84",
        ),
        (
            '{"type": "FeatureCollection", "features": [], "crs": {"name": "EPSG:4326"}}',
            "no points",
        ),
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
    places = [
        moved(*home, np.array(offset, float)) for offset in ((0, 40), (30, 0), (0, -120), (0, 2e7))
    ]
    assets = read_assets(
        write(tmp_path / "p", *(feature(longitude, latitude) for latitude, longitude in places))
    )
    assert assets.longitudes[0] < 0 < assets.longitudes[1]
    numbers, offsets = assets.near(*home, 100)
    assert numbers.tolist() == [0, 1]
    assert offsets == pytest.approx(np.array([[0, 40], [30, 0]]), abs=1e-3)

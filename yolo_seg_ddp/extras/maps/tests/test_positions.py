"""`python -m yolo_seg_ddp maps` on photographs with a drone's metadata, predicted by a stand-in for
the network.
"""

import csv
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from geojson_pydantic import FeatureCollection

from tests.commands.test_inference_tiles import predict
from tests.support.drone_photos import GPS, HOME, dji, exif_of, write_photo, xmp_of
from tests.yolo.colour_network import paint
from yolo_seg_ddp.extras.maps.__main__ import main
from yolo_seg_ddp.extras.maps.wgs84 import moved
from yolo_seg_ddp.utils.errors import UserError

SIZE = (700, 500)
CENTRE = {"CalibratedOpticalCenterX": "350.0", "CalibratedOpticalCenterY": "250.0"}
HOSTILE = '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]>'


def picture(*corners: tuple[int, int]) -> np.ndarray:
    """Draw a pole of 40 x 60 pixels at each upper left corner."""
    masks = []
    for left, top in corners:
        mask = np.zeros(SIZE[::-1], bool)
        mask[top : top + 60, left : left + 40] = True
        masks.append((1, mask))
    return paint(masks, SIZE)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven files: four with findings, one whose XMP is hostile, one without metadata, one that is
    no photograph.
    """
    folder = tmp_path_factory.mktemp("flight")
    down, oblique = dji(**CENTRE), dji(GimbalPitchDegree="-45", GimbalYawDegree="90", **CENTRE)
    turned = {**down, "CalibratedOpticalCenterX": "250.0", "CalibratedOpticalCenterY": "350.0"}
    two = picture((330, 20), (600, 220))
    write_photo(folder / "a down.jpg", two, exif=exif_of(), xmp=xmp_of(down))
    write_photo(folder / "b.jpg", picture((330, 220)), exif=exif_of(), xmp=xmp_of(oblique))
    (folder / "c.jpg").write_bytes(b"no photograph")
    write_photo(
        folder / "d turned.jpg", np.rot90(two), exif=exif_of(orientation=6), xmp=xmp_of(turned)
    )
    hostile = xmp_of(down).replace(b"<x:", HOSTILE.encode() + b"<x:")
    write_photo(folder / "e.jpg", two, exif=exif_of(GPS), xmp=hostile)
    level = {**oblique, "GimbalPitchDegree": "-3"}
    write_photo(folder / "f.jpg", picture((330, 220)), xmp=xmp_of(level))
    cv2.imwrite(str(folder / "g.png"), cv2.cvtColor(picture((5, 5)), cv2.COLOR_RGB2BGR))
    return folder


@pytest.fixture(scope="module")
def poles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two poles: 50 m and 90 m east of the camera."""
    features = []
    for number, east in enumerate((50, 90)):
        latitude, longitude = moved(*HOME, np.array([0.0, east]))
        point = {"type": "Point", "coordinates": [longitude, latitude]}
        features.append(
            {"type": "Feature", "geometry": point, "properties": {"pole_id": f"=P{number}"}}
        )
    file = tmp_path_factory.mktemp("assets") / "poles.geojson"
    file.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return file


@pytest.fixture(scope="module")
def output(photos: Path, poles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert predict(photos, folder, "--tiles", "320") == 0
    assert main(["--predictions", str(folder), "--assets", str(poles), "--asset-range", "80"]) == 0
    return folder


def test_each_finding_is_at_its_asset_on_the_ground_at_the_camera_or_nowhere(output: Path) -> None:
    text = (output / "detections.geojson").read_bytes()
    collection: FeatureCollection[Any] = FeatureCollection.model_validate_json(text)
    found = [
        feature.properties for feature in collection.features if feature.properties is not None
    ]
    place = [(Path(item["photograph"]).name, item["position_kind"]) for item in found]
    assert place == [
        *[("a down.jpg", "ground")] * 2,
        ("b.jpg", "asset"),
        *[("d turned.jpg", "ground")] * 2,
        *[("e.jpg", "camera")] * 2,
        ("f.jpg", "asset"),
        ("g.png", None),
    ]
    by_name = {
        name: [item for item in found if item["photograph"].endswith(name)] for name, _ in place
    }
    assert [item["asset_id"] for item in by_name["b.jpg"] + by_name["f.jpg"]] == ["=P0", "=P0"]
    assert by_name["b.jpg"][0]["ground_sigma_m"] > 7
    assert by_name["f.jpg"][0]["reason"] == "gimbal pitch above -15 degrees"
    assert "DOCTYPE" in by_name["e.jpg"][0]["reason"]
    # 20 m north, 25 m east of the camera's centre, at 500 px focal length and 50 m height: 10 px
    # are 1 m.
    distances = sorted(item["distance_m"] for item in by_name["a down.jpg"])
    assert distances == pytest.approx([20, 27], abs=0.3)


def test_turning_a_photograph_in_its_file_moves_no_finding(output: Path) -> None:
    """`d turned.jpg` is stored turned, so its camera is turned too; shown upright it is the picture
    of `a down.jpg`.
    """
    features = json.loads((output / "detections.geojson").read_text())["features"]
    places = {"a": [], "d": []}  # type: dict[str, list[list[float]]]
    for item in features:
        name = Path(item["properties"]["photograph"]).name[0]
        if name in places:
            offset = np.array(item["geometry"]["coordinates"]) - HOME[::-1]
            metres = offset * (75_500, 111_190)
            places[name].append(metres.tolist())
    east, north = np.array(sorted(places["a"])).T
    # Stored pixels of `d` are those of `a` turned by 90 degrees against the clock.
    assert np.array(sorted(places["d"])) == pytest.approx(
        np.array(sorted(zip(-north, east, strict=True))), abs=0.4
    )


def test_the_work_list_links_thumbnails_and_pictures_and_escapes_asset_ids(output: Path) -> None:
    with (output / "worklist.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert rows[2]["asset_id"] == "'=P0"
    assert rows[0]["time"] == "2026-05-04T10:11:12"
    for row in rows:
        assert (output / row["thumbnail"]).exists()
        assert (output / row["picture"]).exists()
    thumbnail = cv2.imread(str(output / rows[0]["thumbnail"]))
    assert thumbnail is not None
    assert max(thumbnail.shape) < 200
    assert (output / "detections.kml").exists()


def test_the_run_says_what_is_on_the_map_and_why_not(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(photos / "e.jpg", tmp_path) == 0
    assert main(["--predictions", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{photos / 'e.jpg'}: XMP refused: it declares a document type (DOCTYPE)\n" in printed
    assert "Map: 2 at the camera (detections.geojson, worklist.csv, detections.kml)" in printed


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("poles.geojson", "{}", r"poles.geojson: not a GeoJSON FeatureCollection"),
        ("poles.geojson", "[" * 100_000, r"poles.geojson: .*nested too deeply"),
        ("about.json", '{"model": "x.pt"}', r"about.json: lacks 'classes'; run inference.py again"),
        (
            "about.json",
            None,
            r"about.json: no such file; name the --output of inference.py, run with this version",
        ),
        (
            "predictions.json",
            '[\n{"file": "a.jpg"}\n]\n',
            r"predictions.json:2: no detections; run inference.py again",
        ),
        (
            "predictions.json",
            None,
            r"predictions.json: no such file; name the --output of inference.py",
        ),
        (
            "photograph",
            None,
            r"b.jpg: .*; the map needs the photographs where inference.py found them",
        ),
    ],
)
def test_a_damaged_or_missing_file_is_named_and_nothing_is_written(
    photos: Path, tmp_path: Path, name: str, content: str | None, complaint: str
) -> None:
    photo = tmp_path / "b.jpg"
    photo.write_bytes((photos / "b.jpg").read_bytes())
    folder = tmp_path / "out"
    assert predict(photo, folder) == 0
    file = {"poles.geojson": tmp_path / name, "photograph": photo}.get(name, folder / name)
    before = {path for path in folder.rglob("*") if path != file}
    file.unlink(missing_ok=True) if content is None else file.write_text(content)
    flags = ("--assets", str(file)) if name == "poles.geojson" else ()
    with pytest.raises(UserError, match=complaint):
        main(["--predictions", str(folder), *flags])
    assert {path for path in folder.rglob("*") if path != file} == before

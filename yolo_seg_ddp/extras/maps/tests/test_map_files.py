"""The three files: valid, complete, and safe with text from strangers."""

import csv
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from geojson_pydantic import FeatureCollection

from tests.support.drone_photos import GPS, dji, exif_of, write_photo, xmp_of
from tests.support.plugin import read_json
from yolo_seg_ddp.extras.maps.asset_files import write_asset_files
from yolo_seg_ddp.extras.maps.findings import Site
from yolo_seg_ddp.extras.maps.map_files import (
    GEOJSON,
    KML,
    WORK_LIST,
    WORK_LIST_COLUMNS,
    write_map_files,
)
from yolo_seg_ddp.extras.maps.metadata import SOFTWARE
from yolo_seg_ddp.extras.maps.thumbnails import save_thumbnails, thumbnail
from yolo_seg_ddp.utils.errors import UserError


def detection(name: str = "pole", centre: tuple[float, float] = (300, 100)) -> dict[str, Any]:
    x, y = centre
    return {
        "class_id": 0,
        "class": name,
        "confidence": 0.875,
        "box_xyxy": [x - 9, y - 9, x + 9, y + 9],
        "polygons": [],
    }


def write_predictions(folder: Path, photos: list[tuple[Path, list[dict[str, Any]]]]) -> None:
    size = {"width": 600, "height": 400}
    entries = [
        json.dumps({"file": str(file), "key": file.stem, **size, "detections": found})
        for file, found in photos
    ]
    (folder / "predictions.json").write_text("[\n" + ",\n".join(entries) + "\n]\n")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / WORK_LIST).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of four photographs: straight down, level, without position, without detections;
    one was not read.
    """
    folder = tmp_path_factory.mktemp("map")
    files = [folder / f"{name}.jpg" for name in ("down", "level", "broken", "nowhere", "empty")]
    write_photo(files[0], exif=exif_of())
    write_photo(
        files[1], exif=exif_of(GPS), xmp=xmp_of(dji(GimbalPitchDegree="-5", GimbalYawDegree="90"))
    )
    write_photo(files[3], xmp=None)
    write_photo(files[4])
    found = [detection(), detection("insulator", (450, 300))]
    write_predictions(
        folder, [(files[0], found), (files[1], found[:1]), (files[3], found[1:]), (files[4], [])]
    )
    lines = write_map_files(folder, Site(), {})
    assert lines[0].startswith("Map: 2 on the ground, 1 at the camera, 1 without position")
    assert len(lines) == 3
    return folder


def test_photographs_that_another_program_wrote_or_turned_are_named_in_one_line_each(
    tmp_path: Path,
) -> None:
    files = [tmp_path / f"{name}.jpg" for name in ("a", "b", "c")]
    for file in files:
        write_photo(file, exif=exif_of())
    viewed = exif_of()
    viewed[SOFTWARE] = "Microsoft Windows Photo Viewer\n10.0"
    write_photo(files[1], exif=viewed)
    write_predictions(tmp_path, [(file, [detection()]) for file in files])
    tables = write_asset_files(tmp_path, Site(), ["pole"], None)
    tables.turned.append(str(files[2]))
    lines = [line for line in tables.lines if line.startswith("Left out")]
    assert lines == [
        "Left out of the assets: turned by 180 degrees: c.jpg; use the files that the drone wrote",
        "Left out of the assets: written again after the flight: b.jpg; use the files that the "
        "drone wrote",
    ]
    write_map_files(tmp_path, Site(), {}, tables.turned)
    assert [row["position_kind"] for row in rows_of(tmp_path)] == ["ground", "camera", "camera"]
    assert "turned by 180 degrees" in rows_of(tmp_path)[2]["reason"]


def test_the_geojson_is_valid_and_its_points_are_longitude_and_latitude(output: Path) -> None:
    collection: FeatureCollection[Any] = FeatureCollection.model_validate_json(
        (output / GEOJSON).read_text(encoding="utf-8")
    )
    assert len(collection.features) == 4
    place: Any = collection.features[0].geometry
    assert tuple(place.coordinates) == pytest.approx((8.5417, 47.3769 + 10 / 111_190), abs=1e-6)
    assert collection.features[3].geometry is None
    ground, _, camera, nowhere = (found.properties or {} for found in collection.features)
    assert (ground["position_kind"], ground["distance_m"]) == ("ground", 10.0)
    assert ground["sigma_m"] > 0
    assert (camera["position_kind"], camera["bearing_deg"]) == ("camera", 90.0)
    assert nowhere["position_kind"] is None
    assert set(ground) == set(nowhere)


def test_a_wire_is_a_line_on_the_ground_where_all_of_it_is_seen_from_above(tmp_path: Path) -> None:
    photos = []
    for name, pitch in (("down", -90), ("level", -20)):
        write_photo(
            tmp_path / f"{name}.jpg", exif=exif_of(), xmp=xmp_of(dji(GimbalPitchDegree=str(pitch)))
        )
        photos.append(
            (
                tmp_path / f"{name}.jpg",
                [detection() | {"centreline": [[100, 100], [300, 100], [500, 60]]}],
            )
        )
    write_predictions(tmp_path, photos)
    write_map_files(tmp_path, Site(), {})
    down, level = read_json(tmp_path / GEOJSON)["features"]
    assert down["geometry"]["type"] == "LineString"
    assert down["geometry"]["coordinates"][1] == pytest.approx(
        (8.5417, 47.3769 + 10 / 111_190), abs=1e-6
    )
    # 10 pixels are 1 metre
    assert down["properties"]["length_m"] == pytest.approx(20 + np.hypot(20, 4), abs=0.1)
    # its end is too flat
    assert (level["geometry"]["type"], level["properties"]["length_m"]) == ("Point", None)


def test_the_work_list_has_a_row_for_each_finding_with_empty_cells_for_what_is_unknown(
    output: Path,
) -> None:
    rows = rows_of(output)
    assert tuple(rows[0]) == WORK_LIST_COLUMNS
    assert [row["position_kind"] for row in rows] == ["ground", "ground", "camera", ""]
    assert (rows[3]["latitude"], rows[3]["sigma_m"]) == ("", "")
    assert rows[3]["reason"] == "no position in EXIF or XMP"
    assert rows[0]["time"] == "2026-05-04T10:11:12"
    features = read_json(output / GEOJSON)["features"]
    for row, item in zip(rows[:3], features[:3], strict=True):
        assert [float(row["longitude"]), float(row["latitude"])] == item["geometry"]["coordinates"]
    assert (output / WORK_LIST).read_bytes().startswith(b"\xef\xbb\xbf")


def kml_of(folder: Path) -> ElementTree.Element:
    root = ElementTree.parse(folder / KML).getroot()
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def test_the_kml_parses_and_shows_pins_lines_and_balloons(output: Path) -> None:
    marks = kml_of(output).findall("Document/Folder/Placemark")
    folders = [folder.findtext("name") for folder in kml_of(output).iter("Folder")]
    assert folders == ["down.jpg", "level.jpg", "nowhere.jpg"]
    assert [mark.findtext("name") for mark in marks] == [
        "pole 0.88",
        "insulator 0.88",
        "pole 0.88",
        "insulator 0.88",
    ]
    assert [len(list(mark.iter("Point"))) for mark in marks] == [1, 1, 1, 0]
    line = str(marks[2].findtext(".//LineString/coordinates")).split()
    start, end = ([float(value) for value in point.split(",")] for point in line)
    assert end[0] > start[0]  # the bearing is east
    assert end[1] == pytest.approx(start[1], abs=1e-6)
    styles = {element.get("id") for element in kml_of(output).iter("Style")}
    assert {str(mark.findtext("styleUrl"))[1:] for mark in marks[:3]} <= styles


UNSAFE = (
    *(
        "=cmd|'/C calc'!A0",
        "+1",
        "-1",
        "@SUM(A1)",
        "＝1",
        "\t=1",
        "a<b>&\"'",
        "a\x01\nb\udce9",
        "]]>",
    ),
    "4 (176) #1%20?",
)


def test_names_from_strangers_neither_compute_nor_break_a_file(tmp_path: Path) -> None:
    for number, name in enumerate(UNSAFE):
        file = tmp_path / f"{name.replace('/', '')}.jpg"
        write_photo(file, xmp=xmp_of(dji(GpsLongitude="-8.5")))
        folder = tmp_path / str(number)
        folder.mkdir()
        relative = Path(file.name)
        write_predictions(folder, [(file, [detection(name)])])
        save_thumbnails(
            folder, relative.stem, np.zeros((40, 60, 3), np.uint8), [0], np.array([[3, 3, 9, 9]])
        )
        write_map_files(folder, Site(), {})
        (row,) = rows_of(folder)
        assert not any(cell.startswith(("=", "+", "@", "\t", "＝")) for cell in row.values())
        assert row["class"].startswith("-") is False
        assert float(row["longitude"]) < 0  # numbers stay numbers
        collection: FeatureCollection[Any] = FeatureCollection.model_validate_json(
            (folder / GEOJSON).read_bytes()
        )
        (item,) = collection.features
        assert item.properties is not None
        assert (folder / item.properties["thumbnail"]).exists()
        (mark,) = kml_of(folder).iter("Placemark")
        balloon = ElementTree.fromstring(f"<b>{mark.findtext('description')}</b>")
        assert (folder / unquote(str(balloon.find(".//img").get("src")))).exists()  # type: ignore[union-attr]
        assert len(balloon) == 2


def test_a_failure_leaves_the_old_files_and_no_parts(tmp_path: Path) -> None:
    (tmp_path / GEOJSON).write_text("old")
    (tmp_path / "predictions.json").write_text('[\n{"file": \n]\n')
    with pytest.raises(UserError, match=r"predictions.json:2: not valid JSON: Expecting value"):
        write_map_files(tmp_path, Site(), {})
    assert (tmp_path / GEOJSON).read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == [GEOJSON, "predictions.json"]


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((5, 5, 15, 10), (128, 128)),  # a small object keeps its surroundings
        ((0, 0, 600, 400), (320, 213)),
        ((560, 380, 600, 400), (128, 128)),
        ((100, 100, 300, 300), (300, 300)),
    ],
)
def test_a_thumbnail_shows_the_box_with_a_margin(
    box: tuple[int, ...], size: tuple[int, int]
) -> None:
    photo = np.zeros((400, 600, 3), np.uint8)
    photo[box[1] : box[3], box[0] : box[2]] = 200
    cut = thumbnail(photo, np.array(box, float), (255, 0, 0))
    assert cut.shape[1::-1] == size
    assert (cut == 200).all(axis=2).any()
    assert photo.max() == 200


def test_a_thin_photograph_has_a_thumbnail(tmp_path: Path) -> None:
    assert thumbnail(
        np.zeros((1, 900, 3), np.uint8), np.array([0, 0, 900, 1.0]), (1, 2, 3)
    ).shape == (1, 320, 3)

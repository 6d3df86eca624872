"""Labels of a map: GeoJSON and GeoPackage become photographs with YOLO's labels."""

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely

import parse_labels
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.data.labels import read_yolo_label
from yolo_seg_ddp.extras.orthophotos.cut import main
from yolo_seg_ddp.extras.orthophotos.pieces import cut_raster
from yolo_seg_ddp.extras.orthophotos.raster import WGS84, open_orthophoto, transformer
from yolo_seg_ddp.extras.orthophotos.tests.rasters import CRS, write_raster
from yolo_seg_ddp.extras.orthophotos.vector_labels import read_map_labels
from yolo_seg_ddp.utils.errors import UserError

pyogrio = pytest.importorskip("pyogrio")
SIZE = (1000, 900)
POLE, WIRE = shapely.box(110, 260, 130, 500), shapely.LineString([(0, 700), (1000, 900)])
RING = shapely.Polygon(
    [(620, 20), (780, 20), (780, 180), (620, 180)], [[(660, 60), (740, 60), (740, 140), (660, 140)]]
)


@pytest.fixture
def raster(tmp_path: Path) -> Path:
    pixels = (
        np.random.default_rng(0)
        .integers(1, 255, (*SIZE[::-1], 1), dtype=np.uint8)
        .repeat(3, axis=2)
    )
    pixels[:200, :200] = 0
    return write_raster(tmp_path / "a.tif", pixels, nodata=0)


def write_geojson(file: Path, raster: Path, crs: str | None = None, **properties: Any) -> Path:
    """Write the pole and the ring in WGS84, or in the raster's system with the member `crs` that
    QGIS writes.
    """
    photo = open_orthophoto(raster)
    to_map = transformer(photo.crs, CRS if crs else WGS84)
    features = []
    for shape in (POLE, RING):
        placed = shapely.transform(
            shape, lambda points: np.stack(to_map.transform(*photo.to_map(points).T), axis=1)
        )
        facts = {"class": "pole", **properties}
        features.append(
            {
                "type": "Feature",
                "properties": facts,
                "geometry": json.loads(shapely.to_geojson(placed)),
            }
        )
    system = {"crs": {"type": "name", "properties": {"name": crs}}} if crs else {}
    file.write_text(json.dumps({"type": "FeatureCollection", **system, "features": features}))
    return file


def write_geopackage(file: Path, raster: Path, crs: str, **columns: Any) -> Path:
    """Write the wire in a reference system."""
    photo = open_orthophoto(raster)
    to_map = transformer(photo.crs, crs)
    line = shapely.transform(
        WIRE, lambda points: np.stack(to_map.transform(*photo.to_map(points).T), axis=1)
    )
    fields = {"Label": np.array(["wire"], object), **columns}
    wkb = np.array([shapely.to_wkb(line)], object)
    kind = {"geometry_type": "LineString", "crs": crs, "driver": "GPKG", "layer": 'my "wires"'}
    pyogrio.raw.write(file, wkb, list(fields.values()), list(fields), **kind)
    return file


@pytest.mark.parametrize("crs", [None, "urn:ogc:def:crs:EPSG::32633"])
@pytest.mark.parametrize("of_lines", ["EPSG:4326", "EPSG:3857", "EPSG:25833"])
def test_labels_of_any_system_lie_on_their_pixels(
    crs: str | None, of_lines: str, raster: Path, tmp_path: Path
) -> None:
    geojson = write_geojson(tmp_path / "a.geojson", raster, crs)
    files = [geojson, write_geopackage(tmp_path / "b.gpkg", raster, of_lines)]
    photo = open_orthophoto(raster)
    labels, num_skipped = read_map_labels(files, photo)
    assert num_skipped == 0
    assert [label.name for label in labels] == ["pole", "pole", "wire"]
    for label, expected in zip(labels, (POLE, RING, WIRE), strict=True):
        assert shapely.transform(label.shape, photo.to_pixels).hausdorff_distance(expected) < 0.05


def test_pixels_are_kept_and_neighbours_together(raster: Path, tmp_path: Path) -> None:
    width = {"width_m": np.array([0.3])}
    files = [
        write_geojson(tmp_path / "a.geojson", raster),
        write_geopackage(tmp_path / "b.gpkg", raster, CRS, **width),
    ]
    cut, output = tmp_path / "cut", tmp_path / "set"
    arguments = [
        "--input",
        raster,
        "--labels",
        *files,
        "--output",
        cut,
        "--long-side",
        "200",
        "--line-width",
        "3",
    ]
    assert main([str(word) for word in arguments]) == 0
    assert (
        parse_labels.main(["--input", str(cut), "--output", str(output), "--long-side", "200"]) == 0
    )
    names = (output / "dataset.yaml").read_text()
    assert names.index("pole") < names.index("wire")
    photo = open_orthophoto(raster)
    corners: dict[str, list[int]] = {"train": [], "val": []}
    areas = np.zeros(2)
    for split, rows in corners.items():
        for file in sorted((output / split / "images").iterdir()):
            left, top = (int(part[1:]) for part in file.stem.split("_")[-2:])
            rows.append(left)
            window = photo.read((left, top, left + 200, top + 180)).astype(float)
            assert abs(read_image(file) - window).mean() < 6  # of a JPEG
            class_ids, polygons = read_yolo_label(output / split / "labels" / f"{file.stem}.txt", 2)
            for class_id, polygon in zip(class_ids, polygons, strict=True):
                found = shapely.Polygon(polygon * (200, 180) + (left, top)).buffer(0)
                areas[class_id] += found.intersection((POLE, WIRE.buffer(6))[class_id]).area
    assert max(corners["train"]) + 200 < min(corners["val"])
    assert len(corners["train"]) == 14  # one of 15 is without photograph
    assert len(corners["val"]) == 5
    assert areas[0] == pytest.approx(POLE.area, rel=0.01)  # the ring lies between the splits
    assert areas[1] == pytest.approx(WIRE.length * 0.8 * 10, rel=0.02)  # 0.3 m are ten pixels


def test_a_tall_raster_is_divided_along_its_height(tmp_path: Path) -> None:
    photo = open_orthophoto(write_raster(tmp_path / "a.tif", np.full((1000, 300, 3), 90, np.uint8)))
    labels, _ = read_map_labels([write_geojson(tmp_path / "a.geojson", photo.file)], photo)
    said = cut_raster(photo, labels, tmp_path / "cut", 200, 6, None, 0.2)
    assert said.endswith("6 train, 2 val, 2 between them left out")


def view_for_table(file: Path) -> None:
    with sqlite3.connect(file) as base:
        base.execute('ALTER TABLE "my ""wires""" RENAME TO other')
        base.execute('CREATE VIEW "my ""wires""" AS SELECT * FROM other')
        base.execute("UPDATE gpkg_geometry_columns SET table_name = 'my \"wires\"'")


def with_crs(crs: str) -> Any:
    feature = (
        '{"properties": {"class": "a"}, "geometry": {"type": "LineString", "coordinates": [[15, '
        "47], [15, 48]]}}"
    )
    return lambda file: file.write_text(f'{{"crs": {crs}, "features": [{feature}]}}')


def with_unknown_system(file: Path) -> None:
    with sqlite3.connect(file) as base:
        base.execute("UPDATE gpkg_spatial_ref_sys SET definition = 'undefined'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:3000]), "malformed|not a GeoPackage"),
        (view_for_table, "not a GeoPackage with a plain table"),
        (lambda file: file.write_text("a,b"), "not valid JSON"),
        (
            lambda file: file.write_text(
                '{"crs": {"properties": {"name": "+proj=x +nadgrids=/a"}}}'
            ),
            "reference system",
        ),
        (
            lambda file: file.write_text('{"features": [{"geometry": {"type": "Point"}}]}'),
            "export it again",
        ),
        (lambda file: file.write_text('{"features": [7]}'), "export it again"),
        (
            with_crs('{"properties": {"name": "urn:ogc:def:crs:EPSG::999999"}}'),
            "reference system EPSG:999999",
        ),
        (
            with_crs('{"type": "link", "properties": {"href": "http://127.0.0.1:9/x"}}'),
            'system {"type": "link"',
        ),
        (with_crs('{"properties": [1]}'), "reference system"),
        (with_crs("4326"), "reference system 4326: export with EPSG:4326"),
        (with_unknown_system, "its coordinate reference system"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_unusable_label_files_are_refused_in_one_line(
    change: Any, message: str, raster: Path, tmp_path: Path
) -> None:
    file = write_geopackage(tmp_path / "b.gpkg", raster, CRS)
    change(file)
    with pytest.raises(UserError, match=message) as caught:
        read_map_labels([file], open_orthophoto(raster))
    assert "b.gpkg" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_feature_needs_a_class_and_points_are_counted(raster: Path, tmp_path: Path) -> None:
    photo = open_orthophoto(raster)
    with pytest.raises(
        UserError, match="a feature without a class: it needs a text in the column `class`"
    ):
        read_map_labels(
            [write_geojson(tmp_path / "a.geojson", raster, None, **{"class": 3})], photo
        )
    point = {
        "type": "Feature",
        "properties": {},
        "geometry": {"type": "Point", "coordinates": [15, 47]},
    }
    (tmp_path / "b.geojson").write_text(
        json.dumps({"type": "FeatureCollection", "features": [point, point]})
    )
    assert read_map_labels([tmp_path / "b.geojson"], photo) == ([], 2)


@pytest.mark.parametrize(
    ("crs", "move", "message"),
    [
        (
            "EPSG:4326",
            lambda points: points[:, ::-1],
            "none of 2 objects .* 4,[0-9.,]+ km away; latitude and longitude look sw",
        ),
        (
            "EPSG:4326",
            lambda points: np.add(points[:, ::-1], [0, 80]),
            "cannot hold|none of 2 objects",
        ),
        ("EPSG:32633", lambda points: points[:, ::-1], "none of 2 objects .*look swapped"),
        (
            "EPSG:32633",
            lambda points: np.add(points, [2000, 0]),
            r"none of 2 objects lies on .*, the nearest is 2\.0 km away; name",
        ),
        ("EPSG:32633", lambda points: np.add(points, [15, 0]), "1 of 2 objects lie outside"),
    ],
)
def test_labels_outside_the_raster_are_said(
    crs: str,
    move: Any,
    message: str,
    raster: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_geojson(tmp_path / "a.geojson", raster, None if crs == WGS84 else crs)
    content = json.loads(file.read_text())
    for feature in content["features"]:
        rings = feature["geometry"]["coordinates"]
        feature["geometry"]["coordinates"] = [move(np.array(ring)).tolist() for ring in rings]
    file.write_text(json.dumps(content))
    photo = open_orthophoto(raster)
    try:
        cut_raster(photo, read_map_labels([file], photo)[0], tmp_path / "cut", 200, 6, None, 0.2)
        said = capsys.readouterr().err
    except UserError as error:
        said = str(error)
    assert re.search(message, said)
    assert (tmp_path / "cut").exists() == said.startswith("WARNING")


def test_a_refused_cut_leaves_nothing_and_takes_no_folder_that_is_in_use(
    raster: Path, tmp_path: Path
) -> None:
    labels = write_geojson(tmp_path / "a.geojson", raster)
    output = tmp_path / "cut"
    words = ["--input", str(raster), "--labels", str(labels), "--output", str(output)]
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match="are fewer than 3 photographs along a side"):
        main([*words, "--long-side", "900"])
    assert set(tmp_path.iterdir()) == before
    output.mkdir()
    (output / "mine.txt").touch()
    with pytest.raises(UserError, match="is not empty; name a new folder"):
        main(words)
    assert [file.name for file in output.iterdir()] == ["mine.txt"]

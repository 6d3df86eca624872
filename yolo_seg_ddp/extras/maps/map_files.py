"""Writes findings for maps and work lists: detections.geojson (RFC 7946), worklist.csv and
detections.kml.

Text from photographs' names, models and asset files is not trusted: characters that no format takes
are replaced, cells that a spreadsheet would compute get an apostrophe, markup is escaped.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np

from yolo_seg_ddp.extras.maps.findings import AT_ASSET, AT_CAMERA, ON_GROUND, Site, locate
from yolo_seg_ddp.extras.maps.metadata import NOT_JPEG, read_metadata
from yolo_seg_ddp.extras.maps.thumbnails import thumbnail_path
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, moved, offsets_m
from yolo_seg_ddp.predict.prediction_files import read_predictions
from yolo_seg_ddp.utils.errors import printable
from yolo_seg_ddp.utils.files import new_text_file
from yolo_seg_ddp.utils.text import counted, plain_text

GEOJSON, WORK_LIST, KML = "detections.geojson", "worklist.csv", "detections.kml"
WORK_LIST_COLUMNS = (
    *(
        "photograph",
        "class",
        "confidence",
        "latitude",
        "longitude",
        "position_kind",
        "sigma_m",
        "bearing_deg",
    ),
    *(
        "distance_m",
        "camera_latitude",
        "camera_longitude",
        "camera_altitude_m",
        "time",
        "asset",
        "asset_id",
    ),
    *("thumbnail", "picture", "reason"),
)
DECIMALS = {"latitude": 7, "longitude": 7}  # by the end of the property's name; 7 decimals are 1 cm
OTHER_DECIMALS = 2
AS_THEY_ARE = ("confidence", "best_confidence", "chance_of_error")
BEARING_LINE_M = 25.0  # length in KML of the line that shows a bearing without distance
KIND_TEXT = {
    ON_GROUND: "on the ground",
    AT_ASSET: "at an asset",
    AT_CAMERA: "at the camera",
    None: "without position",
}
# aabbggrr: orange, green, blue
KML_COLOURS = {ON_GROUND: "ff00a5ff", AT_ASSET: "ff00c800", AT_CAMERA: "ffff9628"}
# What spreadsheets compute, also in double width: OWASP, "CSV Injection".
_FORMULA_STARTS = tuple("=+-@＝＋－＠'")

Finding = dict[str, Any]


def write_map_files(
    folder: Path,
    site: Site,
    of_asset: Mapping[tuple[str, int], Finding],
    turned: Collection[str] = (),
) -> list[str]:
    """Write the three files from predictions.json, one photograph at a time; return lines with a
    summary.

    of_asset: properties of the asset of a detection, by photograph and number of the detection.
    turned: photographs that were turned by 180 degrees.
    Prints a line for each photograph whose XMP is refused. Files appear only when all three are
    complete.
    """
    kinds: Counter[str | None] = Counter()
    reasons: Counter[str] = Counter()
    temporary = [folder / f".{name}.tmp-{os.getpid()}" for name in (GEOJSON, WORK_LIST, KML)]
    with ExitStack() as stack:
        for file in temporary:
            stack.callback(file.unlink, missing_ok=True)
        with ExitStack() as writers:
            geojson, work_list, kml = (
                writers.enter_context(new_text_file(file, encoding, newline=""))
                for file, encoding in zip(temporary, ("utf-8", "utf-8-sig", "utf-8"), strict=True)
            )
            # a table for spreadsheets: UTF-8 with a byte-order mark, comma
            rows = csv.writer(work_list)
            rows.writerow(WORK_LIST_COLUMNS)
            makers = (_GeoJson(geojson), _Kml(kml))
            for finding in _findings(folder, site, of_asset, turned):
                kinds[finding["position_kind"]] += 1
                reasons.update([finding["reason"]] if finding["reason"] else [])
                rows.writerow([cell(finding[name]) for name in WORK_LIST_COLUMNS])
                for maker in makers:
                    maker.add(finding)
            for maker in makers:
                maker.end()
        for file, name in zip(temporary, (GEOJSON, WORK_LIST, KML), strict=True):
            os.replace(file, folder / name)
    counts = (
        ", ".join(f"{kinds[kind]} {text}" for kind, text in KIND_TEXT.items() if kinds[kind])
        or "nothing"
    )
    return [
        f"Map: {counts} ({GEOJSON}, {WORK_LIST}, {KML})",
        *(
            f"  {counted(number, 'detection')} without a place on the ground: {text}"
            for text, number in reasons.most_common()
        ),
    ]


def _findings(
    folder: Path, site: Site, of_asset: Mapping[tuple[str, int], Finding], turned: Collection[str]
) -> Iterator[Finding]:
    """Yield all findings, rounded, with links to their pictures.

    Their text is valid in every format.
    """
    for entry in read_predictions(folder):
        if not entry["detections"]:
            continue
        photo = replace(read_metadata(Path(entry["file"])), is_turned=entry["file"] in turned)
        if photo.problem not in (None, NOT_JPEG):
            print(f"{printable(entry['file'], 400)}: {photo.problem}", flush=True)
        for number, finding in enumerate(locate(photo, entry, site)):
            finding |= of_asset.get((entry["file"], number), {})
            if finding["position_kind"] == AT_ASSET:
                point, camera = (
                    [finding[f"{prefix}{name}"] for name in ("latitude", "longitude")]
                    for prefix in ("", "camera_")
                )
                finding["distance_m"] = float(
                    np.linalg.norm(offsets_m(camera[0], camera[1], geocentric(*point)))
                )
            links = {
                "thumbnail": thumbnail_path(entry["key"], number),
                "picture": f"{entry['key']}.jpg",
            }
            yield {name: plain(name, value) for name, value in {**finding, **links}.items()}


def plain(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, float) and name not in AS_THEY_ARE:
        return round(value, DECIMALS.get(name.rpartition("_")[2], OTHER_DECIMALS))
    return value


class _GeoJson:
    """A FeatureCollection of points, and of lines for wires.

    Coordinates have no altitude: that above the ellipsoid is unknown.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.separator = "\n"
        file.write('{"type": "FeatureCollection", "features": [')

    def add(self, finding: Finding) -> None:
        properties = dict(finding)
        longitude, latitude = properties.pop("longitude"), properties.pop("latitude")
        geometry: Finding | None = None
        if line := properties.pop("centreline"):
            geometry = {"type": "LineString", "coordinates": line}
        elif latitude is not None:
            geometry = {"type": "Point", "coordinates": [longitude, latitude]}
        feature = {"type": "Feature", "geometry": geometry, "properties": properties}
        self.file.write(self.separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
        self.separator = ",\n"

    def end(self) -> None:
        self.file.write("\n]}\n")


def cell(value: Any) -> Any:
    """Return a value as a cell that a spreadsheet does not compute; None becomes an empty cell."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


class _Kml:
    """KML 2.2 (OGC 07-147r2): a folder for each photograph; each finding in it has a pin, a line
    from the camera and a balloon.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.photograph: str | None = None
        styles = "".join(
            f'<Style id="{kind}"><IconStyle><color>{colour}</color></IconStyle>'
            f"<LineStyle><color>{colour}</color><width>2</width></LineStyle></Style>\n"
            for kind, colour in KML_COLOURS.items()
        )
        file.write(
            '<?xml version="1.0" encoding="UTF-8"?>\n<kml xmlns="http://www.opengis.net/kml/2.2">\n'
        )
        file.write(f"<Document><name>Detections</name>\n{styles}")

    def add(self, finding: Finding) -> None:
        if finding["photograph"] != self.photograph:
            self.end_folder()
            self.photograph = finding["photograph"]
            self.file.write(f"<Folder><name>{escape(Path(finding['photograph']).name)}</name>\n")
        style = (
            f"<styleUrl>#{finding['position_kind']}</styleUrl>" if finding["position_kind"] else ""
        )
        title = f"{finding['class']} {finding['confidence']:.2f}"
        self.file.write(
            f"<Placemark><name>{escape(title)}</name>{style}<description>"
            f"{escape(_balloon(finding))}</description>"
            f"{_geometry(finding)}</Placemark>\n"
        )

    def end_folder(self) -> None:
        if self.photograph is not None:
            self.file.write("</Folder>\n")

    def end(self) -> None:
        self.end_folder()
        self.file.write("</Document></kml>\n")


def _balloon(finding: Finding) -> str:
    """Return HTML: the thumbnail, linked to the annotated picture, and a table of what is known."""
    thumbnail, picture = (escape(quote(finding[name])) for name in ("thumbnail", "picture"))
    rows = (
        ("position", KIND_TEXT[finding["position_kind"]], ""),
        ("standard deviation", finding["sigma_m"], " m"),
        ("asset", finding["asset"], ""),
        ("asset id", finding["asset_id"], ""),
        ("bearing", finding["bearing_deg"], "°"),
        ("distance", finding["distance_m"], " m"),
        ("no ground point", finding["reason"], ""),
        ("time", finding["time"], ""),
        ("photograph", finding["photograph"], ""),
    )
    table = "".join(
        f"<tr><td>{name}</td><td>{escape(f'{value}{unit}')}</td></tr>"
        for name, value, unit in rows
        if value is not None
    )
    return f'<a href="{picture}"><img src="{thumbnail}" width="320"/></a><table>{table}</table>'


def _geometry(finding: Finding) -> str:
    """Return a point, and a line to it from the camera if both are known, or in the direction of
    the bearing.
    """
    if finding["latitude"] is None:
        return ""
    point = (finding["longitude"], finding["latitude"])
    camera = (finding["camera_longitude"], finding["camera_latitude"])
    marker = f"<Point><coordinates>{_text(point)}</coordinates></Point>"
    end = point
    if finding["position_kind"] == AT_CAMERA and finding["bearing_deg"] is not None:
        bearing = np.radians(finding["bearing_deg"])
        latitude, longitude = moved(
            camera[1], camera[0], BEARING_LINE_M * np.array([np.cos(bearing), np.sin(bearing)])
        )
        end = (longitude, latitude)
    if end == camera:
        return marker
    line = (
        f"<LineString><tessellate>1</tessellate><coordinates>{_text(camera)} "
        f"{_text(end)}</coordinates></LineString>"
    )
    return f"<MultiGeometry>{marker}{line}</MultiGeometry>"


def _text(point: tuple[float, float]) -> str:
    return f"{point[0]:.7f},{point[1]:.7f}"

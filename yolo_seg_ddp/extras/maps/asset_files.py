"""Writes the assets that photographs show, and what changed since an earlier flight: GeoJSON (RFC
7946) and CSV.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.extras.maps.assets import ASSET_SIGMA_M
from yolo_seg_ddp.extras.maps.changes import GONE, Before, Change, ellipse_of, find_changes
from yolo_seg_ddp.extras.maps.findings import AT_ASSET, Site
from yolo_seg_ddp.extras.maps.map_files import cell, plain
from yolo_seg_ddp.extras.maps.metadata import read_metadata
from yolo_seg_ddp.extras.maps.survey import Asset, Survey, View, survey, view_of
from yolo_seg_ddp.extras.maps.thumbnails import sharpness, thumbnail_path
from yolo_seg_ddp.predict.prediction_files import read_predictions
from yolo_seg_ddp.utils.errors import printable
from yolo_seg_ddp.utils.files import write_bytes_atomic, write_text_atomic
from yolo_seg_ddp.utils.text import csv_text

ASSETS, CHANGES = "assets", "changes"  # .geojson, .csv
CUT_SHARE = 0.5  # factor for the size of a view whose box touches the photograph's edge
MOST_NAMED = 12  # photographs in a line
Row = dict[str, Any]


@dataclass(frozen=True)
class AssetTables:
    """The rows of the files; changes: None without an earlier flight. flights: the photographs.

    of_detection: the asset's properties for the files of detections, by photograph and number of
    the detection. turned: the photographs that the flight shows to be turned. rewritten: those that
    another program wrote after the drone.
    """

    assets: list[Row]
    changes: list[Row] | None
    flights: list[list[View]]
    of_detection: dict[tuple[str, int], Row]
    turned: list[str]
    rewritten: list[str]

    @property
    def lines(self) -> list[str]:
        """Lines with a summary."""
        classes = Counter(row["class"] for row in self.assets)
        sure = sum(row["sure"] for row in self.assets)
        what = ", ".join(f"{number} {name}" for name, number in classes.most_common()) or "none"
        lines = [
            f"Assets: {what}; {sure} of {len(self.assets)} seen often enough to be sure "
            "(assets.html)"
        ]
        for reason, files in (
            ("turned by 180 degrees", self.turned),
            ("written again after the flight", self.rewritten),
        ):
            if files:
                shown = ", ".join(printable(Path(file).name, 100) for file in files[:MOST_NAMED])
                more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
                lines.append(
                    f"Left out of the assets: {reason}: {shown}{more}; use the files that the "
                    "drone wrote"
                )
        if self.changes is not None:
            kinds = Counter(row["change"] for row in self.changes)
            what = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()) or "none"
            lines.append(f"Changes since the earlier flight: {what} (changes.csv, changes.geojson)")
        return lines


def write_asset_files(
    folder: Path, site: Site, names: Sequence[str], before: Before | None
) -> AssetTables:
    """Write assets.geojson and assets.csv out of predictions.json; with `before` also
    changes.geojson and changes.csv.

    names: of the model's classes.
    """
    views, entries = [], {}
    rewritten: list[str] = []
    for entry in read_predictions(folder):
        photo = read_metadata(Path(entry["file"]))
        views.append(view_of(photo, entry))
        rewritten += [entry["file"]] if photo.written_by else []
        boxes = [
            {name: item[name] for name in ("box_xyxy", "confidence")}
            for item in entry["detections"]
        ]
        # Outlines would take too much memory.
        entries[entry["file"]] = {**entry, "detections": boxes}
    surveyed = survey([view for view in views if view is not None], site)
    changes = find_changes(surveyed, before, names) if before else []
    _name(surveyed.assets, names, before)
    rows: dict[str, Row] = {}
    of_detection: dict[tuple[str, int], Row] = {}
    for asset in surveyed.assets:
        if asset.is_placed or asset.known is not None:
            row = _row(asset, surveyed, _views(folder, asset, entries), names)
            rows[asset.asset_id] = row
            properties = {
                name: row[name]
                for name in ("asset", "asset_id", "asset_beside_m", "asset_candidates")
            }
            if asset.known is not None or len(asset.views) > 1:
                properties |= {name: row[name] for name in ("latitude", "longitude", "sigma_m")}
                properties["position_kind"] = AT_ASSET
            of_detection |= dict.fromkeys(asset.views, properties)
    listed = [_change_row(change, before, rows) for change in changes] if before else None
    for change in listed or []:
        if change["change"] != GONE:
            rows[change["asset"]] |= {
                "change": change["change"],
                "chance_of_error": change["chance_of_error"],
            }
    _write(folder / ASSETS, list(rows.values()))
    if listed is not None:
        _write(folder / CHANGES, listed)
    return AssetTables(
        list(rows.values()),
        listed,
        surveyed.flights,
        of_detection,
        sorted(surveyed.turned),
        rewritten,
    )


def _name(assets: list[Asset], names: Sequence[str], before: Before | None) -> None:
    """Name the assets without a name after their class, in the order of the photographs."""
    taken = {asset.asset_id for asset in assets} | set(before.ids if before else ())
    numbers = {name: itertools.count(1) for name in names}
    for asset in [asset for asset in assets if not asset.asset_id]:
        while not asset.asset_id or asset.asset_id in taken:
            asset.asset_id = f"{names[asset.class_id]} {next(numbers[names[asset.class_id]])}"


def _views(folder: Path, asset: Asset, entries: dict[str, Row]) -> list[Row]:
    """Return an asset's detections, sorted by the product of size, sharpness and confidence; the
    best first.
    """
    views, scores = [], []
    for file, number in asset.views:
        entry = entries[file]
        detection = entry["detections"][number]
        size = (entry["width"], entry["height"])
        box = np.array(detection["box_xyxy"], np.float64)
        links = {
            "thumbnail": thumbnail_path(entry["key"], number),
            "picture": f"{entry['key']}.jpg",
        }
        is_cut = (box[:2] <= 2).any() or (box[2:] >= np.array(size) - 2).any()
        area = float(np.prod(box[2:] - box[:2])) * (CUT_SHARE if is_cut else 1)
        sharp = sharpness(folder / links["thumbnail"], box, size) if len(asset.views) > 1 else 1.0
        views.append(
            {
                "photograph": file,
                "detection": number,
                "confidence": detection["confidence"],
                **links,
            }
        )
        scores.append((np.sqrt(max(area, 1)), sharp + 1e-9, detection["confidence"]))
    best = np.log(np.array(scores)).sum(axis=1)
    return [views[row] for row in sorted(range(len(views)), key=lambda row: (-best[row], row))]


def _row(asset: Asset, surveyed: Survey, views: list[Row], names: Sequence[str]) -> Row:
    """Return the properties of an asset's feature, with its position; unknown values are None."""
    latitude = asset.latitude
    longitude = asset.longitude
    covariance = asset.covariance
    known, row = surveyed.site.assets, asset.known
    # the list is more exact
    if known is not None and row is not None and asset.sigma_m > ASSET_SIGMA_M:
        latitude, longitude = float(known.latitudes[row]), float(known.longitudes[row])
        covariance = (ASSET_SIGMA_M**2 + surveyed.common_m**2) * np.eye(2)
    major_m, minor_m, bearing_deg = ellipse_of(covariance)
    confidences = [view["confidence"] for view in views]
    looks = max(asset.looks, len(views))
    properties = {
        "asset": asset.asset_id,
        "class": names[asset.class_id],
        "latitude": latitude,
        "longitude": longitude,
        "sigma_m": float(np.sqrt(np.linalg.eigvalsh(covariance)[-1])),
        "ellipse_major_m": major_m,
        "ellipse_minor_m": minor_m,
        "ellipse_bearing_deg": bearing_deg,
        "common_sigma_m": surveyed.common_m,
        "above_take_off_m": asset.up_m if asset.is_placed else None,
        "photographs": len(views),
        "looks": looks,
        "sure": asset.is_sure,
        "confidence": round(sum(confidences) / looks, 4),
        "best_confidence": max(confidences),
        "asset_id": known.ids[row] if known is not None and row is not None else None,
        "asset_beside_m": asset.beside_m if asset.is_placed else None,
        "asset_candidates": asset.candidates or None,
        "change": None,
        "chance_of_error": None,
        **{f"best_{name}": views[0][name] for name in ("photograph", "thumbnail", "picture")},
    }
    listed = [{name: plain(name, value) for name, value in view.items()} for view in views]
    return {name: plain(name, value) for name, value in properties.items()} | {"views": listed}


def _change_row(change: Change, before: Before, rows: dict[str, Row]) -> Row:
    """Return the properties of a change's feature, with the asset's present position, or the
    earlier one if it is gone.
    """
    old = change.before
    now = rows[change.asset.asset_id] if change.asset else {}
    class_before = None if old is None else before.classes[before.places.class_ids[old]]
    if old is not None and not now:
        now = {"asset": before.ids[old], "class": class_before}
        now |= {
            name: float(getattr(before.places, name)[old]) for name in ("latitude", "longitude")
        }
    properties = {
        "asset": now["asset"],
        "change": change.kind,
        "chance_of_error": float(f"{change.chance:.2g}"),
        "class": now["class"],
        "class_before": class_before,
        "latitude": now["latitude"],
        "longitude": now["longitude"],
        "moved_m": change.moved_m,
        "looks": change.looks,
        "thumbnail": now.get("best_thumbnail"),
        "picture": now.get("best_picture"),
    }
    return {name: plain(name, value) for name, value in properties.items()}


def _write(path: Path, rows: list[Row]) -> None:
    """Write rows as GeoJSON points with properties, and as a CSV table without the lists."""
    features = []
    for row in rows:
        properties = {
            name: value for name, value in row.items() if name not in ("latitude", "longitude")
        }
        geometry = {"type": "Point", "coordinates": [row["longitude"], row["latitude"]]}
        features.append(
            {"type": "Feature", "id": row["asset"], "geometry": geometry, "properties": properties}
        )
    lines = ",\n".join(
        json.dumps(feature, ensure_ascii=False, allow_nan=False) for feature in features
    )
    write_text_atomic(
        path.with_suffix(".geojson"),
        f'{{"type": "FeatureCollection", "features": [\n{lines}\n]}}\n',
    )
    columns = [name for name in (rows[0] if rows else {"asset": ""}) if name != "views"]
    table = csv_text(columns, ([cell(row[name]) for name in columns] for row in rows))
    write_bytes_atomic(path.with_suffix(".csv"), table.encode("utf-8-sig"))

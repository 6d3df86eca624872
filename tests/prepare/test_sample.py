"""The built-in sample, also at the size of a drone's photographs: deterministic, and as awkward as
EPRI's own files.
"""

import ast
import csv
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.support.plugin import must_run
from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.data.images import exif_orientation, read_image, upright_size
from yolo_seg_ddp.prepare.parsing.label_csv import LABEL_CSV, ClassTable
from yolo_seg_ddp.prepare.parsing.outlines import object_ring
from yolo_seg_ddp.prepare.sample import write_sample
from yolo_seg_ddp.prepare.sample.scene import Drawing, draw_scene
from yolo_seg_ddp.utils.errors import UserError

NUM_PHOTOS = 24


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "raw"
    write_sample(folder, NUM_PHOTOS, seed=3)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    text = (folder / LABEL_CSV).read_text(encoding="utf-8-sig")
    return list(csv.DictReader(io.StringIO(text)))


def objects_of(row: dict[str, str]) -> list[dict[str, Any]]:
    return ast.literal_eval(row["Label"])["objects"]


def photos_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("Circuit*/*")}


def test_equal_calls_write_equal_bytes_larger_samples_more_other_seeds_others(
    sample: Path, tmp_path: Path
) -> None:
    for name, seed in (("four", 3), ("other", 6)):
        write_sample(tmp_path / name, 4, seed)
    large, four, other = (
        files_of(folder) for folder in (sample, tmp_path / "four", tmp_path / "other")
    )
    assert set(four) == set(other)
    assert all(four[name] != other[name] for name in four)
    assert len(four) == 5
    assert large.pop(LABEL_CSV).startswith(four.pop(LABEL_CSV))
    assert {name: large[name] for name in four} == four
    write_sample(tmp_path / "four", 4, seed=3)
    with pytest.raises(UserError, match="choose an empty folder"):
        write_sample(tmp_path / "four", 2, seed=3)
    again = files_of(tmp_path / "four")
    assert {name: again[name] for name in four} == four


def test_every_class_is_drawn(sample: Path) -> None:
    names = load_dataset_yaml(DEFAULT_DATASET_YAML).names
    classes = ClassTable(names)
    counts = Counter(
        classes.find(entry["value"]) for row in rows_of(sample) for entry in objects_of(row)
    )
    assert min(counts[class_id] for class_id in range(len(names))) >= NUM_PHOTOS // 3
    assert len(photos_of(sample)) == NUM_PHOTOS


def test_names_are_unique_and_one_row_lacks_its_photograph_and_one_photograph_its_row(
    sample: Path,
) -> None:
    photos = photos_of(sample)
    named, present = {row["External ID"] for row in rows_of(sample)}, set(photos)
    assert len(named - present) == 1
    assert len(present - named) == 1
    assert len({name.lower() for name in photos}) == NUM_PHOTOS
    assert {path.suffix for path in photos.values()} == {".JPG", ".jpg", ".JPEG"}
    assert sum(path.parent.name == "Circuit10" for path in photos.values()) == NUM_PHOTOS // 4


def test_some_polygons_pass_the_edge_one_has_two_points_and_one_touches_itself(
    sample: Path,
) -> None:
    photos = photos_of(sample)
    num_past_edge = num_short = num_touching = 0
    for row in rows_of(sample):
        if row["External ID"] not in photos:
            continue
        width, height = upright_size(photos[row["External ID"]].read_bytes())
        outlines = [entry["polygon"] for entry in objects_of(row) if "polygon" in entry]
        for polygon in (
            np.array([(point["x"], point["y"]) for point in outline]) for outline in outlines
        ):
            num_short += len(polygon) < 3
            num_past_edge += bool((polygon < 0).any() or (polygon > (width, height)).any())
            num_touching += len(polygon) > 3 and len(
                {tuple(point) for point in polygon.tolist()}
            ) < len(polygon)
    assert num_short == 1
    assert num_past_edge >= 3
    assert num_touching == 1


def test_turned_files_are_upright_again(sample: Path) -> None:
    by_number = {int(path.stem.split("(")[1][:-1]): path for path in photos_of(sample).values()}
    found = {number - 1: exif_orientation(path.read_bytes()) for number, path in by_number.items()}
    turned = {index: orientation for index, orientation in found.items() if orientation != 1}
    assert turned == {2: 6, 5: 8, 7: 3}
    for index in turned:
        scene = draw_scene(3, index)
        drawn = scene.image
        assert _difference(read_image(by_number[index + 1]), drawn) < 6
        stored = np.asarray(Image.open(by_number[index + 1]))
        assert stored.shape != drawn.shape or _difference(stored, drawn) > 20


def test_wires_are_as_thin_as_asked_and_nothing_else_moves() -> None:
    wide, thin = draw_scene(0, 0), draw_scene(0, 0, wire_width_px=3)
    assert [annotation.name for annotation in thin.annotations] == [
        annotation.name for annotation in wide.annotations
    ]
    for before, after in zip(wide.annotations, thin.annotations, strict=True):
        assert np.array_equal(before.points, after.points)
    wires = [annotation.points for annotation in wide.annotations if annotation.is_line]
    near_wires = np.zeros(wide.image.shape[:2], np.uint8)
    cv2.polylines(near_wires, [np.rint(points).astype(np.int32) for points in wires], False, 1, 40)
    changed = np.abs(wide.image.astype(int) - thin.image.astype(int)).max(2) > 40
    assert changed.sum() > 1000
    assert changed[near_wires == 0].mean() < 0.001


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire_width_px": 0.5}, "wire_width_px: 0.5"),
        ({"wire_width_px": 41}, "wire_width_px: 41"),
        ({"seed": -1}, "seed: -1; must not be negative"),
    ],
)
def test_impossible_samples_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        write_sample(tmp_path, 1, **options)


def test_another_folders_photographs_and_labels_are_never_overwritten(tmp_path: Path) -> None:
    photo = tmp_path / "Circuit1" / "1 (1).JPG"
    photo.parent.mkdir()
    photo.write_bytes(b"not ours")
    with pytest.raises(UserError, match=r"1 \(1\).JPG: not part of the sample"):
        write_sample(tmp_path, 2)
    assert photo.read_bytes() == b"not ours"
    photo.unlink()
    (tmp_path / LABEL_CSV).write_text("Label,External ID\n", encoding="utf-8")
    with pytest.raises(UserError, match=LABEL_CSV):
        write_sample(tmp_path, 2)
    assert not list(tmp_path.glob("Circuit*/*"))


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


# --- at the size of a drone's photographs ---------------------------------------------------------


SIZE_PX = 1600


@pytest.fixture(scope="module")
def large_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "raw"
    write_sample(folder, 1, seed=2, long_side_px=SIZE_PX)
    return folder


def test_the_same_bytes_on_one_thread_and_on_a_processor_without_avx2(
    large_sample: Path, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {"OPENCV_CPU_DISABLE": "AVX2,AVX512-SKX,FMA3"}
    plain["NPY_DISABLE_CPU_FEATURES"] = "AVX512F AVX512_SKX AVX2 FMA3"
    plain = plain if os.uname().machine == "x86_64" else {}
    command = f"""
import os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
from pathlib import Path
from yolo_seg_ddp.prepare.sample import write_sample
write_sample(Path({str(tmp_path)!r}), 1, seed=2, long_side_px={SIZE_PX})
"""
    must_run("python", "-c", command, **plain)
    assert files_of(tmp_path) == files_of(large_sample)


def test_photographs_have_the_size_asked_for_wires_are_lines_and_all_else_polygons(
    large_sample: Path,
) -> None:
    for path in large_sample.glob("Circuit*/*"):
        assert sorted(read_image(path).shape[:2]) == [1067, SIZE_PX]
    entries = [entry for row in rows_of(large_sample) for entry in objects_of(row)]
    assert {"pole", "insulator", "conductor"} <= {entry["value"] for entry in entries}
    assert all(
        ("line" in entry) == (entry["value"] in ("conductor", "other_wire", "other-wire"))
        for entry in entries
    )


@pytest.mark.parametrize("width_px", [4.0, 6.5, 10.0])
@pytest.mark.parametrize("end", [(680.0, 110.0), (690.0, 400.0), (580.0, 560.0)])
def test_a_wire_covers_its_width_times_its_length(
    width_px: float, end: tuple[float, float]
) -> None:
    """On black, a white wire's pixels add up to its area, at any slope."""
    drawing = Drawing(np.random.default_rng(0), 700, 600)
    path = np.array([(100.3, 100.2), end])
    drawing.paint_wire("conductor", path, (1e4, 1e4, 1e4), width_px)
    area = drawing.image[..., 0].sum() / 255
    assert area == pytest.approx(width_px * np.linalg.norm(path[1] - path[0]), rel=0.03)


def test_labels_of_the_asked_width_cover_the_wires() -> None:
    """Where two drawings differ that differ in the wires' width alone, there is the wider label,
    and not more.
    """
    thin, wide = (draw_scene(2, 1, SIZE_PX, width_px) for width_px in (4, 9))
    assert [one.name for one in thin.annotations] == [one.name for one in wide.annotations]
    differs = (np.abs(thin.image.astype(int) - wide.image.astype(int)).max(axis=2) > 24).astype(
        np.uint8
    )
    size = (thin.image.shape[1], thin.image.shape[0])
    labels = []
    for width_px in (4.0, 9.0):
        mask = np.zeros(size[::-1], np.uint8)
        for wire in (one for one in thin.annotations if one.is_line):
            ring = object_ring("line", wire.points, size, width_px, 0.25)
            cv2.fillPoly(mask, [np.rint(ring * 16).astype(np.int32) - 8], 1, cv2.LINE_8, 4)
        labels.append(mask)
    inner = np.asarray(cv2.erode(labels[0], np.ones((3, 3), np.uint8)))
    label = labels[1] * (1 - inner)
    near = cv2.dilate(labels[1], np.ones((5, 5), np.uint8))
    assert (differs * near).sum() / differs.sum() > 0.97
    assert (differs * label).sum() / label.sum() > 0.5  # a branch or the hardware covers the rest


def test_unasked_wires_are_4_to_10_pixels_wide_and_parts_as_large_as_real_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[float] = []
    monkeypatch.setattr(Drawing, "paint_wire", lambda *arguments: widths.append(arguments[-1]))
    heights = {"insulator": (40, 150), "transformers": (200, 500), "crossarm": (50, 500)}
    for index in (0, 1):
        for drawn in draw_scene(2, index, SIZE_PX).annotations:
            low, high = heights.get(drawn.name, (0, SIZE_PX * 2))
            assert low <= np.ptp(drawn.points[:, 1]) <= high, drawn.name
    assert len(widths) > 5
    assert all(4 <= width_px <= 10 for width_px in widths)

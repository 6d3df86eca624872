"""Photographs in folders and zips, their outlines and frames, and their split
into train and val.
"""

import os
import tempfile
import zipfile
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from tests.prepare.parsing.raw_folder import (
    BOX,
    NAMES,
    build,
    photo,
    polygon,
    problems_of,
    record,
    write_csv,
)
from tests.prepare.parsing.tool_folder import HEIGHT, TEXT, WIDTH, files, png
from tests.prepare.parsing.tool_folder import build as build_tool
from yolo_seg_ddp.data.dataset_yaml import label_file_for, load_dataset_yaml
from yolo_seg_ddp.data.images import read_image, upright_size
from yolo_seg_ddp.data.label_shapes import measure_labels
from yolo_seg_ddp.data.labels import read_yolo_label
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.sources import Photograph, find_photographs
from yolo_seg_ddp.prepare.parsing.split import assign_splits, bursts, output_stems
from yolo_seg_ddp.training.data import Data
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.model import trained_stretch


def test_half_extracted_photograph_is_taken_from_its_zip(raw: Path) -> None:
    (raw / "Circuit2").mkdir()
    with zipfile.ZipFile(raw / "Circuit2.zip") as archive:
        whole = {number: archive.read(f"Circuit2/2 ({number}).JPG") for number in (1, 2)}
    (raw / "Circuit2" / "2 (1).JPG").write_bytes(whole[1])
    (raw / "Circuit2" / "2 (2).JPG").write_bytes(whole[2][:-10])
    manifest = build(raw)
    assert record(manifest, "2 (1).jpg")["source"] == "Circuit2/2 (1).JPG"
    assert record(manifest, "2 (2).jpg")["source"] == "Circuit2.zip/Circuit2/2 (2).JPG"
    assert problems_of(manifest) == [("Circuit2/2 (2).JPG", "duplicate photograph")]


def test_damaged_zip_member_is_one_unreadable_photograph(raw: Path) -> None:
    data = bytearray((raw / "Circuit2.zip").read_bytes())
    data[data.find(b"\xff\xda") + 40] ^= 0xFF
    (raw / "Circuit2.zip").write_bytes(bytes(data))
    manifest = build(raw)
    assert problems_of(manifest) == [("Circuit2.zip/Circuit2/2 (1).JPG", "unreadable photograph")]
    assert "CRC" in manifest["problems"][0]["text"]


def test_what_lies_in_a_folder_that_may_be_listed_but_not_entered_is_a_problem() -> None:
    nobody = 65534
    problems: list[Problem] = []
    # others may enter its parents, unlike those of pytest's folders
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        closed = folder / "closed"
        (closed / "inner").mkdir(parents=True)
        for file in (folder / "open.jpg", closed / "a.jpg"):
            file.write_bytes(photo())
        folder.chmod(0o755)
        closed.chmod(0o444)
        is_root = os.geteuid() == 0
        try:
            if is_root:  # who may enter any folder
                os.seteuid(nobody)
            assert list(find_photographs(folder, problems)) == ["open.jpg"]
        finally:
            if is_root:
                os.seteuid(0)
            closed.chmod(0o755)
    assert {problem.place for problem in problems} == {"closed/a.jpg", "closed/inner"}


# --- One photograph and its label: pixels, outlines, line width, and EXIF frame -------------------


def test_outlines_lie_on_the_pixels_they_were_drawn_on_also_after_the_folder_was_moved(
    raw: Path,
) -> None:
    manifest = build(raw, line_width_px=10.0)
    moved = (raw.parent / "processed").rename(raw.parent / "moved")
    spec = load_dataset_yaml(moved / "dataset.yaml")
    assert spec.names == NAMES
    files = [file for split in ("train", "val") for file in spec.image_files(split)]
    assert sorted(file.name for file in files) == [
        f"{a} ({b}).jpg" for a in (1, 2) for b in (1, 2, 3)
    ]
    for file in files:
        image = read_image(file)
        is_small = file.name.startswith("1")
        assert (
            not is_small
            or file.read_bytes() == (raw / "Circuit1" / file.name).with_suffix(".JPG").read_bytes()
        )
        assert max(image.shape[:2]) == (400 if is_small else 500)
        class_ids, polygons = read_yolo_label(label_file_for(file), len(NAMES))
        assert class_ids.tolist() == [NAMES.index("insulator"), NAMES.index("conductor")]
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.fillPoly(mask, [np.round(polygons[0] * image.shape[1::-1]).astype(np.int32)], 1)
        red = (image[..., 0] > 150) & (image[..., 1] < 130)
        assert (red & (mask > 0)).sum() / (red | (mask > 0)).sum() > 0.93
        width_px = np.ptp(polygons[1][:, 1]) * (300 if is_small else 500)
        assert width_px == pytest.approx(10, abs=0.01), "in pixels of the original"
    assert manifest["counts"]["objects"]["insulator"] == manifest["counts"]["objects"]["conductor"]
    assert sum(manifest["counts"]["photographs"].values()) == 6
    assert manifest["problems"] == []


@pytest.mark.parametrize("drawn_on", ["upright", "stored"])
def test_outlines_of_turned_photographs_find_their_frame(raw: Path, drawn_on: str) -> None:
    data = photo(orientation=6)
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(data)
    width, height = upright_size(data)
    assert (width, height) == (300, 400)
    far = (390, 280) if drawn_on == "stored" else (280, 390)  # fits one frame only
    write_csv(
        raw,
        [
            (
                "1 (1).JPG",
                [BOX, polygon("pole", (far[0] - 30, far[1] - 30), (far[0], far[1] - 30), far)],
            )
        ],
    )
    manifest = build(raw)
    assert record(manifest, "1 (1).jpg")["exif_frame"] == drawn_on
    assert manifest["counts"]["turned_photographs"] == {drawn_on: 1}
    if drawn_on == "stored":
        image = read_image(raw.parent / "processed" / "train" / "images" / "1 (1).jpg")
        _, polygons = read_yolo_label(
            raw.parent / "processed" / "train" / "labels" / "1 (1).txt", len(NAMES)
        )
        center = (polygons[0].mean(axis=0) * (width, height)).astype(int)
        assert image[center[1], center[0], 0] > 200


def test_frame_that_cannot_be_told_is_counted_and_can_be_given(raw: Path) -> None:
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(photo(orientation=6))
    write_csv(raw, [("1 (1).JPG", [BOX])])
    assert record(build(raw), "1 (1).jpg")["exif_frame"] == "ambiguous"
    assert record(build(raw, exif_frame="stored"), "1 (1).jpg")["exif_frame"] == "stored"


def deep_picture(values: np.ndarray, kind: str) -> tuple[str, bytes]:
    """Return the suffix and the bytes of a picture of 12 bits in 16, or of floats."""
    pixels: Any = values.astype(np.float32 if kind == "floats" else np.uint16)
    suffix = ".png" if kind == "png" else ".tif"
    return suffix, cv2.imencode(
        suffix, np.stack([pixels] * 3, axis=2) if kind == "colour" else pixels
    )[1].tobytes()


@pytest.mark.parametrize("kind", ["png", "tif", "colour", "floats"])
def test_photographs_of_12_bits_are_stretched_once_for_the_data_set_and_alike_in_inference(
    tmp_path: Path, kind: str
) -> None:
    """They were nearly black."""
    ramp = np.tile(np.linspace(0, 4095, WIDTH), (HEIGHT, 1))
    contents: dict[str, bytes | str] = {"classes.txt": "pole\nwire"}
    for number, values in enumerate((ramp, ramp / 2)):
        suffix, data = deep_picture(values, kind)
        contents |= {f"images/{number}{suffix}": data, f"labels/{number}.txt": TEXT}
    raw = files(tmp_path / "raw", contents)
    manifest = build_tool(raw)
    spec = load_dataset_yaml(tmp_path / "processed" / "dataset.yaml")
    assert spec.stretch == pytest.approx((20, 3980), abs=60)
    dataset: Any = SimpleNamespace(photos=[], windowed=None)
    policy: Any = SimpleNamespace(windows=None)
    labels = measure_labels([])
    model: Any = SimpleNamespace(args=Data(spec, dataset, dataset, policy, labels).metadata())
    means = []
    for item in manifest["photographs"]:
        found = read_image(tmp_path / "processed" / item["split"] / "images" / item["file"]).astype(
            int
        )
        again = read_image(raw / item["source"], stretch=trained_stretch(model))
        assert np.abs(found - again).mean() < 2
        means.append(found.mean())
    assert means == pytest.approx([127, 63], abs=4)


def test_photographs_with_few_grey_levels_are_said(tmp_path: Path) -> None:
    few = np.tile(np.arange(WIDTH) % 12, (HEIGHT, 1)).astype(np.uint8)
    raw = files(
        tmp_path / "raw",
        {"images/a.png": png(few), "labels/a.txt": TEXT, "classes.txt": "pole\nwire"},
    )
    said: list[str] = []
    build_tool(raw, announce=said.append)
    assert (
        "the photographs have at most 12 of 256 grey levels, too few for detail: export them with "
        "all" in said
    )


# --- Which photograph goes to which side, and under which name ------------------------------------


def photographs(names: list[str], circuit: str = "Circuit1") -> list[Photograph]:
    return [Photograph(name, name, circuit, Path(name), None, 1, "") for name in names]


def test_adding_photographs_moves_none() -> None:
    names = [f"{circuit} ({number}).JPG" for circuit in range(10) for number in range(100)]
    few = assign_splits(photographs(names[:500]), "hash", 0.2)
    many = assign_splits(photographs(names), "hash", 0.2)
    assert all(many[key] == split for key, split in few.items())
    assert 0.17 < list(many.values()).count("val") / 1000 < 0.23
    assert assign_splits(photographs([name.upper() for name in names]), "hash", 0.2) == many


def test_few_photographs_are_split_by_the_share_that_was_asked_for() -> None:
    """Of 20 photographs, one was in val; of others, a half."""
    for total in range(3, 60):
        for start in range(0, 90, 30):
            chosen = photographs([f"{number}.jpg" for number in range(start, start + total)])
            number = [*assign_splits(chosen, "hash", 0.2).values()].count("val")
            assert abs(number - 0.2 * total) <= max(0.05 * total, 0.5) or (number, total) == (
                1,
                2,
            ), (start, total)
    pairs = [[one.key for one in chosen[at : at + 2]] for at in range(0, 58, 2)]
    splits = assign_splits(chosen, "hash", 0.2, pairs)
    assert all(len({splits[key] for key in pair}) == 1 for pair in pairs)
    assert 0.15 <= [*splits.values()].count("val") / len(chosen) <= 0.25


@pytest.mark.parametrize("val_fraction", [1e-9, 0.5, 1 - 1e-9])
def test_neither_side_stays_empty(val_fraction: float) -> None:
    chosen = photographs(["a.jpg", "b.jpg", "c.jpg"], "C1") + photographs(["d.jpg"], "C2")
    for mode, number in (("hash", 2), ("hash", 3), ("circuit", 4)):
        assert set(assign_splits(chosen[:number], mode, val_fraction).values()) == {"train", "val"}
    assert len(assign_splits(chosen[:1], "hash", val_fraction)) == 1


def test_circuits_stay_whole_and_come_near_the_share() -> None:
    chosen = [
        one for k in range(8) for one in photographs([f"{k} ({n}).JPG" for n in range(50)], f"C{k}")
    ]
    splits = assign_splits(chosen, "circuit", 0.25)
    assert len({(one.circuit, splits[one.key]) for one in chosen}) == 8
    assert list(splits.values()).count("val") == 100


@pytest.mark.parametrize(
    ("mode", "together", "message"),
    [("circuit", [], "--split-by hash"), ("time", [["a.jpg", "b.jpg"]], "smaller --time-gap")],
)
def test_one_circuit_or_series_cannot_be_split(
    mode: str, together: list[list[str]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        assign_splits(photographs(["a.jpg", "b.jpg"]), mode, 0.2, together)


def test_groups_stay_whole_in_every_mode_and_keep_the_share() -> None:
    """500 groups of 1 to 3 photographs, the photographs of a group in different circuits."""
    chosen = [
        item for c in "abcdefgh" for item in photographs([f"{c}{n:03}.jpg" for n in range(125)], c)
    ]
    together = [
        [one.key for one in chosen[start : start + 1 + start % 3]] for start in range(0, 1000, 3)
    ]
    for mode, tolerance in (("hash", 30), ("circuit", 130), ("time", 2)):
        splits = assign_splits(chosen, mode, 0.2, together)
        assert all(len({splits[key] for key in group}) == 1 for group in together)
        assert abs(list(splits.values()).count("val") - 200) <= tolerance
        assert assign_splits(chosen[::-1], mode, 0.2, together[::-1]) == splits


def test_a_photograph_without_a_copy_stays_where_it_was() -> None:
    chosen = photographs([f"{number}.jpg" for number in range(100)])
    before, after = (
        assign_splits(chosen, "hash", 0.2, groups) for groups in ([], [["1.jpg", "7.jpg"]])
    )
    # it follows the first name
    assert {key for key in before if before[key] != after[key]} <= {"7.jpg"}
    assert after["1.jpg"] == after["7.jpg"]


def test_a_group_larger_than_the_smaller_side_goes_to_the_larger_one() -> None:
    chosen = photographs([f"{number}.jpg" for number in range(100)])
    for first in range(20):  # of different hashes
        large = [item.key for item in chosen[first : first + 60]]
        for val_fraction, side in ((0.2, "train"), (0.8, "val")):
            splits = assign_splits(chosen, "hash", val_fraction, [large])
            assert {splits[key] for key in large} == {side}


def test_what_shares_a_photograph_is_one_group() -> None:
    chosen = photographs([f"{number}.jpg" for number in range(9)])
    splits = assign_splits(
        chosen, "time", 0.5, [["0.jpg", "8.jpg"], ["3.jpg", "5.jpg"], ["5.jpg", "8.jpg"]]
    )
    assert len({splits[f"{number}.jpg"] for number in (0, 3, 5, 8)}) == 1


def test_a_pause_longer_than_the_gap_begins_a_new_series() -> None:
    start = datetime(2023, 4, 3, 13, 26, 37)
    times = {
        name: start + timedelta(seconds=after)
        for name, after in zip("dacb", (61, 0, 30, 0), strict=True)
    }
    assert bursts(times, 30) == [["a", "b", "c"], ["d"]]
    assert bursts(times, 31) == [["a", "b", "c", "d"]]
    assert bursts(times, 0) == [["a", "b"], ["c"], ["d"]]


def test_output_names_are_safe_and_unique_without_case() -> None:
    names = ["4 (1).JPG", "x.jpg", "X.png", "a:b*?.jpg", "-….jpg", "ä.jpg", "n" * 300 + ".jpg"]
    stems = output_stems(photographs([*names, "\U0001d49c" * 200 + ".jpg"]))
    assert stems["4 (1).jpg"] == "4 (1)"
    assert stems["ä.jpg"] == "ä"
    assert stems["a:b*?.jpg"] == "a_b__"
    assert len({stem.lower() for stem in stems.values()}) == 8
    assert all(
        len(stem) <= 130 and len(f"{stem}-12345678.jpg".encode()) <= 255 for stem in stems.values()
    )

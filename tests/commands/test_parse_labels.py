"""parse_labels.py from raw folders and zips to a YOLO-seg data set."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import filelock
import numpy as np
import pytest
from PIL import Image

from tests.conftest import PROJECT
from utils.common.errors import UserError
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, label_file_for, load_dataset_yaml
from utils.data.images import encode_jpeg, read_image, upright_size
from utils.data.labels import read_yolo_label
from utils.data.parsing.build import BuildOptions, build_dataset
from utils.data.parsing.label_csv import LABEL_CSV
from utils.data.parsing.manifest import report_lines
from utils.data.parsing.photograph import PhotographOptions
from utils.data.parsing.sources import Photograph
from utils.data.parsing.split import assign_splits, output_stems
from utils.data.parsing.state import LOCK_FILE

NAMES = load_dataset_yaml(DEFAULT_DATASET_YAML).names


def photo(width: int = 400, height: int = 300, shade: int = 90, orientation: int | None = None) -> bytes:
    pixels = np.full((height, width, 3), shade, np.uint8)
    cv2.rectangle(pixels, (40, 30), (119, 89), (250, 20, 20), -1)
    if orientation is None:
        return encode_jpeg(pixels)
    exif, stream = Image.Exif(), io.BytesIO()
    exif[274] = orientation
    Image.fromarray(pixels).save(stream, "JPEG", quality=95, exif=exif)
    return stream.getvalue()


def polygon(value: str, *pairs: tuple[float, float]) -> dict[str, Any]:
    return {"value": value, "polygon": [{"x": x, "y": y} for x, y in pairs]}


BOX = polygon("insulator", (40, 30), (120, 30), (120, 90), (40, 90))
WIRE = {"value": "conductor", "line": [{"x": 10, "y": 200}, {"x": 390, "y": 200}]}


def write_csv(folder: Path, rows: list[tuple[str, object]]) -> None:
    with (folder / LABEL_CSV).open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["Label", "External ID"])
        for name, content in rows:
            text = content if isinstance(content, str) else repr({"objects": content, "classifications": []})
            writer.writerow([text, name])


def write_zip(file: Path, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Six photographs of two circuits: one circuit in a folder, the other in a zip, all labelled."""
    folder = tmp_path / "raw"
    (folder / "Circuit1").mkdir(parents=True)
    for number in range(1, 4):
        (folder / "Circuit1" / f"1 ({number}).JPG").write_bytes(photo(shade=60 + number))
    members = {f"Circuit2/2 ({number}).JPG": photo(1000, 500, shade=70 + number) for number in range(1, 4)}
    write_zip(folder / "Circuit2.zip", members)
    names = [f"{circuit} ({number}).jpg" for circuit in (1, 2) for number in range(1, 4)]
    write_csv(folder, [(name, [BOX, WIRE]) for name in names])
    return folder


def options(**changes: Any) -> BuildOptions:
    photograph = {"class_names": NAMES, "long_side_px": 500, "line_width_px": 6.0, "exif_frame": "auto"}
    photograph |= {key: changes.pop(key) for key in list(changes) if key in photograph}
    values = {"split_by": "hash", "val_fraction": 0.4, "keep_unlabelled": False} | changes
    return BuildOptions(PhotographOptions(**photograph), **values)


def build(raw: Path, **changes: Any) -> dict[str, Any]:
    return build_dataset(raw, raw.parent / "processed", options(**changes), num_workers=2)


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file of a data set but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROJECT / "parse_labels.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def problems_of(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["place"], item["kind"]) for item in manifest["problems"]]


def record(manifest: dict[str, Any], file: str) -> dict[str, Any]:
    (found,) = [item for item in manifest["photographs"] if item["file"] == file]
    return found


# --- what comes out ---


def test_outlines_lie_on_the_pixels_they_were_drawn_on(raw: Path) -> None:
    manifest = build(raw)
    spec = load_dataset_yaml(raw.parent / "processed" / "dataset.yaml")
    assert spec.names == NAMES
    files = [file for split in ("train", "val") for file in spec.image_files(split)]
    assert sorted(file.name for file in files) == [f"{a} ({b}).jpg" for a in (1, 2) for b in (1, 2, 3)]
    for file in files:
        image = read_image(file)
        assert max(image.shape[:2]) == (400 if file.name.startswith("1") else 500)
        label = read_yolo_label(label_file_for(file), len(NAMES))
        assert label.class_ids.tolist() == [NAMES.index("insulator"), NAMES.index("conductor")]
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.fillPoly(mask, [np.round(label.polygons[0] * image.shape[1::-1]).astype(np.int32)], 1)
        red = (image[..., 0] > 150) & (image[..., 1] < 130)
        assert (red & (mask > 0)).sum() / (red | (mask > 0)).sum() > 0.93
    assert manifest["counts"]["objects"]["insulator"] == manifest["counts"]["objects"]["conductor"]
    assert sum(manifest["counts"]["photographs"].values()) == 6
    assert manifest["problems"] == []


def test_wire_width_is_in_pixels_of_the_original(raw: Path) -> None:
    build(raw, line_width_px=10.0)
    (file,) = (raw.parent / "processed").glob("*/labels/2 (1).txt")
    wire = read_yolo_label(file, len(NAMES)).polygons[1] * (1000, 500)
    assert np.ptp(wire[:, 1]) == pytest.approx(10, abs=0.01)


def test_small_upright_jpeg_is_copied_byte_for_byte(raw: Path) -> None:
    build(raw)
    (file,) = (raw.parent / "processed").glob("*/images/1 (1).jpg")
    assert file.read_bytes() == (raw / "Circuit1" / "1 (1).JPG").read_bytes()


def test_the_folder_can_be_moved(raw: Path) -> None:
    build(raw)
    (raw.parent / "processed").rename(raw.parent / "elsewhere")
    assert load_dataset_yaml(raw.parent / "elsewhere" / "dataset.yaml").image_files("train")


def test_same_input_gives_the_same_bytes_everywhere(raw: Path, tmp_path: Path) -> None:
    build(raw)
    build_dataset(raw, tmp_path / "second", options(), num_workers=1)
    assert tree(tmp_path / "processed") == tree(tmp_path / "second")


# --- running again ---


def test_running_again_touches_nothing(raw: Path) -> None:
    build(raw)
    before = {path: path.stat().st_mtime_ns for path in (raw.parent / "processed").glob("*/*/*")}
    assert len(before) == 12
    build(raw)
    assert before == {path: path.stat().st_mtime_ns for path in (raw.parent / "processed").glob("*/*/*")}


def test_changed_line_width_rebuilds_labels_but_no_image(raw: Path) -> None:
    folder = raw.parent / "processed"
    build(raw)
    images = {path: path.stat().st_mtime_ns for path in folder.glob("*/images/*")}
    labels = {path: path.read_bytes() for path in folder.glob("*/labels/*")}
    build(raw, line_width_px=20.0)
    assert images == {path: path.stat().st_mtime_ns for path in folder.glob("*/images/*")}
    assert all(path.read_bytes() != text for path, text in labels.items())


@pytest.mark.parametrize(
    "changes", [{"long_side_px": 200}, {"val_fraction": 0.9}, {"split_by": "circuit"}, {"line_width_px": 2.0}]
)
def test_changed_option_gives_what_a_fresh_build_gives(raw: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    build(raw)
    build(raw, **changes)
    build_dataset(raw, tmp_path / "fresh", options(**changes), num_workers=2)
    assert tree(tmp_path / "processed") == tree(tmp_path / "fresh")


def test_changed_photograph_and_row_are_built_again_and_removed_ones_go(raw: Path, tmp_path: Path) -> None:
    build(raw)
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(photo(600, 300, shade=200))
    (raw / "Circuit1" / "1 (2).JPG").unlink()
    write_csv(raw, [(f"{a} ({b}).JPG", [BOX] if b == 3 else [BOX, WIRE]) for a in (1, 2) for b in (1, 2, 3)])
    manifest = build(raw)
    assert record(manifest, "1 (1).jpg")["width"] == 600
    assert record(manifest, "2 (3).jpg")["objects"] == {"insulator": 1}
    assert problems_of(manifest) == [(f"{LABEL_CSV}:3", "row without a photograph")]
    build_dataset(raw, tmp_path / "fresh", options(), num_workers=2)
    assert tree(tmp_path / "processed") == tree(tmp_path / "fresh")


def test_damaged_outputs_are_made_again(raw: Path) -> None:
    folder = raw.parent / "processed"
    build(raw)
    whole = tree(folder)
    image, label = sorted(folder.glob("*/images/*"))[0], sorted(folder.glob("*/labels/*"))[1]
    image.write_bytes(image.read_bytes()[:100])
    label.write_text("0 0 0 1 1 0 1\n")
    sorted(folder.glob("*/labels/*"))[2].unlink()
    build(raw)
    assert tree(folder) == whole


def test_killed_run_continues_to_the_same_result(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_zip(raw / "Circuit7.zip", {f"7 ({n}).JPG": photo(2400, 1600, shade=n) for n in range(24)})
    write_csv(raw, [(f"7 ({n}).JPG", [BOX, WIRE]) for n in range(24)])
    flags = ["--input", str(raw), "--workers", "1", "--output"]
    victim = subprocess.Popen([sys.executable, PROJECT / "parse_labels.py", *flags, tmp_path / "killed"])
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "killed").glob("*/labels/*.txt"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait(timeout=10) == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/images/[!.]*")}
    assert 0 < len(done) < 24
    assert not (tmp_path / "killed" / "manifest.json").exists()
    assert run(*flags, tmp_path / "killed").returncode == 0
    assert sum(path.stat().st_mtime_ns == then for path, then in done.items()) >= len(done) - 1
    assert run(*flags, tmp_path / "undisturbed").returncode == 0
    assert tree(tmp_path / "killed") == tree(tmp_path / "undisturbed")


def test_leftovers_of_a_killed_run_are_swept(raw: Path) -> None:
    folder = raw.parent / "processed"
    build(raw)
    whole = tree(folder)
    (folder / "val" / "images" / ".99-1.2 (1).jpg.part").write_bytes(b"half")
    (folder / "val" / "labels" / "9 (9).txt").write_text("")
    with (folder / ".parse_state.jsonl").open("a") as stream:
        stream.write('{"key": "2 (1).jpg", "stem": "2 (')
    build(raw)
    assert tree(folder) == whole


# --- what is wrong with the data ---


def test_unreadable_rows_and_photographs_are_listed_and_the_rest_is_built(raw: Path) -> None:
    (raw / "Circuit1" / "1 (2).JPG").write_bytes(photo()[:1500])
    (raw / "Circuit1" / "1 (9).JPG").write_bytes(photo())
    (raw / "Circuit3.zip").write_bytes(b"PK but not a zip")
    lost = polygon("pole", (900, 5), (950, 5), (950, 90))
    rows: list[tuple[str, object]] = [
        ("1 (1).JPG", [BOX, polygon("Tower", (1, 1), (9, 1), (9, 9)), lost]),
        ("1 (2).JPG", [BOX]),
        ("1 (3).JPG", "Skip"),
        ("2 (1).JPG", []),
        ("2 (2).JPG", [BOX]),
        ("2 (2).jpg", [BOX, WIRE]),
        ("2 (3).JPG", [BOX]),
        ("2 (3).JPG", [BOX]),
        ("8 (8).JPG", [BOX]),
    ]
    write_csv(raw, rows)
    manifest = build(raw)
    assert problems_of(manifest) == [
        ("Circuit1/1 (2).JPG", "unreadable photograph"),
        ("Circuit1/1 (9).JPG", "photograph without a row"),
        ("Circuit3.zip", "unreadable archive"),
        (f"{LABEL_CSV}:2", "unknown class"),
        (f"{LABEL_CSV}:2", "unusable object"),
        (f"{LABEL_CSV}:4", "unreadable row"),
        (f"{LABEL_CSV}:7", "duplicate row"),
        (f"{LABEL_CSV}:9", "duplicate row"),
        (f"{LABEL_CSV}:10", "row without a photograph"),
    ]
    built = {item["file"]: item["objects"] for item in manifest["photographs"]}
    assert built == {
        "1 (1).jpg": {"insulator": 1},
        "2 (1).jpg": {},
        "2 (2).jpg": {"conductor": 1, "insulator": 1},
        "2 (3).jpg": {"insulator": 1},
    }
    assert manifest["unknown_values"] == {"Tower": 1}
    assert [path.read_text() for path in (raw.parent / "processed").glob("*/labels/2 (1).txt")] == [""]
    assert manifest == build(raw)
    report = "\n".join(report_lines(manifest, num_problems=3))
    assert "Tower 1" in report
    assert "… and 6 more, all in manifest.json" in report
    assert "Circuit1/1 (2).JPG: truncated or corrupt JPEG" in report
    assert "no photograph called" not in report  # it is among the six: what could not be read comes first


def test_unlabelled_photographs_are_kept_on_request(raw: Path) -> None:
    (raw / "Circuit1" / "1 (9).JPG").write_bytes(photo())
    assert record(build(raw, keep_unlabelled=True), "1 (9).jpg")["objects"] == {}
    assert all(item["file"] != "1 (9).jpg" for item in build(raw)["photographs"])
    assert not list((raw.parent / "processed").glob("*/*/1 (9).*"))


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


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("drawn_on", ["upright", "stored"])
def test_outlines_of_turned_photographs_find_their_frame(raw: Path, orientation: int, drawn_on: str) -> None:
    data = photo(orientation=orientation)
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(data)
    width, height = upright_size(data)
    assert (width, height) == (300, 400)
    far = (390, 280) if drawn_on == "stored" else (280, 390)  # fits one frame only
    write_csv(raw, [("1 (1).JPG", [BOX, polygon("pole", (far[0] - 30, far[1] - 30), (far[0], far[1] - 30), far)])])
    manifest = build(raw)
    assert record(manifest, "1 (1).jpg")["exif_frame"] == drawn_on
    assert manifest["counts"]["turned_photographs"] == {drawn_on: 1}
    if drawn_on == "stored":
        image = read_image(raw.parent / "processed" / "train" / "images" / "1 (1).jpg")
        label = read_yolo_label(raw.parent / "processed" / "train" / "labels" / "1 (1).txt", len(NAMES))
        center = (label.polygons[0].mean(axis=0) * (width, height)).astype(int)
        assert image[center[1], center[0], 0] > 200


def test_frame_that_cannot_be_told_is_counted_and_can_be_given(raw: Path) -> None:
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(photo(orientation=6))
    write_csv(raw, [("1 (1).JPG", [BOX])])
    assert record(build(raw), "1 (1).jpg")["exif_frame"] == "ambiguous"
    assert record(build(raw, exif_frame="stored"), "1 (1).jpg")["exif_frame"] == "stored"


# --- splits and names ---


def photographs(names: list[str], circuit: str = "Circuit1") -> list[Photograph]:
    return [Photograph(name, name, circuit, Path(name), None, 1, "") for name in names]


def test_adding_photographs_moves_none() -> None:
    names = [f"{circuit} ({number}).JPG" for circuit in range(10) for number in range(100)]
    few = assign_splits(photographs(names[:500]), "hash", 0.2)
    many = assign_splits(photographs(names), "hash", 0.2)
    assert all(many[key] == split for key, split in few.items())
    assert 0.17 < list(many.values()).count("val") / 1000 < 0.23
    assert assign_splits(photographs([name.upper() for name in names]), "hash", 0.2) == many


def test_neither_side_stays_empty() -> None:
    for names in (["a.jpg", "b.jpg"], ["a.jpg", "b.jpg", "c.jpg"]):
        for val_fraction in (1e-9, 1 - 1e-9):
            assert set(assign_splits(photographs(names), "hash", val_fraction).values()) == {"train", "val"}
    assert len(assign_splits(photographs(["a.jpg"]), "hash", 0.2)) == 1


def test_unreadable_photograph_does_not_empty_its_side(raw: Path, tmp_path: Path) -> None:
    splits = {item["source"]: item["split"] for item in build(raw, val_fraction=1e-9)["photographs"]}
    (alone,) = [source for source, split in splits.items() if split == "val"]
    if alone.startswith("Circuit2"):
        write_zip(raw / "Circuit2.zip", {"2 (1).JPG": b"x", "2 (2).JPG": b"x", "2 (3).JPG": b"x"})
    else:
        (raw / alone).write_bytes(b"x")
    counts = build(raw, val_fraction=1e-9)["counts"]["photographs"]
    assert counts["val"] == 1
    assert counts["train"] >= 2
    build_dataset(raw, tmp_path / "fresh", options(val_fraction=1e-9), num_workers=2)
    assert tree(tmp_path / "processed") == tree(tmp_path / "fresh")


def test_circuits_stay_whole_and_come_near_the_share() -> None:
    chosen = [
        item for number in range(8) for item in photographs([f"{number} ({n}).JPG" for n in range(50)], f"C{number}")
    ]
    splits = assign_splits(chosen, "circuit", 0.25)
    by_circuit = {
        item.circuit: {splits[other.key] for other in chosen if other.circuit == item.circuit} for item in chosen
    }
    assert all(len(sides) == 1 for sides in by_circuit.values())
    assert list(splits.values()).count("val") == 100


@pytest.mark.parametrize("val_fraction", [0.01, 0.5, 0.99])
def test_each_side_has_a_circuit(val_fraction: float) -> None:
    chosen = photographs(["a.jpg", "b.jpg", "c.jpg"], "C1") + photographs(["d.jpg"], "C2")
    assert set(assign_splits(chosen, "circuit", val_fraction).values()) == {"train", "val"}


def test_one_circuit_cannot_be_split() -> None:
    with pytest.raises(UserError, match="--split-by hash"):
        assign_splits(photographs(["a.jpg", "b.jpg"]), "circuit", 0.2)


def test_output_names_are_safe_and_unique_without_case() -> None:
    stems = output_stems(
        photographs(["4 (1).JPG", "x.jpg", "X.png", "a:b*?.jpg", "-….jpg", "ä.jpg", "n" * 300 + ".jpg"])
    )
    assert stems["4 (1).jpg"] == "4 (1)"
    assert stems["ä.jpg"] == "ä"
    assert stems["a:b*?.jpg"] == "a_b__"
    assert len({stem.lower() for stem in stems.values()}) == 7
    assert all(len(stem) <= 130 for stem in stems.values())


# --- refusals ---


def test_missing_input_names_the_download(tmp_path: Path) -> None:
    done = run("--input", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "python download_data.py" in done.stderr
    (tmp_path / "empty").mkdir()
    assert "python download_data.py" in run("--input", tmp_path / "empty", "--output", tmp_path / "out").stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_nothing_usable_leaves_nothing_behind(raw: Path, existing: bool) -> None:
    output = raw.parent / "processed"
    if existing:
        (output / "train" / "notes").mkdir(parents=True)
    write_csv(raw, [("1 (1).JPG", "Skip")])
    done = run("--input", raw, "--output", output)
    assert done.returncode == 1
    assert f"{LABEL_CSV}:2" in done.stderr
    assert [path for path in output.rglob("*") if path.name != LOCK_FILE] == (
        [output / "train", output / "train" / "notes"] if existing else []
    )


def test_rows_without_any_photograph_are_an_error(raw: Path) -> None:
    write_csv(raw, [("77 (1).JPG", [BOX])])
    with pytest.raises(UserError, match="none of its rows"):
        build(raw)


def test_strict_fails_after_building_what_is_readable(raw: Path) -> None:
    write_csv(raw, [("1 (1).JPG", "Skip"), *((f"2 ({n}).JPG", [BOX]) for n in (1, 2, 3))])
    flags = ("--input", raw, "--output", raw.parent / "processed")
    assert run(*flags).returncode == 0
    strict = run(*flags, "--strict")
    assert strict.returncode == 1
    assert "--strict: 1 rows" in strict.stderr
    assert json.loads((raw.parent / "processed" / "manifest.json").read_text())["skipped"]["unreadable row"] == 1


def test_foreign_files_are_never_touched(raw: Path) -> None:
    theirs = raw.parent / "processed" / "train" / "images" / "mine.jpg"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"mine")
    with pytest.raises(UserError, match="name another --output"):
        build(raw)
    assert theirs.read_bytes() == b"mine"


def test_output_inside_the_input_is_refused(raw: Path) -> None:
    with pytest.raises(UserError, match="lies inside"):
        build_dataset(raw, raw / "processed", options(), num_workers=1)


def test_two_runs_do_not_write_into_one_folder(raw: Path) -> None:
    build(raw)
    before = tree(raw.parent / "processed")
    with (
        filelock.FileLock(raw.parent / "processed" / LOCK_FILE),
        pytest.raises(UserError, match="another parse_labels"),
    ):
        build(raw)
    assert tree(raw.parent / "processed") == before


@pytest.mark.parametrize(
    "flags",
    [("--val-fraction", "1"), ("--line-width", "0"), ("--long-side", "3"), ("--workers", "-1"), ("--split-by", "coin")],
)
def test_senseless_options_are_wrong_usage(flags: tuple[str, str]) -> None:
    done = run(*flags)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_output_that_cannot_be_written_is_one_line(raw: Path) -> None:
    (raw.parent / "processed").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot be written"):
        build(raw)

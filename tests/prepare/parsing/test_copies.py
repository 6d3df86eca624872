"""Copies of a picture, and the photographs of a series, stay on one side."""

import io
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.prepare.parsing.raw_folder import BOX, WIRE, build, picture, write_csv
from yolo_seg_ddp.prepare.parsing.manifest import report_lines
from yolo_seg_ddp.utils.errors import UserError

START = datetime(2023, 4, 3, 13, 26, 37)


def write(
    folder: Path, name: str, pixels: np.ndarray, after_s: float | None = None, quality: int = 95
) -> None:
    """Write a photograph that was taken `after_s` seconds after START."""
    folder.mkdir(exist_ok=True)
    exif, stream = Image.Exif(), io.BytesIO()
    if after_s is not None:
        exif.get_ifd(0x8769)[0x9003] = f"{START + timedelta(seconds=after_s):%Y:%m:%d %H:%M:%S}"
    Image.fromarray(pixels).save(stream, "JPEG", quality=quality, exif=exif)
    (folder / name).write_bytes(stream.getvalue())


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Twelve pictures, each once more darker and recompressed; the time of each pair is its own."""
    folder = tmp_path / "raw"
    for number in range(12):
        image = picture(number)
        write(folder, f"{number}.jpg", image, 100 * number)
        write(
            folder,
            f"copy {number}.jpg",
            (image * 0.7).astype(np.uint8),
            100 * number + 20,
            quality=60,
        )
    write_csv(
        folder,
        [(file.name, [BOX, WIRE] if "11" in file.name else [BOX]) for file in folder.iterdir()],
    )
    return folder


def sides(processed: Path) -> dict[str, str]:
    return {file.stem: file.parts[-3] for file in processed.glob("*/images/*.jpg")}


def test_the_same_picture_in_train_and_val(
    pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("yolo_seg_ddp.utils.progress.SECONDS_BETWEEN_LINES", 0.0)
    manifest = build(pairs)
    # The search was silent for a minute in a set of many copies.
    assert "pairs of photographs that may show the same: 1 of " in capsys.readouterr().err
    processed = pairs.parent / "processed"
    split_of = sides(processed)
    assert set(split_of.values()) == {"train", "val"}
    assert all(split_of[str(number)] == split_of[f"copy {number}"] for number in range(12))
    assert sorted(manifest["copies"]) == sorted(
        [f"{number}.jpg", f"copy {number}.jpg"] for number in range(12)
    )
    assert "copies: 24 photographs show only 12 pictures; each is on one side" in report_lines(
        manifest
    )
    build(pairs)  # moves no copy
    assert sides(processed) == split_of


def test_photographs_that_are_all_alike_are_split_one_by_one(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for number in range(9):
        write(raw, f"{number}.jpg", (picture(1) * (1 - 0.03 * number)).astype(np.uint8))
    write_csv(raw, [(f"{number}.jpg", [BOX]) for number in range(9)])
    manifest = build(raw)
    assert set(sides(tmp_path / "processed").values()) == {"train", "val"}
    assert any("all are alike" in line for line in report_lines(manifest))


def test_circuits_that_all_share_pictures_are_split_as_plain_circuits(tmp_path: Path) -> None:
    """Two circuits whose photographs show the same four pictures would be one group, and one side
    empty.
    """
    raw = tmp_path / "raw"
    for number in range(4):
        write(raw, f"1 ({number}).jpg", picture(number))
        write(raw, f"2 ({number}).jpg", (picture(number) * 0.7).astype(np.uint8), quality=60)
    write_csv(raw, [(file.name, [BOX]) for file in raw.iterdir()])
    manifest = build(raw, split_by="circuit")
    split_of = sides(tmp_path / "processed")
    assert {split_of[f"1 ({number})"] for number in range(4)} != {
        split_of[f"2 ({number})"] for number in range(4)
    }
    assert all(
        len({split_of[f"{circuit} ({number})"] for number in range(4)}) == 1 for circuit in (1, 2)
    )
    line = (
        "copies: 8 photographs show only 4 pictures; 4 in train and val: every circuit shares some"
    )
    assert line in report_lines(manifest)


def test_a_series_of_one_drone_is_one_group(tmp_path: Path) -> None:
    """Four series of three pictures each, with pauses of 20 s inside and of 60 s between them, and
    one without a time.
    """
    raw = tmp_path / "raw"
    for number in range(12):
        write(raw, f"{number * 7 % 12}.jpg", picture(number), 20 * number + 40 * (number // 3))
    write(raw, "no time.jpg", picture(99))
    write_csv(raw, [(file.name, [BOX]) for file in raw.iterdir()])
    manifest = build(raw, split_by="time", val_fraction=0.25)
    split_of = sides(tmp_path / "processed")
    for series in range(4):
        assert (
            len({split_of[str(number * 7 % 12)] for number in range(3 * series, 3 * series + 3)})
            == 1
        )
    assert list(split_of.values()).count("val") in (3, 4)
    line = "series: 4, the longest of 3 photographs; 1 without a time in EXIF, each on its own"
    assert line in report_lines(manifest)
    assert "time_gap_s 30" in (tmp_path / "processed" / "dataset.yaml").read_text()
    assert len(build(raw, split_by="time", time_gap_s=19.0)["series"]) == 12


def test_without_any_time_in_exif_there_are_no_series(raw: Path) -> None:
    with pytest.raises(
        UserError, match="none of 6 photographs has a time in EXIF; use --split-by hash"
    ):
        build(raw, split_by="time")


def test_a_class_with_too_few_objects_in_val_is_named(pairs: Path) -> None:
    manifest = build(pairs, val_fraction=0.6)
    counts = manifest["counts"]["objects"]
    assert counts["insulator"]["val"] >= 5 > counts["conductor"]["val"]
    (line,) = [
        line
        for line in report_lines(manifest)
        if line.startswith("classes with fewer than 5 objects in val: ")
    ]
    assert f"conductor {counts['conductor']['val']} of 2" in line
    assert "pole" not in line, "a class without any object has nothing to judge"
    assert "insulator" not in line

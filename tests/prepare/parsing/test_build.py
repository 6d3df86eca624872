"""A data set built, built again, and built from data with errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests.prepare.download.archives import zip_bytes
from tests.prepare.parsing.raw_folder import (
    BOX,
    WIRE,
    build,
    options,
    photo,
    polygon,
    problems_of,
    record,
    tree,
    write_csv,
)
from yolo_seg_ddp.prepare.parsing.build import build_dataset
from yolo_seg_ddp.prepare.parsing.formats import EPRI
from yolo_seg_ddp.prepare.parsing.manifest import report_lines
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV, Source
from yolo_seg_ddp.prepare.parsing.state import LOCK_FILE
from yolo_seg_ddp.utils.errors import UserError


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*")}


def test_running_again_touches_nothing_and_another_line_width_no_image(raw: Path) -> None:
    folder = raw.parent / "processed"
    build(raw)
    before, labels = times(folder), {path: path.read_bytes() for path in folder.glob("*/labels/*")}
    assert len(before) == 12
    build(raw)
    assert times(folder) == before
    build(raw, line_width_px=20.0)
    assert {path for path, then in times(folder).items() if then != before[path]} == labels.keys()
    assert all(path.read_bytes() != text for path, text in labels.items())


def change_nothing(raw: Path, folder: Path) -> None:
    """The second build has other options."""


def change_photographs_and_rows(raw: Path, folder: Path) -> None:
    (raw / "Circuit1" / "1 (1).JPG").write_bytes(photo(600, 300, shade=200))
    (raw / "Circuit1" / "1 (2).JPG").unlink()
    write_csv(
        raw,
        [(f"{a} ({b}).JPG", [BOX] if b == 3 else [BOX, WIRE]) for a in (1, 2) for b in (1, 2, 3)],
    )


def damage_outputs(raw: Path, folder: Path) -> None:
    image, label = sorted(folder.glob("*/images/*"))[0], sorted(folder.glob("*/labels/*"))[1]
    image.write_bytes(image.read_bytes()[:100])
    label.write_text("0 0 0 1 1 0 1\n")
    sorted(folder.glob("*/labels/*"))[2].unlink()


def leave_files_of_a_killed_run(raw: Path, folder: Path) -> None:
    (folder / "val" / "images" / ".99-1.2 (1).jpg.part").write_bytes(b"half")
    (folder / "val" / "labels" / "9 (9).txt").write_text("")
    with (folder / ".parse_state.jsonl").open("a") as stream:
        stream.write('{"key": "2 (1).jpg", "stem": "2 (')


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        (change_nothing, {}),
        (change_nothing, {"long_side_px": 200}),
        (change_nothing, {"val_fraction": 0.9}),
        (change_nothing, {"split_by": "circuit"}),
        (change_nothing, {"line_width_px": 2.0}),
        (change_photographs_and_rows, {}),
        (damage_outputs, {}),
        (leave_files_of_a_killed_run, {}),
    ],
)
def test_a_second_build_gives_what_a_fresh_build_gives(
    raw: Path, tmp_path: Path, change: Callable[[Path, Path], None], changes: dict[str, Any]
) -> None:
    build(raw)
    change(raw, tmp_path / "processed")
    manifest = build(raw, **changes)
    build_dataset([Source(EPRI, "", raw)], tmp_path / "fresh", options(**changes), num_workers=1)
    assert tree(tmp_path / "processed") == tree(tmp_path / "fresh")
    if change is change_photographs_and_rows:
        assert record(manifest, "1 (1).jpg")["width"] == 600
        assert record(manifest, "2 (3).jpg")["objects"] == {"insulator": 1}
        assert problems_of(manifest) == [(f"{LABEL_CSV}:3", "missing photograph")]


def test_unreadable_rows_and_photographs_are_listed_and_the_rest_is_built(raw: Path) -> None:
    (raw / "Circuit1" / "1 (2).JPG").write_bytes(photo()[:1500])
    (raw / "Circuit1" / "1 (9).JPG").write_bytes(photo())
    (raw / "Circuit3.zip").write_bytes(b"PK but not a zip")
    lost = polygon("insulator", (900, 5), (950, 5), (950, 90))
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
        ("Circuit1/1 (9).JPG", "unlisted photograph"),
        ("Circuit3.zip", "unreadable archive"),
        (f"{LABEL_CSV}:2", "unknown class"),
        (f"{LABEL_CSV}:2", "unusable object"),
        (f"{LABEL_CSV}:4", "unreadable row"),
        (f"{LABEL_CSV}:7", "duplicate row"),
        (f"{LABEL_CSV}:9", "duplicate row"),
        (f"{LABEL_CSV}:10", "missing photograph"),
    ]
    built = {item["file"]: item["objects"] for item in manifest["photographs"]}
    assert built == {
        "1 (1).jpg": {"insulator": 1},
        "2 (1).jpg": {},
        "2 (2).jpg": {"conductor": 1, "insulator": 1},
        "2 (3).jpg": {"insulator": 1},
    }
    assert manifest["unknown_values"] == {"Tower": 1}
    assert [path.read_text() for path in (raw.parent / "processed").glob("*/labels/2 (1).txt")] == [
        ""
    ]
    assert manifest == build(raw)
    assert manifest["account"]["Tower"]["left_out"] == {"unknown class": 1}
    report = "\n".join(report_lines(manifest, num_problems=3))
    assert "… and 6 more, all in manifest.json" in report
    assert "Circuit1/1 (2).JPG: truncated or corrupt JPEG" in report
    # it is among the six: what could not be read comes first
    assert "no photograph called" not in report
    write_csv(raw, [*rows, *((f"9 ({number}).JPG", [BOX]) for number in range(20))])
    lines = [line for line in report_lines(build(raw)) if "no photograph called" in line]
    assert lines == [
        f"  {LABEL_CSV}:10: no photograph called 8 (8).JPG … and 20 more like this, all in "
        "manifest.json"
    ]


def test_unlabelled_photographs_are_kept_on_request(raw: Path) -> None:
    (raw / "Circuit1" / "1 (9).JPG").write_bytes(photo())
    assert record(build(raw, keep_unlabelled=True), "1 (9).jpg")["objects"] == {}
    assert all(item["file"] != "1 (9).jpg" for item in build(raw)["photographs"])
    assert not list((raw.parent / "processed").glob("*/*/1 (9).*"))


def test_unreadable_photograph_does_not_empty_its_side(raw: Path, tmp_path: Path) -> None:
    splits = {
        item["source"]: item["split"] for item in build(raw, val_fraction=1e-9)["photographs"]
    }
    (alone,) = [source for source, split in splits.items() if split == "val"]
    if alone.startswith("Circuit2"):
        (raw / "Circuit2.zip").write_bytes(
            zip_bytes({f"2 ({number}).JPG": b"x" for number in (1, 2, 3)})
        )
    else:
        (raw / alone).write_bytes(b"x")
    counts = build(raw, val_fraction=1e-9)["counts"]["photographs"]
    assert counts["val"] == 1
    assert counts["train"] >= 2
    build_dataset(
        [Source(EPRI, "", raw)], tmp_path / "fresh", options(val_fraction=1e-9), num_workers=2
    )
    assert tree(tmp_path / "processed") == tree(tmp_path / "fresh")


def test_what_cannot_be_built_is_refused_in_one_line_and_nothing_is_touched(raw: Path) -> None:
    output = raw.parent / "processed"
    with pytest.raises(UserError, match="lies inside"):
        build_dataset([Source(EPRI, "", raw)], raw / "processed", options(), num_workers=1)
    output.write_text("a file in the way")
    with pytest.raises(UserError, match="cannot be written"):
        build(raw)
    output.unlink()
    theirs = output / "train" / "images" / "mine.jpg"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"mine")
    with pytest.raises(UserError, match="name another --output"):
        build(raw)
    assert theirs.read_bytes() == b"mine"
    theirs.unlink()
    build(raw)
    before = tree(output)
    with (
        filelock.FileLock(output / LOCK_FILE),
        pytest.raises(UserError, match="another parse_labels"),
    ):
        build(raw)
    write_csv(raw, [("77 (1).JPG", [BOX])])
    with pytest.raises(UserError, match="none of its rows"):
        build(raw)
    assert tree(output) == before


@pytest.mark.parametrize(
    "place", ["train", "train/images", "val/labels", ".parse.lock", ".parse_state.jsonl"]
)
def test_a_link_in_the_output_lets_the_parser_delete_files_elsewhere(
    raw: Path, tmp_path: Path, place: str
) -> None:
    build(raw)
    (tmp_path / "home").mkdir()
    output, moved = tmp_path / "processed", tmp_path / "home" / "moved"
    (output / place).rename(moved)
    (output / place).symlink_to(moved)
    if moved.is_dir():
        (moved / "of the user.txt").write_text("own")
    before = tree(tmp_path / "home")
    with pytest.raises(UserError, match=rf"processed/{place}: .*link.*remove it") as refused:
        build_dataset([Source(EPRI, "", raw)], output, options(), num_workers=1)
    assert tree(tmp_path / "home") == before
    if moved.is_dir():
        assert "--trust-links" in str(refused.value)
        build_dataset([Source(EPRI, "", raw)], output, options(), num_workers=1, trust_links=True)
        assert (output / place).is_symlink()

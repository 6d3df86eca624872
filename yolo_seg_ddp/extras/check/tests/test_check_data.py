"""check_data.py on a data set without a fault, and on one with a planted fault of every kind."""

import copy
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
from PIL import Image

import check_data
from tests.prepare.parsing.raw_folder import picture
from tests.support.browser import CHROMIUM, browser_page
from tests.support.recipes import run_command
from yolo_seg_ddp.data.images import EXIF_ORIENTATION_TAG, encode_jpeg, fit_long_side, write_jpeg
from yolo_seg_ddp.extras.check.findings import KINDS, MODEL_KINDS
from yolo_seg_ddp.extras.check.tests.planted import INSULATOR, NAMES, NUM_VAL, POLE, DataFolder, row
from yolo_seg_ddp.utils.errors import UsageError, UserError

# An outline with a hole, joined to it by a bridge of zero width as parse_labels.py writes it.
WITH_HOLE = (
    *((0.1, 0.1), (0.3, 0.1), (0.31, 0.3), (0.1, 0.3), (0.1, 0.1)),
    *((0.15, 0.15), (0.15, 0.25), (0.25, 0.25), (0.25, 0.15), (0.15, 0.15)),
)


def check(data: DataFolder, output: Path, *flags: str) -> dict[str, Any]:
    assert run_command(check_data, "--data", data.yaml, "--output", output, *flags) == 0
    content: dict[str, Any] = json.loads((output / "check.json").read_text())
    return content


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    return DataFolder(tmp_path_factory.mktemp("clean"))


class Faulty(NamedTuple):
    """A data set, the places of each kind of fault that was planted in it, and what check_data.py
    says.
    """

    data: DataFolder
    planted: dict[str, set[str]]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    data = DataFolder(tmp_path_factory.mktemp("faulty"))
    data.write_yaml(NAMES)
    planted: dict[str, set[str]] = defaultdict(set)
    plant_rows(data, planted)
    plant_pictures(data, planted)
    plant_classes(data, planted)
    return Faulty(data, planted, check(data, data.root / "check", "--tolerate"))


def plant_rows(data: DataFolder, planted: dict[str, set[str]]) -> None:
    crossing = ((0.1, 0.1), (0.3, 0.3), (0.3, 0.1), (0.1, 0.3))
    faults = {
        "unreadable_label": "0 0.1 0.2 0.3 abc 0.5 0.6",
        "outside": "0 0.1 0.2 0.3 1.4 0.5 0.6",
        "no_area": "0 0.1 0.2 0.3 0.3 0.1 0.2",
        "crosses_itself": row(0, crossing),
        "duplicate_line": row(1, (*INSULATOR[2:], *INSULATOR[:2])),
        "box_row": "0 0.2 0.2 0.1 0.1",
        "tiny": row(0, ((0.1, 0.1), (0.104, 0.1), (0.1, 0.104))),
        "rectangle": row(0, ((0.1, 0.1), (0.2, 0.1), (0.2, 0.2), (0.1, 0.2))),
        "touches_edge": row(0, ((0.0, 0.1), (0.1, 0.12), (0.1, 0.2), (0.0, 0.18))),
    }
    for number, (kind, fault) in enumerate(faults.items()):
        data.write_rows("train", number, row(0, POLE), "", row(1, INSULATOR), fault)
        planted[kind].add(f"{data.labels('train', number)}:4")
    data.write_rows(
        "train", 9, row(0, POLE), row(1, WITH_HOLE), "0 0.5", "7 0.1 0.1 0.2 0.1 0.2 0.2"
    )
    planted["no_area"].add(f"{data.labels('train', 9)}:3")
    planted["unreadable_label"].add(f"{data.labels('train', 9)}:4")
    data.labels("train", 10).unlink()
    planted["no_label_file"].add(str(data.photo("train", 10)))
    (data.labels("train", 0).parent / "stray.txt").write_text(row(0, POLE) + "\n")
    (data.labels("train", 0).parent / "classes.txt").write_text("pole\n")
    planted["label_without_photo"].add(str(data.labels("train", 0).with_name("stray.txt")))


def plant_pictures(data: DataFolder, planted: dict[str, set[str]]) -> None:
    def place(kind: str, split: str, number: int, image: np.ndarray) -> None:
        write_jpeg(data.photo(split, number), image)
        planted[kind].add(str(data.photo(split, number)))

    place("dark", "train", 11, picture(11) // 8)
    place("overexposed", "train", 12, (picture(12).astype(int) + 180).clip(0, 255).astype(np.uint8))
    place("uniform", "train", 13, np.full((300, 400, 3), 90, np.uint8))
    place("odd_shape", "train", 15, picture(15, (400, 180)))
    place("odd_size", "train", 16, fit_long_side(picture(16), 100))
    place("odd_size", "train", 14, picture(14, (1600, 1200)))
    place("blurred", "train", 17, cv2.GaussianBlur(picture(17), (0, 0), 3))
    data.photo("train", 18).write_bytes(encode_jpeg(picture(18))[:9000])
    planted["unreadable_photo"].add(str(data.photo("train", 18)))
    exif = Image.Exif()
    exif[EXIF_ORIENTATION_TAG] = 3
    Image.fromarray(picture(19)).save(data.photo("train", 19), exif=exif)
    planted["turned"].add(str(data.photo("train", 19)))

    brighter = (picture(20) * 1.2).clip(0, 255).astype(np.uint8)
    data.photo("val", 0).write_bytes(encode_jpeg(fit_long_side(brighter, 300), 40))
    data.photo("val", 1).write_bytes(data.photo("train", 21).read_bytes())
    planted["leak"] |= {str(data.photo("val", number)) for number in (0, 1)}
    scene = picture(90, (428, 320))  # two frames of a flight
    write_jpeg(data.photo("train", 1), scene[:300, :400])
    place("overlap", "val", 2, scene[20:, 28:])
    place("repeated", "train", 23, (picture(22) * 0.7).astype(np.uint8))


def plant_classes(data: DataFolder, planted: dict[str, set[str]]) -> None:
    """crossarm: val only. cutout: in a few photographs of train, and not in val. insulator: in
    almost no one of val.
    """
    data.write_rows("val", 2, row(0, POLE), row(2, ((0.1, 0.1), (0.3, 0.12), (0.25, 0.2))))
    for number in range(3, 12):
        data.write_rows("val", number, row(0, POLE))
    data.write_rows(
        "train", 20, row(0, POLE), row(1, INSULATOR), row(3, ((0.1, 0.1), (0.3, 0.12), (0.25, 0.2)))
    )
    for kind in ("class_not_in_train", "class_not_in_val", "class_unused", "class_share"):
        planted[kind].add(str(data.yaml))


def places(facts: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for one in facts["findings"]:
        found[one["kind"]].add(one["file"] + (f":{one['line']}" if one["line"] else ""))
    return found


def test_a_set_without_faults_has_no_findings(clean: DataFolder, tmp_path: Path) -> None:
    facts = check(clean, tmp_path)
    assert facts["findings"] == []
    counts = {"photographs": 24, "objects": 24, "looked_for": 24}
    counts |= {"small": 0, "medium": 24, "large": 0}
    assert facts["splits"]["train"]["classes"][1] == counts


def test_a_class_that_was_looked_for_in_few_photographs_has_no_other_share(tmp_path: Path) -> None:
    data = DataFolder(tmp_path)
    (tmp_path / "val/ignore").mkdir()
    for number in range(2, NUM_VAL):
        data.write_rows("val", number, row(0, POLE))
        whole = row(1, ((0, 0), (1, 0), (1, 1), (0, 1)))
        (tmp_path / f"val/ignore/{number}.txt").write_text(whole)
    facts = check(data, tmp_path)
    assert facts["findings"] == []
    assert facts["splits"]["val"]["classes"][1]["looked_for"] == 2


# those: test_contradictions.py
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - set(MODEL_KINDS)))
def test_each_planted_fault_is_found_and_nothing_else(kind: str, faulty: Faulty) -> None:
    assert faulty.planted[kind], f"no {kind} was planted"
    assert places(faulty.facts)[kind] == faulty.planted[kind]


def test_the_texts_name_the_other_line_the_other_file_and_the_class(faulty: Faulty) -> None:
    data = faulty.data
    texts = {(one["kind"], Path(one["file"]).name): one["text"] for one in faulty.facts["findings"]}
    assert texts["duplicate_line", "4.txt"] == "insulator repeats line 3"
    assert (
        texts["leak", "1.jpg"]
        == f"shows the same as {data.photo('train', 21)} of train (the same file)"
    )
    assert f"{data.photo('train', 20)} of train (similarity 0.9" in texts["leak", "0.jpg"]
    assert texts["touches_edge", "8.txt"].startswith("pole is cut at the left edge")
    assert (
        texts["outside", "1.txt"]
        == "coordinate 1.4 is outside 0..1; normalise by the picture's size"
    )
    of_classes = [
        one["text"] for one in faulty.facts["findings"] if one["kind"].startswith("class_")
    ]
    assert of_classes == [
        "crossarm: 1 in val, none in train",
        "cutout: 1 in train, none in val",
        "unused: no objects",
        "insulator: in 96% of the photographs of train, in 17% of those of val",
    ]


@pytest.mark.parametrize("flags", [(), ("--strict", "--tolerate")])
def test_errors_fail_and_hints_do_not(
    flags: tuple[str, ...],
    clean: DataFolder,
    faulty: Faulty,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = faulty.data
    with pytest.raises(
        UserError, match=re.escape(f"errors; the first: {data.photo('val', 1)}: shows")
    ):
        check(data, tmp_path, *flags)
    assert (tmp_path / "check.html").exists()
    assert capsys.readouterr().out.endswith("check.html, correct the errors, and run this again\n")
    (clean.labels("val", 3).parent / "stray.txt").write_text("")
    assert check(clean, tmp_path, *flags)["num_hints"] == 1
    (clean.labels("val", 3).parent / "stray.txt").unlink()
    said = capsys.readouterr().out
    assert "0 errors, 1 hint: " in said
    assert "hint  Label file without a photograph       1  " in said
    command = (
        f"python train_yolo_ddp.py --model yolov8n-seg.pt --data {clean.yaml} --save-dir "
        f"models/{clean.root.name}"
    )
    assert said.splitlines()[-1] == f"Next: {command}"


def test_small_objects_are_judged_at_the_input_that_the_labels_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataFolder(tmp_path / "cells")
    places = ((0.2, 0.0125), (0.4, 0.0125), (0.6, 0.006))
    rows = [row(0, ((x, 0.2), (x + w, 0.201), (x + w, 0.2 + w), (x, 0.2 + w))) for x, w in places]
    for file in tmp_path.rglob("*.jpg"):
        write_jpeg(file, np.kron(cv2.imread(str(file)), np.ones((4, 4, 1), np.uint8)))
        data.write_rows(file.parent.parent.name, int(file.stem), *rows)
    facts = check(data, tmp_path / "out", "--tolerate")
    said = capsys.readouterr().out.splitlines()
    assert f"train with --img-size {facts['img_size']}" in said[-2]
    assert said[-1].endswith(f" --img-size {facts['img_size']}")
    assert (
        facts["counts"]["tiny"]
        == 0
        < check(data, tmp_path, "--tolerate", "--img-size", "640")["counts"]["tiny"]
    )


def test_labels_behind_a_link_need_trust_links(clean: DataFolder, tmp_path: Path) -> None:
    labels, elsewhere = clean.labels("val", 0).parent, tmp_path / "elsewhere"
    labels.rename(elsewhere)
    labels.symlink_to(elsewhere)
    try:
        facts = check(clean, tmp_path / "untrusted", "--tolerate")
        assert places(facts).keys() == {"unreadable_label", "class_not_in_val"}
        assert "pass --trust-links" in facts["findings"][0]["text"]
        assert check(clean, tmp_path / "trusted", "--trust-links")["findings"] == []
    finally:
        labels.unlink()
        elsewhere.rename(labels)


def test_a_list_with_a_folder_that_is_missing_is_checked(clean: DataFolder, tmp_path: Path) -> None:
    names = [*clean.photo("val", 0).parent.iterdir(), Path("gone/images/x.jpg")]
    (clean.root / "some.txt").write_text("\n".join(map(str, names)))
    listed = clean.root / "listed.yaml"
    listed.write_text(clean.yaml.read_text() + "\ntest: some.txt\n")
    data = copy.copy(clean)
    data.yaml = listed
    facts = check(data, tmp_path, "--tolerate")
    assert [
        Path(one["file"]).name for one in facts["findings"] if one["kind"] == "unreadable_photo"
    ] == ["x.jpg"]


def test_several_ranks_are_refused_in_one_line(
    clean: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="start it without torchrun"):
        run_command(check_data, "--data", clean.yaml)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_command(check_data, "--data", clean.yaml) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_a_browser_shows_the_page_without_a_complaint(faulty: Faulty, tmp_path: Path) -> None:
    with browser_page(tmp_path / "profile") as page:
        for width_px, scheme in ((400, "light"), (1400, "dark")):
            page.open(faulty.data.root / "check" / "check.html", width_px, scheme)
            assert page.run("document.documentElement.scrollWidth") <= width_px, (
                "the page scrolls sideways"
            )
        assert page.run("document.images.length") > 20
        assert page.run(
            "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
        )
        shown = page.run(
            "[...document.querySelectorAll('#summary td[data-key]')].map(c => [c.dataset.key, "
            "+c.dataset.value])"
        )
        assert dict(shown) == {
            f"counts.{kind}": number for kind, number in faulty.facts["counts"].items() if number
        }
        photographs = page.run("document.querySelectorAll('#labels figure').length")
        readable = (
            faulty.facts["splits"]["train"]["photographs"]
            + faulty.facts["splits"]["val"]["photographs"]
            - 1
        )
        assert photographs == readable, "a small picture of each photograph that can be read"
        assert not page.run("document.querySelector('#touches_edge details').open")
        page.run("document.querySelector('.zoom').click()")
        assert page.run("document.querySelector('dialog').open")
        page.assert_harmless()

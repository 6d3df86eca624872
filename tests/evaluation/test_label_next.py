"""Which photographs to label next: on made-up features and detections, and with the stand-in that finds red and green."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO
from torch import nn

import check_data
from tests.conftest import run_main
from tests.sources.checks.planted import picture, row
from tests.yolo.colour_network import NAMES, ColourNetwork, install
from utils.common.errors import UserError
from utils.data.images import encode_jpeg
from utils.evaluation import label_next
from utils.evaluation.label_next import Found, choose, compare, disagreement, distances, joined, near_threshold

LEFT, RIGHT, WIDE = (0.1, 0.1, 0.3, 0.5), (0.7, 0.1, 0.9, 0.5), (0.1, 0.1, 0.5, 0.5)
SIZE = (700, 500)
COLOUR = {"wire": (0, (255, 0, 0)), "pole": (1, (0, 255, 0)), "lake": (None, (100, 100, 255))}


def found(*objects: tuple[int, float, tuple[float, ...]]) -> Found:
    class_ids, scores, boxes = zip(*objects, strict=True) if objects else ((), (), ())
    return Found(np.array(class_ids, np.int64), np.array(scores, float), np.array(boxes, float).reshape(-1, 4))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((), (), 0),
        (((0, 0.8, LEFT),), ((0, 0.8, LEFT),), 0),
        (((0, 0.8, LEFT),), (), 1),
        (((0, 0.8, LEFT),), ((1, 0.8, LEFT),), 1),  # another class
        (((0, 0.8, LEFT),), ((0, 0.8, RIGHT),), 1),
        (((0, 0.8, LEFT),), ((0, 0.8, WIDE),), 0.5),  # half of the area is shared
        (((0, 0.9, LEFT),), ((0, 0.3, LEFT),), 0.5),  # 1 - 2 * 0.3 / 1.2
        (((0, 0.5, LEFT), (0, 0.5, RIGHT)), ((0, 0.5, RIGHT), (0, 0.5, LEFT)), 0),
        (((0, 0.6, LEFT),), ((0, 0.6, LEFT), (0, 0.6, LEFT)), 1 / 3),  # each object counts once
    ],
)
def test_disagreement(first: Any, second: Any, expected: float) -> None:
    assert disagreement(found(*first), found(*second)) == pytest.approx(expected)
    assert disagreement(found(*second), found(*first)) == pytest.approx(expected)
    mirrored = found(*first).mirrored(), found(*second).mirrored()
    assert disagreement(*mirrored) == pytest.approx(expected)
    assert disagreement(mirrored[0].mirrored(), found(*second)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ((), 0),
        (((0, 0.25, LEFT),), 1),
        (((0, 0.4, LEFT),), 0.5),  # odds of 2 to 3 instead of 1 to 3
        (((0, 1 / 7, LEFT),), 0.5),  # odds of 1 to 6
        (((0, 1.0, LEFT),), 0),
        (((1, 0.25, LEFT), (0, 0.25, RIGHT)), 4),  # class 1 is three times as important
    ],
)
def test_detections_near_the_threshold_count_most(objects: Any, expected: float) -> None:
    assert near_threshold(found(*objects), np.array([1.0, 3.0])) == pytest.approx(expected, abs=1e-5)


def test_ranks_are_joined_whatever_their_units() -> None:
    doubts = {"near_threshold": np.array([0.0, 500.0, 2.0, 0.0]), "mirrored": np.array([0.1, 0.2, 0.3, 0.0])}
    assert joined(doubts) == pytest.approx(np.array([(1.5 + 2) / 8, (4 + 3) / 8, (3 + 4) / 8, (1.5 + 1) / 8]))


def test_the_choice_is_that_of_computing_every_gain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_next, "BLOCK", 7)
    rng = np.random.default_rng(1)
    near, directions = compare(rng.normal(size=(60, 5)), rng.normal(size=(9, 5)))
    weight = rng.random(60)
    expected: list[int] = []
    left = near.copy()
    for _ in range(60):
        nearer = (left - distances(directions, directions)).clip(0)
        nearer[expected] = -1
        expected.append(int((nearer @ weight).argmax()))
        left -= nearer[expected[-1]]
    chosen = [position for position, _ in choose(directions, near, weight, 99)]
    assert chosen[:40] == expected[:40]
    assert sorted(chosen) == list(range(60))


class Network(ColourNetwork):
    """Its last layer gets the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Identity()])

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        self.model[-1]([images])
        return super().forward(images)


def photo(kind: str, number: int) -> bytes:
    """Draw a grey scene with a thing of a kind's colour."""
    noise = picture(10 * list(COLOUR).index(kind) + number, SIZE)[:, :, :1].repeat(3, 2).astype(float)
    image = (noise / 2 - noise.mean() / 2 + 80).clip(0, 255).astype(np.uint8)
    left, top, right, bottom = corners(number)
    image[top:bottom, left:right] = COLOUR[kind][1]
    return encode_jpeg(image, 98, "444")


def corners(number: int) -> tuple[int, int, int, int]:
    return 40 + 60 * number, 50 + 30 * number, 240 + 60 * number, 250 + 30 * number


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Three labelled wires; unlabelled: three wires, four poles, a lake, a labelled one again, a pole twice, damaged."""
    for kind in ("images", "labels"):
        (tmp_path / "train" / kind).mkdir(parents=True)
    outline = np.array([(0.1, 0.1), (0.4, 0.12), (0.38, 0.5), (0.1, 0.5)])
    for number in range(3):
        (tmp_path / "train" / "images" / f"{number}.jpg").write_bytes(photo("wire", number))
        (tmp_path / "train" / "labels" / f"{number}.txt").write_text(row(0, outline) + "\n")
    data, new = tmp_path / "data.yaml", tmp_path / "new"
    data.write_text(f"train: train/images\nnames: [{', '.join(NAMES)}]\n")
    (new / "more").mkdir(parents=True)
    for kind, numbers in (("wire", (3, 4, 5)), ("pole", (0, 2, 4, 6)), ("lake", (7,))):
        for number in numbers:
            (new / "more" / f"{kind}{number}.jpg").write_bytes(photo(kind, number))
    (new / "again.jpg").write_bytes(photo("wire", 1))
    (new / "twice.jpg").write_bytes((new / "more" / "pole4.jpg").read_bytes())
    (new / "damaged.jpg").write_bytes(photo("wire", 6)[:5000])
    return data, new


def run(folders: tuple[Path, Path], output: Path, *flags: str) -> list[dict[str, str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        monkeypatch.setattr(check_data, "load_for_prediction", lambda path, device: Network())
        words = ("--data", folders[0], "--model", "m/x.pt", "--unlabelled", folders[1], "--output", output)
        assert run_main(check_data, monkeypatch, *words, "--img-size", "640", *flags) == 0
    return list(csv.DictReader((output / "next.csv").read_text().splitlines()))


@pytest.mark.parametrize("tiles", ["off", "320"])
def test_a_new_kind_of_photograph_comes_first(
    folders: tuple[Path, Path], tmp_path: Path, tiles: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(folders, tmp_path / "out", "--next", "3", "--tiles", tiles)
    names = [Path(each["photograph"]).name for each in rows]
    assert [each["rank"] for each in rows] == ["1", "2", "3"]
    assert [name[:4] for name in names[:2]] == ["pole", "lake"]
    assert ("tiles" in rows[0]) == (tiles == "320")
    assert float(rows[0]["unlike_labelled"]) > 1
    printed = capsys.readouterr().out
    assert "damaged.jpg: truncated or corrupt JPEG" in printed
    assert "left out: 1 that are labelled, 1 that show the same as another" in printed
    check_tool_files(tmp_path / "out", [Path(each["photograph"]) for each in rows], folders[1])


def check_tool_files(output: Path, files: list[Path], root: Path) -> None:
    names = [file.relative_to(root).as_posix() for file in files]
    tasks = json.loads((output / "label_studio.json").read_text())
    assert [task["data"]["image"] for task in tasks] == [f"/data/local-files/?d={root.name}/{name}" for name in names]
    coco = COCO(str(output / "annotations" / "instances_default.json"))
    images = coco.loadImgs(coco.getImgIds())
    assert [(image["file_name"], image["width"], image["height"]) for image in images] == [(n, *SIZE) for n in names]
    for file, task, image in zip(files, tasks, images, strict=True):
        kind, number = file.stem[:4], int(file.stem[4:])
        objects = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
        regions = task["predictions"][0]["result"]
        assert len(objects) == len(regions) == (kind != "lake")
        if objects:
            left, top, right, bottom = corners(number)
            assert objects[0]["bbox"] == pytest.approx([left, top, right - left, bottom - top], abs=3)
            assert regions[0]["value"]["polygonlabels"] == [kind]


def test_rare_classes_count_more_and_mirror_images_are_turned_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    rows = {Path(each["photograph"]).stem: each for each in run(folders, tmp_path / "out", "--tiles", "off")}
    assert len(rows) == 8  # fewer than the default of 50
    assert all(float(each["mirrored"]) < 0.01 for each in rows.values())
    pole, wire = (float(rows[name]["near_threshold"]) for name in ("pole4", "wire4"))
    assert pole / wire == pytest.approx(3**0.5, rel=0.05)  # three wires are labelled and no pole


def test_nothing_new_is_one_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data, new = folders
    for found_, message in (
        (new / "nothing", r"--unlabelled \S+nothing: no photographs there"),
        (data.parent / "train" / "images", "no photograph that can be read and is new: 3 are labelled"),
    ):
        with pytest.raises(UserError, match=message):
            run((data, found_), tmp_path / "out")
        assert not (tmp_path / "out").exists()

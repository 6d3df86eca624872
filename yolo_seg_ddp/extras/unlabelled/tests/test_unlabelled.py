"""Photographs without labels: what is sure, what is ignored, what is left out; killed runs, ranks
and the page.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from scipy.stats import binom

from tests.commands import test_pretended_gpu as pretended_gpu
from tests.predict.tiny_network import smooth_data, tiny_weights
from tests.support.ranks import run_ranks
from tests.yolo.colour_network import COLOURS, ColourNetwork, install
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.data.labels import ANY_CLASS, format_yolo_label, read_photos, read_yolo_label
from yolo_seg_ddp.data.polygons import polygon_boxes
from yolo_seg_ddp.evaluation.metrics.matching import count_at_levels
from yolo_seg_ddp.extras.unlabelled import __main__ as command
from yolo_seg_ddp.extras.unlabelled import data_set
from yolo_seg_ddp.extras.unlabelled.data_set import NewData, Originals
from yolo_seg_ddp.extras.unlabelled.judging import (
    Teacher,
    confirmed,
    num_needed,
    sure_from,
    upper_bound,
)
from yolo_seg_ddp.pages import save_image
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import UserError

SIZE = (320, 240)
WIRE, SPOT = (8, 228, 200, 6), (300, 2, 5, 5)  # left, top, width, height


class HalfBlind(ColourNetwork):
    """Sees nothing in the left half."""

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(images * (torch.arange(images.shape[-1]) >= images.shape[-1] // 2))


def write_scene(file: Path, seed: int, *others: tuple[int, ...]) -> None:
    """Draw nine poles, which are labelled, and others, which are not, on
    a background of its own.
    """
    random = np.random.default_rng(seed)
    photo = cv2.resize(random.integers(60, 160, (12, 16), np.uint8), SIZE)[..., None].repeat(
        3, axis=2
    )
    places = [(30 + 95 * (number % 3), 15 + 70 * (number // 3)) for number in range(9)]
    poles = [(*place, *random.integers(22, 50, 2).tolist()) for place in places]
    for left, top, width, height in (*poles, *others):
        photo[top : top + height, left : left + width] = COLOURS[0 if width == WIRE[2] else 1]
    for folder in ("images", "labels", "ignore"):
        (file.parents[1] / folder).mkdir(parents=True, exist_ok=True)
    save_image(file, photo)
    outlines = [
        np.array([(x, y), (x + w, y), (x + w, y + h), (x, y + h)]) / SIZE for x, y, w, h in poles
    ]
    (file.parents[1] / "labels" / f"{file.stem}.txt").write_text(
        format_yolo_label((1, each) for each in outlines)
    )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a labelled data set, and photographs: two of one name, a mirrored one of val, and no
    photograph.
    """
    root = tmp_path_factory.mktemp("scene")
    for number in range(8):
        write_scene(
            root / "mine" / ("val" if number else "train") / "images" / f"{number}.png",
            number,
            SPOT,
        )
    (root / "mine/train/ignore/0.txt").write_text("-1 0 0 1 0 1 1\n")
    (root / "mine/dataset.yaml").write_text(
        "train: train/images\nval: val/images\nnames: [wire, pole]\n"
    )
    write_scene(root / "photos/images/a.png", 20, SPOT, WIRE)
    write_scene(root / "photos/more/images/a.png", 21)
    save_image(root / "photos/copy.jpg", read_image(root / "mine/val/images/3.png")[:, ::-1].copy())
    (root / "photos/broken.jpg").write_bytes(b"broken")
    (root / "model.pt").write_bytes(b"weights")

    # The first pole is an insulator for people, who drew a box.
    for split, seed in (("train", 30), ("val", 31)):
        write_scene(root / f"new/{split}/images/1.png", seed, SPOT, WIRE)
        file = root / f"new/{split}/labels/1.txt"
        _, outlines = read_yolo_label(file, 2)
        low, high = outlines[0].min(axis=0), outlines[0].max(axis=0)
        numbers = " ".join(f"{number:.5f}" for number in [*(low + high) / 2, *high - low])
        file.write_text(f"0 {numbers}\n")
    (root / "new/train/ignore/1.txt").write_text("-1 0 0 1 0 1 0.01\n")
    (root / "new/dataset.yaml").write_text(
        "train: train/images\nval: val/images\nnames: [insulator]\n"
    )
    return root


ADD_PHOTOS = {"labelled": "mine/dataset.yaml", "photos": "photos"}
STRICT = ("--wrong=0.05", "--certainty=0.9")
ADD_CLASSES = {"labelled": "new/dataset.yaml", "sure-from": "mine/dataset.yaml"}


def run(
    root: Path,
    output: Path,
    *more: str,
    flags: Mapping[str, str] = ADD_PHOTOS,
    precision: Any = None,
) -> dict[str, bytes]:
    """Run the command with the network that sees colours; return the files that it wrote."""
    words = [f"--{flag}={root / place}" for flag, place in {"model": "model.pt", **flags}.items()]
    network = ColourNetwork()
    network.args |= {"thin_classes": [0], "precision": precision, "imgsz": 320}
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        patch.setattr("yolo_seg_ddp.predict.opening.open_model", lambda *given, **named: network)
        assert command.main([*words, f"--output={output}", "--device=cpu", *more]) == 0
    files = (file for file in output.rglob("*") if file.is_file())
    return {
        str(file.relative_to(output)): file.read_bytes().replace(bytes(output), b"")
        for file in files
    }


def test_sure_detections_become_labels_and_unsure_ones_regions_to_ignore(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, mine = run(scene, tmp_path / "new"), scene / "mine"
    said = capsys.readouterr().out
    assert (
        "2 photographs added, 1 left out: not readable, 1 left out: shows a labelled photograph"
        in said
    )
    assert (
        "wire: 0 labels; ignored: 1 (class not sure enough); no detection becomes a label, because "
        in said
    )
    assert (
        "pole: 18 labels; ignored: 1 (not sure enough); these become labels, because 0 of its 63 "
        "validation detections" in said
    )
    assert (
        f"Next: python train_yolo_ddp.py --data {tmp_path}/new/dataset.yaml --save-dir models/new"
        in said
    )
    spec = load_dataset_yaml(tmp_path / "new/dataset.yaml")
    assert (
        "train has each labelled photograph 6 times: 75% of a training is on labels of people\n"
        in said
    )
    assert "An epoch has 8 times as many steps as before: " in said
    (old, again, two, *more, one), val = read_photos(spec, "train"), read_photos(spec, "val")
    assert [each.file.name for each in (old, again, two, *more)] == [
        "0.png",
        "2-0.png",
        "2-a.png",
        *(f"{n}-0.png" for n in range(3, 7)),
    ]
    assert one.file.name == "a.png"
    assert len(val) == 7
    assert (old.rough.tolist(), one.rough.tolist()) == ([], [*range(9)])
    assert len(again.ignored) == 1
    assert again.file.read_bytes() == old.file.read_bytes()
    assert files["train/ignore/0.txt"] == b"-1 0 0 1 0 1 1\n"
    assert files["val/labels/3.txt"] == (mine / "val/labels/3.txt").read_bytes()
    for photo, place in ((one, "photos"), (two, "photos/more")):
        assert photo.file.read_bytes() == (scene / place / "images/a.png").read_bytes()
        _, labels = read_yolo_label(scene / place / "labels/a.txt", 2)
        found, expected = (
            np.sort(polygon_boxes(each), axis=0) for each in (photo.polygons, labels)
        )
        np.testing.assert_allclose(found, expected, atol=1.01 / 240)  # a pixel
    assert one.ignored_ids.tolist() == [0, 1]
    regions = polygon_boxes([outline * SIZE for outline in one.ignored])
    np.testing.assert_allclose(regions, [(8, 228, 208, 234), (300, 2, 305, 7)], atol=1.1)
    assert not two.ignored
    assert files["unlabelled.html"].count(b"<article>") == 2
    assert (
        b"9 labels, 1 ignored (class not sure enough), 1 ignored (not sure enough)"
        in files["unlabelled.html"]
    )
    assert (
        b"cd /train &amp;&amp; rm images/2-a.png labels/2-a.txt ignore/2-a.txt"
        in files["unlabelled.html"]
    )
    for file in (tmp_path / "new/train").glob("*/2-a.*"):
        file.unlink()
    assert "train/labels/2-a.txt" not in run(scene, tmp_path / "new")
    assert "1 left out: deleted by hand\n" in capsys.readouterr().out


def test_a_new_class_keeps_its_labels_and_the_model_adds_those_of_the_old_classes(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = run(scene, tmp_path / "new", *STRICT, flags=ADD_CLASSES)
    said = capsys.readouterr().out
    assert "2 photographs added\nwire: 0 labels" in said
    assert "insulator: 0 labels; ignored: nothing; people labelled it\n" in said
    assert "wire: 0 labels; ignored: 2 (class not sure enough); no detection becomes" in said
    assert (
        "pole: 16 labels; ignored: 2 (not sure enough); these become labels, because 0 of" in said
    )
    yaml = tmp_path / "new/dataset.yaml"
    run_line = f"train_yolo_ddp.py --data {yaml} --model {scene}/model.pt --save-dir models/new"
    assert f"Next: python {run_line}\n" in said

    spec = load_dataset_yaml(yaml)
    assert spec.names == ("wire", "pole", "insulator")
    for split, name in (("train", "1"), ("val", "2-1")):
        (photo,) = read_photos(spec, split)
        assert photo.file.read_bytes() == (scene / f"new/{split}/images/1.png").read_bytes()
        assert photo.class_ids.tolist() == [1] * 8 + [2]
        assert photo.rough.size == 0

        # What people wrote is there as they wrote it, but for the number of the class.
        (row,) = (scene / f"new/{split}/labels/1.txt").read_text().splitlines()
        assert files[f"{split}/labels/{name}.txt"].decode().splitlines()[-1] == f"2{row[1:]}"

        # Nothing is sure of a wire, so nobody looked for wires.
        corners = polygon_boxes(photo.ignored)
        is_whole = (corners == [0, 0, 1, 1]).all(axis=1)
        assert photo.ignored_ids[is_whole].tolist() == [0]
        assert [ANY_CLASS in photo.ignored_ids, 1 in photo.ignored_ids] == [split == "train", True]
        assert f"/new/{split} &amp;&amp; rm".encode() in files["unlabelled.html"].replace(
            b"cd /", b"/new/"
        )


def test_old_photographs_may_join_those_of_the_new_class(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [str(scene / name / "dataset.yaml") for name in ("new", "mine")]
    run(scene, tmp_path / "new", "--labelled", *sets, "--conf=0.3", flags={})
    spec = load_dataset_yaml(tmp_path / "new/dataset.yaml")
    old, new = read_photos(spec, "train")
    assert sorted(new.class_ids.tolist()) == [0] + [1] * 9 + [2]
    assert [old.file.name, new.file.name] == ["0.png", "1.png"]
    _, labels = read_yolo_label(scene / "mine/train/labels/0.txt", 2)
    assert old.class_ids.tolist() == [1] * 9
    np.testing.assert_allclose(np.concatenate(old.polygons), np.concatenate(labels))
    assert old.ignored_ids.tolist() == [2, ANY_CLASS]

    # A class that people labelled in all photographs says so.
    file = tmp_path / "poles.yaml"
    file.write_text(
        f"path: {scene}/mine\ntrain: train/images\nval: val/images\nnames: [box, pole]\n"
    )
    capsys.readouterr()
    run(scene, tmp_path / "poles", f"--labelled={file}", "--conf=0.3", flags={})
    assert "pole: 0 labels; ignored: nothing; people labelled it\nbox: 0" in capsys.readouterr().out


def test_the_model_labels_a_class_where_nobody_looked_for_it(scene: Path, tmp_path: Path) -> None:
    """In train somebody looked for nothing, in val for poles and wires. No wire is sure."""
    root = tmp_path / "both"
    for split, seed in (("train", 30), ("val", 31)):
        write_scene(root / split / "images/1.png", seed, WIRE)
    (root / "train/labels/1.txt").write_text("")
    (root / "train/ignore/1.txt").write_text("1 0 0 1 0 1 1 0 1\n0 0 0 1 0 1 1 0 1\n")
    (root / "dataset.yaml").write_text(
        "train: train/images\nval: val/images\nnames: [wire, pole]\n"
    )
    run(scene, tmp_path / "out", *STRICT, flags={**ADD_CLASSES, "labelled": f"{root}/dataset.yaml"})
    spec = load_dataset_yaml(tmp_path / "out/dataset.yaml")
    assert spec.names == ("wire", "pole")
    (train,), (val,) = (read_photos(spec, split) for split in ("train", "val"))
    assert train.class_ids.tolist() == [1] * 9
    assert train.ignored_ids[train.unsearched].tolist() == [0]
    (given,) = read_photos(load_dataset_yaml(root / "dataset.yaml"), "val")
    np.testing.assert_equal(val.polygons, given.polygons)
    assert val.unsearched.size == 0


def test_what_is_sure_of_an_old_class_follows_from_its_training(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's file holds the precision of its validation; else a person says what is sure."""
    flags = {"labelled": "new/dataset.yaml"}
    ids, is_right = np.repeat([0, 1], 100), np.arange(200) % 100 < 90
    recorded = count_at_levels(2, ids, is_right | (ids == 1), np.full(200, 0.7)).ravel().tolist()
    run(scene, tmp_path / "file", flags=flags, precision=recorded)
    said = capsys.readouterr().out
    for name, num_wrong in (("wire", 10), ("pole", 0)):
        line = next(line for line in said.splitlines() if line.startswith(f"{name}: "))
        words = f"become labels, because {num_wrong} of its 100 validation detections from "
        assert words + "confidence 0.20 on are wrong" in line
    run(scene, tmp_path / "strict", *STRICT, flags=flags, precision=recorded)
    assert "wire: 0 labels; ignored: 2 (class not sure enough)" in capsys.readouterr().out
    run(scene, tmp_path / "conf", "--conf=0.1", flags=flags, precision=recorded)
    assert "pole: 18 labels; ignored: nothing; from confidence 0.1 on" in capsys.readouterr().out

    asks = r"^.*/model\.pt: does not say .*; name .* with --sure-from, or a confidence with --conf$"
    for number, (bad, more) in enumerate(
        [
            (None, ()),
            (recorded[1:], ()),
            ([-1, *recorded[1:]], ()),
            ([0.5, *recorded[1:]], ()),
            (recorded, ("--img-size=640",)),
            (recorded, ("--no-mask-score",)),
        ]
    ):
        with pytest.raises(UserError, match=asks):
            run(scene, tmp_path / f"{number}", *more, flags=flags, precision=bad)


def test_photographs_like_no_labelled_one_are_left_out_unless_they_are_kept(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEWEST_GROUPS", "MOST_FALSE_ALARMS"):
        monkeypatch.setattr(command, name, 1)  # each is unlike
    assert not {
        name
        for name in run(scene, tmp_path / "new")
        if name.startswith("train/images/") and "a.png" in name
    }
    assert "train/images/a.png" in run(scene, tmp_path / "kept", "--keep-unlike")


@pytest.mark.parametrize(
    ("flags", "last", "num_compared"), [(ADD_PHOTOS, "copy", 4), (ADD_CLASSES, "2-1", 0)]
)
def test_a_killed_run_goes_on_and_two_ranks_write_the_same_files(
    scene: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: Mapping[str, str],
    last: str,
    num_compared: int,
) -> None:
    whole, add = run(scene, tmp_path / "whole", flags=flags), NewData.add

    def killed(data: NewData, name: str, *given: Any) -> None:
        if name == last:
            raise UserError("killed")
        add(data, name, *given)

    monkeypatch.setattr(NewData, "add", killed)
    with pytest.raises(UserError, match="killed"):
        run(scene, tmp_path / "killed", flags=flags)
    monkeypatch.setattr(NewData, "add", add)
    assert not (tmp_path / "killed/dataset.yaml").exists()
    assert run(scene, tmp_path / "killed", flags=flags) == whole
    files, *num_read = zip(
        *run_ranks(run_counting, 2, scene, tmp_path / "ranks", flags, join=False, timeout_s=240),
        strict=True,
    )
    assert files[0] == whole
    assert num_read == [(num_compared,) * 2], (
        "each labelled photograph is decoded once to find its copies, on one rank"
    )


def run_counting(
    root: Path, output: Path, flags: Mapping[str, str]
) -> tuple[dict[str, bytes], int]:
    """Return what `run` does, and how many photographs this rank decodes for comparisons with new
    ones.
    """
    counts: Counter[Path] = Counter()

    def counted(file: Path, size_px: int) -> np.ndarray:
        counts[file] += 1
        return read_image(file, size_px)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_set, "read_image", counted)
        return run(root, output, flags=flags), counts.total()


LOOKS = {
    "as it is": lambda photo: photo,
    "mirrored": lambda photo: photo[:, ::-1],
    "turned": lambda photo: photo[::-1, ::-1],
    "smaller": lambda photo: cv2.resize(photo, None, fx=0.6, fy=0.6, interpolation=cv2.INTER_AREA),
    "darker": lambda photo: (photo * 0.7).astype(np.uint8),
    "cropped": lambda photo: photo[20:-10, 25:-15],
}


@pytest.mark.parametrize("split", ["val", "test", "train"])
def test_no_photograph_that_shows_one_of_val_comes_into_train(tmp_path: Path, split: str) -> None:
    """A copy is left out whatever it is of; of a photograph that only overlaps, as in a series, one
    of train is welcome.
    """
    rough = np.random.default_rng(3).integers(0, 90, (13, 17, 3), np.uint8)
    view = cv2.resize(rough, (350, 260)) + np.linspace(0, 160, 260).astype(np.uint8)[:, None, None]
    photo = view[:240, :320]
    for name, pixels in {"own": photo, "other": rough}.items():
        save_image(tmp_path / f"{name}.png", np.ascontiguousarray(pixels))
    originals = Originals(
        [(split, tmp_path / "own.png"), ("train", tmp_path / "other.png")], distributed.RankInfo()
    )
    looks = {name: look(photo) for name, look in LOOKS.items()} | {"next": view[12:252, 20:340]}
    shown = {}
    for name, pixels in looks.items():
        save_image(tmp_path / "new.png", np.ascontiguousarray(pixels))
        shown[name] = originals.shown_by(tmp_path / "new.png", read_image(tmp_path / "new.png"))
    assert shown.pop("next") == ("" if split == "train" else f"{split}/own.png")
    assert set(shown.values()) == {f"{split}/own.png"}, shown


def test_bad_input_is_one_line(scene: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(
        UserError, match=rf"^--output {tmp_path}: holds something else, or .*; name a new folder$"
    ):
        run(scene, tmp_path)
    run(scene, tmp_path / "new")
    with pytest.raises(
        UserError, match=r"^--output .*/new: .* made of other .*; name a new folder$"
    ):
        run(scene, tmp_path / "new", "--wrong=0.01")
    with pytest.raises(UserError, match=r"^--photos .*/none: no such file or folder$"):
        run(scene, tmp_path / "other", f"--photos={tmp_path / 'none'}")
    with pytest.raises(
        UserError, match=r"^.*/none\.yaml: No such .*; name a data-set YAML with --labelled$"
    ):
        run(scene, tmp_path / "other", f"--labelled={tmp_path / 'none.yaml'}")
    with pytest.raises(
        UserError, match=r"^.*/none\.yaml: .*; name a data-set YAML with --sure-from"
    ):
        run(scene, tmp_path / "other", flags={**ADD_CLASSES, "sure-from": "none.yaml"})
    two = {"labelled": "new/dataset.yaml", "photos": "photos"}
    with pytest.raises(UserError, match=r"^--labelled: with --photos it names one data set$"):
        run(scene, tmp_path / "other", "--labelled", *[f"{scene}/new/dataset.yaml"] * 2, flags=two)
    with pytest.raises(
        UserError, match=r"^.*/mine/dataset\.yaml: has all classes of .*model\.pt: "
    ):
        run(scene, tmp_path / "other", "--conf=0.5", flags={"labelled": "mine/dataset.yaml"})
    with pytest.raises(UserError, match=r"^--model .*/a\.onnx: no training goes on from it; name "):
        run(scene, tmp_path / "other", flags={**ADD_CLASSES, "model": "a.onnx"})
    assert not (tmp_path / "other").exists()


def counts(scores: np.ndarray, is_right: np.ndarray) -> np.ndarray:
    return count_at_levels(1, np.zeros(len(scores)), is_right, scores)[0]


def test_the_bound_is_exact_and_the_share_of_wrong_detections_keeps_the_limit() -> None:
    for num_wrong, num in ((0, 10), (3, 40), (17, 200)):
        bound = float(upper_bound(np.array(num_wrong), np.array(num), 0.9))
        assert binom.cdf(num_wrong, num, bound) == pytest.approx(0.1)
    assert num_needed(0.05, 0.9) == 45 == np.ceil(np.log(0.1) / np.log(0.95))
    random, num_kept = np.random.default_rng(0), 0
    for _ in range(200):  # a detection is wrong with a probability of 1 - its confidence
        scores = random.uniform(0.2, 1, 300)
        level, _ = sure_from(counts(scores, random.uniform(size=300) <= scores), 0.1, 0.9)
        num_kept += level is None or (1 - level) / 2 <= 0.1
    assert 180 <= num_kept < 200
    few = sure_from(counts(np.full(44, 0.9), np.ones(44)), 0.05, 0.9)[1]
    as_many = "; 45 as good ones would be enough"
    assert few == (
        "no detection becomes a label, because 0 of its 44 validation detections from confidence "
        "0.20 on are wrong"
        f"{as_many}; --wrong 0.06 would be kept now"
    )
    # "0 of its 0 validation detections are wrong" was said.
    assert sure_from(counts(np.zeros(0), np.zeros(0)), 0.05, 0.9)[1] == (
        "no detection becomes a label, because it has no validation detection "
        "from confidence 0.20 on; 45 right ones would be enough"
    )


def strip(top: int, height: int, right: int = 100) -> Region:
    return Region(0, top, np.ones((height, right), bool))


def test_a_mask_agrees_by_its_overlap_and_a_thin_one_by_its_centreline() -> None:
    found, others, ids = (
        [strip(10, 10), strip(11, 10), strip(50, 9)],
        [strip(10, 10), strip(53, 3)],
        np.zeros(3, int),
    )
    assert confirmed(found, ids, others, ids[:2], ())[0].tolist() == [True, False, False]
    assert confirmed(found, ids, others, ids[:2], (0,))[0].tolist() == [True, True, True]
    assert confirmed([strip(10, 3, 140)], ids[:1], others, ids[:2], (0,))[0].tolist() == [False]
    assert confirmed(found, ids, others, ids[:2] + 1, (0,))[0].tolist() == [False] * 3


def test_a_view_that_disagrees_a_region_to_ignore_and_an_unlike_photograph(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    teacher = Teacher(
        Predictor(
            ColourNetwork(), 320, torch.device("cpu"), 8, None, {"confidence": 0.1, "iou": 0.7}
        )
    )
    labels = read_photos(load_dataset_yaml(scene / "mine/dataset.yaml"), "val")[0]
    photo = read_image(labels.file)
    found, agrees = teacher.see(photo)
    corner = [np.array([[0.5, 0], [1, 0], [1, 0.3]])]  # where the spot lies
    ignoring = replace(labels, ignored_ids=np.array([ANY_CLASS]), ignored=corner)
    for given, num_judged in ((labels, 10), (ignoring, 9)):
        is_right, is_judged = teacher.judge(found, given, SIZE)
        assert [agrees.sum(), is_right.sum(), is_judged.sum()] == [10, 9, num_judged]

    # Masks that fill little of their boxes: of a label without an outline the box is compared.
    thin = [Region(one.left, one.top, np.eye(*one.mask.shape, dtype=bool)) for one in found.masks]
    slanted, boxed = replace(found, masks=thin), replace(labels, boxed=np.arange(9))
    for given, num_right in ((labels, 0), (boxed, 9)):
        assert teacher.judge(slanted, given, SIZE)[0].sum() == num_right
        overlap = teacher.overlap(slanted, given, SIZE)
        assert (overlap.max(axis=0) >= 0.5).sum() == num_right
    blind = Teacher(replace(teacher.predictor, model=HalfBlind(), steps=()))
    assert not blind.see(photo)[1][:3].any()
    note = command.look_at(photo, blind, np.zeros((0, 8)), [None, 0.2])[1]
    assert {each["why"] for each in note["found"]} == {"second view disagrees"}
    assert found.features is not None
    near = found.features + np.tile([[1.0], [-1.0]], (15, 8))
    unlike, unsure = "looks like no labelled photograph", "no object is sure"
    for judged, level, why in (
        (near, 0.2, ""),
        (near + 9, 0.2, unlike),
        (near[:9] + 9, 0.2, ""),
        (near, 0.99, unsure),
    ):
        assert command.look_at(photo, teacher, judged, [None, level])[1]["left_out"] == why


def test_the_command_runs_on_a_gpu(tmp_path: Path) -> None:
    data, model = smooth_data(tmp_path / "data"), tiny_weights(tmp_path / "best.pt")
    picture = read_image(tmp_path / "data/val/images/0.png")
    for name, pixels in (("new", 255 - picture), ("copy", picture)):
        save_image(tmp_path / f"photos/{name}.png", pixels)
    line = f"--model {model} --labelled {data} --photos {tmp_path}/photos --output {tmp_path}/out"
    (seen,) = pretended_gpu.run(tmp_path, 1, "yolo_seg_ddp.extras.unlabelled.__main__", line)
    printed = (tmp_path / "printed.txt").read_text()
    assert seen["code"] == 0, printed
    assert seen["copies"] > 0
    assert (
        "0 photographs added, 1 left out: shows a labelled photograph, 1 left out: no object is "
        "sure" in printed
    )
    assert "Next: label more photographs, or name others with --photos: none was added" in printed

"""`--skip-bad`: unreadable photographs are left out by every kind of cache, on all ranks alike, and
stay out on resume.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train_yolo_ddp
from tests.support.recipes import run_command
from yolo_seg_ddp.data import cache, packed_images
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.cache import CachePlace, index_text
from yolo_seg_ddp.data.dataset import SegmentationDataset
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import ImageError, encode_jpeg, load_photo
from yolo_seg_ddp.data.labels import read_photos
from yolo_seg_ddp.data.options import DataOptions
from yolo_seg_ddp.data.packed_images import PackedImages, open_images
from yolo_seg_ddp.run.checkpoint import latest_manifest
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.data import open_split
from yolo_seg_ddp.training.plan import SKIPPED_FILE
from yolo_seg_ddp.utils.errors import DataErrors, UserError
from yolo_seg_ddp.utils.options import section_of

BAD = {"1.jpg": b"", "4.jpg": b"\xff\xd8\xff\xe0 not all", "6.jpg": b"just words"}
NUM_PHOTOS = 9


def write_set(root: Path) -> Path:
    """Write nine photographs, each with one object of another place, of which
    three cannot be read.
    """
    for split in ("train", "val"):
        (root / split / "images").mkdir(parents=True)
        (root / split / "labels").mkdir()
        for number in range(NUM_PHOTOS):
            name = f"{number}.jpg"
            whole = encode_jpeg(np.full((96, 128, 3), 20 * number, np.uint8))
            is_bad = split == "train" and name in BAD
            (root / split / "images" / name).write_bytes(BAD[name] if is_bad else whole)
            left = number / 20
            label = f"0 {left} 0.1 {left + 0.5} 0.1 {left + 0.5} 0.6\n"
            (root / split / "labels" / f"{number}.txt").write_text(label)
    (root / "data.yaml").write_text("train: train/images\nval: val/images\nnames: [pole]\n")
    return root / "data.yaml"


def mend(root: Path, name: str) -> None:
    (root / "train" / "images" / name).write_bytes(encode_jpeg(np.full((96, 128, 3), 7, np.uint8)))


def opened(data: Path, said: list[str] | None = None, **options: Any) -> SegmentationDataset:
    config = TrainConfig(data=str(data), img_size=64, **options)
    lines: list[str] = [] if said is None else said
    spec = load_dataset_yaml(data)
    photos = read_photos(spec, "train", lines.append)
    of_split = (config.window_config, spec, "train", photos, 0, lines.append)
    return replace(open_split(section_of(config, DataOptions), *of_split), augment=Augmentation())


KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "blocks": {"windows": 2},
    "none": {"cache": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_unreadable_photograph_no_longer_refuses_all_others(kind: str, tmp_path: Path) -> None:
    data, said = write_set(tmp_path), list[str]()
    if kind != "none":
        with pytest.raises(
            DataErrors,
            match=r"3 of 9 photographs cannot be used: .*; the trainer's --skip-bad goes on",
        ) as refused:
            opened(data, said, **KINDS[kind])
        assert [Path(line.split(": ")[0]).name for line in refused.value.details] == [*BAD]
    for _ in range(2):  # built, then found
        dataset = opened(data, said, skip_bad=True, **KINDS[kind])
        assert [photo.file.name for photo in dataset.photos] == [
            "0.jpg",
            "2.jpg",
            "3.jpg",
            "5.jpg",
            "7.jpg",
            "8.jpg",
        ]
        assert sorted(dataset.skipped) == [f"train/images/{name}" for name in BAD]
        assert "empty file" in dataset.skipped["train/images/1.jpg"]
        for index, photo in enumerate(dataset.photos):  # pixels and labels still belong together
            number = int(photo.file.stem)
            assert photo.polygons[0].min(axis=0)[0] == pytest.approx(number / 20)
            if dataset.windowed is not None:
                pixels, _ = dataset.windowed.store.read(index, (0, 0, 128, 96), 0)
            else:
                pixels = dataset.image(index)
            assert np.abs(pixels.astype(int) - 20 * number).max() <= 2
        dataset[0, len(dataset) - 1]
    assert sum("packing" in line for line in said) == 1
    if kind != "none":
        # also from the finished cache
        with pytest.raises(DataErrors, match="3 of 9 photographs cannot be used"):
            opened(data, **KINDS[kind])


def test_a_photograph_that_can_be_read_again_with_the_same_bytes_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_set(tmp_path)
    for name in BAD:
        mend(tmp_path, name)
    real = load_photo

    def failing(file: Path, long_side_px: int) -> np.ndarray:
        if file.name == "3.jpg":
            raise ImageError("Input/output error")
        return real(file, long_side_px)

    with monkeypatch.context() as patch:
        patch.setattr(packed_images, "load_photo", failing)
        assert len(opened(data, skip_bad=True)) == 8
    assert len(opened(data, skip_bad=True)) == 9


def test_a_listed_photograph_that_is_gone_is_left_out_too(tmp_path: Path) -> None:
    data = write_set(tmp_path)
    (tmp_path / "list.txt").write_text("train/images/0.jpg\ntrain/images/gone.jpg\n")
    data.write_text("train: list.txt\nnames: [pole]\n")
    with pytest.raises(UserError, match=r"gone\.jpg: No such file"):
        opened(data)
    dataset = opened(data, skip_bad=True)
    assert [photo.file.name for photo in dataset.photos] == ["0.jpg"]
    assert "No such file" in dataset.skipped["train/images/gone.jpg"]


def test_a_split_without_a_readable_photograph_is_refused(tmp_path: Path) -> None:
    data = write_set(tmp_path)
    for number in range(NUM_PHOTOS):
        (tmp_path / "train" / "images" / f"{number}.jpg").write_bytes(b"")
    with pytest.raises(DataErrors, match="9 of 9 photographs cannot be used") as error:
        opened(data, skip_bad=True)
    assert "--skip-bad" not in str(error.value)


def test_a_killed_build_continues_behind_the_photographs_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, files = write_set(tmp_path), sorted((tmp_path / "train" / "images").iterdir())
    monkeypatch.setattr(cache, "MIN_BETWEEN_SAVES", 1)
    real, made = packed_images._pack, list[bool]()

    def dying(file: Path, long_side_px: int) -> Any:
        if file.name == "7.jpg" and not made:
            raise KeyboardInterrupt
        return real(file, long_side_px)

    monkeypatch.setattr(packed_images, "_pack", dying)
    said: list[str] = []
    place = CachePlace(tmp_path, tmp_path / ".cache", "train", said.append, skips_bad=True)
    with pytest.raises(KeyboardInterrupt):
        open_images(files, 64, place)
    made.append(True)
    packed = open_images(files, 64, place)
    assert isinstance(packed, PackedImages)
    assert "  continuing at 7/9" in said
    assert sorted(packed.index.unusable) == [1, 4, 6]
    assert len(packed.index.sizes) == 6
    assert len(opened(data, skip_bad=True)) == 6


@pytest.mark.parametrize("unusable", [{"99": "x"}, [1], "x", None, [["train/images/0.jpg"]]])
def test_a_cache_whose_list_of_unusable_photographs_is_wrong_is_built_again(
    unusable: Any, tmp_path: Path
) -> None:
    data = write_set(tmp_path)
    opened(data, skip_bad=True)
    (index_file,) = (tmp_path / ".cache").glob("train-64-*.json")
    content = json.loads(index_file.read_text())
    facts = {name: value for name, value in content.items() if name != "checksum"}
    index_file.write_text(index_text({**facts, "unusable": unusable}))
    assert len(opened(data, skip_bad=True)) == 6
    assert json.loads(index_file.read_text()) == content


@pytest.mark.slow
def test_a_run_lists_what_it_left_out_and_resumes_only_with_the_same_photographs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_set(tmp_path / "set")

    def train(*flags: str) -> int:
        common = (
            "--data",
            data,
            "--save-dir",
            tmp_path / "run",
            "--model",
            "yolov8n-seg.yaml",
            "--threads",
            "1",
        )
        sizes = ("--img-size", "64", "--batch-size", "3", "--num-workers", "0", "--device", "cpu")
        return run_command(train_yolo_ddp, *common, *sizes, "--val-pictures-every", "0", *flags)

    assert train("--skip-bad", "--epochs", "1") == 0
    listed = tmp_path / "run" / SKIPPED_FILE
    assert (
        f"3 photographs cannot be read and are left out (--skip-bad): {listed} lists them"
        in capsys.readouterr().out
    )
    assert [Path(line.split(": ")[0]).name for line in listed.read_text().splitlines()] == list(BAD)
    facts = latest_manifest(tmp_path / "run" / "checkpoint")
    assert facts["skipped_photographs"] == [f"train/images/{name}" for name in BAD]
    mend(tmp_path / "set", "4.jpg")
    with pytest.raises(
        UserError, match=r"train/images/4\.jpg was left out and now can be read, or is gone, and"
    ):
        train("--skip-bad", "--epochs", "2")
    (tmp_path / "set/train/images/4.jpg").write_bytes(BAD["4.jpg"])
    (tmp_path / "set/train/images/5.jpg").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"train/images/5\.jpg cannot be read any more, and a resumed run"
    ):
        train("--skip-bad", "--epochs", "2")
    (tmp_path / "set/train/images/5.jpg").write_bytes(
        encode_jpeg(np.full((96, 128, 3), 100, np.uint8))
    )
    assert train("--skip-bad", "--epochs", "2") == 0
    said = capsys.readouterr().out
    assert "Training complete after 2 epochs" in said
    assert said.splitlines()[-1].startswith("Next: python evaluate_model.py --model ")
    assert not (tmp_path / "run-1").exists(), "the run was resumed, not set aside"

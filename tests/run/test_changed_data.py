"""A run is resumed on the data with which it began: photographs, labels and classes are compared by
content.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from train_yolo_ddp import train
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.fingerprint import Fingerprint, take_fingerprint
from yolo_seg_ddp.data.labels import read_photos
from yolo_seg_ddp.run.checkpoint import save_checkpoint
from yolo_seg_ddp.run.folder import CHANGES_FILE, DATA_FILE, open_run_folder
from yolo_seg_ddp.run.records import read_config
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import claimed_output

IMAGE = b"the bytes of a photograph" * 20
LABELS = "0 0.1 0.1 0.3 0.1 0.3 0.3\n1 0.5 0.5 0.8 0.5 0.8 0.8 0.6 0.8\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("train", "val"):
        for kind in ("images", "labels"):
            (tmp_path / "data" / name / kind).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "data" / name / "images" / f"{number}.jpg").write_bytes(
                IMAGE + bytes([number])
            )
            (tmp_path / "data" / name / "labels" / f"{number}.txt").write_text(LABELS)
    (tmp_path / "data" / "data.yaml").write_text(
        "train: train/images\nval: val/images\nnames: [wire, pole]\n"
    )
    return tmp_path / "data"


def taken(folder: Path) -> Fingerprint:
    spec = load_dataset_yaml(folder / "data.yaml")
    return take_fingerprint(
        spec.names, {split: read_photos(spec, split) for split in ("train", "val")}, spec.root
    )


def begin(run: Path, data: Path) -> None:
    open_run_folder(run, TrainConfig(save_dir=str(run)), data=taken(data))
    save_checkpoint(run / "checkpoint", 7, {"weight": torch.zeros(1)})


def swap(file: Path) -> int:
    return file.write_text(
        "".join(f"{1 - int(line[0])}{line[1:]}\n" for line in file.read_text().splitlines())
    )


def in_place(file: Path) -> None:
    """Change one byte of a photograph; its size and times stay."""
    content, facts = bytearray(file.read_bytes()), file.stat()
    content[-2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def to_train(folder: Path) -> None:
    """Move the first photograph of val behind the last one of train, where the order of all
    photographs stays.
    """
    for file in ("images/0.jpg", "labels/0.txt"):
        (folder / "val" / file).rename(folder / "train" / file.replace("0", "9"))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "regions to ignore": (
        lambda d: shutil.copytree(d / "val/labels", d / "val/ignore"),
        "3 photographs with other labels",
    ),
    "numbers of classes": (
        lambda d: [swap(file) for file in d.glob("*/labels/*")],
        "6 photographs with other labels",
    ),
    "one label of val": (
        lambda d: (d / "val/labels/2.txt").write_text(""),
        "1 photograph with other labels .*val/images/2",
    ),
    "no label file": (
        lambda d: (d / "train/labels/0.txt").unlink(),
        "1 photograph with other labels",
    ),
    "order of rows": (
        lambda d: (d / "train/labels/0.txt").write_text("\n".join(LABELS.split("\n")[::-1])),
        "other labels",
    ),
    "a corner of the other object": (
        lambda d: (d / "train/labels/0.txt").write_text(
            LABELS.replace("\n1 0.5 0.5", " 0.5 0.5\n1")
        ),
        "other labels",
    ),
    "a byte": (
        lambda d: in_place(d / "train/images/1.jpg"),
        "1 photograph with another content .*train/images/1",
    ),
    "one more": (
        lambda d: shutil.copy(d / "val/images/0.jpg", d / "train/images/9.jpg"),
        "1 photograph added",
    ),
    "renamed": (
        lambda d: (d / "val/images/0.jpg").rename(d / "val/images/9.jpg"),
        "1 photograph added .*; 1 photograph gone",
    ),
    "another split": (
        to_train,
        "1 photograph added .*train/images/9.*; 1 photograph gone .*val/images/0",
    ),
    "names swapped": (
        lambda d: (d / "data.yaml").write_text(
            "train: train/images\nval: val/images\nnames: [pole, wire]\n"
        ),
        "classes 0 wire, 1 pole, but --data has 0 pole, 1 wire",
    ),
    "a third class": (
        lambda d: (d / "data.yaml").write_text(
            "train: train/images\nval: val/images\nnames: [wire, pole, cap]\n"
        ),
        "classes 0 wire, 1 pole, but --data has 0 wire, 1 pole, 2 cap",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_is_not_resumed_on_other_data_unless_its_owner_accepts(
    data: Path, tmp_path: Path, name: str
) -> None:
    change, said = CHANGES[name]
    run = tmp_path / "run"
    begin(run, data)
    digest = taken(data).digest
    change(data)
    assert taken(data).digest != digest
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(UserError, match=said):
            open_run_folder(run, TrainConfig(save_dir=str(run)), data=taken(data))
    accepting = TrainConfig(save_dir=str(run), accept_changed_data=True)
    if "classes" in said:
        with pytest.raises(UserError, match=said):
            open_run_folder(run, accepting, data=taken(data))
        return
    resumes, lines = open_run_folder(run, accepting, data=taken(data))
    assert (resumes, len(lines)) == (True, 1)
    assert (
        lines[0].removeprefix("The data changed, which --accept-changed-data accepts: ")
        in (run / CHANGES_FILE).read_text()
    )
    assert "after step 7" in (run / CHANGES_FILE).read_text()
    assert "accept_changed_data" not in read_config(run), (
        "the next start does not accept further changes"
    )
    assert open_run_folder(run, TrainConfig(save_dir=str(run)), data=taken(data)) == (True, [])


def test_another_place_other_times_and_another_way_to_write_a_number_are_no_change(
    data: Path, tmp_path: Path
) -> None:
    run, moved = tmp_path / "run", tmp_path / "elsewhere"
    begin(run, data)
    shutil.copytree(data, moved)
    (moved / "val/labels/0.txt").write_text(LABELS.replace("0.1", "0.100"))
    assert taken(moved).digest == taken(data).digest
    assert open_run_folder(run, TrainConfig(save_dir=str(run)), data=taken(moved)) == (True, [])
    (run / DATA_FILE).unlink()  # a run of an older version
    resumes, lines = open_run_folder(run, TrainConfig(save_dir=str(run)), data=taken(moved))
    assert (resumes, len(lines)) == (True, 1)
    assert DATA_FILE in lines[0]
    assert open_run_folder(run, TrainConfig(save_dir=str(run)), data=taken(moved)) == (True, [])


def test_a_run_goes_on_with_its_data_in_another_place_and_names_what_differs(
    data: Path, tmp_path: Path
) -> None:
    """`--resume` asked for `--data`, and then refused it."""
    run, moved = tmp_path / "run", tmp_path / "elsewhere"
    open_run_folder(
        run, TrainConfig(save_dir=str(run), data=str(data / "data.yaml")), data=taken(data)
    )
    save_checkpoint(run / "checkpoint", 7, {"weight": torch.zeros(1)})
    shutil.move(data, moved)
    there: dict[str, Any] = {"save_dir": str(run), "data": str(moved / "data.yaml")}
    for resume in (None, str(run)):
        resumes, lines = open_run_folder(
            run, TrainConfig(**there, resume=resume), data=taken(moved)
        )
        # the first start notes the new place
        assert (resumes, len(lines)) == (True, 1 - bool(resume))
    there["data"] = str((moved / "data.yaml").rename(moved / "other.yaml"))
    (moved / "data.yaml").write_text((moved / "other.yaml").read_text())
    swap(moved / "val/labels/1.txt")
    with pytest.raises(UserError, match="1 photograph with other labels"):
        open_run_folder(run, TrainConfig(**there, resume=str(run)), data=taken(moved))
    with pytest.raises(UserError, match=r"other options than that run's: data .*other\.yaml"):
        open_run_folder(run, TrainConfig(**there, resume=str(run)))
    # as with any other data
    assert open_run_folder(run, TrainConfig(**there), data=taken(moved))[0] is False


def started_on(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": number}.items():
        monkeypatch.setenv(name, str(value))


def test_two_processes_with_four_images_go_on_as_one_with_eight_and_back_and_not_as_one_with_four(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--batch-size 8` set a run of 2 x 4 aside, and `--resume` refused it."""
    run = tmp_path / "run"
    for resume in ("", str(run)):
        started_on(2, monkeypatch)
        open_run_folder(run, TrainConfig(save_dir=str(run), batch_size=4), data=taken(data))
        save_checkpoint(
            run / "checkpoint", 7, {"weight": torch.zeros(1)}, manifest={"global_batch_size": 8}
        )
        started_on(1, monkeypatch)
        for batch_size, accumulate in ((8, 1), (2, 4)):
            same = TrainConfig(
                save_dir=str(run), batch_size=batch_size, accumulate=accumulate, resume=resume
            )
            assert open_run_folder(run, same, data=taken(data)) == (True, [])
    with pytest.raises(UserError, match="batch_size 2 -> 4"):
        open_run_folder(
            run, TrainConfig(save_dir=str(run), batch_size=4, resume=str(run)), data=taken(data)
        )
    resumes, [line] = open_run_folder(
        run, TrainConfig(save_dir=str(run), batch_size=4), data=taken(data)
    )
    assert not resumes
    assert "batch_size 2 -> 4" in line


def test_a_photograph_that_cannot_be_read_is_left_to_skip_bad(data: Path) -> None:
    before, photos = (
        taken(data),
        {"train": read_photos(load_dataset_yaml(data / "data.yaml"), "train")[1:]},
    )
    without = take_fingerprint(before.names, photos, data.resolve(), ["train train/images/0.jpg"])
    of_train = {key: value for key, value in before.photographs.items() if key.startswith("train")}
    assert without.changes_since(Fingerprint(before.names, of_train)) == []
    fewer = Fingerprint(
        before.names, {key: texts for key, texts in of_train.items() if not key.endswith("0.jpg")}
    )
    assert without.changes_since(fewer) == fewer.changes_since(without) == []
    backwards = Fingerprint(before.names, dict(reversed([*before.photographs.items()])))
    assert backwards.digest == before.digest


def test_photographs_are_read_again_only_if_their_file_changed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_dataset_yaml(data / "data.yaml")
    photos = {split: read_photos(spec, split) for split in ("train", "val")}
    before = take_fingerprint(spec.names, photos, spec.root)
    in_place(data / "val/images/2.jpg")
    read: list[str] = []
    plain = Path.open

    def spied(path: Path, *more: Any, **named: Any) -> Any:
        read.extend([path.name] * path.is_relative_to(data))
        return plain(path, *more, **named)

    monkeypatch.setattr(Path, "open", spied)
    after = take_fingerprint(spec.names, photos, spec.root, before=before)
    assert read == ["2.jpg"]
    assert len(after.changes_since(before)) == 1


@pytest.mark.parametrize(
    "flags",
    ["--model yolov9n-seg.pt", "--save-dir {file}", "--save-dir {file}/run", "--freeze 999"],
)
def test_what_needs_no_photograph_is_refused_before_one_is_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        "train_yolo_ddp.open_data", lambda *_: pytest.fail("photographs are read first")
    )
    words = flags.format(file=tmp_path / "file").split()
    given = [
        "--data",
        str(data / "data.yaml"),
        "--model",
        "yolov8n-seg.yaml",
        "--device",
        "cpu",
        *words,
    ]
    with pytest.raises(UserError, match=re.escape(words[0]) + "|" + re.escape(words[1])):
        train(parse_config(TrainConfig, "", given))


def test_two_processes_do_not_write_into_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new" / "out"
    with claimed_output(str(output)):
        with (
            pytest.raises(UserError, match=r"--output .*out: another process writes there"),
            claimed_output(str(output)),
        ):
            pytest.fail("both have the folder")
        with claimed_output(str(tmp_path / "new" / "other")):
            assert not output.exists()
        monkeypatch.setenv("RANK", "1")  # rank 0 holds the folder for all
        with claimed_output(str(output)):
            pass
    monkeypatch.delenv("RANK")
    with claimed_output(str(output)):
        pass

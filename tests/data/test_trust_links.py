"""Links and entries that leave the data set: refused with the option's name, and followed with `--trust-links`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import parse_labels
from tests.data.test_dataset_yaml import PHOTO, write_set
from utils.common.errors import UserError
from utils.data.dataset import read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.sources.parsing.sources import find_photographs
from utils.training.launch import require_dataset

CELL = '{"objects": [{"value": "pole", "polygon": [{"x": 4, "y": 3}, {"x": 60, "y": 3}, {"x": 60, "y": 50}]}]}'


def write_disk(disk: Path) -> None:
    """Write photographs and labels, as on a large disk outside the data set."""
    for number, folder in enumerate(("one", "two")):
        for kind in ("images", "labels"):
            (disk / folder / kind).mkdir(parents=True)
        (disk / folder / "images" / f"{number}.jpg").write_bytes(PHOTO)
        (disk / folder / "labels" / f"{number}.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n")


# Links of the data set and where on the disk they lead (None: a photograph of its own), its text, and what is refused.
CASES: dict[str, tuple[dict[str, str | None], str, str]] = {
    "linked folder": (
        {"train/images": "one/images", "train/labels": "one/labels"},
        "train: train/images",
        r"data\.yaml: train: .* lies outside .*--trust-links",
    ),
    "linked subfolder, and one back to itself": (
        {"images/far": "one/images", "labels/far": "one/labels", "images/round": "../set/images"},
        "train: images",
        r"images/far: .*--trust-links",
    ),
    "linked files": (
        {"images/0.jpg": "one/images/0.jpg", "labels/0.txt": "one/labels/0.txt"},
        "train: images",
        r"images/0\.jpg: .*--trust-links",
    ),
    "listed files": ({}, "train: list.txt", r"list\.txt:1: .*--trust-links"),
    "beside path": (
        {},
        "path: ../disk/two\ntrain: ../one/images",
        r"data\.yaml: train: .* lies outside .*--trust-links",
    ),
    "linked labels": (
        {"images/0.jpg": None, "labels": "one/labels"},
        "train: images",
        r"labels/0\.txt: lies outside .*--trust-links",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_images_on_another_disk_need_trust_links(case: str, tmp_path: Path) -> None:
    links, text, message = CASES[case]
    root, disk = tmp_path / "set", tmp_path / "disk"
    write_disk(disk)
    for place, target in links.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).symlink_to(disk / target) if target else (root / place).write_bytes(PHOTO)
    root.mkdir(exist_ok=True)
    (root / "list.txt").write_text(f"{disk}/one/images/0.jpg\n")
    (root / "data.yaml").write_text(f"{text}\nnames: [pole]\n")
    with pytest.raises(UserError, match=message) as error:
        read_photos(load_dataset_yaml(root / "data.yaml"), "train")
    assert str(error.value).isprintable()
    (photo,) = read_photos(load_dataset_yaml(root / "data.yaml", trust_links=True), "train")
    assert photo.file.name == "0.jpg"
    assert photo.class_ids.tolist() == [0]


def test_the_link_that_the_user_typed_is_always_followed(tmp_path: Path) -> None:
    write_disk(tmp_path / "disk")
    (tmp_path / "disk" / "data.yaml").write_text("train: one/images\nval: two/images\nnames: [pole]\n")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "set.yaml").write_text("path: link\ntrain: one/images\nnames: [pole]\n")
    for file in (tmp_path / "link" / "data.yaml", tmp_path / "set.yaml"):
        assert len(read_photos(load_dataset_yaml(file), "train")) == 1
    assert len(find_photographs(tmp_path / "link", [])) == 2


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("images/a.jpg", "/dev/zero", "not a regular file"),
        ("images/a.jpg", None, "not a regular file"),  # a pipe
        ("labels/a.txt", "/dev/zero", "not a regular file"),
        ("labels/a.txt", None, "not a regular file"),
        ("labels/a.txt", "a.txt", "Too many levels"),
        ("labels/a.txt", "gone.txt", "No such file"),
    ],
)
def test_trusted_links_open_no_pipes_and_no_devices(name: str, target: str | None, words: str, tmp_path: Path) -> None:
    file = write_set(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name) if target is None else (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=rf"{name}: {words}"):
        read_photos(load_dataset_yaml(file, trust_links=True), "train")


@pytest.mark.parametrize("flags", [(), ("--trust-links",)])
def test_the_parser_follows_links_out_of_the_raw_folder_only_with_trust_links(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_disk(tmp_path / "disk")
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "Circuit1").symlink_to(tmp_path / "disk" / "one" / "images")
    (raw / "b.jpg").symlink_to(tmp_path / "disk" / "two" / "images" / "1.jpg")
    (raw / "c.jpg").write_bytes(PHOTO)
    rows = "".join(f'"{CELL.replace(chr(34), chr(34) * 2)}",{name}\n' for name in ("0.jpg", "b.jpg", "c.jpg"))
    (raw / "labels.csv").write_text("Label,External ID\n" + rows)
    monkeypatch.setattr(sys, "argv", ["parse", "--input", str(raw), "--output", str(tmp_path / "out"), *flags])
    parse_labels.main()
    assert len(list((tmp_path / "out").glob("*/images/*.jpg"))) == (3 if flags else 1)
    assert capsys.readouterr().out.count("or pass --trust-links") == (0 if flags else 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [("labels.csv", "Label,External ID\nPRIVATE,a.jpg\n"), ("coco.json", '{"images": [], "annotations": "PRIVATE"}')],
)
def test_a_linked_label_file_is_quoted(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(text)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jpg").write_bytes(PHOTO)
    (raw / name).symlink_to(tmp_path / "secret")
    monkeypatch.setattr(sys, "argv", ["parse", "--input", str(raw), "--output", str(tmp_path / "out")])
    with pytest.raises(UserError, match=rf"{name}: a link that leaves .*or pass --trust-links") as error:
        parse_labels.main()
    assert "PRIVATE" not in str(error.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_the_launcher_checks_the_data_set_as_the_trainer_will_read_it(tmp_path: Path) -> None:
    write_disk(tmp_path / "disk")
    (tmp_path / "set").mkdir()
    data = tmp_path / "set" / "data.yaml"
    data.write_text("train: ../disk/one/images\nval: ../disk/two/images\nnames: [pole]\n")
    (tmp_path / "config.yaml").write_text("trust_links: true\n")
    config = ["--config", str(tmp_path / "config.yaml")]
    for arguments in (["--trust-links"], config, ["--no-trust-links", "--trust-links"]):
        require_dataset([f"--data={data}", *arguments], None)
    for arguments in ([], [*config, "--no-trust-links"]):
        with pytest.raises(UserError, match="lies outside"):
            require_dataset([f"--data={data}", *arguments], None)

"""Odd text and odd names, as users bring them, in the commands that read them: the answer, or one line with the remedy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from inference import list_photos, unique_keys
from tests.data.test_dataset_yaml import PHOTO, write_set
from utils.common.errors import UserError
from utils.data.cache import open_or_build
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.labels import read_photos
from utils.sources.parsing.label_csv import Problem, read_label_csv
from utils.sources.parsing.sources import find_photographs


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_label_csv_in_utf_16_says_how_to_convert_it(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes("Label,External ID\n{},a.jpg\n".encode(encoding))
    with pytest.raises(UserError, match=r"labels\.csv:1: UTF-16; .*iconv -f UTF-16") as error:
        list(read_label_csv(tmp_path / "labels.csv", []))
    assert str(error.value).isprintable()


def test_a_name_in_latin_1_in_the_label_csv_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes("Label,External ID\n{},café.jpg\n{},b.jpg\n".encode("latin-1"))
    problems: list[Problem] = []
    assert [row.image_name for row in read_label_csv(tmp_path / "labels.csv", problems)] == ["b.jpg"]
    (problem,) = problems
    assert problem.place == "labels.csv:2"
    assert "iconv -f LATIN1" in problem.text


FILE_NAMES = {
    "not utf-8": b"caf\xe9.jpg",
    "utf-8": "café 電柱.jpg".encode(),
    "line break": b"new\nline.jpg",
    "terminal code": b"\x1b[2J.jpg",
    "quotes": b'it\'s "a" & b <c>.jpg',
    "dash": b"--help.jpg",
    "percent": b"%2e%2e%2fa.jpg",
    "dots": b"a.b.c..jpg",
    "capitals": b"A.JPEG",
    "long": b"x" * 250 + b".jpg",
    "spaces": b" a .jpg",
}


@pytest.mark.parametrize("case", FILE_NAMES)
def test_a_photograph_of_any_name_is_packed_parsed_and_found(case: str, tmp_path: Path) -> None:
    root = tmp_path / "set"
    file = write_set(root)
    name = os.fsdecode(FILE_NAMES[case])
    (root / "images" / "a.jpg").rename(root / "images" / name)
    photos = read_photos(load_dataset_yaml(file), "train")
    index = open_or_build([photo.file for photo in photos], 64, root / ".cache", "train", lambda _: None)
    assert index is not None
    assert len(index.sizes) == 1
    (found,) = find_photographs(root / "images", []).values()
    assert found.name == name
    assert [photo.name for photo in list_photos(str(root / "images"))] == [name]


def test_the_fingerprint_of_a_plain_name_stays_so_that_caches_stay_valid(tmp_path: Path) -> None:
    photo = tmp_path / "é.jpg"
    photo.write_bytes(PHOTO)
    os.utime(photo, ns=(1, 1))
    index = open_or_build([photo], 64, tmp_path / ".cache", "train", lambda _: None)
    assert index is not None
    assert index.pixel_file.name == "train-64-b83fca42-803228f291108a4c.u8"


def test_inference_skips_what_macos_leaves(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(PHOTO)
    (tmp_path / "._a.jpg").write_bytes(b"\0\5\x16\7")
    assert [photo.name for photo in list_photos(str(tmp_path))] == ["a.jpg"]


def test_folders_nested_a_thousand_deep_are_read(tmp_path: Path) -> None:
    file = write_set(tmp_path)
    here, deepest = os.getcwd(), "d/" * 1100
    os.makedirs(tmp_path / "images" / deepest[:1000])
    try:
        os.chdir(tmp_path / "images" / deepest[:1000])
        os.makedirs(deepest[1000:])
        os.chdir(deepest[1000:])
        Path("deep.jpg").write_bytes(PHOTO)
        assert len(load_dataset_yaml(file).image_files("train")) == 2
        assert len(find_photographs(tmp_path / "images", [])) == 2
        assert len(list_photos(str(tmp_path / "images"))) == 2
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-rf", str(tmp_path / "images")], check=True)  # pytest's own clean-up fails


def test_no_two_photographs_of_a_folder_get_results_of_one_name() -> None:
    files = [Path(name) for name in ("a.jpg", "x/a.jpg", "a_1.jpg", "y/A.png", "z/a_1.jpg")]
    assert [key for _, key in unique_keys(files)] == ["a", "a_2", "a_1", "A_3", "a_1_1"]

"""What users and attackers bring: tables of data-set YAML files, lists, labels, photographs and names, each with its answer.

An answer is the split's photographs, or one printable line that says what is wrong and what to do.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference import list_photos, unique_keys
from tests.conftest import PROJECT
from utils.common.config import Options, option, parse_config
from utils.common.errors import DataErrors, UserError
from utils.data.cache import open_or_build
from utils.data.dataset import read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.images import ImageError, decode_image, encode_jpeg
from utils.data.labels import LabelError, read_yolo_label
from utils.sources.parsing.label_csv import Problem, read_label_csv
from utils.sources.parsing.sources import find_photographs

PHOTO = encode_jpeg(np.full((60, 80, 3), 90, np.uint8))
TRIANGLE = "0 0.1 0.1 0.5 0.1 0.5 0.5\n"
NAMES = "names: {0: pole, 1: wire}\n"
BOM = "\ufeff"


def write_set(root: Path, text: str | bytes = "train: images\n" + NAMES) -> Path:
    (root / "images").mkdir(parents=True, exist_ok=True)
    (root / "labels").mkdir(exist_ok=True)
    (root / "images" / "a.jpg").write_bytes(PHOTO)
    (root / "labels" / "a.txt").write_text(TRIANGLE)
    (root / "data.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return root / "data.yaml"


def refusal(error: pytest.ExceptionInfo[UserError]) -> str:
    words = str(error.value)
    assert words.isprintable()
    return words


# --- data-set YAML ---

ACCEPTED_YAML = {
    "byte-order mark": BOM + "train: images\n" + NAMES,
    "windows line ends": "train: images\r\nnames:\r\n  0: pole\r\n  1: wire\r\n",
    "quoted numbers": "train: images\nnames: {'0': pole, '1': wire}\n",
    "quoted and plain numbers": "train: images\nnames: {'1': wire, 0: pole}\n",
    "home folder": "path: ~/set\ntrain: images\n" + NAMES,
    "list of one folder": "train: [images]\nnames: [pole, wire]\n",
    "absolute path": "path: {root}\ntrain: {root}/images\n" + NAMES,
    "dots in a path": "train: ./images/../images\n" + NAMES,
    "unknown keys": "train: images\nroboflow: {version: 3}\ndownload: rm -rf /\n" + NAMES,
    "nc beside names": "train: images\nnc: 2\n" + NAMES,
}  # fmt: skip
REFUSED_YAML: dict[str, tuple[str | bytes, str]] = {
    "latin-1": ("# Masten auf Höhe\ntrain: images\n".encode("latin-1"), "data.yaml:1: byte 0xf6 is not UTF-8; .*iconv -f LATIN1"),
    "utf-16": (("train: images\n" + NAMES).encode("utf-16"), "data.yaml:1: UTF-16; .*iconv -f UTF-16 -t UTF-8"),
    "utf-16 without mark": (("train: images\n" + NAMES).encode("utf-16-le"), "data.yaml:1: UTF-16; "),
    "binary": (bytes(range(256)), "data.yaml"),
    "numbers from 1": ("train: images\nnames: {1: pole, 2: wire}\n", "numbered 0 to 1 without gaps, found .1, 2."),
    "gap": ("train: images\nnames: {0: pole, 2: wire}\n", "without gaps, found .0, 2."),
    "number twice": ("train: images\nnames: {0: pole, '0': wire}\n", "without gaps"),
    "names and numbers exchanged": ("train: images\nnames: {pole: 0, wire: 1}\n", "without gaps"),
    "nc alone": ("train: images\nnc: 2\n", "`names` must list the classes.*`nc` alone does not name them"),
    "huge nc": ("train: images\nnc: 1000000000\n", "`names` must list the classes"),
    "names as text": ("train: images\nnames: pole\n", "`names` must list the classes"),
    "unknown user": ("path: ~nobody-of-this-name/x\ntrain: images\n" + NAMES, "path: ~nobody-of-this-name/x: "),
    "date that is none": ("train: 2026-99-99\n" + NAMES, "not valid YAML"),
    "deep brackets": ("train: " + "[" * 20_000 + "\n", "not valid YAML"),
    "tabs": ("train:\n\timages\n", "not valid YAML"),
    "merge conflict": ("<<<<<<< HEAD\ntrain: images\n=======\n", "not valid YAML|expected keys"),
    "empty": ("", "expected keys"),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED_YAML)
def test_yaml_files_as_users_write_them_are_read(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "set"
    spec = load_dataset_yaml(write_set(root, ACCEPTED_YAML[case].replace("{root}", str(root))))
    assert spec.names == ("pole", "wire")
    assert [photo.file.name for photo in read_photos(spec, "train")] == ["a.jpg"]


@pytest.mark.parametrize("case", REFUSED_YAML)
def test_a_wrong_yaml_is_one_line_that_names_file_and_fault(case: str, tmp_path: Path) -> None:
    text, expected = REFUSED_YAML[case]
    with pytest.raises(UserError, match=expected) as error:
        load_dataset_yaml(write_set(tmp_path, text))
    assert "data.yaml" in refusal(error)


def test_class_numbers_from_1_or_with_a_gap_print_the_corrected_block(tmp_path: Path) -> None:
    with pytest.raises(DataErrors) as error:
        load_dataset_yaml(write_set(tmp_path, "train: images\nnames: {1: pole, 3: wire}\n"))
    lines = error.value.details
    assert lines[1:4] == ("names:", "  0: pole", "  1: wire")
    assert lines[5:] == ("names:", "  0: unused_0", "  1: pole", "  2: unused_2", "  3: wire")
    for block in (lines[1:4], lines[5:]):
        assert load_dataset_yaml(write_set(tmp_path, "\n".join(["train: images", *block]))).splits
    with pytest.raises(DataErrors) as error:
        load_dataset_yaml(write_set(tmp_path, "train: images\nnames: {0: pole, 4000000000: wire}\n"))
    assert error.value.details == ()


def test_nc_without_names_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataErrors) as error:
        load_dataset_yaml(write_set(tmp_path, "train: images\nnc: 2\n"))
    assert error.value.details[1:] == ("names:", "  0: class_0", "  1: class_1")


def test_a_config_file_in_latin_1_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Config(Options):
        config: str | None = option(None, "file")

    (tmp_path / "c.yaml").write_bytes("# für\n".encode("latin-1"))
    with pytest.raises(SystemExit):
        parse_config(Config, "test", ["--config", str(tmp_path / "c.yaml")])
    (line,) = capsys.readouterr().err.splitlines()
    assert "c.yaml:1: byte 0xfc is not UTF-8" in line


# --- lists and labels ---


@pytest.mark.parametrize("text", [BOM + "images/a.jpg\n", "images/a.jpg\r\n", "\n\nimages/a.jpg", "./images/a.jpg  \n"])
def test_a_list_with_a_byte_order_mark_or_windows_line_ends_is_read(text: str, tmp_path: Path) -> None:
    file = write_set(tmp_path, "train: list.txt\n" + NAMES)
    (tmp_path / "list.txt").write_bytes(text.encode())
    assert [file.name for file in load_dataset_yaml(file).image_files("train")] == ["a.jpg"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_list_in_another_encoding_says_how_to_convert_it(encoding: str, tmp_path: Path) -> None:
    file = write_set(tmp_path, "train: list.txt\n" + NAMES)
    (tmp_path / "list.txt").write_bytes("images/a.jpg\nimages/café.jpg\n".encode(encoding))
    with pytest.raises(UserError, match=r"list\.txt:[12]: .*iconv -f (LATIN1|UTF-16)") as error:
        load_dataset_yaml(file).image_files("train")
    refusal(error)


LABELS: dict[str, tuple[str | bytes, int | str]] = {
    "byte-order mark": (BOM + TRIANGLE, 1),
    "windows line ends": (TRIANGLE.strip() + "\r\n" + TRIANGLE.strip() + "\r\n", 2),
    "tabs": (TRIANGLE.replace(" ", "\t"), 1),
    "class as a float": ("0.0 0.1 0.1 0.5 0.1 0.5 0.5\n", 1),
    "empty": ("", 0),
    "exponents": ("0 1e-1 1e-1 5e-1 1e-1 5e-1 5e-1", 1),
    "latin-1": ("0 0.1 0.1 0.5 0.1 0.5 0.5 # für\n".encode("latin-1"), "a.txt:1: byte 0xfc is not UTF-8"),
    "utf-16": (TRIANGLE.encode("utf-16"), "a.txt:1: UTF-16"),
    "utf-16 without mark": (TRIANGLE.encode("utf-16-le"), "a.txt:1: UTF-16"),
    "commas": (TRIANGLE.replace(" ", ","), "a.txt:1: not a number"),
    "decimal commas": (TRIANGLE.replace(".", ","), "a.txt:1: not a number"),
    "pixels": ("0 10 10 50 10 50 50\n", "a.txt:1: coordinate 10 is outside"),
    "numbers from 1": ("2 0.1 0.1 0.5 0.1 0.5 0.5\n", r"a.txt:1: class 2 is not one of 0\.\.1"),
    "names": ("pole 0.1 0.1 0.5 0.1 0.5 0.5\n", "a.txt:1: not a number"),
    "json": ('{"objects": []}', "a.txt:1: not a number"),
}


@pytest.mark.parametrize("case", LABELS)
def test_label_files_are_read_or_refused_by_line(case: str, tmp_path: Path) -> None:
    text, expected = LABELS[case]
    (tmp_path / "a.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    if isinstance(expected, int):
        assert len(read_yolo_label(tmp_path / "a.txt", 2)[0]) == expected
        return
    with pytest.raises(LabelError, match=expected) as error:
        read_yolo_label(tmp_path / "a.txt", 2)
    refusal(error)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_label_csv_in_utf_16_says_how_to_convert_it(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes("Label,External ID\n{},a.jpg\n".encode(encoding))
    with pytest.raises(UserError, match=r"labels\.csv:1: UTF-16; .*iconv -f UTF-16") as error:
        list(read_label_csv(tmp_path / "labels.csv", []))
    refusal(error)


def test_a_name_in_latin_1_in_the_label_csv_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes("Label,External ID\n{},café.jpg\n{},b.jpg\n".encode("latin-1"))
    problems: list[Problem] = []
    assert [row.image_name for row in read_label_csv(tmp_path / "labels.csv", problems)] == ["b.jpg"]
    (problem,) = problems
    assert problem.place == "labels.csv:2"
    assert "iconv -f LATIN1" in problem.text


# --- photographs ---

QUIET_JOB = """
import sys
from utils.common.environment import prepare_environment
prepare_environment()
import ultralytics.utils  # first: it replaces Image.open
from pathlib import Path
from utils.data.images import ImageError, decode_image
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        decode_image(file.read_bytes())
        print(file.name, "read")
    except ImageError as error:
        print(file.name, "refused")
"""


def pictures() -> dict[str, bytes]:
    """Return noise as every kind of file, whole and damaged in several ways."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8))
    files: dict[str, bytes] = {}
    for kind in ("JPEG", "PNG", "TIFF", "WEBP", "BMP"):
        stream = io.BytesIO()
        noise.save(stream, kind)
        data = stream.getvalue()
        files |= {f"{kind}-whole": data, f"{kind}-half": data[: len(data) // 2], f"{kind}-head": data[:20]}
        if kind in ("JPEG", "PNG"):  # in the other formats nothing tells wrong pixels from right ones
            third = len(data) // 3
            wrong = bytes(byte ^ 0x5A for byte in data[third : third + 400])
            files[f"{kind}-other-bytes"] = data[:third] + wrong + data[third + 400 :]
    return files | {
        "empty": b"",
        "text": b"hello",
        "heic": b"\0\0\0\x18ftypheic" + bytes(90),
        "png-alone": b"\x89PNG\r\n\x1a\n",
    }


PICTURES = pictures()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # pytest replaces the filter of the first test that decodes
@pytest.mark.parametrize("case", PICTURES)
def test_photographs_are_read_or_refused_in_one_line(case: str) -> None:
    if case.endswith("-whole"):
        assert decode_image(PICTURES[case]).shape == (90, 120, 3)
        return
    with pytest.raises(ImageError) as error:
        decode_image(PICTURES[case])
    assert str(error.value).isprintable()


def test_a_damaged_photograph_makes_no_library_print_and_looks_for_no_package(tmp_path: Path) -> None:
    for name, data in PICTURES.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", QUIET_JOB, str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    answers = dict(line.split() for line in done.stdout.splitlines())
    assert answers.keys() == PICTURES.keys(), "nobody else may print"
    assert all((answers[name] == "read") == name.endswith("-whole") for name in answers)


# --- names ---

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


def test_files_that_macos_leaves_are_skipped_and_counted(tmp_path: Path) -> None:
    file = write_set(tmp_path, "train: images\nval: list.txt\n" + NAMES)
    for name in ("._a.jpg", "._b.JPG", ".DS_Store"):
        (tmp_path / "images" / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / "list.txt").write_text("images/._a.jpg\nimages/a.jpg\n")
    said: list[str] = []
    photos = [read_photos(load_dataset_yaml(file), split, said.append) for split in ("train", "val")]
    assert [[photo.file.name for photo in split] for split in photos] == [["a.jpg"], ["a.jpg"]]
    assert [line.partition(" skipped")[0] for line in said] == ["train: 2 hidden files", "val: 1 hidden files"]
    assert [photo.name for photo in list_photos(str(tmp_path / "images"))] == ["a.jpg"]


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

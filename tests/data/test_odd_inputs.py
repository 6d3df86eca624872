"""Odd text, names and links, as users bring them, in the commands that read them: the answer, or
one line with the remedy.
"""

import os
import subprocess
from pathlib import Path

import pytest

import parse_labels
from inference import unique_keys
from tests.data.caches import PACKED, opened
from tests.data.test_dataset_yaml import PHOTO, write_set
from tests.support.plugin import run_main
from yolo_seg_ddp.data.dataset_yaml import list_photos, load_dataset_yaml, not_read
from yolo_seg_ddp.data.labels import read_photos
from yolo_seg_ddp.prepare.parsing.label_csv import Problem, read_label_csv
from yolo_seg_ddp.prepare.parsing.sources import find_photographs
from yolo_seg_ddp.training.launch import require_dataset
from yolo_seg_ddp.utils.errors import UserError


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_label_csv_in_utf_16_says_how_to_convert_it(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes("Label,External ID\n{},a.jpg\n".encode(encoding))
    with pytest.raises(UserError, match=r"labels\.csv:1: UTF-16; .*iconv -f UTF-16") as error:
        list(read_label_csv(tmp_path / "labels.csv", []))
    assert str(error.value).isprintable()


def test_a_name_in_latin_1_in_the_label_csv_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(
        "Label,External ID\n{},café.jpg\n{},b.jpg\n".encode("latin-1")
    )
    problems: list[Problem] = []
    assert [row.image_name for row in read_label_csv(tmp_path / "labels.csv", problems)] == [
        "b.jpg"
    ]
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
    assert len(opened(PACKED, [photo.file for photo in photos], root / ".cache").index.sizes) == 1
    (found,) = find_photographs(root / "images", []).values()
    assert found.name == name
    (root / "images" / "._a.jpg").write_bytes(b"\0\5\x16\7")  # what macOS leaves is skipped
    assert [photo.name for photo in list_photos(str(root / "images"))] == [name]


def test_the_name_of_packed_files_and_the_digest_of_a_photograph_stay_so_that_caches_stay_valid(
    tmp_path: Path,
) -> None:
    photo = tmp_path / "é.jpg"
    photo.write_bytes(PHOTO)
    index = opened(PACKED, [photo], tmp_path / ".cache").index
    assert index.pixel_files[0].name == "train-64-017600c7-0-of-1.u8"
    assert index.digests["é.jpg"][0] == "fc91ff40fd292355"


def test_a_list_names_photographs_from_here_or_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_set(tmp_path / "set").parent / "images")
    file, other = tmp_path / "list.txt", tmp_path / "b.jpg"
    other.write_bytes(PHOTO)
    file.write_text(f"b.jpg\r\n\na.jpg\n{other}")
    assert list_photos(str(file)) == [other, Path("a.jpg"), other]
    for text, refusal in (
        ("b.jpg\n\nc.jpg\n", ":3: c.jpg: no photo"),
        ("list.txt", ":1: list.txt: no"),
        ("", ": names no"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=f"{file}{refusal}"):
            list_photos(str(file))


def test_files_that_are_not_read_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_set(tmp_path / "set")
    images = tmp_path / "set" / "images"
    spec = load_dataset_yaml(file)
    assert not_read(spec.image_files("train")) == ""
    for name in (
        "b.HEIC",
        "c.DNG",
        "d.HEIC",
        "e",
        *("f.jfif", "g.JPE", "h.txt", "a.SRT", "Thumbs.db", ".DS_Store", "LICENSE", "README"),
    ):
        (images / name).write_bytes(PHOTO)
    said = (
        f"4 files not read: .HEIC (2), .DNG (1), without suffix (1); such as {images / 'b.HEIC'}; "
        "convert photographs to JPEG"
    )
    lines: list[str] = []
    assert [photo.name for photo in spec.image_files("train", lines.append)] == [
        "a.jpg",
        "f.jfif",
        "g.JPE",
    ]
    assert lines == [f"train: {said}"]
    assert [photo.name for photo in list_photos(str(images))] == ["a.jpg", "f.jfif", "g.JPE"]
    assert capsys.readouterr().out == f"--source: {said}\n"
    run_main(parse_labels, monkeypatch, "--input", tmp_path / "set", "--output", tmp_path / "out")
    assert f"images/b.HEIC: {said.replace(f'{images.parent}/', '')}\n" in capsys.readouterr().out
    for photo in list_photos(str(images)):
        photo.unlink()
    for find in (lambda: spec.image_files("train"), lambda: list_photos(str(images))):
        with pytest.raises(
            UserError, match=r"no (images|photographs) .*4 files not read: \.HEIC \(2\)"
        ):
            find()


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
        # pytest's own clean-up fails
        subprocess.run(["rm", "-rf", str(tmp_path / "images")], check=True)


def test_no_two_photographs_of_a_folder_get_results_of_one_name() -> None:
    files = [Path(name) for name in ("a.jpg", "x/a.jpg", "a_1.jpg", "y/A.png", "z/a_1.jpg")]
    assert [key for _, key in unique_keys(files)] == ["a", "a_2", "a_1", "A_3", "a_1_1"]


CELL = (
    '{"objects": [{"value": "pole", "polygon": [{"x": 4, "y": 3}, {"x": 60, "y": 3}, {"x": 60, '
    '"y": 50}]}]}'
)


def write_disk(disk: Path) -> None:
    """Write photographs and labels, as on a large disk outside the data set."""
    for number, folder in enumerate(("one", "two")):
        for kind in ("images", "labels"):
            (disk / folder / kind).mkdir(parents=True)
        (disk / folder / "images" / f"{number}.jpg").write_bytes(PHOTO)
        (disk / folder / "labels" / f"{number}.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n")


# Links of the data set and where on the disk they lead (None: a photograph of its own), its text,
# and what is refused.
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
    (tmp_path / "disk" / "data.yaml").write_text(
        "train: one/images\nval: two/images\nnames: [pole]\n"
    )
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
def test_trusted_links_open_no_pipes_and_no_devices(
    name: str, target: str | None, words: str, tmp_path: Path
) -> None:
    file = write_set(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name) if target is None else (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=rf"{name}: {words}"):
        read_photos(load_dataset_yaml(file, trust_links=True), "train")


@pytest.mark.parametrize("flags", [(), ("--trust-links",)])
def test_the_parser_follows_links_out_of_the_raw_folder_only_with_trust_links(
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_disk(tmp_path / "disk")
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "Circuit1").symlink_to(tmp_path / "disk" / "one" / "images")
    (raw / "b.jpg").symlink_to(tmp_path / "disk" / "two" / "images" / "1.jpg")
    (raw / "c.jpg").write_bytes(PHOTO)
    rows = "".join(
        f'"{CELL.replace(chr(34), chr(34) * 2)}",{name}\n' for name in ("0.jpg", "b.jpg", "c.jpg")
    )
    (raw / "labels.csv").write_text("Label,External ID\n" + rows)
    run_main(parse_labels, monkeypatch, "--input", raw, "--output", tmp_path / "out", *flags)
    assert len(list((tmp_path / "out").glob("*/images/*.jpg"))) == (3 if flags else 1)
    assert capsys.readouterr().out.count("or pass --trust-links") == (0 if flags else 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", "Label,External ID\nPRIVATE,a.jpg\n"),
        ("coco.json", '{"images": [], "annotations": "PRIVATE"}'),
    ],
)
def test_a_linked_label_file_is_quoted(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(text)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jpg").write_bytes(PHOTO)
    (raw / name).symlink_to(tmp_path / "secret")
    with pytest.raises(
        UserError, match=rf"{name}: a link that leaves .*or pass --trust-links"
    ) as error:
        run_main(parse_labels, monkeypatch, "--input", raw, "--output", tmp_path / "out")
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

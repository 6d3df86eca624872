"""Data-set YAML files and label files, as users write them."""

from pathlib import Path

import numpy as np
import pytest

from yolo_seg_ddp.data import dataset_yaml
from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, label_file_for, load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.data.labels import LabelError, format_yolo_label, read_photos, read_yolo_label
from yolo_seg_ddp.utils.errors import DataErrors, UserError

PHOTO = encode_jpeg(np.full((60, 80, 3), 90, np.uint8))
TRIANGLE = "0 0.1 0.1 0.5 0.1 0.5 0.5\n"
NAMES = "names: {0: pole, 1: wire}\n"
BOM = "\ufeff"


def write_yaml(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder / "data.yaml"


def write_set(root: Path, text: str | bytes = "train: images\n" + NAMES) -> Path:
    """Write a data set of one labelled photograph."""
    touch(root / "images" / "a.jpg", root / "labels" / "a.txt")
    (root / "images" / "a.jpg").write_bytes(PHOTO)
    (root / "labels" / "a.txt").write_text(TRIANGLE)
    return write_yaml(root, text)


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


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
    "latin-1": (
        "# Masten auf Höhe\ntrain: images\n".encode("latin-1"),
        "data.yaml:1: byte 0xf6 is not UTF-8; .*iconv -f LATIN1",
    ),
    "utf-16": (
        ("train: images\n" + NAMES).encode("utf-16"),
        "data.yaml:1: UTF-16; .*iconv -f UTF-16 -t UTF-8",
    ),
    "utf-16 without mark": (
        ("train: images\n" + NAMES).encode("utf-16-le"),
        "data.yaml:1: UTF-16; ",
    ),
    "binary": (bytes(range(256)), "data.yaml"),
    "numbers from 1": (
        "train: images\nnames: {1: pole, 2: wire}\n",
        "numbered 0 to 1 without gaps, found .1, 2.",
    ),
    "number twice": ("train: images\nnames: {0: pole, '0': wire}\n", "without gaps"),
    "names and numbers exchanged": ("train: images\nnames: {pole: 0, wire: 1}\n", "without gaps"),
    "no names": ("train: images\n", "`names` must list the classes"),
    "empty names": ("train: images\nnames: []\n", "`names` must list the classes"),
    "nc alone": (
        "train: images\nnc: 2\n",
        "`names` must list the classes.*`nc` alone does not name them",
    ),
    "another nc": ("train: images\nnc: 3\n" + NAMES, "`nc` is 3 but `names` lists 2 classes"),
    "names as text": ("train: images\nnames: pole\n", "`names` must list the classes"),
    "list as a name": ("train: .\nnames: [a, [b]]\n", "`names` holds a list"),
    "terminal code in a name": ('train: .\nnames: ["a\\e[2J"]\n', "`names` holds "),
    "reference as a name": ("x: &b [q, q]\ntrain: .\nnames: &a [*b, *b]\n", "`names` holds a list"),
    "unknown user": (
        "path: ~nobody-of-this-name/x\ntrain: images\n" + NAMES,
        "path: ~nobody-of-this-name/x: ",
    ),
    "date that is none": ("train: 2026-99-99\n" + NAMES, "not valid YAML"),
    "open bracket": ("train: [a\n", "not valid YAML"),
    "deep brackets": ("train: " + "[" * 1_000 + "\n", "not valid YAML"),
    "tabs": ("train:\n\timages\n", "not valid YAML"),
    "merge conflict": ("<<<<<<< HEAD\ntrain: images\n=======\n", "not valid YAML|expected keys"),
    "empty": ("", "expected keys"),
}


@pytest.mark.parametrize("case", ACCEPTED_YAML)
def test_yaml_files_as_users_write_them_are_read(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = tmp_path / "set"
    spec = load_dataset_yaml(write_set(root, ACCEPTED_YAML[case].replace("{root}", str(root))))
    assert spec.names == ("pole", "wire")
    assert [photo.file.name for photo in read_photos(spec, "train")] == ["a.jpg"]


@pytest.mark.parametrize("case", REFUSED_YAML)
def test_a_wrong_yaml_is_one_line_that_names_file_and_fault(case: str, tmp_path: Path) -> None:
    text, expected = REFUSED_YAML[case]
    file = write_yaml(tmp_path, text)
    with pytest.raises(UserError, match=expected) as error:
        load_dataset_yaml(file)
    assert str(file) in str(error.value)
    assert str(error.value).isprintable()


def test_class_numbers_from_1_or_with_a_gap_print_the_corrected_block(tmp_path: Path) -> None:
    with pytest.raises(DataErrors) as error:
        load_dataset_yaml(write_yaml(tmp_path, "train: images\nnames: {1: pole, 3: wire}\n"))
    lines = error.value.details
    assert lines[1:4] == ("names:", "  0: pole", "  1: wire")
    assert lines[5:] == ("names:", "  0: unused_0", "  1: pole", "  2: unused_2", "  3: wire")
    for block in (lines[1:4], lines[5:]):
        assert load_dataset_yaml(write_yaml(tmp_path, "\n".join(["train: images", *block]))).splits
    for text, block in (
        ("nc: 2", ("names:", "  0: class_0", "  1: class_1")),
        ("names: {0: pole, 4000000: wire}", ()),
    ):
        with pytest.raises(DataErrors) as error:
            load_dataset_yaml(write_yaml(tmp_path, f"train: images\n{text}\n"))
        assert error.value.details[1:] == block


def test_the_projects_own_yaml_lists_the_eight_classes() -> None:
    spec = load_dataset_yaml(DEFAULT_DATASET_YAML)
    assert len(spec.names) == 8
    assert spec.names[0] == "conductor"
    assert set(spec.splits) == {"train", "val"}


def test_paths_are_relative_to_the_yaml_not_to_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "set" / "train" / "images"
    touch(images / "b.jpg", images / "a.PNG", images / "deep" / "c.jpeg", images / "notes.txt")
    files = [
        write_yaml(tmp_path / "configs", "path: ../set\ntrain: train/images\n" + NAMES),
        # without `path`: its own folder
        write_yaml(tmp_path / "set", "train: train/images\n" + NAMES),
        # Roboflow's paths mean the data set's own folders.
        write_yaml(
            tmp_path / "set" / "yaml",
            "path: ..\ntrain: ../train/images\nval: ../valid/images\n" + NAMES,
        ),
    ]
    monkeypatch.chdir(tmp_path / "configs")
    for file in files:
        spec = load_dataset_yaml(file)
        assert spec.root == tmp_path / "set"
        assert spec.names == ("pole", "wire")
        assert spec.image_files("train") == [
            images / "a.PNG",
            images / "b.jpg",
            images / "deep" / "c.jpeg",
        ]
    with pytest.raises(UserError, match="val"):
        spec.image_files("val")


def test_a_split_may_be_several_folders_and_list_files_without_counting_twice(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one" / "1.jpg", tmp_path / "two" / "2.jpg"
    touch(one, two, tmp_path / "lists" / "train.txt")
    (tmp_path / "lists" / "train.txt").write_text("../two/2.jpg\n\n  ../two/3.jpg  \n")
    spec = load_dataset_yaml(
        write_yaml(tmp_path, "train: [one, one, lists/train.txt]\nval: lists/train.txt\n" + NAMES)
    )
    assert sorted(file.resolve() for file in spec.image_files("train")) == [
        one,
        two,
        tmp_path / "two" / "3.jpg",
    ]
    assert [file.resolve() for file in spec.image_files("val")] == [two, tmp_path / "two" / "3.jpg"]


@pytest.mark.parametrize(
    "text", [BOM + "images/a.jpg\n", "images/a.jpg\r\n", "\n\nimages/a.jpg", "./images/a.jpg  \n"]
)
def test_a_list_with_a_byte_order_mark_or_windows_line_ends_is_read(
    text: str, tmp_path: Path
) -> None:
    file = write_set(tmp_path, "train: list.txt\n" + NAMES)
    (tmp_path / "list.txt").write_bytes(text.encode())
    assert [file.name for file in load_dataset_yaml(file).image_files("train")] == ["a.jpg"]


COUNTS = "a path counts from the list's folder"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data/images/a.jpg\n", f"such as data/images/a.jpg; {COUNTS}: write images/a.jpg for it"),
        ("no/x.jpg\nno/y.jpg", f"none of its photographs exists, such as no/x.jpg; {COUNTS}$"),
        ("\n\n", "no images in"),
        ("images", "not an image"),
        ("images/folder.jpg", "not a regular file"),
        (None, "does not exist"),
        *(
            (
                "images/a.jpg\nimages/café.jpg\n".encode(encoding),
                r"list\.txt:[12]: .*iconv -f (LATIN1|UTF-16)",
            )
            for encoding in ("latin-1", "utf-16")
        ),
    ],
)
def test_a_list_without_a_photograph_or_in_another_encoding_is_refused(
    text: str | bytes | None, words: str, tmp_path: Path
) -> None:
    file = write_set(tmp_path, "train: list.txt\n" + NAMES)
    (tmp_path / "images" / "folder.jpg").mkdir()
    if text is not None:
        (tmp_path / "list.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words) as error:
        load_dataset_yaml(file).image_files("train")
    assert str(error.value).isprintable()


def test_missing_split_folder_and_images_say_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set" / "empty").mkdir(parents=True)
    (tmp_path / "set" / "valid" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dataset_yaml, "DEFAULT_DATASET_YAML", tmp_path / "own" / "data.yaml")
    paths = "train: empty\nval: valid/images\n"
    for folder, text, split, words in (
        (
            "set",
            paths,
            "test",
            r"data\.yaml: no split `test`; it has train, val: add `test: FOLDER/images`",
        ),
        ("set", paths, "train", r"train: no images in .*empty; images are \.jpg"),
        (
            "set",
            "val: val/images\n",
            "val",
            r"val: .*val/images does not exist; .*set holds empty, valid",
        ),
        (
            "set",
            "path: set\n" + paths,
            "val",
            r"set/set/valid/images does not exist; .*write `path: \.` for .*/valid",
        ),
        (
            "set",
            "path: /no\n" + paths,
            "val",
            r"/no/valid/images does not exist; .*write `path: \.`",
        ),
        ("yamls", "path: set\n" + paths, "val", rf"does not exist; .*write `path: {tmp_path}/set`"),
        ("yamls", "path: other\n" + paths, "val", r"its `path`, .*yamls/other, does not exist"),
        (
            "own",
            "val: absent\n",
            "val",
            r"absent does not exist; run python parse_labels\.py first",
        ),
    ):
        with pytest.raises(UserError, match=words):
            load_dataset_yaml(write_yaml(tmp_path / folder, text + NAMES)).image_files(split)


def test_a_missing_yaml_names_the_option_and_a_folder_gets_the_name_of_its_yaml(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        UserError,
        match=r"absent\.yaml: No such file or directory; name a data-set YAML with --data",
    ):
        load_dataset_yaml(tmp_path / "absent.yaml")
    file = write_set(tmp_path)
    with pytest.raises(
        UserError, match=rf"Is a directory; name a data-set YAML with --data, such as {file}"
    ):
        load_dataset_yaml(tmp_path)


def test_a_split_without_any_object_is_announced(tmp_path: Path) -> None:
    spec, said = load_dataset_yaml(write_set(tmp_path)), list[str]()
    read_photos(spec, "train", said.append)
    assert said == []
    (tmp_path / "labels" / "a.txt").rename(tmp_path / "a.txt")
    read_photos(spec, "train", said.append)
    assert said == [
        "WARNING: train: no photograph has an object; labels of the first are looked for in "
        f"{tmp_path}/labels/a.txt"
    ]


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("/d/train/images/x.jpg", "/d/train/labels/x.txt"),
        ("/images/train/images/deep/x.jpg", "/images/train/labels/deep/x.txt"),
        ("/images/val/x.tar.PNG", "/labels/val/x.tar.txt"),
        ("/my_images/x.jpg", "/my_images/x.txt"),
        ("/d/images.old/images", "/d/images.old/images.txt"),
        ("images/4 (176).JPG", "labels/4 (176).txt"),
    ],
)
def test_labels_lie_beside_the_last_images_folder(image: str, label: str) -> None:
    assert label_file_for(Path(image)) == Path(label)


def test_files_that_macos_leaves_are_skipped_and_counted(tmp_path: Path) -> None:
    file = write_set(tmp_path, "train: images\nval: list.txt\n" + NAMES)
    for name in ("._a.jpg", "._b.JPG", ".DS_Store"):
        (tmp_path / "images" / name).write_bytes(b"\0\5\x16\7")
    (tmp_path / "list.txt").write_text("images/._a.jpg\nimages/a.jpg\n")
    said: list[str] = []
    photos = [
        read_photos(load_dataset_yaml(file), split, said.append) for split in ("train", "val")
    ]
    assert [[photo.file.name for photo in split] for split in photos] == [["a.jpg"], ["a.jpg"]]
    assert [line.partition(" skipped")[0] for line in said] == [
        "train: 2 hidden files",
        "val: 1 hidden files",
    ]


READ: dict[str, tuple[str, int]] = {
    "empty": ("", 0),
    "blank": ("\n  \n", 0),
    "byte-order mark": (BOM + TRIANGLE, 1),
    "windows line ends": (TRIANGLE.strip() + "\r\n" + TRIANGLE.strip() + "\r\n", 2),
    "tabs": (TRIANGLE.replace(" ", "\t"), 1),
    "class as a float": ("0.0 0.1 0.1 0.5 0.1 0.5 0.5\n", 1),
    "exponents": ("0 1e-1 1e-1 5e-1 1e-1 5e-1 5e-1", 1),
}
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "latin-1": ("0 0.1 0.1 0.5 0.1 0.5 0.5 # für\n".encode("latin-1"), "1: byte 0xfc is not UTF-8"),
    "commas": (TRIANGLE.replace(" ", ","), "1: not a number"),
    "word": (TRIANGLE + "1 0 0 x 0 1 1\n", "2: not a number"),
    "just outside": (TRIANGLE + "1 0 0 1.01 0 1 1\n", r"2: coordinate 1\.01 is outside"),
    "no number": (TRIANGLE + "1 0 0 nan 0 1 1\n", "2: coordinate nan"),
    "class too large": (TRIANGLE + "2 0 0 1 0 1 1\n", r"2: class 2 is not one of 0\.\.1"),
    "class below 0": ("-1 0 0 1 0 1 1\n", "1: class -1"),
    "class and a half": ("1.5 0 0 1 0 1 1\n", r"1: class 1\.5"),
    "class nan": ("nan 0 0 1 0 1 1\n", "1: class nan"),
    "odd": ("1 0 0 1 0 1\n", "1: 5 coordinates"),
    "point": ("1 0 0\n", "1: 2 coordinates"),
    "class alone": ("1\n", "1: 0 coordinates"),
    "flat box": ("1 0.5 0.5 0 0.1\n", "1: box of width 0"),
}  # fmt: skip


def read(folder: Path, text: str | bytes) -> tuple[np.ndarray, list[np.ndarray]]:
    (folder / "a.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yolo_label(folder / "a.txt", 2)


@pytest.mark.parametrize("case", READ)
def test_label_files_as_users_write_them_are_read(case: str, tmp_path: Path) -> None:
    text, expected = READ[case]
    class_ids, polygons = read(tmp_path, text)
    assert class_ids.tolist() == [0] * expected
    assert class_ids.dtype == np.int64
    assert len(polygons) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_label_files_are_named_by_file_and_line(case: str, tmp_path: Path) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(LabelError, match=rf"a\.txt:{expected}") as error:
        read(tmp_path, text)
    assert str(error.value).isprintable()


def test_yolo_text_round_trip(tmp_path: Path) -> None:
    triangle = np.array([[0.1, 0.2], [0.3, 0.4], [1.2, -0.1]])
    text = format_yolo_label([(1, triangle), (0, triangle[::-1])])
    assert text.splitlines()[0] == "1 0.100000 0.200000 0.300000 0.400000 1.000000 0.000000"
    class_ids, polygons = read(tmp_path, text)
    assert class_ids.tolist() == [1, 0]
    assert polygons[0].dtype == np.float32
    np.testing.assert_allclose(polygons[0], np.clip(triangle, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1 0.5 0.5 0.2 0.4", [[0.4, 0.3], [0.6, 0.3], [0.6, 0.7], [0.4, 0.7]]),  # a box
        ("1 -0.0005 0 1.0005 0 1 1", [[0, 0], [1, 0], [1, 1]]),  # rounding past the edge
    ],
)
def test_rows_become_outlines_inside_the_photograph(
    tmp_path: Path, row: str, expected: list[list[float]]
) -> None:
    _, (polygon,) = read(tmp_path, row)
    np.testing.assert_allclose(polygon, expected, atol=1e-6)
    assert polygon.min() >= 0
    assert polygon.max() <= 1

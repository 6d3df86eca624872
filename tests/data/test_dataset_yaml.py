"""The data-set YAML: where images are found, what the classes are called, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.common.errors import UserError
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, label_file_for, load_dataset_yaml

NAMES = "names: {0: pole, 1: wire}\n"


def write_yaml(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "data.yaml"
    file.write_text(text)
    return file


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_paths_are_relative_to_the_yaml_and_not_to_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "set" / "train" / "images"
    touch(images / "b.jpg", images / "a.PNG", images / "deep" / "c.jpeg", images / "notes.txt")
    file = write_yaml(tmp_path / "configs", "path: ../set\ntrain: train/images\n" + NAMES)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    spec = load_dataset_yaml(file)
    assert spec.root == tmp_path / "set"
    assert spec.names == ("pole", "wire")
    assert spec.image_files("train") == [images / "a.PNG", images / "b.jpg", images / "deep" / "c.jpeg"]


def test_without_a_path_the_yamls_own_folder_is_the_root(tmp_path: Path) -> None:
    touch(tmp_path / "train" / "x.jpg")
    spec = load_dataset_yaml(write_yaml(tmp_path, "train: train\nnames: [pole]\n"))
    assert spec.image_files("train") == [tmp_path / "train" / "x.jpg"]
    assert spec.names == ("pole",)


def test_a_split_may_be_several_folders_and_list_files_without_counting_twice(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "1.jpg", tmp_path / "two" / "2.jpg"
    touch(one, two)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("../two/2.jpg\n\n  ../two/3.jpg  \n")
    spec = load_dataset_yaml(write_yaml(tmp_path, "train: [one, one, lists/train.txt]\nval: lists/train.txt\n" + NAMES))
    assert sorted(file.resolve() for file in spec.image_files("train")) == [one, two, tmp_path / "two" / "3.jpg"]
    assert [file.resolve() for file in spec.image_files("val")] == [two, tmp_path / "two" / "3.jpg"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train: a\nnames: {0: pole, 2: wire}\n", "without gaps, found [0, 2]"),
        ("train: a\nnames: {1: pole}\n", "numbered 0 to 0 without gaps"),
        ("train: a\nnames: {0: pole, wire: 1}\n", "without gaps"),
        ("train: a\n", "`names` must list the classes"),
        ("train: a\nnames: []\n", "`names` must list the classes"),
        ("just words\n", "expected keys"),
        ("train: [a\n", "not valid YAML"),
    ],
)
def test_a_wrong_yaml_is_named_with_its_fault(tmp_path: Path, text: str, complaint: str) -> None:
    file = write_yaml(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_dataset_yaml(file)
    assert str(file) in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_yaml_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: No such file or directory; name a data-set YAML with --data"):
        load_dataset_yaml(tmp_path / "absent.yaml")


def test_missing_split_folder_and_images_say_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    spec = load_dataset_yaml(write_yaml(tmp_path, "train: empty\nval: absent\n" + NAMES))
    with pytest.raises(UserError, match=r"data\.yaml: no split `test`; it has train, val"):
        spec.image_files("test")
    with pytest.raises(UserError, match=r"train: no images in .*empty; run python parse_labels\.py first"):
        spec.image_files("train")
    with pytest.raises(UserError, match=r"val: .*absent does not exist; run python parse_labels\.py first"):
        spec.image_files("val")


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


def test_the_projects_own_yaml_lists_the_eight_classes() -> None:
    spec = load_dataset_yaml(DEFAULT_DATASET_YAML)
    assert len(spec.names) == 8
    assert spec.names[0] == "conductor"
    assert set(spec.splits) == {"train", "val"}


def test_roboflows_paths_mean_the_data_sets_own_folders(tmp_path: Path) -> None:
    write_image = tmp_path / "set" / "train" / "images" / "a.jpg"
    write_image.parent.mkdir(parents=True)
    write_image.touch()
    file = write_yaml(tmp_path / "set", "train: ../train/images\nval: ../valid/images\n" + NAMES)
    spec = load_dataset_yaml(file)
    assert spec.image_files("train") == [write_image]
    with pytest.raises(UserError, match="val"):
        spec.image_files("val")

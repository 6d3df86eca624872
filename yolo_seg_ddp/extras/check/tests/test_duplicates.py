"""Photographs that show the same picture, through changes of their bytes, and those that do not."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.prepare.parsing.raw_folder import build, picture
from tests.prepare.parsing.test_copies import pairs, write  # noqa: F401 # pairs: a fixture
from yolo_seg_ddp.data.images import ImageError, encode_jpeg, fit_long_side
from yolo_seg_ddp.extras.check.pictures import Picture, find_duplicates, measure, same_measured
from yolo_seg_ddp.prepare import near_duplicates
from yolo_seg_ddp.prepare.near_duplicates import THUMB_PX, Likeness, same_pictures, signature
from yolo_seg_ddp.prepare.parsing.photograph import build_image


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Picture]:
    """Measures of a picture of 1200 x 900, of changed copies of it, and of others."""
    scene = picture(1, (1320, 990))
    image = scene[:900, :1200].copy()
    changed = image.astype(np.float32)
    jpegs = {
        "original": encode_jpeg(image),
        "darker": encode_jpeg((changed * 0.6).astype(np.uint8)),
        "brighter": encode_jpeg((changed * 1.3).clip(0, 255).astype(np.uint8)),
        "gamma": encode_jpeg((255 * (changed / 255) ** 1.6).astype(np.uint8)),
        "quality": encode_jpeg(image, 20),
        "small": encode_jpeg(fit_long_side(image, 200)),
        "cropped": encode_jpeg(image[:, 60:]),
        "cropped all around": encode_jpeg(image[45:-45, 60:-60]),
        "mirrored": encode_jpeg(np.ascontiguousarray(image[:, ::-1])),
        "turned": encode_jpeg(np.rot90(image).copy()),
        "halfway": encode_jpeg(scene[30:930, 35:1235]),
        # the camera turned by a twentieth of the view
        "moved": encode_jpeg(scene[60:960, 70:1270]),
        "other": encode_jpeg(picture(2, (1200, 900))),
    }
    folder = tmp_path_factory.mktemp("copies")
    for name, jpeg in jpegs.items():
        (folder / f"{name}.jpg").write_bytes(jpeg)
    return {name: measure(folder / f"{name}.jpg") for name in jpegs}


CHANGES = [
    "darker",
    "brighter",
    "gamma",
    "quality",
    "small",
    "cropped",
    "cropped all around",
    "mirrored",
    "turned",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_shows_the_same(measured: dict[str, Picture], change: str) -> None:
    groups, neighbours = same_measured([measured["original"], measured["other"], measured[change]])
    assert (groups.tolist(), neighbours) == ([0, 1, 0], [])


def test_the_same_place_seen_from_elsewhere_overlaps_and_is_no_copy(
    measured: dict[str, Picture],
) -> None:
    groups, neighbours = same_measured([measured[name] for name in ("original", "moved", "other")])
    assert (groups.tolist(), neighbours) == ([0, 1, 2], [(0, 1)])


@pytest.mark.parametrize(
    ("splits", "names", "kinds"),
    [
        (("train", "val"), ("original", "moved"), ["overlap"]),
        (("train", "train"), ("original", "moved"), []),
        (("train", "val"), ("original", "small"), ["leak"]),
        (("train", "train"), ("original", "small"), ["repeated"]),
        # of one group
        (("train", "val", "val"), ("original", "halfway", "moved"), ["leak", "leak", "repeated"]),
    ],
)
def test_overlaps_count_between_splits_and_only_once(
    measured: dict[str, Picture], splits: tuple[str, ...], names: tuple[str, ...], kinds: list[str]
) -> None:
    found = find_duplicates(
        [(split, Path(name), measured[name]) for split, name in zip(splits, names, strict=True)]
    )
    assert [one.kind for one in found] == kinds


def test_many_alike_are_one_finding_with_three_examples(measured: dict[str, Picture]) -> None:
    splits = ["train"] * 9 + ["val"] * 4
    found = find_duplicates(
        [(split, Path(f"{n}.jpg"), measured["original"]) for n, split in enumerate(splits)]
    )
    assert [(one.kind, len(one.details["files"])) for one in found] == [
        ("leak", 4),
        ("repeated", 11),
    ]
    assert found[1].text.startswith("11 photographs look like another")
    assert found[1].text.endswith(": 1.jpg, 2.jpg, 3.jpg and others")


def test_round_pictures_of_one_kind_are_no_copies_for_their_rim(tmp_path: Path) -> None:
    rows, columns = np.mgrid[:400, :400] - 200
    outside = np.hypot(rows, columns) > 180
    for number in range(6):
        image = picture(number, (400, 400)) // 3 + np.array([120, 50, 20], np.uint8)
        image[outside] = 0  # the disc is alike, its detail is not
        (tmp_path / f"{number}.jpg").write_bytes(encode_jpeg(image))
    (tmp_path / "6.jpg").write_bytes(encode_jpeg(np.rot90(image).copy(), 60))
    found = same_measured([measure(tmp_path / f"{number}.jpg") for number in range(7)])
    assert (found[0].tolist(), found[1]) == ([0, 1, 2, 3, 4, 5, 5], [])


def test_other_objects_before_a_fixed_camera_are_other_pictures(tmp_path: Path) -> None:
    scene = picture(1, (1200, 900)) // 3  # the objects are a hundredth of the picture
    for number in range(6):
        image = scene.copy()
        cv2.ellipse(
            image,
            (250 + 140 * number, 300 + 60 * number),
            (60, 20),
            30.0 * number,
            0,
            360,
            (90, 110, 60),
            -1,
        )
        (tmp_path / f"{number}.jpg").write_bytes(encode_jpeg(image))
    (tmp_path / "6.jpg").write_bytes(encode_jpeg((0.7 * image).astype(np.uint8), 40))
    numbers, _ = same_measured([measure(tmp_path / f"{number}.jpg") for number in range(7)])
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5, 5]


def test_copies_are_found_across_blocks_as_by_comparing_all_pairs() -> None:
    """300 pictures, every third a noisy copy of the one 150 before it; more than two blocks."""
    rng = np.random.default_rng(0)
    thumbs = rng.normal(128, 40, (300, THUMB_PX, THUMB_PX)).clip(0, 255)
    source = np.arange(300)
    source[150::3] -= 150
    thumbs = (thumbs[source] + rng.normal(0, 4, thumbs.shape)).clip(0, 255).astype(np.uint8)
    pictures = [
        Picture(400, 300, 1, k.to_bytes(2), 90.0, 200.0, 40.0, 3.0, thumb)
        for k, thumb in enumerate(thumbs)
    ]
    assert same_measured(pictures)[0].tolist() == source.tolist()


def test_pictures_of_one_colour_are_the_same_only_as_the_same_file(tmp_path: Path) -> None:
    grey = np.full((90, 120, 3), 90, np.uint8)
    for name, quality in (("a", 95), ("b", 95), ("c", 60)):
        (tmp_path / name).write_bytes(encode_jpeg(grey, quality))
    assert same_measured([measure(tmp_path / name) for name in "abc"])[0].tolist() == [0, 0, 2]


def test_copies_that_parsing_put_on_one_side_are_those_that_the_check_finds(
    pairs: Path,  # noqa: F811
) -> None:
    build(pairs)
    numbers, _ = same_measured(
        [measure(file) for file in (pairs.parent / "processed").glob("*/images/*.jpg")]
    )
    assert (len(numbers), len(set(numbers.tolist()))) == (24, 12)


def test_parsing_and_checking_find_the_same_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first said that each was on one side, and the second that a pair was in two splits."""
    for name, image in (
        ("small.jpg", picture(1)),
        ("large.jpg", np.kron(picture(1), np.ones((9, 9, 1), np.uint8))),
    ):
        write(tmp_path, name, image)
        jpeg, facts = build_image((tmp_path / name).read_bytes(), 1280)
        (tmp_path / "output.jpg").write_bytes(jpeg)
        assert bytes.fromhex(facts.signature) == signature(measure(tmp_path / "output.jpg").thumb)
    seen: list[list[bytes]] = []

    def record(*two: np.ndarray) -> Likeness:
        seen.append([thumb.tobytes() for thumb in two])
        return Likeness()

    monkeypatch.setattr(near_duplicates, "likeness", record)
    thumbs = np.stack([measure(tmp_path / name).thumb for name in ("small.jpg", "output.jpg")])
    for order in ([0, 1], [1, 0]):
        kept = thumbs[order]
        same_pictures("ab", [signature(thumb) for thumb in kept], kept.__getitem__)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("missing", [1, 2, 500])
def test_a_jpeg_without_its_last_bytes_is_refused(missing: int, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encode_jpeg(picture(1))[:-missing])
    with pytest.raises(ImageError, match="truncated"):
        measure(tmp_path / "a.jpg")

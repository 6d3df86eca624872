"""Masks as PNG, GIF, TIFF or BMP become outlines with their holes and parts, within bounds."""

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import parse_labels
from tests.prepare.parsing.raw_folder import photo, tree
from tests.prepare.parsing.tool_folder import (
    BOX,
    HEIGHT,
    PHOTO,
    STRIP,
    WIDTH,
    box_of,
    build,
    drawn,
    files,
    hard_masks,
    iou,
    labels_of,
    mask,
    png,
    texts_of,
    whole,
    yolo,
)
from tests.support.plugin import run_main
from yolo_seg_ddp.data.labels import ANY_CLASS, read_yolo_label
from yolo_seg_ddp.extras.labels import mask_values
from yolo_seg_ddp.extras.labels.cvat import decode_rows
from yolo_seg_ddp.extras.labels.tests.tool_files import REGIONS, cvat, shape, via
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.prepare.parsing.formats import YOLO
from yolo_seg_ddp.utils.errors import UserError


def test_masks_of_cvat_and_of_pngs_keep_their_holes_and_parts(tmp_path: Path) -> None:
    for name, values in hard_masks().items():
        runs = np.diff([0, *np.flatnonzero(np.diff(values.ravel())) + 1, values.size]).tolist()
        rle = ", ".join(map(str, [0] * bool(values[0, 0]) + runs))
        text = cvat(shape("mask", "pole", rle=rle, left=0, top=0, width=WIDTH, height=HEIGHT))
        for kind, contents in (
            ("xml", {"a.xml": text}),
            ("png", {"a_pole_1.png": png(values.astype(np.uint8) * 255)}),
        ):
            raw = files(tmp_path / f"{name}-{kind}" / "raw", {**contents, "a.jpg": PHOTO})
            build(raw)
            ((_, polygon),) = labels_of(raw.parent / "processed", num_classes=2)
            assert iou(whole(drawn(polygon)), values) >= 0.99, f"{name} as {kind}"


def test_masks_at_an_address_are_fetched_as_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"{number}.jpg": photo(WIDTH, HEIGHT, shade=50 + 9 * number) for number in range(6)}
    contents |= {f"{number}_pole_1.png": png(mask(BOX)) for number in range(6)}
    raw = files(tmp_path / "raw", contents)
    for place, output in ((raw, "local"), (raw.as_uri(), "stored")):
        assert (
            run_main(parse_labels, monkeypatch, "--input", place, "--output", tmp_path / output)
            == 0
        )
    for name, content in tree(tmp_path / "local").items():
        assert name.startswith(".") or tree(tmp_path / "stored")[name] == content, name


@pytest.mark.parametrize("name", hard_masks())
def test_cvats_rows_are_decoded(name: str) -> None:
    mask = hard_masks()[name]
    changes = np.flatnonzero(np.diff(mask.ravel(), prepend=False))
    rows = ", ".join(map(str, np.diff([0, *changes, mask.size])))
    bitmap, left, top = decode_rows(rows, (5, 3, WIDTH, HEIGHT))
    assert (whole(Region(left - 5, top - 3, bitmap)) == mask).all()


def test_a_mask_is_never_a_photograph(tmp_path: Path) -> None:
    grainy = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
    contents = {
        "images/a.jpg": PHOTO,
        "images/b.png": png(grainy),
        "images/b_1.png": png(grainy[::-1]),
    }
    contents |= {
        "masks/a.png": png(mask(BOX)),
        "masks/b.png": png(mask(STRIP)),
        "classes.txt": b"pole",
    }
    raw = files(tmp_path / "raw", contents)
    manifest = build(raw)
    assert [record["source"] for record in manifest["photographs"]] == [
        "images/a.jpg",
        "images/b.png",
    ]
    text = files(raw, {"labels/a.txt": yolo(0, BOX)})
    manifest = build(text, label_format=YOLO, keep_unlabelled=True)
    assert {record["source"] for record in manifest["photographs"]} == {
        "images/a.jpg",
        "images/b.png",
        "images/b_1.png",
    }


def test_masks_and_regions_without_a_list_of_classes_get_classes_or_numbers(tmp_path: Path) -> None:
    values = mask(BOX, value=3) + mask(STRIP, value=5)
    for name, content, classes in [
        ("masks/a.png", png(values), ["class_3", "class_5"]),
        (
            "masks/a.png",
            png(np.stack([values * 0, values, values * 9], axis=2)),
            ["colour_1b0300", "colour_2d0500"],
        ),
        (
            "masks/a.png",
            png(values.astype(np.uint16) + (values > 0).astype(np.uint16) * 300),
            ["object"],
        ),
        ("masks/a_instances.png", png(values), ["object"]),
        # 179 values
        (
            "masks/a.png",
            png(np.repeat(np.arange(180, dtype=np.uint8)[:, None], 300, axis=1)),
            ["object"],
        ),
        ("masks/0c5d.png", png(mask(BOX)), ["object"]),  # Data Science Bowl 2018
        ("masks/a.png", png(cv2.blur(mask(BOX), (3, 3))), ["object"]),
        ("a.json", via([REGIONS[0] | {"region_attributes": {}}]).encode(), ["object"]),
    ]:
        raw = files(
            tmp_path / f"{len(list(tmp_path.iterdir()))}" / "raw",
            {"images/a.jpg": PHOTO, name: content},
        )
        assert build(raw)["classes"] == classes


@pytest.mark.parametrize("folders", [("masks", "images"), ("SegmentationClass", "JPEGImages")])
def test_void_pixels_are_a_region_to_ignore_for_all_classes(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    values = mask(BOX, value=1) + mask(STRIP, value=255)
    contents: dict[str, bytes | str] = {
        f"{folders[0]}/a.png": png(values),
        f"{folders[1]}/a.jpg": PHOTO,
    }
    if folders[0] != "masks":
        contents["SegmentationObject/a.png"] = png(values)
    manifest = build(files(tmp_path / "raw", contents))
    assert (manifest["classes"], manifest["counts"]["ignored"]) == (["class_1"], {"all classes": 1})
    (file,) = (tmp_path / "processed").glob("*/ignore/a.txt")
    class_ids, outlines = read_yolo_label(file, 1, ANY_CLASS)
    assert (class_ids.tolist(), box_of(outlines[0])) == ([ANY_CLASS], STRIP)


def several(*masks: np.ndarray, folder: str = "masks", **more: str) -> dict[str, bytes | str]:
    """Return a photograph for each mask, and more files."""
    photographs = {
        f"images/{n}.jpg": photo(WIDTH, HEIGHT, shade=40 + 20 * n) for n in range(len(masks))
    }
    lists = {name.replace("__", "."): text for name, text in more.items()}
    return {
        **photographs,
        **{f"{folder}/{n}.png": png(values) for n, values in enumerate(masks)},
        **lists,
    }


ONE, TWO, THREE, WHITE = (mask(BOX, value=value) for value in (1, 2, 3, 255))
DOTS = mask((0, 0, 2, 1), value=7) + mask((9, 9, 10, 10), value=40)
IN_ALL_MASKS: list[tuple[dict[str, bytes | str], dict[str, int], str]] = [
    (
        several(ONE, TWO, THREE, classes__txt="a\nb\nc"),
        {"a": 1, "b": 1, "c": 1},
        "the value 1 is its first name, a",
    ),
    (
        several(ONE, TWO, folder="SegmentationClass", class_names__txt="a\nb"),
        {"a": 1, "b": 1},
        "the value 1 is its first",
    ),
    (several(ONE, TWO, classes__txt="BG\na\nb"), {"a": 1, "b": 1}, ""),
    (
        several(ONE, TWO, ONE, TWO, ONE + DOTS),
        {"class_1": 3, "class_2": 2},
        "4.png: the values 7, 40 in this mask only",
    ),
    (several(WHITE, WHITE, DOTS), {"object": 2}, "2.png: the values 7, 40: damage of 3 pixels"),
    (several(WHITE, WHITE, ONE), {"object": 3}, "2.png: the value 1: read as black and white"),
    (
        several(WHITE, WHITE, WHITE + mask((0, 0, 1, 1), value=9)),
        {"object": 3},
        "2.png: the values 9, 255: read as black",
    ),
    (
        several(WHITE, WHITE, DOTS, folder="masks/wire"),
        {"wire": 2},
        "2.png: the values 7, 40: damage",
    ),
    (several(ONE, TWO, WHITE, classes__txt="background\na\nb"), {"a": 1, "b": 1}, ""),
    (
        several(ONE, TWO) | several(WHITE, WHITE, folder="fore"),
        {"class_1": 1, "class_2": 1},
        "masks of fore/ are not used: those of masks/ tell more about the classes",
    ),
    (
        several(ONE, TWO, obj_class_to_machine_color__json='{"a": 1, "b": [2, 2, 2]}')
        | several(*(np.stack([m, m * 9, m], axis=2) for m in (ONE, TWO)), folder="masks_human"),
        {"a": 1, "b": 1},
        "masks_human/",
    ),
    (
        several(ONE, TWO, classes__txt="a\nb\nc\nd"),
        {},
        "classes.txt: is 0 or 1 the value of its first name, a",
    ),
    (
        several(WHITE, WHITE, ONE + mask(STRIP, value=2)),
        {},
        "2.png: holds the values 1, 2, but most masks of this folder",
    ),
    (
        several(ONE, TWO, obj_class_to_machine_color__json="[1]"),
        {},
        "not Supervisely's list of values",
    ),
]


@pytest.mark.parametrize(("contents", "objects", "text"), IN_ALL_MASKS)
def test_what_one_mask_does_not_tell_all_masks_do(
    tmp_path: Path, contents: dict[str, bytes | str], objects: dict[str, int], text: str
) -> None:
    """Else names move by one value, a few grey pixels become classes, or each object is read from
    two masks.
    """
    raw = files(tmp_path / "raw", contents)
    if not objects:
        with pytest.raises(UserError, match=text):
            build(raw)
        return
    manifest = build(raw)
    assert {
        name: sum(counts.values()) for name, counts in manifest["counts"]["objects"].items()
    } == objects
    assert text in texts_of(manifest)
    assert bool(manifest["problems"]) == bool(text)


def test_masks_keep_the_bounds_of_untrusted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_values, "MAX_MASK_PIXELS", 1000)
    with pytest.raises(UserError, match="150x90 is more than 0 megapixels"):
        build(files(tmp_path / "large", {"a.jpg": PHOTO, "a_mask.png": png(mask(BOX))}))
    monkeypatch.undo()
    noise = (np.random.default_rng(0).random((400, 400)) > 0.97).astype(np.uint8) * 255
    monkeypatch.setattr(mask_values, "MAX_OBJECTS", 100)
    with pytest.raises(UserError, match="more than 100 objects in one mask"):
        build(
            files(
                tmp_path / "noise",
                {"SegmentationClass/a.png": png(noise), "JPEGImages/a.jpg": photo(400, 400)},
            )
        )


def picture_file(values: np.ndarray, suffix: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, {".gif": "GIF", ".tif": "TIFF", ".bmp": "BMP"}[suffix])
    return stream.getvalue()


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".bmp"])
@pytest.mark.parametrize(
    "names",
    [
        ("images/21_training.jpg", "1st_manual/21_manual1"),
        ("images/a.jpg", "masks/a"),
        ("a.jpg", "a_mask"),
    ],
)
def test_masks_of_other_kinds_and_with_an_ending_of_their_own(
    tmp_path: Path, suffix: str, names: tuple[str, str]
) -> None:
    manifest = build(
        files(
            tmp_path / "raw",
            {names[0]: PHOTO, f"{names[1]}{suffix}": picture_file(mask(BOX), suffix)},
        )
    )
    assert manifest["classes"] == ["object"]
    (found,) = labels_of(tmp_path / "processed", Path(names[0]).stem, num_classes=1)
    assert box_of(found[1]) == BOX


def test_two_masks_of_one_photograph_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    """DRIVE has the field of view beside the vessels."""
    contents: dict[str, bytes | str] = {
        "images/21_training.jpg": PHOTO,
        "1st_manual/21_manual1.gif": picture_file(mask(BOX), ".gif"),
        "mask/21_training_mask.gif": picture_file(mask((5, 5, 140, 85)), ".gif"),
    }
    with pytest.raises(
        UserError,
        match=r"1st_manual/21_manual1.gif and mask/21_training_mask.gif are masks of one photo",
    ):
        build(files(tmp_path / "raw", contents))

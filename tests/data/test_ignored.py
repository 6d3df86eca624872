"""Regions to ignore and rough outlines: their files, and that they move with the picture and change
nothing else.
"""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import COLOURLESS, PICTURES, SIZE_PX, Pictures, box, dataset_of, samples_of
from tests.data.test_windows import MANY, windows_of
from tests.prepare.parsing.tool_folder import files
from yolo_seg_ddp.data.dataset import UNKNOWN, Photo, Sample, collate, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.labels import ANY_CLASS, with_regions_of
from yolo_seg_ddp.utils.errors import DataErrors


def doubled(photo: Photo) -> Photo:
    return replace(photo, ignored_ids=photo.class_ids, ignored=photo.polygons)


def placed(shown: Photo | Sample) -> tuple[set[tuple[int, bytes]], set[tuple[int, bytes]]]:
    """Return classes and outlines of objects and of regions."""
    both = ((shown.class_ids, shown.polygons), (shown.ignored_ids, shown.ignored))
    objects, regions = (
        {(k, outline.tobytes()) for k, outline in zip(*each, strict=True)} for each in both
    )
    return objects, regions


VIEWS: list[dict[str, Any]] = [
    {"degrees": 30, "flipud": 0.5, "mosaic": 0},
    {"scale": 0.9},
    {"mixup": 1},
]
ADDED: list[dict[str, Any]] = [
    {"copy_paste": 1},
    *({name: 1, "wire_classes": (2,)} for name in ("paste", "draw_wires")),
]


@pytest.mark.parametrize("config", VIEWS + ADDED, ids=str)
def test_regions_move_with_objects_of_their_outline_and_change_nothing_else(
    config: dict[str, Any],
) -> None:
    pictures, augmentation = copy.copy(PICTURES), replace(COLOURLESS, **config)
    pictures.photos = [doubled(photo) for photo in PICTURES.photos]
    samples, views = (samples_of(each, pictures=pictures) for each in (augmentation, COLOURLESS))
    assert "scale" not in config or any(len(now.ignored) > len(now.polygons) for now in samples), (
        "any part is enough"
    )
    for now, before, view in zip(samples, samples_of(augmentation), views, strict=True):
        assert placed(now)[0] == placed(before)[0]
        assert np.array_equal(np.maximum(now.masks, 0), before.masks)
        # bars are not drawn over regions
        assert "draw_wires" in config or np.array_equal(now.image, before.image)
        assert config in ADDED or placed(now)[1] >= placed(now)[0]
        assert config not in ADDED or placed(now)[1] == placed(view)[1], (
            "no region is pasted, or cut by what is"
        )


ROUGH_CLASS = 0


def with_rough(photo: Photo) -> Photo:
    return replace(photo, rough=np.flatnonzero(photo.class_ids == ROUGH_CLASS))


@pytest.mark.parametrize("config", VIEWS + ADDED, ids=str)
def test_a_rough_outline_stays_rough_and_is_not_pasted(config: dict[str, Any]) -> None:
    pictures, augmentation = copy.copy(PICTURES), replace(COLOURLESS, **config)
    pictures.photos = [with_rough(photo) for photo in PICTURES.photos]
    samples = samples_of(augmentation, pictures=pictures)
    assert sum(len(sample.rough) for sample in samples) > 9
    for now, before, view in zip(
        samples, samples_of(augmentation), samples_of(COLOURLESS), strict=True
    ):
        rough = np.flatnonzero(now.class_ids == ROUGH_CLASS)
        assert (
            now.rough.tolist() == rough.tolist()
            if "paste" not in config
            else set(now.rough) <= set(rough)
        )
        if config in ADDED:
            assert len(now.rough) <= (view.class_ids == ROUGH_CLASS).sum()
        else:
            assert placed(now) == placed(before)
            assert np.array_equal(now.image, before.image)


def with_boxes(photo: Photo) -> Photo:
    """Return the photograph with boxes in place of the outlines of a class."""
    boxed = np.flatnonzero(photo.class_ids == ROUGH_CLASS)
    polygons = [*photo.polygons]
    for number in boxed:
        (x1, y1), (x2, y2) = polygons[number].min(0), polygons[number].max(0)
        polygons[number] = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])
    return replace(photo, polygons=polygons, boxed=boxed)


@pytest.mark.parametrize("config", VIEWS + ADDED, ids=str)
def test_a_box_stays_a_box_until_it_is_turned_and_is_not_pasted(config: dict[str, Any]) -> None:
    pictures, augmentation = copy.copy(PICTURES), replace(COLOURLESS, **config)
    pictures.photos = [with_boxes(photo) for photo in PICTURES.photos]
    samples = samples_of(augmentation, pictures=pictures)
    kept, other = ("rough", "boxed") if "degrees" in config else ("boxed", "rough")
    assert sum(len(getattr(sample, kept)) for sample in samples) > 9
    for now, view in zip(samples, samples_of(COLOURLESS, pictures=pictures), strict=True):
        of_class = np.flatnonzero(now.class_ids == ROUGH_CLASS)
        assert not len(getattr(now, other))
        assert set(getattr(now, kept)) <= set(of_class)
        if "paste" not in config:
            assert getattr(now, kept).tolist() == of_class.tolist()
        if config in ADDED:
            assert len(now.boxed) <= (view.class_ids == ROUGH_CLASS).sum()
        for number in now.boxed if "paste" not in config else ():
            drawn, (low, high) = now.polygons[number], now.boxes[number].reshape(2, 2)
            assert (np.minimum(np.abs(drawn - low), np.abs(drawn - high)) < 1e-4).all()


def test_what_a_box_hides_of_a_larger_outline_is_unknown() -> None:
    pictures = Pictures(1, (SIZE_PX, SIZE_PX))
    outlines = [box(0.25, 0.25, 0.5, 0.5), box(0.5, 0.5, 0.5, 0.25), box(0.5, 0.5, 0.125, 0.125)]
    pictures.photos[0] = Photo(Path(), np.arange(3), outlines, boxed=np.array([1]))
    masks = dataset_of(None, pictures)[0, 0].masks
    counts = [int((masks == value).sum()) for value in (UNKNOWN, 1, 2, 3)]
    # The box lies on a quarter of the square, and an outline of 4 x 4 pixels on both.
    assert counts == [64 - 16, 256 - 64, 128 - 64, 16]


def test_a_window_keeps_every_piece_of_a_region() -> None:
    windows = windows_of([doubled(photo) for photo, _ in MANY], [size for _, size in MANY], 4)
    shown = [placed(windows.labels(windows.window(0, index))) for index in range(len(windows))]
    assert all(objects <= regions for objects, regions in shown)
    assert any(objects < regions for objects, regions in shown), "pieces too small to be objects"
    whole = [np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)]
    photos = [with_regions_of(photo, np.array([7]), whole) for photo, _ in MANY]
    windows = windows_of(photos, [size for _, size in MANY], 4)
    for photo in (windows.labels(windows.window(0, index)) for index in range(len(windows))):
        assert (photo.ignored_ids.tolist(), photo.unsearched.tolist()) == ([7], [0])
    windows = windows_of([with_rough(photo) for photo, _ in MANY], [size for _, size in MANY], 4)
    for photo in (windows.labels(windows.window(0, index)) for index in range(len(windows))):
        assert photo.rough.tolist() == np.flatnonzero(photo.class_ids == ROUGH_CLASS).tolist()
    boxes = [with_boxes(photo) for photo, _ in MANY]
    windows = windows_of(boxes, [size for _, size in MANY], 4)
    for photo in (windows.labels(windows.window(0, index)) for index in range(len(windows))):
        assert photo.boxed.tolist() == np.flatnonzero(photo.class_ids == ROUGH_CLASS).tolist()
        assert all(len(photo.polygons[number]) == 4 for number in photo.boxed)


@pytest.mark.parametrize("config", [None, *VIEWS, {"copy_paste": 1}], ids=str)
def test_outlines_are_learned_where_nobody_looked_for_another_class(
    config: dict[str, Any] | None,
) -> None:
    """A region to ignore as large as the photograph took the background from all masks."""
    whole = [np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)] * 2
    pictures = copy.copy(PICTURES)
    pictures.photos = [
        with_regions_of(photo, np.array([5, ANY_CLASS]) if n == 2 else np.array([5, 6]), whole)
        for n, photo in enumerate(PICTURES.photos)
    ]
    augmentation = None if config is None else replace(COLOURLESS, **config)
    samples = samples_of(augmentation, pictures=pictures)
    for now, before in zip(samples, samples_of(augmentation), strict=True):
        assert np.array_equal(np.maximum(now.masks, 0), before.masks)
        is_whole = np.isin(np.arange(len(now.ignored)), now.unsearched)
        assert set(now.ignored_ids[is_whole]) <= {5, 6}
        assert set(now.ignored_ids[~is_whole]) <= {ANY_CLASS}
        assert (now.masks == -1).any() == (ANY_CLASS in now.ignored_ids)
    assert sum(len(now.unsearched) for now in samples) > len(samples)


def test_a_batch_has_a_map_for_each_image_and_class_below_its_objects() -> None:
    pictures = Pictures(2, (SIZE_PX, SIZE_PX))
    outlines = [box(0.5, 0, 0.5, 1), box(0, 0, 0.25, 0.25), box(0, 0.75, 0.25, 0.25)]
    pictures.photos[1] = Photo(
        Path(), np.array([1]), [box(0.5, 0.5, 0.25, 0.25)], np.array([ANY_CLASS, 2, 2]), outlines
    )
    data = dataset_of(None, pictures)
    batch = pickle.loads(pickle.dumps(collate([data[0, 0], data[0, 1]])))  # noqa: S301 # our own
    assert batch.ignored_of.tolist() == [[1, 1], [ANY_CLASS, 2]]
    assert batch.ignored.sum((1, 2)).tolist() == [16 * 32, 2 * 8 * 8]
    assert not batch.ignored[0, :, :16].any()
    counts = [int((batch.masks[1] == value).sum()) for value in (-1, 0, 1)]
    assert counts == [16 * 32 + 128 - 64, 384, 64], "the object is on top"
    assert batch.masks[0].min() == 0
    alone = collate([data[0, 0]])
    assert alone.ignored is alone.rough is alone.boxed is None
    with_one = collate([data[0, 0], replace(data[0, 1], rough=np.array([0]))])
    assert vars(with_one)["rough"].tolist() == [*[False] * len(alone.class_ids), True]


def test_regions_are_read_from_the_folder_beside_the_labels(tmp_path: Path) -> None:
    row, yaml = "1 0.5 0.5 0.2 0.2\n", "train: images\nval: flat\nnames: [wire, pole]\n"
    contents = {
        "data.yaml": yaml,
        "images/a.jpg": "",
        "labels/a.txt": row,
        "flat/c.jpg": "",
        "flat/c.txt": row,
    }
    spec = load_dataset_yaml(files(tmp_path, contents) / "data.yaml")
    file = files(tmp_path, {"ignore/a.txt": f"\n0{row[1:]}-1 0.5 0.5 0.5 0.5"}) / "ignore/a.txt"
    (one,), (flat,) = read_photos(spec, "train"), read_photos(spec, "val")
    assert (one.class_ids.tolist(), one.ignored_ids.tolist(), one.rough.tolist()) == (
        [1],
        [0, ANY_CLASS],
        [],
    )
    np.testing.assert_allclose(one.ignored[1][0], 0.25)
    files(
        tmp_path,
        {"labels/a.txt": f"0 0.5 0.5 0.1 0.1\n{row}", "ignore/a.txt": f"1 0.5 0.5 0.1 0.1\n{row}"},
    )
    (one,) = read_photos(spec, "train")
    assert (one.class_ids.tolist(), one.ignored_ids.tolist(), one.rough.tolist()) == (
        [0, 1],
        [1],
        [1],
    )
    assert one.boxed.tolist() == [0], "a row of five numbers, unless its outline is rough"
    assert not flat.ignored, "labels beside the photographs are no regions"
    file.write_text(f"{row}-2 0.5 0.5 0.5 0.5")
    with pytest.raises(DataErrors, match=r"ignore/a\.txt:2: class -2 is not one of -1\.\.1"):
        read_photos(spec, "train")
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(DataErrors, match="is a link that leaves it"):
        read_photos(spec, "train")

"""Training on windows: which ones, in what shares, and that labels lie on their pixels; the same
for all ranks and workers.
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import WINDOWED, WINDOWED_PX, windows_as_samples
from tests.data.pictures import (
    COLOURLESS,
    WORST_LABEL,
    box,
    content,
    unlabelled_pixels,
    worst_label,
)
from yolo_seg_ddp.data import windows as module
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import letterbox, write_jpeg
from yolo_seg_ddp.data.labels import Photo, format_yolo_label
from yolo_seg_ddp.data.windows import (
    CELL,
    EMPTY,
    OBJECT,
    ROLES,
    WHOLE,
    Window,
    WindowConfig,
    WindowedPhotos,
    Windows,
)
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.data import open_data

SIDE_PX = 640
STILL = Augmentation(mosaic=0, translate=0, scale=0, fliplr=0, hsv_h=0, hsv_s=0, hsv_v=0)


def test_boxes_and_photographs_of_both_splits_are_said(tmp_path: Path) -> None:
    """A training on boxes, whose val was its train, said neither."""
    boxes = [box(0.1 * number, 0.2, 0.05, 0.3) for number in range(10)]
    for name, outlines in {"a": boxes, "b": [outline[:3] for outline in boxes]}.items():
        write_jpeg(tmp_path / f"{name}.jpg", np.zeros((60, 80, 3), np.uint8))
        (tmp_path / f"{name}.txt").write_text(
            format_yolo_label((0, outline) for outline in outlines)
        )
        (tmp_path / f"{name}-list.txt").write_text(f"{name}.jpg\n")
    # Of c three objects have boxes, of d the only one.
    rows = (tmp_path / "b.txt").read_text().splitlines(keepends=True)
    box_row = "0 0.5 0.5 0.2 0.2\n"
    for name, text in {"c": box_row * 3 + "".join(rows[3:]), "d": box_row}.items():
        write_jpeg(tmp_path / f"{name}.jpg", np.zeros((60, 80, 3), np.uint8))
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / f"{name}-list.txt").write_text(f"{name}.jpg\n")

    def said_of(train: str, val: str, **options: Any) -> list[str]:
        said: list[str] = []
        (tmp_path / "data.yaml").write_text(
            f"train: {train}-list.txt\nval: {val}-list.txt\nnames: [box]\n"
        )
        spec = load_dataset_yaml(tmp_path / "data.yaml")
        config = TrainConfig(img_size=64, cache="none", save_dir=str(tmp_path / "none"), **options)
        open_data(config, spec, torch.device("cpu"), said.append)
        beginnings = ("The outlines", "Outlines", "WARNING", "1 photograph")
        return [line.partition(";")[0][:61] for line in said if line.startswith(beginnings)]

    shared = "1 photograph of val is in train, too: scores will be too high"
    rectangles = "The outlines of box are upright rectangles and teach such mas"
    assert said_of("a", "a") == [rectangles, shared]
    assert said_of("b", "a") == []
    counts = "Outlines: 7 of 10 objects in train, 0 of 1 object in val"
    no_masks = "WARNING: no outline in val: mask AP is 0, and boxes choose be"
    turned = "WARNING: --degrees, --shear: of turned boxes only the class i"
    assert said_of("c", "d", degrees=9.0) == [counts, no_masks, turned]


def photo_with(count: int, seed: int, largest: float = 0.3) -> Photo:
    """A photograph with objects of all sizes, from specks to wires across it; each has a class of
    its own.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(0.004, largest, (count, 2))
    sizes[::3] = np.stack(
        [rng.uniform(0.3, 1, len(sizes[::3])), np.full(len(sizes[::3]), 0.004)], 1
    )
    polygons = [box(*rng.uniform(-0.02, 0.98, 2), *size) for size in sizes]
    return Photo(Path("unread.jpg"), np.arange(count), polygons)


def windows_of(
    photos: list[Photo], sizes: list[tuple[int, int]], per_photo: int, seed: int = 0
) -> Windows:
    return Windows(photos, np.array(sizes), SIDE_PX, WindowConfig(per_photo, 0.5, 1.0), seed)


MANY = [
    (photo_with(count, count), size)
    for count, size in [(12, (3648, 5472)), (3, (2000, 900)), (40, (1500, 2600))]
]


@pytest.mark.parametrize(("per_photo", "has_luck"), [(1, True), (3, True), (8, True), (3, False)])
def test_every_object_is_seen_in_time(
    per_photo: int, has_luck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk over the cells alone keeps the promise, too."""
    if not has_luck:
        monkeypatch.setattr(
            Windows, "on_object", lambda self, photo, rng: Window(photo, 0, 0, 9, 9)
        )
    photos, sizes = [photo for photo, _ in MANY], [size for _, size in MANY]
    windows = windows_of(photos, sizes, per_photo)
    stated = windows.epochs_until_seen()
    assert len(stated) == len(photos)
    latest = np.zeros(len(photos), int)
    for start in (0, 5):
        for number, photo in enumerate(photos):
            unseen, epochs = set(photo.class_ids.tolist()), 0
            while unseen:
                for slot in range(per_photo):
                    window = windows.window(start + epochs, number * per_photo + slot)
                    is_whole = window.shape == sizes[number]  # seen far away only does not count
                    unseen -= set() if is_whole else set(windows.labels(window).class_ids.tolist())
                epochs += 1
                assert epochs <= stated[number], f"{unseen} not seen"
            latest[number] = max(latest[number], epochs)
    assert max(latest) > max(stated) / 4, "the stated number is far too high"


def test_windows_lie_in_their_photograph_at_the_scales_asked_for() -> None:
    sizes = [size for _, size in MANY]
    windows = windows_of([photo_with(12, number, largest=0.1) for number in range(3)], sizes, 4)
    scales = []
    for index in range(len(windows)):
        for epoch in range(40):
            window = windows.window(epoch, index)
            height, width = sizes[window.photo]
            assert 0 <= window.left < window.right <= width
            assert 0 <= window.top < window.bottom <= height
            if window.shape != (height, width):
                scales.append(SIDE_PX / max(window.shape))
    assert min(scales) == pytest.approx(0.5, abs=0.03)
    assert max(scales) == pytest.approx(1.0, abs=0.03)
    assert np.median(scales) == pytest.approx(math.sqrt(0.5), abs=0.05)


def test_shares_of_the_roles_and_of_windows_without_objects() -> None:
    photos = [MANY[0][0], Photo(Path("empty.jpg"), np.zeros(0, np.int64), []), MANY[1][0]]
    sizes = [(3648, 5472), (3648, 5472), (2000, 900)]
    windows = windows_of(photos, sizes, 2)
    drawn = [windows.window(epoch, index) for epoch in range(80) for index in range(len(windows))]
    whole = [window.shape == sizes[window.photo] for window in drawn]
    assert np.mean(whole) == ROLES.count(WHOLE) / len(ROLES)
    of_empty = [window.photo == 1 for window in drawn]
    assert np.mean(of_empty) * 3 == (ROLES.count(WHOLE) + ROLES.count(EMPTY)) / len(ROLES)
    without = [not len(windows.labels(window).class_ids) for window in drawn]
    assert 0.04 < np.mean(without) <= (ROLES.count(EMPTY) + ROLES.count(WHOLE) / 3) / len(ROLES)
    first = Counter(
        windows.window(0, index).shape == sizes[index // 2] for index in range(len(windows))
    )
    assert first[False] >= 4, "the first epoch has more roles than one"


def test_photographs_without_any_object_are_walked_over() -> None:
    empty = Photo(Path("empty.jpg"), np.zeros(0, np.int64), [])
    windows = windows_of([empty, empty], [(2000, 3000), (300, 200)], 3)
    assert windows.epochs_until_seen().tolist() == []
    seen = np.zeros((2000, 3000), bool)
    for epoch in range(60):
        for index in range(6):
            window = windows.window(epoch, index)
            assert window.photo == index // 3
            if window.photo == 0 and window.shape != (2000, 3000):
                seen[window.top : window.bottom, window.left : window.right] = True
            elif window.photo == 1:  # smaller than the network's input: always whole
                assert window.shape == (300, 200)
    assert seen.all()


def test_objects_of_a_rare_class_are_shown_as_often_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common = [box(0.1 + 0.02 * number, 0.1, 0.01, 0.02) for number in range(30)]
    photo = Photo(Path("x.jpg"), np.array([*([0] * 30), 1]), [*common, box(0.8, 0.8, 0.01, 0.02)])
    monkeypatch.setattr(module, "ROLES", (OBJECT,))
    windows = windows_of([photo], [(3648, 5472)], 1)
    shown = [
        set(windows.labels(windows.window(epoch, 0)).class_ids.tolist()) for epoch in range(300)
    ]
    assert 0.4 < np.mean([classes == {1} for classes in shown]) < 0.6
    assert all(shown)


def test_windows_of_one_scale_have_it_on_large_objects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROLES", (OBJECT,))
    photo = Photo(Path("x.jpg"), np.array([0]), [box(0.2, 0.3, 0.4, 0.5)])
    windows = Windows([photo], np.array([(3648, 5472)]), SIDE_PX, WindowConfig(1, 1.0, 1.0), 0)
    assert {windows.window(epoch, 0).shape for epoch in range(20)} == {(SIDE_PX, SIDE_PX)}


@pytest.mark.parametrize("low_scale", [0.25, 0.9])
def test_compact_objects_are_whole_and_wires_not_shrunk(
    low_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROLES", (OBJECT,))
    objects = {
        "small": box(0.5, 0.5, 0.01, 0.02),
        "large": box(0.2, 0.3, 0.4, 0.5),  # 2189 x 1824 pixels, 3.4 times the window at scale 1
        "wire": box(0.1, 0.4, 0.8, 0.002),
    }
    scales = {}
    for number, (name, outline) in enumerate(objects.items()):
        photo = Photo(Path("x.jpg"), np.array([0]), [outline])
        windows = Windows(
            [photo], np.array([(3648, 5472)]), SIDE_PX, WindowConfig(1, low_scale, 1.0), number
        )
        drawn = [windows.window(epoch, 0) for epoch in range(200)]
        scales[name] = [SIDE_PX / max(window.shape) for window in drawn]
        low, high = (outline.min(axis=0), outline.max(axis=0)) * np.array([5472, 3648])
        whole = [
            (low >= (window.left, window.top)).all()
            and (high <= (window.right, window.bottom)).all()
            for window in drawn
        ]
        assert all(whole) if name != "wire" else not any(whole), name
    fitting = SIDE_PX * 7 / 8 / (0.4 * 5472)
    assert min(scales["large"]) == pytest.approx(min(low_scale, fitting / 2), rel=0.05)
    assert max(scales["large"]) == pytest.approx(fitting, rel=0.05)
    for name in ("small", "wire"):
        assert min(scales[name]) == pytest.approx(low_scale, rel=0.05)
        assert max(scales[name]) == pytest.approx(1, rel=0.05)


def test_a_cell_is_never_at_the_border_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of([MANY[0][0]], [MANY[0][1]], 1)
    monkeypatch.setattr(module, "ROLES", (CELL,))
    asked = []
    bounds = Windows._bounds

    def noted(self: Windows, photo: int, cell: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(bounds(self, photo, cell))
        return asked[-1]

    monkeypatch.setattr(Windows, "_bounds", noted)
    for epoch in range(200):
        window = windows.window(epoch, 0)
        low, high = asked[-1]
        margin = max(window.shape) / 16 - 1
        for start, end, least, most, side in (
            (window.left, window.right, low[0], high[0], 5472),
            (window.top, window.bottom, low[1], high[1], 3648),
        ):
            assert start <= max(least - margin, 0)
            assert end >= min(most + margin, side)


def test_a_wire_along_an_edge_of_the_photograph_is_no_sliver() -> None:
    edges = [
        box(0, 0, 2 / 4000, 1),
        box(0, 0, 1, 2 / 3000),
        box(1 - 2 / 4000, 0, 2 / 4000, 1),
        box(0, 1 - 2 / 3000, 1, 1),
    ]
    windows = windows_of([Photo(Path("x.jpg"), np.arange(4), edges)], [(3000, 4000)], 1)
    for number, (left, top) in enumerate([(0, 1000), (1500, 0), (3360, 1000), (1500, 2360)]):
        assert windows.labels(Window(0, left, top, left + 640, top + 640)).class_ids.tolist() == [
            number
        ]
    # 80 pixels of one, 14 of the other
    wires = [box(0.14, 0.5, 0.6, 0.004), box(0.1565, 0.3, 0.6, 0.004)]
    flat = windows_of([Photo(Path("x.jpg"), np.arange(2), wires)], [(500, 4000)], 1)
    assert flat.labels(Window(0, 0, 0, 640, 500)).class_ids.tolist() == [0]


def test_a_window_at_scale_one_shows_the_photographs_own_pixels(windowed: WindowedPhotos) -> None:
    native = dataclasses.replace(
        windowed,
        windows=Windows(
            WINDOWED.photos, windowed.windows.sizes, WINDOWED_PX, WindowConfig(3, 1.0, 1.0), 0
        ),
    )
    data = windows_as_samples(native, STILL)
    assert len(data) == 18
    for epoch in range(3):
        for index in range(len(data)):
            window = native.windows.window(epoch, index)
            whole = WINDOWED.whole(window.photo).astype(float)
            expected = whole[window.top : window.bottom, window.left : window.right]
            image = data[epoch, index].image.astype(float)
            if window.shape != (WINDOWED_PX, WINDOWED_PX):  # a whole photograph or a large object
                expected, _, _ = letterbox(expected.astype(np.uint8), WINDOWED_PX)
            # JPEG, and half a pixel of interpolation at the edges of shrunk ones
            assert np.abs(image - expected).mean() < 3


@pytest.mark.parametrize("mosaic_epochs", [0, 9])
def test_labels_lie_on_their_pixels(windowed: WindowedPhotos, mosaic_epochs: int) -> None:
    data = windows_as_samples(windowed, dataclasses.replace(COLOURLESS, degrees=5), mosaic_epochs)
    samples = [data[epoch, index] for epoch in range(4) for index in range(len(data))]
    assert max(map(worst_label, samples)) < WORST_LABEL
    # Slivers that are too small to be labelled remain visible.
    assert np.mean([unlabelled_pixels(sample) for sample in samples]) < 25
    assert np.mean([len(sample.class_ids) > 0 for sample in samples]) > 0.8
    for sample in samples:
        for box_xyxy, polygon in zip(sample.boxes, sample.polygons, strict=True):
            np.testing.assert_allclose(box_xyxy, [*polygon.min(0), *polygon.max(0)], atol=1e-4)
            assert box_xyxy.min() >= 0
            assert box_xyxy.max() <= WINDOWED_PX


def test_each_epoch_shows_other_windows(windowed: WindowedPhotos) -> None:
    windows = windowed.windows
    drawn = [[windows.window(epoch, index) for index in range(len(windows))] for epoch in (0, 1, 0)]
    assert drawn[0] == drawn[2]
    assert (
        sum(first != second for first, second in zip(drawn[0], drawn[1], strict=True))
        > len(windows) / 2
    )
    other = Windows(windows.photos, windows.sizes, WINDOWED_PX, windows.config, seed=1)
    assert [other.window(0, index) for index in range(len(windows))] != drawn[0]


def test_validation_shows_the_same_windows_in_all_epochs_and_runs(windowed: WindowedPhotos) -> None:
    data = SegmentationDataset(WINDOWED.photos, WINDOWED_PX, windowed=windowed)
    assert len(data) == len(windowed.windows)
    samples = [data[0, index] for index in range(len(data))]
    assert [content(sample) for sample in samples] == [
        content(data[5, index]) for index in range(len(data))
    ]
    assert max(map(worst_label, samples)) < WORST_LABEL
    for index, sample in enumerate(samples):
        assert sorted(sample.class_ids.tolist()) == sorted(data.labels(index).class_ids.tolist())
        height, width = windowed.windows.window(0, index).shape
        scale = WINDOWED_PX / max(height, width)
        assert sample.inner_size == pytest.approx((width * scale, height * scale), abs=1)
        np.testing.assert_allclose(
            sample.pad, (WINDOWED_PX - np.array(sample.inner_size)) / 2, atol=1
        )
    assert len({sample.inner_size for sample in samples}) > 1, "some windows are not square"


@pytest.mark.parametrize("scale", [1.3, 0.9, 0.55, 0.35])
def test_a_view_into_a_window_has_no_rim_of_fill_colour(
    windowed: WindowedPhotos, scale: float
) -> None:
    tile = windowed._tile(Window(0, 10, 10, 630, 470))
    # The input shows a part of the window, which goes on beyond each edge of the input.
    shift = WINDOWED_PX / 2 - scale * np.array([310.3, 230.6])
    filled = [np.full((WINDOWED_PX, WINDOWED_PX, 4), fill, np.uint8) for fill in (0, 255)]
    for canvas in filled:
        tile.draw(canvas, np.column_stack([scale * np.eye(2), shift]))
    np.testing.assert_array_equal(filled[0][..., :3], filled[1][..., :3])


def test_windows_are_off_by_default_and_announced_and_validation_has_its_own(
    photo_folder: Path,
) -> None:
    spec = load_dataset_yaml(photo_folder / "data.yaml")
    spec = dataclasses.replace(spec, splits={**spec.splits, "val": spec.splits["train"]})
    said: list[str] = []

    def opened(split: str, **options: Any) -> SegmentationDataset:
        data = open_data(
            TrainConfig(img_size=64, **options), spec, torch.device("cpu"), said.append
        )
        return data.train if split == "train" else data.val

    whole = opened("train")
    assert len(whole) == 7
    assert not list((photo_folder / ".cache").glob("*blocks*"))
    photos = read_photos(spec, "train")
    plain = SegmentationDataset(
        photos, 64, packed=whole.packed, augment=Augmentation(), mosaic_epochs=90
    )
    for index in range(len(plain)):
        now, before = whole[1, index], plain[1, index]
        assert now.image.tobytes() == before.image.tobytes()
        assert [polygon.tobytes() for polygon in now.polygons] == [
            polygon.tobytes() for polygon in before.polygons
        ]
    said.clear()
    cut = opened("train", windows=3, epochs=2)
    assert len(cut) == 21
    assert cut.packed is None
    lines = "\n".join(said).splitlines()
    assert "in blocks, into" in lines[0]
    assert lines[1] == "Windows: 3 per photograph and epoch, 21 in all, at scale 0.5 to 1"
    assert "at least once in any 3 epochs" in lines[2]
    assert "the run has 2 epochs: --windows 5 shows all objects" in lines[3]
    assert "at most 128 pixels a side; parse_labels.py --long-side native" not in "".join(lines)
    vals = [opened("val", windows=3, seed=seed).windowed for seed in (0, 1)]
    shown = [[part.windows.window(0, index) for index in range(21)] for part in vals if part]
    assert len(shown) == 2
    assert shown[0] == shown[1], "the same validation in runs with other seeds"

"""The pictures of a training: drawn often enough and no more, of the right photographs, and never
at its expense.
"""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from yolo_seg_ddp.data.dataset import Photo, Sample, SegmentationDataset
from yolo_seg_ddp.data.images import read_image, write_jpeg
from yolo_seg_ddp.data.loader import EpochBatches
from yolo_seg_ddp.predict.detections import Detections
from yolo_seg_ddp.training import pictures as training_pictures
from yolo_seg_ddp.training.pictures import REDRAW_S, Curves, ValidationPictures
from yolo_seg_ddp.utils.text import class_color

NAMES = ("pole", "wire")
SIZE_PX = 64


def test_curves_are_drawn_last_and_every_half_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    now_s = 1000.0
    monkeypatch.setattr(training_pictures, "read_epochs", lambda _: [])
    monkeypatch.setattr(
        training_pictures, "plot_training_curves", lambda _, file, best: drawn.append(file)
    )
    monkeypatch.setattr(training_pictures.time, "monotonic", lambda: now_s)
    curves = Curves(tmp_path)
    counts = []
    for passed_s, is_last in (
        (1, False),
        (REDRAW_S - 1, False),
        (1, False),
        (REDRAW_S, False),
        (1, True),
    ):
        now_s += passed_s
        curves.draw(is_last)
        counts.append(len(drawn))
    assert counts == [0, 1, 1, 2, 3]
    assert set(drawn) == {tmp_path / "results.png"}


def square(left: float, top: float, side: float) -> np.ndarray:
    return np.array(
        [[left, top], [left + side, top], [left + side, top + side], [left, top + side]], np.float32
    )


def photo(*class_ids: int, file: Path = Path("photo.jpg")) -> Photo:
    return Photo(file, np.array(class_ids, np.int64), [square(0.1, 0.2, 0.3) for _ in class_ids])


def test_label_statistics_count_every_object_and_photograph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        training_pictures, "plot_label_statistics", lambda *arguments: given.extend(arguments)
    )
    training_pictures.save_label_statistics(
        [photo(0, 1), photo(), photo(1)], NAMES, tmp_path / "labels.jpg"
    )
    class_ids, boxes, counts, names, path = given
    assert (class_ids.tolist(), counts.tolist(), names) == ([0, 1, 1], [2, 0, 1], NAMES)
    np.testing.assert_allclose(boxes, [[0.1, 0.2, 0.4, 0.5]] * 3, rtol=1e-6)
    assert path == tmp_path / "labels.jpg"


def test_a_label_file_of_thousands_of_objects_neither_fills_memory_nor_delays_the_start(
    tmp_path: Path,
) -> None:
    file, count = tmp_path / "a.jpg", 2000
    write_jpeg(file, np.full((SIZE_PX, SIZE_PX, 3), 128, np.uint8))
    corners = np.random.default_rng(0).uniform(0, 0.9, (count, 2)).tolist()
    crowd = Photo(
        file, np.zeros(count, np.int64), [square(left, top, 0.1) for left, top in corners]
    )
    dataset = SegmentationDataset([crowd], SIZE_PX)
    tracemalloc.start()
    training_pictures.save_first_batch(
        dataset, EpochBatches(1, 1, 0, 1, seed=0), NAMES, tmp_path / "batch.jpg"
    )
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    picture = read_image(tmp_path / "batch.jpg").astype(float)
    assert share_of(picture, 0) > 0.005  # class names cover most
    assert peak_bytes < 300e6  # a mask of the picture's size for each would be 0.5 GB


def test_a_box_is_not_drawn_as_a_rectangular_mask(grey: Path, tmp_path: Path) -> None:
    squares = [square(0.1, 0.1, 0.3), square(0.5, 0.5, 0.4)]
    photo = Photo(grey, np.array([0, 1]), squares, boxed=np.array([1]))
    dataset, batches = SegmentationDataset([photo], SIZE_PX), EpochBatches(1, 1, 0, 1, seed=0)
    training_pictures.save_first_batch(dataset, batches, NAMES, tmp_path / "batch.jpg")
    picture = read_image(tmp_path / "batch.jpg").astype(float)
    assert share_of(picture, 0) > 0.05 > 0.01 > share_of(picture, 1)


def sample(index: int) -> Sample:
    image = np.full((SIZE_PX, SIZE_PX, 3), 128, np.uint8)
    boxes = np.array([[0, 0, 32, 32]], np.float32)
    masks = np.zeros((SIZE_PX // 4,) * 2, np.int32)
    return Sample(index, image, np.array([0]), boxes, masks, [square(0, 0, 32)], (SIZE_PX, SIZE_PX))


@pytest.fixture
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("photos") / "grey.jpg"
    write_jpeg(file, np.full((SIZE_PX, SIZE_PX, 3), 128, np.uint8))
    return file


def show(pictures: ValidationPictures, shown: Sample, *scores: float) -> None:
    """Let pictures of epoch 1 see wires in the lower right quarter, and prototypes that give each a
    full mask.
    """
    boxes = torch.tensor([[32.0, 32, 64, 64]]).repeat(len(scores), 1)
    ones = torch.ones(len(scores), dtype=torch.int64)
    detections = Detections(boxes, torch.tensor(scores), ones, torch.ones(len(scores), 32))
    observe = pictures.observer(1, is_last=False)
    assert observe is not None
    observe(shown, detections, torch.ones(32, SIZE_PX // 4, SIZE_PX // 4))


def share_of(picture: np.ndarray, class_id: int) -> float:
    tint = 0.6 * 128 + 0.4 * np.array(class_color(class_id))
    return float((np.abs(picture - tint).max(axis=-1) <= 16).mean())


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ((0.9, 0.1), "epoch 1: 1 detection"),
        ((0.1,), "epoch 1: all guesses below 0.25"),  # longer words were cut off under a portrait
        ((), "epoch 1: no detections"),
    ],
)
def test_truth_stands_beside_what_was_surely_found(
    tmp_path: Path,
    grey: Path,
    scores: tuple[float, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    arrange = training_pictures.image_grid

    def arranged(images: Any, columns: int, cell_px: int, captions: list[str]) -> np.ndarray:
        said.extend(captions)
        return arrange(images, columns, cell_px, captions)

    monkeypatch.setattr(training_pictures, "image_grid", arranged)
    pictures = ValidationPictures([photo(0, file=grey)], NAMES, every=5, rank=0, world_size=1)
    show(pictures, sample(0), *scores)
    shown: list[Any] = []
    pictures.finish(tmp_path, lambda *arguments: shown.append(arguments), epoch=1)
    picture = read_image(tmp_path / "val_batch0_pred.jpg").astype(float)
    quarter = picture.shape[1] // 4
    truth, prediction = picture[:, :quarter], picture[:, quarter : 2 * quarter]
    assert share_of(truth, 0) > 0.1 > share_of(truth, 1)
    assert (share_of(prediction, 1) > 0.1) == bool(scores)
    assert share_of(prediction, 0) < 0.1
    assert said == ["truth, grey.jpg", told]
    assert [(tag, max(image.shape), step) for tag, image, step in shown] == [
        ("validation", 1280, 1)
    ]
    pictures.finish(tmp_path, lambda *arguments: pytest.fail("nothing new"), epoch=1)


def test_validation_pictures_show_the_photograph_without_the_inputs_padding(tmp_path: Path) -> None:
    file = tmp_path / "wide.jpg"
    write_jpeg(file, np.full((400, 800, 3), 40, np.uint8))
    corners = np.array([[0, 16], [32, 16], [32, 32], [0, 32]], np.float32)
    box = np.array([[0, 16, 32, 32]], np.float32)
    inside: dict[str, Any] = {"inner_size": (SIZE_PX, SIZE_PX // 2), "pad": (0, SIZE_PX // 4)}
    padded = replace(sample(0), **inside, boxes=box, polygons=[corners])
    pictures = ValidationPictures([photo(0, file=file)], NAMES, every=1, rank=0, world_size=1)
    show(pictures, padded)
    truth, prediction = pictures._pairs
    assert (
        truth.shape
        == prediction.shape
        == (training_pictures.VAL_PX // 2, training_pictures.VAL_PX, 3)
    )
    tint = 0.6 * 40 + 0.4 * np.array(class_color(0))
    assert np.abs(truth[20:140, 20:300] - tint).max() <= 16, "the label's upper left quarter"
    assert np.abs(truth[220:, 420:].astype(int) - 40).max() <= 16, "the rest is the photograph"


@pytest.mark.parametrize(("size_px", "side_px"), [(64, 512), (512, 512), (1280, 640)])
def test_small_inputs_are_enlarged_and_large_ones_shrunk_with_all_that_is_on_them(
    size_px: int, side_px: int
) -> None:
    image = np.full((size_px, size_px, 3), 128, np.uint8)
    masks = np.zeros((1, size_px // 4, size_px // 4), bool)
    masks[:, size_px // 8 :, size_px // 8 :] = True
    picture = training_pictures._draw(
        image, np.array([1]), np.array([[0.0, 0, 1, 1]]) * size_px, masks, NAMES
    )
    assert picture.shape == (side_px, side_px, 3)
    assert share_of(picture[side_px // 2 + 8 :, side_px // 2 + 8 :].astype(float), 1) > 0.9
    assert share_of(picture[: side_px // 2 - 8, side_px // 2 + 8 :].astype(float), 1) < 0.05


def test_pictures_are_due_first_last_and_every_few_epochs_on_rank_0_alone() -> None:
    photos = [photo(0)] * 30

    def epochs(every: int, rank: int) -> list[int]:
        pictures = ValidationPictures(photos, NAMES, every, rank, 2)
        return [epoch for epoch in range(1, 13) if pictures.observer(epoch, is_last=epoch == 12)]

    assert epochs(5, rank=0) == [1, 5, 10, 12]
    assert epochs(0, rank=0) == epochs(5, rank=1) == []


def test_of_many_photographs_a_few_with_objects_in_rank_0s_share_are_drawn(grey: Path) -> None:
    photos = [photo(0, file=grey) if number % 3 == 0 else photo(file=grey) for number in range(100)]
    pictures = ValidationPictures(photos, NAMES, 1, rank=0, world_size=2)
    drawn = []
    for index in range(100):
        before = len(pictures._pairs)
        show(pictures, sample(index), 0.9)
        drawn += [index] * (len(pictures._pairs) > before)
    assert len(drawn) == training_pictures.VAL_IMAGES
    assert all(index % 6 == 0 for index in drawn)
    assert (drawn[0], drawn[-1]) == (0, 96)


def test_no_picture_ends_a_training(
    tmp_path: Path, grey: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    for name in ("save_image", "plot_label_statistics", "plot_training_curves"):
        monkeypatch.setattr(training_pictures, name, full)
    # neither a data set nor batches
    training_pictures.save_first_pictures([], None, NAMES, tmp_path)  # type: ignore[arg-type]
    Curves(tmp_path).draw(is_last=True)
    pictures = ValidationPictures([photo(0, file=grey)], NAMES, every=1, rank=0, world_size=1)
    show(pictures, sample(0), 0.9)
    pictures.finish(tmp_path, full, epoch=1)
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in told] == [
        *("labels.jpg", "train_batch0.jpg", "results.png", "val_batch0_pred.jpg")
    ]
    assert "No space left on device" in told[-1]
    assert list(tmp_path.iterdir()) == []

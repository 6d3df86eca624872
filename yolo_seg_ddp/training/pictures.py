"""Pictures of a training run: label statistics, a training batch, validation predictions and
curves.

An error while a picture is drawn is printed in one line; the training continues.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.data.dataset import Photo, Sample, SegmentationDataset
from yolo_seg_ddp.data.images import fit_long_side, load_photo, resize_area, scaled_size
from yolo_seg_ddp.data.loader import EpochBatches
from yolo_seg_ddp.data.polygons import polygon_boxes
from yolo_seg_ddp.evaluation.native_masks import outlines_in_photo, place
from yolo_seg_ddp.pages import (
    NO_DETECTIONS,
    READABLE_PX,
    draw_instances,
    image_grid,
    plot_label_statistics,
    plot_training_curves,
    save_image,
)
from yolo_seg_ddp.predict.detections import Detections, photo_masks
from yolo_seg_ddp.run.records import best_epoch, read_config, read_epochs
from yolo_seg_ddp.utils.errors import one_line, print_warning
from yolo_seg_ddp.utils.text import counted

MAX_IMAGES = 16
MOST_PX = 640  # side at which instances are drawn, at most
# drawn on one picture, the largest first; a label file may hold tens of thousands
MOST_OBJECTS = 300
REDRAW_S = 30.0  # drawing takes a second, as long as an epoch of a small data set
VAL_IMAGES = 8
CHOSEN_FROM = 512  # the first samples: reading the labels of all would take minutes
VAL_PX = 640  # long side of a validation photograph
# letters of 13 pixels, which can be read on a screen that shows the grid at half its size
VAL_FONT_SCALE = 0.6
VAL_CONFIDENCE = 0.25  # as in inference.py
# drawn on a picture without detections as confident as that: what an early epoch has learned
VAL_GUESSES = 3
VAL_MOST_OBJECTS = 50  # drawn on one picture, the most confident first
VAL_FILE = "val_batch0_pred.jpg"
ShowImage = Callable[[str, np.ndarray, int], None]  # tag, RGB uint8 (H, W, 3), step: RunLog.image


@contextmanager
def going_on_without_picture(name: str) -> Iterator[None]:
    """Print any error of this block and continue: a full disk, a missing font."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 # see above; the loader raises faults of the data too
        print_warning(f"{name} was not drawn: {type(error).__name__}: {one_line(error)}")


def save_first_pictures(
    dataset: SegmentationDataset, batches: EpochBatches, names: tuple[str, ...], folder: Path
) -> None:
    """Draw `labels.jpg` and `train_batch0.jpg` into the folder of a new run."""
    with going_on_without_picture("labels.jpg"):
        save_label_statistics(dataset.photos, names, folder / "labels.jpg")
    with going_on_without_picture("train_batch0.jpg"):
        save_first_batch(dataset, batches, names, folder / "train_batch0.jpg")


def save_label_statistics(photos: list[Photo], names: tuple[str, ...], path: Path) -> None:
    """Draw statistics of the labels: classes, counts, positions and sizes."""
    class_ids = [np.zeros(0, np.int64), *(photo.class_ids for photo in photos)]
    boxes = polygon_boxes([polygon for photo in photos for polygon in photo.polygons])
    counts = np.array([len(photo.class_ids) for photo in photos])
    plot_label_statistics(np.concatenate(class_ids), boxes, counts, names, path)


def save_first_batch(
    dataset: SegmentationDataset, batches: EpochBatches, names: tuple[str, ...], path: Path
) -> None:
    """Draw up to 16 samples of the first batch of the first epoch, masks as the loss sees them; an
    object that has a box and no outline has none.
    """
    pictures = []
    for key in next(iter(batches))[:MAX_IMAGES]:
        sample = dataset[key]
        class_ids, boxes = sample.class_ids[:MOST_OBJECTS], sample.boxes[:MOST_OBJECTS]
        masks = sample.masks[None] == np.arange(1, len(class_ids) + 1)[:, None, None]
        masks[sample.boxed[sample.boxed < MOST_OBJECTS]] = False
        pictures.append(_draw(sample.image, class_ids, boxes, masks, names))
    columns = int(np.ceil(np.sqrt(len(pictures))))
    save_image(path, image_grid(pictures, columns, max(len(picture) for picture in pictures)))


class ValidationPictures:
    """Labels and predictions side by side, `val_batch0_pred.jpg`, for the same few photographs
    every `every` epochs.

    `evaluate` calls what `observer` returns for each image, so the pictures need no extra forward
    pass.
    """

    def __init__(
        self,
        photos: list[Photo],
        names: tuple[str, ...],
        every: int,
        rank: int,
        world_size: int,
        *,
        are_windows: bool = False,
    ) -> None:
        self.photos = photos
        self.names = names
        self.every = every
        self.are_windows = are_windows
        # From rank 0's share only; photographs with objects first.
        mine = range(0, len(photos), world_size) if rank == 0 and every else range(0)
        labelled = [index for index in mine if len(photos[index].class_ids)] or list(mine)
        picked = (
            np.linspace(0, len(labelled) - 1, min(VAL_IMAGES, len(labelled))).round().astype(int)
        )
        self._wanted = {labelled[place] for place in picked}
        self._pairs: list[np.ndarray] = []
        self._captions: list[str] = []

    def observer(
        self, epoch: int, is_last: bool
    ) -> Callable[[Sample, Detections, torch.Tensor], None] | None:
        """Return the function that draws this epoch's images (epochs count from 1), or None when
        none are due on this rank.
        """
        self._pairs = []
        self._captions = []
        is_due = self._wanted and (epoch == 1 or epoch % self.every == 0 or is_last)
        return partial(self._take, epoch) if is_due else None

    def finish(self, folder: Path, show: ShowImage, epoch: int) -> None:
        """Write the images drawn since `observer`, if any, to the run folder and to TensorBoard."""
        if self._pairs:
            with going_on_without_picture(VAL_FILE):
                grid = image_grid(self._pairs, 4, VAL_PX, self._captions)
                self._pairs = []
                save_image(folder / VAL_FILE, grid)
                # TensorBoard keeps each.
                show("validation", fit_long_side(grid, 1280), epoch)

    def _take(
        self, epoch: int, sample: Sample, detections: Detections, prototypes: torch.Tensor
    ) -> None:
        if sample.index not in self._wanted:
            return
        with going_on_without_picture(VAL_FILE):
            num_sure = int((detections.scores >= VAL_CONFIDENCE).sum())
            # the best come first
            kept = detections[: min(num_sure, VAL_MOST_OBJECTS) or VAL_GUESSES]
            file = self.photos[sample.index].file
            (left, top), (width, height) = sample.pad, sample.inner_size
            window = sample.image[top : top + height, left : left + width]
            photo = window if self.are_windows else load_photo(file, VAL_PX)
            photo = resize_area(
                photo, *scaled_size(photo.shape[1], photo.shape[0], VAL_PX / max(photo.shape))
            )
            placement = place(sample, (photo.shape[1], photo.shape[0]))
            truth = outlines_in_photo(sample, placement)
            first = slice(MOST_OBJECTS)
            true_boxes = torch.from_numpy(sample.boxes)
            masks = list(photo_masks(prototypes, kept, placement))
            pair = []
            for class_ids, boxes, shapes, scores, nothing in (
                (sample.class_ids[first], true_boxes[first], truth[first], None, "no labels"),
                (kept.class_ids.numpy(), kept.boxes, masks, kept.scores.numpy(), NO_DETECTIONS),
            ):
                in_photo = placement.boxes_to_photo(boxes).numpy()
                style: dict[str, Any] = {"font_scale": VAL_FONT_SCALE, "nothing": nothing}
                pair.append(
                    draw_instances(photo, class_ids, in_photo, shapes, scores, self.names, **style)
                )
            self._pairs += pair
            guesses = f"all guesses below {VAL_CONFIDENCE}" if len(kept) else NO_DETECTIONS
            words = counted(len(kept), "detection") if num_sure else guesses
            self._captions += [f"truth, {file.name}", f"epoch {epoch}: {words}"]


class Curves:
    """Draws `results.png` after the last epoch, and before it after an epoch every half minute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._drawn_s = time.monotonic()

    def draw(self, is_last: bool) -> None:
        """Draw the run's epochs, unless the last drawing or the start is less than half a minute
        ago.
        """
        if is_last or time.monotonic() - self._drawn_s >= REDRAW_S:
            with going_on_without_picture("results.png"):
                epochs = read_epochs(self.folder)
                best = best_epoch(epochs, read_config(self.folder)) or {"epoch": 0}
                plot_training_curves(epochs, self.folder / "results.png", best=best["epoch"])
            self._drawn_s = time.monotonic()


def _draw(
    image: np.ndarray,
    class_ids: np.ndarray,
    boxes: np.ndarray,
    masks: np.ndarray,
    names: tuple[str, ...],
) -> np.ndarray:
    """Draw instances on a network input (S, S, 3). masks: bool (n, S/4, S/4).

    A small input is enlarged, so that class names do not hide the objects. A large one is shrunk,
    which bounds the time.
    """
    shown = fit_long_side(image, MOST_PX)
    # The mask's pixel of each pixel of the picture.
    place = ((np.arange(len(shown)) + 0.5) * masks.shape[-1] / len(shown)).astype(int)
    boxes = boxes * (len(shown) / len(image))
    masks = masks[:, place[:, None], place[None]]
    return draw_instances(shown, class_ids, boxes, masks, None, names, min_px=READABLE_PX)

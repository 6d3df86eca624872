"""Which part of which photograph a training sample shows: a function of (seed, epoch, index).

A photograph's windows take turns in a cycle of eight (ROLES): one shows the whole photograph; three
lie on objects, whose classes are drawn evenly; three walk over the cells of a grid that hold an
object, one over the other cells, which bounds the share of windows without an object. The walks go
through their cells in a random order and then again in the same one, so that a cell is never left
out for long. docs/research/windows.md gives the reasons.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from yolo_seg_ddp.data.augment import Tile, compose, seen_window, warp_into
from yolo_seg_ddp.data.blocks import BlockStore, open_blocks
from yolo_seg_ddp.data.cache import CachePlace
from yolo_seg_ddp.data.labels import Photo, split_regions
from yolo_seg_ddp.data.pieces import Sides, pieces_in
from yolo_seg_ddp.data.polygons import areas, extents, join_outlines
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.text import counted

WHOLE, OBJECT, CELL, EMPTY = range(4)
ROLES = (WHOLE, OBJECT, CELL, EMPTY, OBJECT, CELL, OBJECT, CELL)
# Shares of a window's side. A window contains the cell or the point for which it was placed with
# this much around it, so that a piece of the object long enough to be kept (pieces.py) is inside.
# The rest of the side is room to move.
MARGIN = 1 / 16
LARGEST_CELL = 3 / 4
# A window placed on an object shows the whole object if that is at least this thick then, in pixels
# of the network's input.
MIN_THICKNESS_PX = 8
# separate these random numbers from those of a sample and of a batch's size
WINDOW_STREAM, CELL_STREAM = 2, 3


@dataclass(frozen=True)
class WindowConfig:
    """How many windows of each photograph make up an epoch, and the range of their scale.

    Scale 1 shows the photograph's own pixels; at 0.5 a window covers twice the side.
    """

    per_photo: int
    low_scale: float
    high_scale: float


@dataclass(frozen=True)
class WindowOptions(Options):
    """Whether a training sees windows of its photographs, and at which scale."""

    group: ClassVar[str] = "data"

    windows: int = option(
        0,
        "windows of each photograph per epoch, cut from its own pixels (docs/windows.md); 0: "
        "whole photographs",
        at_least=0,
    )
    window_scale: tuple[float, ...] = option(
        (0.5, 1.0),
        "lowest and highest scale of windows; 1: own pixels",
        needs="windows",
        above=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window_scale) != 2 or self.window_scale[0] > self.window_scale[1]:
            raise UsageError("--window-scale: give the lowest and the highest scale, such as 0.5 1")

    @property
    def window_config(self) -> WindowConfig | None:
        """The windows of the training; None for whole photographs."""
        return WindowConfig(self.windows, *self.window_scale) if self.windows else None


@dataclass(frozen=True)
class Window:
    """A rectangle of a photograph, in its pixels."""

    photo: int
    left: int
    top: int
    right: int
    bottom: int

    @property
    def shape(self) -> tuple[int, int]:
        """Its (height, width)."""
        return self.bottom - self.top, self.right - self.left


class Windows:
    """The windows of all samples of a data set at `side_px`, the side of the network input.

    `sizes` are the photographs' (height, width), int (N, 2).
    """

    def __init__(
        self,
        photos: Sequence[Photo],
        sizes: np.ndarray,
        side_px: int,
        config: WindowConfig,
        seed: int,
    ) -> None:
        self.photos, self.sizes, self.side_px, self.config, self.seed = (
            photos,
            sizes,
            side_px,
            config,
            seed,
        )
        self._cells = [self._cells_with_objects(number) for number in range(len(photos))]
        self._labelled = np.flatnonzero([len(cells) > 0 for cells in self._cells])

    def __len__(self) -> int:
        return len(self.photos) * self.config.per_photo

    def window(self, epoch: int, index: int) -> Window:
        """Return the window of sample `index` in an epoch."""
        photo, slot = divmod(index, self.config.per_photo)
        turn = epoch * self.config.per_photo + slot
        # Photographs begin at different places of the cycle, so that each epoch has all roles.
        cycle, place = divmod(turn + photo, len(ROLES))
        role = ROLES[place]
        rng = np.random.default_rng((self.seed, epoch, index, WINDOW_STREAM))
        height, width = self.sizes[photo].tolist()
        if role == WHOLE:
            return Window(photo, 0, 0, width, height)
        cells = self._cells[photo]
        if role in (OBJECT, CELL) and not len(cells) and len(self._labelled):
            photo, role = int(rng.choice(self._labelled)), OBJECT
        if role == OBJECT and len(self._cells[photo]):
            return self.on_object(photo, rng)
        if role == EMPTY:
            empty = np.setdiff1d(np.arange(math.prod(self._grid(photo))), cells)
            cells = empty if len(empty) else cells
        if not len(cells):  # no photograph has an object
            cells = np.arange(math.prod(self._grid(photo)))
        number = cycle * ROLES.count(role) + ROLES[:place].count(role)
        order = np.random.default_rng((self.seed, photo, role, CELL_STREAM)).permutation(cells)
        return self._around(photo, *self._bounds(photo, int(order[number % len(order)])), rng)

    def labels(self, window: Window) -> Photo:
        """Return the window's labels as those of a photograph: coordinates from 0 to 1 of the
        window.
        """
        photo = self.photos[window.photo]
        size = self.sizes[window.photo][::-1]
        if window.shape == tuple(self.sizes[window.photo].tolist()):
            return photo
        corner, (height, width) = np.array([window.left, window.top]), window.shape
        cut: Sides = (
            window.left > 0,
            window.top > 0,
            window.right < size[0],
            window.bottom < size[1],
        )
        class_ids, polygons = photo.with_regions()
        outlines = [polygon * size - corner for polygon in polygons]
        owners, pieces = pieces_in(outlines, width, height, cut, self.side_px, class_ids < 0)
        return Photo(
            photo.file,
            *split_regions(class_ids[owners], [piece / (width, height) for piece in pieces]),
        )

    def epochs_until_seen(self) -> np.ndarray:
        """Return for each photograph with objects in how many consecutive epochs all its objects
        are seen: int (N,).
        """
        num_cells = np.array([len(cells) for cells in self._cells if len(cells)], int)
        turns = -(-num_cells // ROLES.count(CELL)) * len(ROLES)
        return -(-turns // self.config.per_photo)

    def describe(self, epochs: int) -> list[str]:
        """Return lines for the console: how many windows there are, and after how many epochs each
        object was in one.
        """
        config, needed = self.config, self.epochs_until_seen()
        lines = [
            f"Windows: {config.per_photo} per photograph and epoch, {len(self)} in all, at scale "
            f"{config.low_scale:g} to "
            f"{config.high_scale:g}"
        ]
        if len(needed):
            most, half = int(needed.max()), int(np.median(needed))
            lines.append(
                f"  every object is in a window at least once in any {most} epochs, of half the "
                f"photographs in any {half}"
            )
            if most > epochs:
                lines.append(
                    f"  the run has {counted(epochs, 'epoch')}: --windows "
                    f"{-(-most * config.per_photo // epochs)} shows all objects"
                )
        largest = int(self.sizes.max())
        if largest < 2 * self.side_px:
            lines.append(
                f"  the photographs have at most {largest} pixels a side; parse_labels.py "
                "--long-side native keeps all they had"
            )
        return lines

    def on_object(
        self, photo: int, rng: np.random.Generator, class_id: int | None = None
    ) -> Window:
        """Return a window on a random object of a class (None: a random one): on the whole object,
        or a point of its outline.

        On a point if the object would be too thin, or if all windows are to have one scale.
        """
        labels = self.photos[photo]
        chosen = rng.choice(np.unique(labels.class_ids)) if class_id is None else class_id
        same = np.flatnonzero(labels.class_ids == chosen)
        points = labels.polygons[int(rng.choice(same))] * self.sizes[photo][::-1]
        low, high = points.min(axis=0), points.max(axis=0)
        edges = np.roll(points, -1, axis=0) - points
        lengths = np.hypot(*edges.T).cumsum()
        fitting = self.side_px * (1 - 2 * MARGIN) / max(*(high - low), 1)
        thickness = 2 * areas(points, np.zeros(1, int))[0] / max(lengths[-1], 1)
        if (
            self.config.low_scale < self.config.high_scale
            and thickness * fitting >= MIN_THICKNESS_PX
        ):
            return self._around(photo, low, high, rng, fitting)
        walked = rng.random() * lengths[-1]
        edge = min(int(np.searchsorted(lengths, walked, side="right")), len(points) - 1)
        point = points[edge] + rng.random() * edges[edge]
        return self._around(photo, point, point, rng)

    def _around(
        self,
        photo: int,
        low: np.ndarray,
        high: np.ndarray,
        rng: np.random.Generator,
        highest_scale: float = math.inf,
    ) -> Window:
        """Return a window of random scale at a random place where it contains the box from `low` to
        `high` (x, y).

        A `highest_scale` below that of the configuration leaves at least the range from half of it.
        """
        sides = self.sizes[photo][::-1].tolist()
        low_scale, high_scale = self.config.low_scale, self.config.high_scale
        if highest_scale < high_scale:
            low_scale, high_scale = min(low_scale, highest_scale / 2), highest_scale
        scale = math.exp(rng.uniform(math.log(low_scale), math.log(high_scale)))
        side = round(min(self.side_px / scale, max(sides)))
        starts = []
        for axis, length in enumerate(sides):
            free = max(length - side, 0)
            first = min(max(high[axis] + MARGIN * side - side, 0), free)
            last = min(max(low[axis] - MARGIN * side, 0), free)
            starts.append(round(rng.uniform(min(first, last), max(first, last))))
        (left, top), (width, height) = starts, (min(side, length) for length in sides)
        return Window(photo, left, top, left + width, top + height)

    def _grid(self, photo: int) -> tuple[int, int]:
        """Return the number of rows and columns of a photograph's grid of cells."""
        height, width = self.sizes[photo].tolist()
        smallest = min(self.side_px / self.config.high_scale, max(height, width))
        rows, columns = (
            1 if side <= smallest else math.ceil(side / (smallest * LARGEST_CELL))
            for side in (height, width)
        )
        return rows, columns

    def _bounds(self, photo: int, cell: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corners of a cell, x, y in pixels."""
        grid = self._grid(photo)
        place = np.array(divmod(cell, grid[1]))[::-1]
        step = self.sizes[photo][::-1] / np.array(grid[::-1])
        return place * step, (place + 1) * step

    def _cells_with_objects(self, photo: int) -> np.ndarray:
        """Return the cells that hold a point of an object, int64: for each object the vertex next
        to its box's centre.
        """
        polygons = self.photos[photo].polygons
        if not polygons:
            return np.zeros(0, np.int64)
        points, starts = join_outlines(polygons)
        low, high = extents(points, starts)
        owner = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(points)))
        distances = np.abs((points - ((low + high) / 2)[owner]) * self.sizes[photo][::-1]).max(
            axis=1
        )
        nearest = points[np.lexsort((distances, owner))[starts]]
        rows, columns = self._grid(photo)
        column, row = np.minimum(
            (nearest * (columns, rows)).astype(np.int64), (columns - 1, rows - 1)
        ).T
        return np.unique(row * columns + column)


@dataclass(frozen=True)
class WindowedPhotos:
    """The windows of an epoch's samples and the store that holds their pixels."""

    windows: Windows
    store: BlockStore

    def tile(self, epoch: int, index: int) -> Tile:
        """Return the window of a sample; to the rest of the augmentation it is a photograph."""
        return self._tile(self.windows.window(epoch, index))

    def tile_on_object(self, photo: int, class_id: int, rng: np.random.Generator) -> Tile:
        """Return a random window on an object of a class in a photograph that has one."""
        return self._tile(self.windows.on_object(photo, rng, class_id))

    def _tile(self, window: Window) -> Tile:
        return Tile(
            self.windows.labels(window),
            window.shape,
            lambda canvas, matrix: self._draw(window, canvas, matrix),
        )

    def _draw(self, window: Window, canvas: np.ndarray, matrix: np.ndarray) -> None:
        level = self.store.level_for(window.photo, math.sqrt(abs(np.linalg.det(matrix[:, :2]))))
        rows, columns = seen_window(matrix, window.shape, canvas.shape[0], margin_px=2 << level)
        if rows:
            left, top = window.left, window.top
            box = (left + columns.start, top + rows.start, left + columns.stop, top + rows.stop)
            pixels, place = self.store.read(window.photo, box, level, channels=canvas.shape[2])
            place[:, 2] -= (left, top)
            warp_into(canvas, pixels, compose(matrix, place))


def open_windows(
    photos: list[Photo], size_px: int, config: WindowConfig, seed: int, place: CachePlace
) -> WindowedPhotos:
    """Open or build a split's block store and plan the windows of the photographs in it.

    Raises UserError if the disk has no room.
    """
    store = open_blocks([photo.file for photo in photos], place)
    return WindowedPhotos(
        Windows(store.index.usable(photos), store.index.sizes, size_px, config, seed), store
    )

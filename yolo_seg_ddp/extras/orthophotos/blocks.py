"""Predicts on an orthophoto of any size in blocks, and joins what lies in several blocks.

A block has the size of a drone's photograph and is treated like one
(yolo_seg_ddp/predict/tiles.py). Neighbouring blocks use the same grid of tiles and overlap by one
tile, so both see the same tiles there. Detections that reach into a neighbour are joined by the
rules for tiles (yolo_seg_ddp/predict/merge_tiles.py), with blocks instead of tiles. The others stay
as they are.

Each finished block is written to a file, so that a killed run can continue. The ranks share the
blocks.
"""

import io
import itertools
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from yolo_seg_ddp.data.images import FILL
from yolo_seg_ddp.predict.agreement import WIDEN_PX
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.merge_tiles import MergedInstance, TileDetection, join_tiles
from yolo_seg_ddp.predict.regions import ROW, Corners, Runs, has_pixels, hull, intersection
from yolo_seg_ddp.predict.tiles import Predictor, Tiling, overlap_px
from yolo_seg_ddp.utils.files import write_bytes_atomic, write_text_atomic

LONGEST_BLOCK_PX = 6000  # longest side of a block, unless two tiles are longer
NEVER = 2.0  # an impossible IoU: duplicates within a block are already dropped
NO_GAPS = np.zeros((0, 2, 2))
MIN_TOLERANCE_PX = 4.0  # two blocks' lines of one wire may lie this far apart, or the wire's width


@dataclass(frozen=True, eq=False)
class BlockPiece(TileDetection):
    """A detection in a block, in pixels of the raster.

    `tile` is the block's number; a wire has a line.
    """

    line: Line | None = None


def piece_of(
    number: int, class_id: int, score: float, mask: Runs, line: Line | None = None
) -> BlockPiece:
    """Return a detection in a block; its box is that of its mask."""
    return BlockPiece(number, class_id, score, np.array(mask.corners, np.float32), mask, line)


def cut_blocks(width: int, height: int, tiling: Tiling) -> list[list[Corners]]:
    """Return rows of blocks that cover a raster.

    Neighbours overlap by a tile, and their grids of tiles coincide.
    """
    size = tiling.size_px
    step = size - overlap_px(size, tiling.overlap)
    step *= max(1, (LONGEST_BLOCK_PX - size) // step)
    columns, rows = (
        [
            (start, min(start + step + size, length))
            for start in range(0, max(length - size, 1), step)
        ]
        for length in (width, height)
    )
    return [[(left, top, right, bottom) for left, right in columns] for top, bottom in rows]


def predict_block(
    predictor: Predictor, photo: np.ndarray, number: int, corners: Corners
) -> list[BlockPiece]:
    """Return the detections in a block, RGB uint8 (H, W, 3), best first.

    They do not depend on other blocks.
    """
    if (photo == FILL).all():
        return []
    ((_, _, prediction),) = predictor.predict([(None, photo)])
    left, top = corners[:2]
    lines = prediction.lines or [None] * len(prediction.masks)
    rows = zip(
        prediction.class_ids.tolist(), prediction.detections.scores.tolist(), lines, strict=True
    )
    pieces = []
    for position, (class_id, score, line) in enumerate(rows):
        region = prediction.masks[position]
        mask = Runs.of(region.mask, left + region.left, top + region.top)
        # Only its box is known.
        if mask.is_empty:
            x1, y1, x2, y2 = prediction.boxes[position].round().astype(int).tolist()
            mask = Runs.of(np.ones((max(y2 - y1, 1), max(x2 - x1, 1)), bool), left + x1, top + y1)
        moved = line and replace(line, points=line.points + np.array([left, top]), gaps=NO_GAPS)
        pieces.append(piece_of(number, class_id, score, mask, moved))
    return pieces


class FinishedBlocks:
    """The finished blocks, a file each in a folder that is removed at the end.

    `settings`: all that they depend on, as text.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder
        self.settings = settings

    def prepare(self, number: int) -> list[int]:
        """Make the folder; return the blocks, of this number, that a killed run with equal
        settings finished. Others are removed.
        """
        note = self.folder / "facts.txt"
        with suppress(FileNotFoundError, UnicodeDecodeError):
            if note.read_text(encoding="utf-8") == self.settings:
                return [block for block in range(number) if self._is_done(block)]
        self.remove()
        self.folder.mkdir(parents=True)
        write_text_atomic(note, self.settings)
        return []

    def remove(self) -> None:
        """Remove the folder."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)

    def save(self, number: int, pieces: Sequence[BlockPiece]) -> None:
        """Write a block's file, atomically."""
        arrays: dict[str, Any] = {"number": np.array(len(pieces))}
        for position, piece in enumerate(pieces):
            numbers = [piece.class_id, piece.score, *piece.mask.corners]
            arrays |= {
                f"facts-{position}": np.array(numbers, np.float64),
                f"edges-{position}": piece.mask.edges,
            }
            if piece.line is not None:
                arrays[f"line-{position}"] = np.column_stack([piece.line.points, piece.line.widths])
        data = io.BytesIO()
        np.savez_compressed(data, **arrays)
        write_bytes_atomic(self._file(number), data.getvalue())

    def load(self, number: int) -> list[BlockPiece]:
        """Return a block's detections."""
        pieces = []
        with np.load(self._file(number), allow_pickle=False) as arrays:
            for position in range(int(arrays["number"])):
                class_id, score, *corners = arrays[f"facts-{position}"].tolist()
                left, top, right, bottom = map(int, corners)
                mask = Runs((left, top, right, bottom), arrays[f"edges-{position}"])
                of_line = arrays.get(f"line-{position}")
                line = None if of_line is None else Line(of_line[:, :2], of_line[:, 2], NO_GAPS)
                pieces.append(piece_of(number, int(class_id), score, mask, line))
        return pieces

    def _is_done(self, number: int) -> bool:
        with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            self.load(number)
            return True
        return False

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.npz"


def join_blocks(
    rows: Sequence[Sequence[Corners]], load: Callable[[int], list[BlockPiece]]
) -> Iterator[list[MergedInstance]]:
    """Yield after each row of blocks the objects that later rows cannot change. `load` returns a
    block's detections.

    Memory holds one row's detections, and those of objects that reach into the next row.
    """
    blocks = [block for row in rows for block in row]
    waiting: list[list[BlockPiece]] = []
    first = 0
    for position, row in enumerate(rows):
        numbers = range(first, first + len(row))
        groups = _connected(
            waiting + [[piece] for number in numbers for piece in load(number)], blocks
        )
        first = numbers.stop
        next_top = rows[position + 1][0][1] if position + 1 < len(rows) else np.inf
        waiting = []
        complete = list[list[BlockPiece]]()
        for group in groups:
            ends = [piece.mask.corners[3] for piece in group if piece.tile in numbers]
            (waiting if max(ends, default=0) + WIDEN_PX > next_top else complete).append(group)
        yield [detected for group in complete for detected in _joined(group, blocks)]


def _connected(groups: list[list[BlockPiece]], blocks: list[Corners]) -> list[list[BlockPiece]]:
    """Join groups of detections that may be one object: two of one class whose masks are close
    where their blocks overlap.
    """
    # Its import takes 0.2 s.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    group_of = [number for number, group in enumerate(groups) for _ in group]
    pieces = [piece for group in groups for piece in group]
    in_block: dict[int, list[int]] = {}
    for position, piece in enumerate(pieces):
        in_block.setdefault(piece.tile, []).append(position)
    links: list[tuple[int, int]] = []
    for one, other in itertools.combinations(sorted(in_block), 2):
        shared = intersection(blocks[one], blocks[other])
        if has_pixels(shared):
            in_one, in_other = (
                _near([pieces[position] for position in in_block[block]], shared)
                for block in (one, other)
            )
            in_one = in_one[:, None]
            in_other = in_other[None]
            meet = (
                np.maximum(in_one[..., :2], in_other[..., :2])
                < np.minimum(in_one[..., 2:4], in_other[..., 2:4])
            ).all(axis=-1)
            for first, second in np.argwhere(meet & (in_one[..., 4] == in_other[..., 4])).tolist():
                links.append((group_of[in_block[one][first]], group_of[in_block[other][second]]))
    pairs = np.array(links, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(pairs.shape[1]), pairs), shape=(len(groups),) * 2)
    _, labels = connected_components(graph, directed=False)
    joined: dict[int, list[BlockPiece]] = {}
    for group, label in zip(groups, labels.tolist(), strict=True):
        joined.setdefault(label, []).extend(group)
    return list(joined.values())


def _near(pieces: Iterable[BlockPiece], corners: Corners) -> np.ndarray:
    """Return the widened box around each mask's pixels in a rectangle, empty without any, and its
    class: int64 (n, 5).
    """
    rows = []
    for piece in pieces:
        shared = intersection(piece.mask.corners, corners)
        inside = (
            Runs.of(piece.mask.crop(shared), *shared[:2]).corners if has_pixels(shared) else shared
        )
        wide = WIDEN_PX if has_pixels(inside) else -ROW
        rows.append(
            (inside[0] - wide, inside[1] - wide, inside[2] + wide, inside[3] + wide, piece.class_id)
        )
    return np.array(rows, np.int64)


def _joined(group: list[BlockPiece], blocks: list[Corners]) -> list[MergedInstance]:
    if len(group) == 1:
        return [MergedInstance((group[0],))]
    numbers = sorted({piece.tile for piece in group})
    # the last: where the raster ends
    tiles = [*(blocks[number] for number in numbers), hull(blocks)]
    return join_tiles(
        [replace(piece, tile=numbers.index(piece.tile)) for piece in group], tiles, NEVER
    )


def lines_of(detected: MergedInstance) -> list[tuple[np.ndarray, float]]:
    """Return an object's lines, points float64 (K, 2) xy and the mean width in pixels; none if it
    is no wire.

    The longest line is extended by the parts of other blocks' lines beyond its ends.
    """
    lines = [
        piece.line
        for piece in detected.pieces
        if isinstance(piece, BlockPiece) and piece.line is not None
    ]
    lines.sort(key=lambda line: -line.length_px)
    parts: list[tuple[np.ndarray, float]] = []
    for line in lines:
        near = max(line.width_px, MIN_TOLERANCE_PX)
        known = shapely.union_all(
            [shapely.LineString(points).buffer(near, cap_style="flat") for points, _ in parts]
        )
        for rest in shapely.get_parts(shapely.difference(shapely.LineString(line.points), known)):
            if not parts or rest.length > 2 * near:
                _continue(parts, shapely.get_coordinates(rest), line.width_px, 2 * near)
    return parts


def _continue(
    parts: list[tuple[np.ndarray, float]], points: np.ndarray, width: float, reach: float
) -> None:
    """Append a line to the one in `parts` that ends within `reach` of it; if there is none, add it
    to `parts`.
    """
    for number, (known, known_width) in enumerate(parts):
        # (2, 2)
        gaps = np.hypot(*(known[[0, -1], None] - points[None, [0, -1]]).transpose(2, 0, 1))
        if gaps.min() <= reach:
            # Which end of the known line is nearest to which end of the new one.
            is_end, is_end_of_points = divmod(int(gaps.argmin()), 2)
            known = known if is_end else known[::-1]
            lengths = [float(np.hypot(*np.diff(some, axis=0).T).sum()) for some in (known, points)]
            mean = float(np.average([known_width, width], weights=lengths))
            parts[number] = np.concatenate([known, points[:: -1 if is_end_of_points else 1]]), mean
            return
    parts.append((points, width))

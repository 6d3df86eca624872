"""Predictions on disk: predictions.json with outlines and its reader, YOLO label files, cut-outs of
the detections.
"""

import heapq
import io
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import cv2
import numpy as np

from yolo_seg_ddp.data.images import write_jpeg
from yolo_seg_ddp.predict.detections import PhotoPrediction
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.contents import BAD_CONTENT, mapping, parse_json, reason_of_content
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.extras import find_extra
from yolo_seg_ddp.utils.files import new_text_file, write_text_atomic

PREDICTIONS, ABOUT = "predictions.json", "about.json"
PREDICTION_PARTS = ".predictions.part-*"


@dataclass(frozen=True)
class Source:
    """A photograph to predict on: its position among all, its file, and the name of its results."""

    position: int
    file: Path
    key: str


class PartWriter:
    """Writes this rank's parts of some files, named by their patterns.

    After an error the parts are removed.
    """

    def __init__(self, folder: Path, patterns: Sequence[str], rank: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = {
            pattern: new_text_file(part_of(folder, pattern, rank)) for pattern in patterns
        }

    def write(self, pattern: str, source: Source, entry: dict[str, Any]) -> None:
        """Add a photograph's entry.

        Each rank must add its photographs in ascending order of their positions.
        """
        self._parts[pattern].write(f"{source.position}\t{json.dumps(entry)}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with ExitStack() as stack:
            for part in self._parts.values():
                stack.callback(Path(part.name).unlink, missing_ok=True)
            for part in self._parts.values():
                part.close()
            if kind is None:
                stack.pop_all()


class PredictionWriter(PartWriter):
    """Writes `labels/<key>.txt` for each photograph, and its entry of predictions.json to this
    rank's part of it.

    `merge_parts` makes predictions.json of all ranks' parts.
    """

    def __init__(
        self,
        folder: Path,
        names: tuple[str, ...],
        rank: int = 0,
        guarantee: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, [PREDICTION_PARTS], rank)
        self.names = names
        self.guarantee = guarantee
        (folder / "labels").mkdir(exist_ok=True)

    def add(self, source: Source, shape: tuple[int, ...], prediction: PhotoPrediction) -> None:
        """Add a photograph of `shape` (H, W, 3) with its detections."""
        entry = {"file": str(source.file), "key": source.key} | photo_entry(
            self.names, shape, prediction
        )
        if self.guarantee:
            entry["guarantee"] = self.guarantee
        self.write(PREDICTION_PARTS, source, entry)
        outers = [
            (each["class_id"], each["polygons"][0])
            for each in entry["detections"]
            if each["polygons"]
        ]
        rows = [
            f"{class_id} " + " ".join(f"{value:.6f}" for value in shares.clip(0, 1).flat)
            for class_id, shares in (
                (number, np.reshape(outer, (-1, 2)) / shape[1::-1]) for number, outer in outers
            )
        ]
        write_text_atomic(
            self.folder / "labels" / f"{source.key}.txt", "\n".join(rows) + "\n" * bool(rows)
        )

    def save_crops(self, key: str, photo: np.ndarray, prediction: PhotoPrediction) -> None:
        """Write each detection's box as crops/<class>/<key>_<number>.jpg."""
        for number, (class_id, box) in enumerate(
            zip(prediction.class_ids.tolist(), prediction.boxes, strict=True)
        ):
            x1, y1 = np.floor(box[:2]).astype(int)
            x2, y2 = np.ceil(box[2:]).astype(int)
            cut = photo[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)]
            if cut.size:
                # which may be `bus/truck`, or `../x` in a hostile model file
                name = self.names[class_id]
                safe = re.sub(r"[^\w \-+().]", "_", name)[:60].strip(" .")
                folder = self.folder / "crops" / (safe if safe == name else f"{safe}-{class_id}")
                folder.mkdir(parents=True, exist_ok=True)
                write_jpeg(folder / f"{key}_{number}.jpg", np.ascontiguousarray(cut))


def photo_entry(
    names: Sequence[str], shape: tuple[int, ...], prediction: PhotoPrediction
) -> dict[str, Any]:
    """Return a photograph's size (H, W, 3) and detections as predictions.json has them; if there
    are lines, the wires, too.
    """
    detections = [
        {
            "class_id": class_id,
            "class": names[class_id],
            "confidence": round(score, 5),
            "box_xyxy": [round(float(value), 2) for value in box],
            "polygons": [part.reshape(-1).tolist() for part in outline(mask)],
        }
        for class_id, score, box, mask in zip(
            prediction.class_ids.tolist(),
            prediction.detections.scores.tolist(),
            prediction.boxes,
            prediction.masks,
            strict=True,
        )
    ]
    # there may be none at all
    for detection, line in zip(detections, prediction.lines, strict=False):
        detection |= line_fields(line) if line is not None else {}
    entry = {"width": shape[1], "height": shape[0], "detections": detections}
    if prediction.lines and (wires := find_extra("wires")):
        entry["wires"] = [
            {"class": detections[route.members[0]]["class"], "detections": list(route.members)}
            | line_fields(route.line)
            for route in wires.find_routes(prediction.lines, prediction.class_ids)
        ]
    return entry


def merge_parts(folder: Path, num_ranks: int) -> None:
    """Write predictions.json from all ranks' parts, in the order of the photographs.

    Raises UserError if a part is missing.
    """
    parts = Parts(folder, PREDICTION_PARTS, num_ranks)
    with parts.merged_into(folder / PREDICTIONS) as output:
        write_list(output, "[", parts.lines(), "]\n")


def read_predictions(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a folder's predictions.json, one photograph at a time, as
    `PredictionWriter.add` wrote them.

    Raises UserError if the file is missing or damaged.
    """
    file = folder / PREDICTIONS
    if not file.is_file():
        raise UserError(f"{file}: no such file; name the --output of inference.py")
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip() in ("[", "]"):
                continue
            try:
                entry = mapping(parse_json(line.rstrip().rstrip(",")))
                if missing := {"file", "key", "width", "height", "detections"} - entry.keys():
                    raise ValueError(f"no {min(missing)}")
            except BAD_CONTENT as error:
                reason = printable(reason_of_content(error), 200)
                raise UserError(f"{file}:{number}: {reason}; run inference.py again") from error
            yield entry


def keys_of(folder: Path) -> set[str]:
    """Return the names of the results in a folder, as its predictions.json lists them; none if it
    cannot be read.
    """
    with suppress(UserError):
        return {str(entry["key"]) for entry in read_predictions(folder)}
    return set()


def remove_results(folder: Path, keys: Collection[str]) -> int:
    """Remove the pictures, labels and cut-outs of photographs; return the number of files."""
    files = [
        file
        for pattern in ("*.jpg", "labels/*.txt")
        for file in folder.glob(pattern)
        if file.stem in keys
    ]
    files += [file for file in folder.glob("crops/*/*.jpg") if file.stem.rpartition("_")[0] in keys]
    for file in files:
        file.unlink()
    return len(files)


@dataclass(frozen=True)
class Parts:
    """All ranks' parts of one file. Each line is a photograph's position, a tab and JSON."""

    folder: Path
    pattern: str
    num_ranks: int

    def lines(self) -> Iterator[str]:
        """Yield the JSON of each photograph, in the order of the photographs."""
        with ExitStack() as stack:
            parts = [part_of(self.folder, self.pattern, rank) for rank in range(self.num_ranks)]
            yield from merge_lines(
                [stack.enter_context(part.open(encoding="utf-8")) for part in parts]
            )

    @contextmanager
    def merged_into(self, target: Path) -> Iterator[TextIO]:
        """Yield a file that becomes `target` at the end; then the parts are removed.

        Raises UserError if a part is missing.
        """
        for part in (part_of(self.folder, self.pattern, rank) for rank in range(self.num_ranks)):
            if not part.exists():
                raise UserError(
                    f"{part} is missing: --output must be a folder that all machines share"
                )
        with written_whole(target) as output:
            yield output
        for part in self.folder.glob(self.pattern):
            part.unlink()


class PhotoLines:
    """JSON of photographs on disk, a line each. `gather` brings those of all ranks to rank 0, which
    then reads them in order.

    Each rank must add its photographs in ascending order of their positions. The file has no name:
    it vanishes with the process.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # lives as long as the process
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._parts: list[TextIO] = []

    def add(self, position: int, content: Any) -> None:
        """Add a photograph's line."""
        self._file.write(f"{position}\t{json.dumps(content)}\n".encode())

    def gather(self) -> None:
        """Bring the lines of all ranks to rank 0; the folder need not be shared.

        Every rank must reach this.
        """
        files = distributed.gather_files(self._file, self.folder)
        self._parts = [io.TextIOWrapper(file, encoding="utf-8") for file in files]

    def __iter__(self) -> Iterator[str]:
        """Yield the JSON of each photograph, in the order of the photographs; on other ranks than 0
        nothing.
        """
        for part in self._parts:
            part.seek(0)
        return merge_lines(self._parts)


def merge_lines(parts: Iterable[TextIO]) -> Iterator[str]:
    """Yield what follows the position in each line, in the order of the positions; within a part
    they ascend.
    """
    for line in heapq.merge(*parts, key=lambda line: int(line.partition("\t")[0])):
        yield line.partition("\t")[2].rstrip("\n")


@contextmanager
def written_whole(target: Path) -> Iterator[TextIO]:
    """Yield a text file that becomes `target` at the end; after an error it is removed."""
    temporary = target.with_name(f".{target.stem}.tmp-{os.getpid()}")
    try:
        with new_text_file(temporary) as output:
            yield output
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_list(
    output: TextIO, start: str, items: Iterable[str], end: str, line_end: str = "\n"
) -> None:
    """Write the items of a JSON list between two texts; one a line, unless `line_end` is empty."""
    output.write(start)
    separator = line_end
    for item in items:
        output.write(separator + item)
        separator = "," + (line_end or " ")
    output.write(line_end + end)


def part_of(folder: Path, pattern: str, rank: int) -> Path:
    """Return a rank's part of a file."""
    return folder / pattern.replace("*", str(rank))


def line_fields(line: Line) -> dict[str, Any]:
    """Return a line's fields of predictions.json, in pixels of the photograph, rounded to
    hundredths.
    """
    return {
        "centreline": line.points.round(2).tolist(),
        "width_px": round(line.width_px, 2),
        "length_px": round(line.length_px, 2),
        "gaps": line.gaps.round(2).tolist(),
    }


def outline(region: Region) -> list[np.ndarray]:
    """Return a mask's outer outlines, largest first, as int32 (V, 2) xy pixels; none for an empty
    mask.
    """
    if not region.mask.any():
        return []
    bitmap = region.mask.view(np.uint8)
    corner = (region.left, region.top)
    contours, _ = cv2.findContours(
        bitmap, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=corner
    )
    parts = [contour[:, 0] for contour in contours if len(contour) >= 3]
    return sorted(parts, key=lambda part: -cv2.contourArea(part))

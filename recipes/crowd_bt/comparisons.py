"""Comparisons of image pairs: the local lists, the prepared format, and the split into training and
validation.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from yolo_seg_ddp.utils.distributed import Say
from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import read_text, write_text_atomic

LISTS = ("gold_batch.json", "Anchor_Anchor.json", "Anchor_Regular.json")
ORDER_FILE = "known_order.json"  # {image: quality}, where it is known: only for metrics
SPLITS = ("train", "val", "all")
METADATA_FILE = "metadata.json"
LABELS = {"left": 1, "right": -1, "draw": 0}
VAL_SHARE = 0.2
GOLD = "gold_gold"
MIN_RELIABILITY = 0.5  # an answer by a measurably worse annotator is used only where η is learned


@dataclass(frozen=True, slots=True)
class Comparison:
    """An answer about two images: `label` +1 says that the first is better, -1 the second, 0 a
    draw.
    """

    img1: str
    img2: str
    label: int
    pair_type: str
    weight: float = 1.0
    annotator_id: str | None = None
    # from 0 to 1, the share of right answers on gold pairs: a measured η
    annotator_reliability: float | None = None

    @property
    def annotator(self) -> str:
        """Who answered; answers of the same reliability count as one annotator's where no name is
        known.
        """
        if self.annotator_id is not None:
            return self.annotator_id
        return (
            ""
            if self.annotator_reliability is None
            else f"reliability {self.annotator_reliability:g}"
        )


@dataclass(frozen=True)
class Comparisons:
    """The training and the validation comparisons, and the known qualities of images, if there are
    any.
    """

    train: list[Comparison]
    val: list[Comparison]
    known_order: dict[str, float]

    @property
    def measured(self) -> dict[str, float | None]:
        """Each annotator's measured reliability, None where it is unknown, in the order of names;
        empty for one crowd.
        """
        reliabilities = {
            row.annotator: row.annotator_reliability for row in [*self.val, *self.train]
        }
        return dict(sorted(reliabilities.items())) if any(reliabilities) else {}

    def of(self, split: str) -> list[Comparison]:
        """Return the comparisons of `train`, `val` or `all`."""
        return {"train": self.train, "val": self.val, "all": [*self.train, *self.val]}[split]


def load_local(folder: Path, image_folder: Path, seed: int, say: Say) -> Comparisons:
    """Read the lists in a folder, leave out pairs with missing images, and split them.

    Raises UserError.
    """
    rows: list[Comparison] = []
    for name in LISTS:
        if not (folder / name).is_file():
            say(f"{folder / name}: not there, skipped")
            continue
        rows += read_rows(folder / name, _local_row)
    if not rows:
        raise UserError(
            f"{folder}: none of {', '.join(LISTS)} has a comparison; python make_data.py makes an "
            "example"
        )
    train, val = split_rows(with_images(rows, image_folder, say), seed)
    return _checked(Comparisons(train, val, read_known_order(folder)), folder)


def load_prepared(
    folder: Path, image_folder: Path, say: Say, *, learns_eta: bool = False
) -> Comparisons:
    """Read a folder in the prepared format, leaving out pairs with missing images. Raises
    UserError.

    Annotations of a measured reliability below 0.5 are left out, too: only a training that learns
    each annotator's η can use them.
    """
    if not (folder / METADATA_FILE).is_file():
        raise UserError(
            f"{folder}: no {METADATA_FILE}; --data-source s3 and make_data.py write the prepared "
            "format"
        )
    splits = {}
    for split in ("train", "val"):
        file = folder / f"{split}_comparisons.json"
        rows = with_images(read_rows(file, _prepared_row), image_folder, say)
        splits[split] = (
            rows if learns_eta and split == "train" else [row for row in rows if is_reliable(row)]
        )
        if dropped := len(rows) - len(splits[split]):
            say(
                f"{file}: {dropped} annotations by annotators of a reliability below "
                f"{MIN_RELIABILITY:g} are left out"
            )
    return _checked(Comparisons(splits["train"], splits["val"], read_known_order(folder)), folder)


def write_prepared(
    folder: Path, rows: Sequence[Comparison], metadata: dict[str, Any], seed: int
) -> None:
    """Split comparisons and write the prepared format; `metadata.json` comes last and makes the
    folder complete.

    `metadata` must hold `user_reliabilities`; the others go into `metadata.json`.
    """
    train, val = split_rows(rows, seed)
    for split, part in (("train", train), ("val", val), ("all", rows)):
        write_json(folder / f"{split}_comparisons.json", [asdict(row) for row in part])
    reliabilities = metadata.pop("user_reliabilities")
    write_json(folder / "user_reliabilities.json", reliabilities)
    has_fixed = any(row.annotator_reliability is not None for row in rows)
    counts = {"num_train": len(train), "num_val": len(val), "num_users": len(reliabilities)}
    write_json(
        folder / METADATA_FILE, {"uses_fixed_eta": has_fixed, "seed": seed, **counts, **metadata}
    )


def is_reliable(row: Comparison) -> bool:
    """Whether the annotator is reliable as far as is known."""
    return row.annotator_reliability is None or row.annotator_reliability >= MIN_RELIABILITY


def split_rows(rows: Sequence[Comparison], seed: int) -> tuple[list[Comparison], list[Comparison]]:
    """Split comparisons 80 to 20 within each pair type.

    The split depends on the rows' order and the seed only.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        places[row.pair_type].append(number)
    chosen: set[int] = set()
    for number, kind in enumerate(sorted(places)):
        order = np.random.default_rng((seed, number)).permutation(places[kind])
        chosen.update(order[: round(VAL_SHARE * len(order))].tolist())
    train = [row for number, row in enumerate(rows) if number not in chosen]
    return train, [rows[number] for number in sorted(chosen)]


def with_images(rows: Sequence[Comparison], folder: Path, say: Say) -> list[Comparison]:
    """Return the comparisons whose images are in the folder; say how many are left out."""
    names = {name for row in rows for name in (row.img1, row.img2)}
    missing = {name for name in names if not (_stays_inside(name) and (folder / name).is_file())}
    kept = [row for row in rows if row.img1 not in missing and row.img2 not in missing]
    if missing:
        example = printable(min(missing))
        say(
            f"WARNING: {len(rows) - len(kept)} of {len(rows)} comparisons are left out: "
            f"{len(missing)} images are not in {folder}, such as {example}"
        )
    return kept


def read_known_order(folder: Path) -> dict[str, float]:
    """Return the known qualities {image: quality} of a data folder; empty without that file.

    Raises UserError.
    """
    file = folder / ORDER_FILE
    qualities = read_json(file) if file.is_file() else {}
    if not isinstance(qualities, dict) or not all(
        _is_number(value) for value in qualities.values()
    ):
        raise UserError(f'{file}: expected {{"image": quality, …}}')
    return {name: float(value) for name, value in qualities.items()}


def read_rows(file: Path, row_of: Callable[[Any], Comparison]) -> list[Comparison]:
    """Return the comparisons of a list. Raises UserError that names the file and the item."""
    items = read_json(file)
    rows = []
    if not isinstance(items, list):
        raise UserError(f"{file}: expected a list of comparisons, found a {type(items).__name__}")
    for number, item in enumerate(items, 1):
        try:
            rows.append(row_of(item))
        except ValueError as error:
            raise UserError(f"{file}: item {number}: {error}") from error
    return rows


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises UserError with file and line."""
    try:
        return json.loads(read_text(file))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({one_line(error)})") from error


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file atomically; make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(content, indent=1, ensure_ascii=False))


def label_of(choice: Any) -> int:
    """Return +1, -1 or 0 for `left`, `right` or `draw`. Raises ValueError."""
    if not isinstance(choice, str) or choice not in LABELS:
        raise ValueError(f"{printable(repr(choice))} is not left, right or draw")
    return LABELS[choice]


def image_names(item: Any) -> tuple[str, str]:
    """Return `img1` and `img2` of a comparison. Raises ValueError."""
    first, second = (item.get("img1"), item.get("img2")) if isinstance(item, dict) else (None, None)
    if not (isinstance(first, str) and first and isinstance(second, str) and second):
        raise ValueError("expected an object with the file names img1 and img2")
    return first, second


def _local_row(item: Any) -> Comparison:
    first, second = image_names(item)
    try:
        label = label_of(item.get("expected_choice"))
    except ValueError as error:
        raise ValueError(f"expected_choice {error}") from error
    return Comparison(
        first, second, label, pair_type_of(item.get("type")), annotator_id=_annotator(item)
    )


def _prepared_row(item: Any) -> Comparison:
    first, second = image_names(item)
    label = item.get("label")
    weight = item.get("weight", 1.0)
    reliability = item.get("annotator_reliability")
    if label not in (-1, 0, 1) or not _is_number(weight) or weight <= 0:
        raise ValueError(
            f"label {printable(repr(label))} is not -1, 0 or 1, or weight is not a number above 0"
        )
    if reliability is not None and not (_is_number(reliability) and 0 <= reliability <= 1):
        raise ValueError(
            f"annotator_reliability {printable(repr(reliability))} is not a number from 0 to 1"
        )
    kind = pair_type_of(item.get("pair_type"))
    annotator = _annotator(item)
    return Comparison(first, second, int(label), kind, float(weight), annotator, reliability)


def _annotator(item: dict[str, Any]) -> str | None:
    annotator = item.get("annotator_id")
    return None if annotator is None else str(annotator)


def pair_type_of(value: Any) -> str:
    """Return a pair type as it may be printed; `unknown` for anything but a name."""
    return printable(value) if isinstance(value, str) and value else "unknown"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _stays_inside(name: str) -> bool:
    """Whether a name from an untrusted list points to a file below the image folder."""
    is_absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
    return not is_absolute and ".." not in PurePosixPath(name).parts and "\0" not in name


def _checked(comparisons: Comparisons, folder: Path) -> Comparisons:
    if not comparisons.train or not comparisons.val:
        raise UserError(
            f"{folder}: {len(comparisons.train)} training and {len(comparisons.val)} validation "
            "comparisons remain; both are needed"
        )
    return comparisons


def image_list(rows: Iterable[Comparison]) -> list[str]:
    """Return the names of all images in the comparisons, sorted."""
    return sorted({name for row in rows for name in (row.img1, row.img2)})

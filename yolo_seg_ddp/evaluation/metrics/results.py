"""The partial result of one image; packing for the exchange between ranks, merging by image id."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from yolo_seg_ddp.evaluation.metrics.matching import IOU_THRESHOLDS, LEVELS


def no_rows() -> np.ndarray:
    """Return the array of what is not given."""
    return np.zeros(0)


@dataclass(frozen=True, eq=False)
class ImageResult:
    """The matches of one image: `n` predictions in descending order of confidence, `m` targets.

    box_hits, mask_hits: whether a prediction matched a target of its class at each of
    IOU_THRESHOLDS. box_confusion: pairs (predicted class, true class), see `confusion_pairs`.
    box_sizes, mask_sizes, target_sizes: positions in SIZES, see `sizes_of_predictions`; all empty
    if AP by size is not wanted. centrelines: lengths and numbers of thin objects by class, see
    `thin_objects.measure`. lengths: see `thin_objects.found_lengths`. box_ignored, mask_ignored:
    see `ignored_shares`; 0 if not given. boxed: targets that have no outline, none if not given;
    they count for boxes alone. Raises ValueError if shapes disagree.
    """

    image_id: int
    scores: np.ndarray  # (n,) float32, 0-1
    class_ids: np.ndarray  # (n,) int64
    box_hits: np.ndarray  # (n, 10) bool
    mask_hits: np.ndarray  # (n, 10) bool
    target_class_ids: np.ndarray  # (m,) int64
    box_confusion: np.ndarray  # (k, 2) int64
    box_sizes: np.ndarray = field(default_factory=no_rows)  # (n, 10) uint8
    mask_sizes: np.ndarray = field(default_factory=no_rows)  # (n, 10) uint8
    target_sizes: np.ndarray = field(default_factory=no_rows)  # (m,) uint8
    centrelines: np.ndarray = field(default_factory=no_rows)  # (classes, 7) int64
    lengths: np.ndarray = field(default_factory=no_rows)  # (classes, 2 + levels) int64
    box_ignored: np.ndarray = field(default_factory=no_rows)  # (n,) float32, 0-1
    mask_ignored: np.ndarray = field(default_factory=no_rows)  # (n,) float32, 0-1
    boxed: np.ndarray = field(default_factory=no_rows)  # (m,) bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_id", int(self.image_id))
        for name, (dtype, width, _) in _ARRAYS.items():
            array: np.ndarray = np.asarray(getattr(self, name), dtype=dtype)
            if array.size == 0 and (name.endswith("_ignored") or name == "boxed"):
                owners = self.target_class_ids if name == "boxed" else self.scores
                array = np.zeros(len(owners), dtype)
            array = array.reshape(-1, width) if width and array.size == 0 else array
            if array.shape[1:] != ((width,) if width else ()) or array.ndim == 0:
                raise ValueError(f"image {self.image_id}: {name} has the shape {array.shape}")
            object.__setattr__(self, name, array)
        if (
            len(
                {
                    len(getattr(self, name))
                    for name, (_, _, rows) in _ARRAYS.items()
                    if rows == "predictions"
                }
            )
            > 1
        ):
            raise ValueError(
                f"image {self.image_id}: scores, class_ids, hits and ignored differ in length"
            )
        sized = (len(self.box_sizes), len(self.mask_sizes), len(self.target_sizes))
        if sized not in (
            (0, 0, 0),
            (len(self.scores), len(self.scores), len(self.target_class_ids)),
        ):
            raise ValueError(
                f"image {self.image_id}: sizes are given for some predictions or targets, not for "
                "all"
            )

    def judged(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which predictions are right, and which are right or wrong, at an IoU of 0.5: bool
        (n,) each.

        Masks are compared, but boxes for a class of which an object of this image has no outline.
        """
        by_box = np.isin(self.class_ids, self.target_class_ids[self.boxed])
        is_right = np.where(by_box, self.box_hits[:, 0], self.mask_hits[:, 0])
        ignored = np.where(by_box, self.box_ignored, self.mask_ignored)
        return is_right, is_right | (ignored < IOU_THRESHOLDS[0])


_HITS = len(IOU_THRESHOLDS)
# name: (dtype, columns or 0 for one dimension, what a row is)
_ARRAYS: dict[str, tuple[type, int, str]] = {
    "scores": (np.float32, 0, "predictions"),
    "class_ids": (np.int64, 0, "predictions"),
    "box_hits": (np.bool_, _HITS, "predictions"),
    "mask_hits": (np.bool_, _HITS, "predictions"),
    "target_class_ids": (np.int64, 0, "targets"),
    "box_confusion": (np.int64, 2, "pairs"),
    "box_sizes": (np.uint8, _HITS, "sized_predictions"),
    "mask_sizes": (np.uint8, _HITS, "sized_predictions"),
    "target_sizes": (np.uint8, 0, "sized_targets"),
    "centrelines": (np.int64, 7, "centrelines"),
    "lengths": (np.int64, 2 + len(LEVELS), "lengths"),
    "box_ignored": (np.float32, 0, "predictions"),
    "mask_ignored": (np.float32, 0, "predictions"),
    "boxed": (np.bool_, 0, "targets"),
}


def pack_results(results: Iterable[ImageResult]) -> dict[str, np.ndarray]:
    """Flatten results into arrays that ranks can exchange as tensors: ids, counts per image, and
    joined values.

    Booleans become uint8, which every backend can send.
    """
    results = list(results)
    packed = {"image_ids": np.array([result.image_id for result in results], np.int64)}
    for name, (dtype, width, rows) in _ARRAYS.items():
        packed[f"num_{rows}"] = np.array(
            [len(getattr(result, name)) for result in results], np.int64
        )
        empty: np.ndarray = np.zeros((0, width) if width else 0, dtype)
        joined = np.concatenate([empty, *(getattr(result, name) for result in results)])
        packed[name] = joined.astype(np.uint8) if dtype is np.bool_ else joined
    return packed


def unpack_results(packed: dict[str, np.ndarray]) -> list[ImageResult]:
    """Undo `pack_results`.

    Raises ValueError if lengths disagree, for example after an incomplete transfer.
    """
    image_ids = packed["image_ids"].tolist()
    columns: dict[str, list[np.ndarray]] = {}
    for name, (_, _, rows) in _ARRAYS.items():
        counts = packed[f"num_{rows}"]
        if len(counts) != len(image_ids) or counts.sum() != len(packed[name]):
            raise ValueError(
                f"packed results: {name} has {len(packed[name])} rows, {counts.sum()} were "
                "announced"
            )
        columns[name] = np.split(packed[name], np.cumsum(counts)[:-1]) if len(counts) else []
    return [
        ImageResult(image_id, **{name: column[index] for name, column in columns.items()})
        for index, image_id in enumerate(image_ids)
    ]


def pool_predictions(results: Iterable[ImageResult]) -> dict[str, np.ndarray]:
    """Pack results, with the predictions of all images in descending order of confidence (float64
    `scores`).
    """
    packed = pack_results(results)
    order = np.argsort(-packed["scores"], kind="stable")
    for name, (_, _, rows) in _ARRAYS.items():
        if rows in ("predictions", "sized_predictions") and len(packed[name]):
            packed[name] = packed[name][order]
    return {**packed, "scores": packed["scores"].astype(np.float64)}


def merge_results(parts: Iterable[Iterable[ImageResult]]) -> list[ImageResult]:
    """Join the results of several ranks: sorted by image id, each image exactly once.

    Of an image that occurs twice with equal results one is kept. Raises ValueError if its results
    differ.
    """
    merged: dict[int, ImageResult] = {}
    for part in parts:
        for result in part:
            known = merged.setdefault(result.image_id, result)
            pairs = (
                (getattr(known, one.name), getattr(result, one.name)) for one in fields(ImageResult)
            )
            if known is not result and not all(np.array_equal(*pair) for pair in pairs):
                raise ValueError(
                    f"image {result.image_id} was evaluated twice, with different results"
                )
    return [merged[image_id] for image_id in sorted(merged)]

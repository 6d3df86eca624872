"""Chooses the photographs to label next; writes them as a list and, with what the model finds, for annotation tools.

Each choice brings as many unlabelled photographs as possible near to one with labels, above all those that the model is
unsure of. Photographs that are only unlike all others, and a second one of the same, bring few.
"""

from __future__ import annotations

import csv
import heapq
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from utils.common.errors import UserError
from utils.common.files import write_text_atomic
from utils.common.progress import Progress
from utils.common.text import plain_text
from utils.data.images import fit_long_side
from utils.evaluation.contradictions import read_photos
from utils.evaluation.metrics.matching import CONFUSION_MIN_SCORE, box_iou
from utils.predict.annotation_files import ToolFiles, ToolWriter, merge_tool_files
from utils.predict.detections import PhotoPrediction
from utils.predict.prediction_files import Source
from utils.predict.tiles import Predictor
from utils.sources.checks.pictures import same_measured
from utils.sources.checks.reading import Entry
from utils.yolo.model import YoloModel

LIST = "next.csv"
FARTHEST = 2.0  # distance of opposite features
BLOCK = 1024  # photographs compared with all others at a time: 80 MB for 20,000 photographs
THRESHOLD = CONFUSION_MIN_SCORE  # from which a detection counts, as in inference.py
MIN_SEEN_PX = 16  # longer side, in pixels of the input, of objects that the whole photograph can show
FAR = 1e-6  # added to lengths that divide


@dataclass(frozen=True)
class Found:
    """A photograph's detections: int64 (n,), float (n,), and boxes float (n, 4) xyxy as shares of its sides."""

    class_ids: np.ndarray
    scores: np.ndarray
    boxes: np.ndarray

    @classmethod
    def of(cls, photo: np.ndarray, prediction: PhotoPrediction) -> Found:
        """Take the detections from a prediction on `photo`, (H, W, 3)."""
        height, width = photo.shape[:2]
        boxes = prediction.boxes / np.array([width, height, width, height])
        return cls(prediction.class_ids, prediction.found.scores.numpy(), boxes)

    def mirrored(self) -> Found:
        """Swap left and right."""
        left, top, right, bottom = self.boxes.T
        return replace(self, boxes=np.stack([1 - right, top, 1 - left, bottom], 1))

    def at_least(self, side: float) -> Found:
        """Return the detections whose longer side is at least this share of the photograph's."""
        kept = (self.boxes[:, 2:] - self.boxes[:, :2]).max(1, initial=0) >= side
        return Found(self.class_ids[kept], self.scores[kept], self.boxes[kept])


def look(entries: Sequence[Entry], predictor: Predictor, title: str) -> tuple[list[Found], list[Found], np.ndarray]:
    """Return what is found in each whole photograph and in its mirror image, turned back, and its features float32 (N, d).

    The features are the means over the input of the maps that the network's last layer gets. Raises UserError if some are
    no numbers.
    """
    whole = replace(predictor, tiling=None)
    pooled: list[torch.Tensor] = []

    def keep(_: Any, inputs: Any) -> None:
        pooled.append(torch.cat([level.float().mean((2, 3)) for level in inputs[0]], 1).cpu())

    def views() -> Iterator[tuple[bool, np.ndarray]]:
        for _, photo in Progress(title, len(entries))(read_photos(entries, whole)):
            small = fit_long_side(photo, predictor.size_px)
            yield False, small
            yield True, np.ascontiguousarray(small[:, ::-1])

    network: YoloModel = predictor.model
    hook = network.model[-1].register_forward_pre_hook(keep)
    found: dict[bool, list[Found]] = {False: [], True: []}
    try:
        for is_mirrored, photo, prediction in whole.predict(views()):
            found[is_mirrored].append(Found.of(photo, prediction))
    finally:
        hook.remove()
    features = torch.cat(pooled).view(len(entries), 2, -1).mean(1).numpy()
    if not np.isfinite(features).all():
        raise UserError("--model: its network gives values that are no numbers; train it again, or pass --amp off")
    return found[False], [each.mirrored() for each in found[True]], features


def find_doubts(
    entries: Sequence[Entry], seen: Sequence[list[Found]], predictor: Predictor, importance: np.ndarray
) -> tuple[dict[str, np.ndarray], list[Found]]:
    """Return what the model is unsure of in each photograph, float (N,), higher is less sure; and what it finds.

    near_threshold: `near_threshold`; mirrored, tiles: `disagreement` with the mirror image and, if the predictor has tiles,
    of these with the whole photograph, for objects that both can show. importance: of each class, float (classes,).
    """
    found, mirrored = seen
    doubts = {"mirrored": np.array([disagreement(*pair) for pair in zip(found, mirrored, strict=True)])}
    if predictor.tiling:
        photos = Progress("photographs in tiles", len(entries))(read_photos(entries, predictor))
        in_tiles = [Found.of(photo, prediction) for _, photo, prediction in predictor.predict(photos)]
        side = MIN_SEEN_PX / predictor.size_px
        pairs = [(one.at_least(side), other.at_least(side)) for one, other in zip(in_tiles, found, strict=True)]
        doubts["tiles"] = np.array([disagreement(*pair) for pair in pairs])
        found = in_tiles
    return {"near_threshold": np.array([near_threshold(each, importance) for each in found]), **doubts}, found


def near_threshold(found: Found, importance: np.ndarray) -> float:
    """Return how many detections could as well be left out: each counts by its class and its distance from THRESHOLD.

    A detection at the threshold counts as 1, one with twice or half its odds as 1/2, and so on.
    """
    ratio = found.scores / (1 - found.scores).clip(FAR) * (1 - THRESHOLD) / THRESHOLD
    return float((np.minimum(ratio, 1 / ratio.clip(FAR)) * importance[found.class_ids]).sum())


def disagreement(first: Found, second: Found) -> float:
    """Return 0 if two sets of detections are equal, 1 if they share nothing: 1 - Dice's coefficient of their confidences.

    Detections of one class are paired so that the sum of IoU times the lower confidence is the highest.
    """
    total = float(first.scores.sum() + second.scores.sum())
    shared = box_iou(first.boxes, second.boxes) * np.minimum.outer(first.scores, second.scores)
    shared *= first.class_ids[:, None] == second.class_ids
    return 1 - 2 * float(shared[linear_sum_assignment(-shared)].sum()) / total if total else 0.0


def joined(doubts: dict[str, np.ndarray]) -> np.ndarray:
    """Return the mean of each photograph's ranks among all, in (0, 1]: float (N,). Their units differ, ranks have none."""
    return np.mean([rankdata(values) / len(values) for values in doubts.values()], axis=0)


@dataclass(frozen=True)
class Choice:
    """A chosen photograph and why: what the list's columns say (docs/check_data.md)."""

    entry: Entry
    reasons: dict[str, float]


def choose_next(
    labelled: Sequence[Entry], unlabelled: Sequence[Entry], predictor: Predictor, number: int, num_classes: int
) -> list[Choice]:
    """Return the photographs to label next, best first. `train`, or every split if there is none, counts as labelled."""
    learnt = [entry for entry in labelled if entry.picture and entry.split == "train"]
    learnt = learnt or [entry for entry in labelled if entry.picture]
    class_ids = [row.class_id for entry in learnt for row in entry.rows]
    known = look(learnt, predictor, "labelled photographs")[2] if learnt else None
    *seen, features = look(unlabelled, predictor, "unlabelled photographs")
    counts = np.bincount(class_ids, minlength=num_classes).clip(1)
    doubts, found = find_doubts(unlabelled, seen, predictor, np.sqrt(counts.mean() / counts))
    doubt = joined(doubts)
    near, directions = compare(features, known)
    chosen = list(choose(directions, near, doubt, number))
    return [
        Choice(
            unlabelled[position],
            {
                "doubt": float(doubt[position]),
                **{name: float(values[position]) for name, values in doubts.items()},
                "unlike_labelled": float(near[position]),
                "brings_nearer": num_nearer,
                "detections": int((found[position].scores >= THRESHOLD).sum()),
            },
        )
        for position, num_nearer in chosen
    ]


def leave_out_known(labelled: Sequence[Entry], unlabelled: Sequence[Entry]) -> tuple[list[Entry], str]:
    """Return the photographs that show the same as no other one, and a line about those left out, "" if there are none.

    Raises UserError if nothing remains.
    """
    both = [entry for entry in (*labelled, *unlabelled) if entry.picture]
    groups = same_measured([entry.picture for entry in both if entry.picture]).tolist()
    num_known = len(both) - len(unlabelled)
    known = set(groups[:num_known])
    first = dict(zip(groups[::-1], both[::-1], strict=True))
    kept = [entry for group, entry in zip(groups, both, strict=True) if group not in known and first[group] is entry]
    num_labelled = sum(group in known for group in groups[num_known:])
    num_copies = len(unlabelled) - num_labelled - len(kept)
    if not kept:
        raise UserError(
            f"--unlabelled: no photograph that can be read and is new: {num_labelled} are labelled in --data"
        )
    line = f"left out: {num_labelled} that are labelled, {num_copies} that show the same as another"
    return kept, line if num_labelled or num_copies else ""


def compare(features: np.ndarray, known: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return each photograph's distance from the nearest labelled one, 0 to 2, and its direction among all: (N, d).

    A distance is 1 - cosine of features (N, d) and (M, d), each of which is first scaled to mean 0 and deviation 1.
    """
    together = features if known is None else np.concatenate([features, known])
    scaled = (together - together.mean(0)) / (together.std(0) + FAR)
    directions = scaled / (np.linalg.norm(scaled, axis=1, keepdims=True) + FAR)
    directions, others = directions[: len(features)], directions[len(features) :]
    if not len(others):
        return np.full(len(features), FARTHEST), directions
    near = [distances(directions[start : start + BLOCK], others).min(1) for start in range(0, len(features), BLOCK)]
    return np.concatenate(near), directions


def distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return 1 - cosine of directions (m, d) and (n, d): (m, n)."""
    return 1 - first @ second.T


def choose(directions: np.ndarray, near: np.ndarray, weight: np.ndarray, number: int) -> Iterator[tuple[int, int]]:
    """Yield the positions of `number` photographs, best first, and how many photographs each brings nearer, itself included.

    Each one lowers the most the sum of all photographs' weight times distance from the nearest labelled or chosen one
    (`near` before the first). All of them lower it by at least 63 % of what is possible (Nemhauser, Wolsey and Fisher, 1978).
    A gain only shrinks from choice to choice, so most need not be computed again (Minoux, 1978).
    """
    near = near.copy()
    waiting = []
    for start in range(0, len(directions), BLOCK):
        gains = (near - distances(directions[start : start + BLOCK], directions)).clip(0) @ weight
        waiting += [(-gain, start + row) for row, gain in enumerate(gains.tolist())]
    heapq.heapify(waiting)
    while waiting and number:
        _, position = heapq.heappop(waiting)
        nearer = (near - distances(directions[position : position + 1], directions)[0]).clip(0)
        best = (-float(nearer @ weight), position)
        if waiting and best > waiting[0]:
            heapq.heappush(waiting, best)
            continue
        near -= nearer
        number -= 1
        yield position, int((nearer > 0).sum())


def write_choice(choices: Sequence[Choice], predictor: Predictor, tools: ToolFiles) -> None:
    """Write LIST and the files for annotation tools, with the detections above THRESHOLD, in the order of the choice."""
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["rank", "photograph", *choices[0].reasons])
    for rank, choice in enumerate(choices, 1):
        file = plain_text(str(choice.entry.file.absolute()))
        rows.writerow([rank, file, *(round(value, 4) for value in choice.reasons.values())])
    sure = replace(predictor, limits={**predictor.limits, "confidence": THRESHOLD})
    photos = read_photos([choice.entry for choice in choices], None)
    with ToolWriter(tools, 0) as writer:
        predictions = Progress("predictions", len(choices))(sure.predict(photos))
        for position, (entry, photo, prediction) in enumerate(predictions):
            writer.add(Source(position, entry.file, entry.file.stem), photo.shape, prediction)
    merge_tool_files(tools, 1)
    write_text_atomic(Path(tools.folder) / LIST, text.getvalue())

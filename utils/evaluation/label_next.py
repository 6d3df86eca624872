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

import numpy as np

from utils.common.errors import UserError
from utils.common.files import write_text_atomic
from utils.common.progress import Progress
from utils.common.text import plain_text
from utils.evaluation.contradictions import read_photos
from utils.evaluation.doubt import FAR, THRESHOLD, find_doubts, joined, look
from utils.predict.annotation_files import ToolFiles, ToolWriter, merge_tool_files
from utils.predict.prediction_files import Source
from utils.predict.tiles import Predictor
from utils.sources.checks.pictures import same_measured
from utils.sources.checks.reading import Entry

LIST = "next.csv"
FARTHEST = 2.0  # distance of opposite features
BLOCK = 1024  # photographs compared with all others at a time: 80 MB for 20,000 photographs


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

"""What lets models of different classes be compared: they are judged on the classes that all of
them and the data set know.
"""

from collections.abc import Sequence
from itertools import chain, compress

import numpy as np
import torch

from yolo_seg_ddp.data.labels import ROUGH, Photo, split_regions
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    class_names,
    trained_label_lengths,
    trained_thin_classes,
    trained_wire_labels,
)

# Facts of a model's training that are lists of a class and further numbers in turn: how many of
# these there are a class.
WIDTHS = {
    "thin_classes": 1,
    "wires_end_at": 1,
    "wires_bent": 1,
    "wires_parallel": 2,
    "label_lengths": 3,
}


def shared_classes(models: Sequence[YoloModel], names: Sequence[str]) -> list[str]:
    """Return the classes of a data set, `names`, that all models know, if one of them knows others;
    else none.
    """
    known = [class_names(model) for model in models]
    return (
        [name for name in names if all(name in each for each in known)]
        if {*known} != {tuple(names)}
        else []
    )


def only_classes(photo: Photo, numbers: Sequence[int]) -> Photo:
    """Return a photograph's labels without the objects of classes that are not in `numbers`."""
    class_ids, outlines = photo.with_regions()
    kept = np.isin(class_ids % ROUGH, numbers) | (class_ids < 0)
    return Photo(photo.file, *split_regions(class_ids[kept], [*compress(outlines, kept.tolist())]))


def number_classes_as(
    model: YoloModel, path: str, names: Sequence[str], shared: Sequence[str]
) -> None:
    """Let a model that was opened for prediction predict the classes `shared` alone, numbered as in
    `names`.
    """
    if not hasattr(model, "model"):
        raise UserError(
            f"{path}: an export cannot leave out classes; compare the .pt file of which it was made"
        )
    known = class_names(model)
    rows = [known.index(name) if name in shared else -1 for name in names]
    numbers = {row: number for number, row in enumerate(rows) if row >= 0}
    facts = {
        "thin_classes": trained_thin_classes(model),
        "label_lengths": trained_label_lengths(model),
    }
    for fact, values in (facts | trained_wire_labels(model)).items():
        if width := WIDTHS.get(fact):
            starts = [start for start in range(0, len(values), width) if values[start] in numbers]
            kept = [
                (numbers[values[start]], *values[start + 1 : start + width]) for start in starts
            ]
            model.args[fact] = [*chain(*kept)]

    head = model.model[-1]
    head.nc = model.nc = len(names)
    model.names = dict(enumerate(names))
    for branch in head.one2one_cv3 if model.end2end else head.cv3:
        layer = branch[-1]
        layer.weight, layer.bias = (
            torch.nn.Parameter(tensor[rows]) for tensor in (layer.weight, layer.bias)
        )
        layer.bias.data[[row < 0 for row in rows]] = -1e4  # a probability of 0

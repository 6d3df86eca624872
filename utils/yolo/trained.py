"""What a model file says of its training: input size, windows, and how objects were labelled. Files are from strangers."""

import math
from typing import Any

from utils.data.dataset_yaml import is_stretch
from utils.yolo.model import MAX_INPUT_PX, YoloModel, class_names

MOST_MARGIN_PX, MOST_LENGTH_PX = 1000.0, 1e9  # of labels around wires; of labels
WINDOW_FACTS = ("per_photo", "low_scale", "high_scale")


def trained_size_px(model: YoloModel) -> int:
    """Return the side of the square input that a loaded model was trained with; 640 if its file does not say."""
    size_px = model.args.get("imgsz", 640)
    return size_px if isinstance(size_px, int) and 32 <= size_px <= MAX_INPUT_PX and size_px % 32 == 0 else 640


def trained_windows(model: YoloModel) -> dict[str, float] | None:
    """Return the facts of a loaded model's training on windows; None if it saw whole photographs.

    `per_photo`: windows of each photograph per epoch. `low_scale`, `high_scale`: shown pixels per pixel of the
    photograph.
    """
    facts = model.args.get("windows")
    return {name: facts[name] for name in WINDOW_FACTS} if are_possible_windows(facts) else None


def trained_thin_classes(model: YoloModel) -> tuple[int, ...]:
    """Return the classes that were long and thin in a loaded model's training on windows; none if its file does not say."""
    return _known_classes(model, model.args.get("thin_classes"))


def trained_wire_labels(model: YoloModel) -> dict[str, Any]:
    """Return how wires were labelled in that training, as `measure_wire_labels` does; nothing that its file does not say."""
    width = model.args.get("wire_width")
    is_width = isinstance(width, list) and len(width) == 2 and all(type(number) is float for number in width)
    is_width = is_width and all(abs(number) <= MOST_MARGIN_PX for number in width)
    end_at = _known_classes(model, model.args.get("wires_end_at"))
    parallel = _facts_of_classes(model, "wires_parallel", 1, 1.0)
    bent = _known_classes(model, model.args.get("wires_bent"))
    facts = {"wires_end_at": [*end_at], "wire_width": width if is_width else [], "wires_parallel": parallel}
    return {**facts, "wires_bent": [*bent]}


def trained_stretch(model: YoloModel) -> tuple[float, float] | None:
    """Return the values of photographs of more than 8 bits that were black and white in that training; None if its file says none."""
    stretch = model.args.get("stretch")
    return (stretch[0], stretch[1]) if is_stretch(stretch) else None


def trained_label_lengths(model: YoloModel) -> list[float]:
    """Return how long labels were in that training, as `label_lengths` does; nothing if the model's file does not say it."""
    return _facts_of_classes(model, "label_lengths", 2, MOST_LENGTH_PX)


def _facts_of_classes(model: YoloModel, name: str, count: int, most: float) -> list[float]:
    """Return a list of classes, each followed by `count` numbers above 0 and at most `most`; nothing if it is anything else."""
    facts, width = model.args.get(name), count + 1
    if not isinstance(facts, list) or len(facts) % width:
        return []
    are_possible = all(type(fact) is float and 0 < fact <= most for n, fact in enumerate(facts) if n % width)
    return facts if are_possible and _known_classes(model, facts[::width]) else []


def _known_classes(model: YoloModel, classes: Any) -> tuple[int, ...]:
    known = range(len(class_names(model)))
    is_list = isinstance(classes, list) and all(type(class_id) is int and class_id in known for class_id in classes)
    return tuple(classes) if is_list else ()


def are_possible_windows(facts: Any) -> bool:
    """Return whether the trainer's options could give these facts of a training on windows."""
    if not isinstance(facts, dict) or not all(0 < facts.get(name, 0) < math.inf for name in WINDOW_FACTS):
        return False
    return bool(facts["low_scale"] <= facts["high_scale"] <= 1)

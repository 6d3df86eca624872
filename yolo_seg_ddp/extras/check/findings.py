"""The findings that the checks report: their kinds, which of these are errors, and how to correct
each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    An error makes the training refuse the data, learn wrong things or measure wrong things.
    """

    title: str
    meaning: str
    remedy: str
    is_error: bool


_error = partial(Kind, is_error=True)
_hint = partial(Kind, is_error=False)
KINDS: dict[str, Kind] = {
    "leak": _error(
        "Photograph in two splits",
        "A photograph of one split shows the same picture as one of another split, perhaps "
        "brighter, smaller or recompressed. Scores on such photographs are too high.",
        "Remove one of the two, or split again: python parse_labels.py --input FOLDER --output "
        "NEW --split-by hash keeps copies together.",
    ),
    "unreadable_photo": _error(
        "Unreadable photograph",
        "The file is truncated, damaged or no picture. The trainer refuses it, or leaves it out "
        "with --skip-bad.",
        "Copy the file again, or remove it with its label file.",
    ),
    "unreadable_label": _error(
        "Unreadable label",
        "A line of a label file, or the whole file, cannot be read. The trainer refuses it.",
        "Correct the line: class, then x and y of at least three points as shares of the "
        "picture's width and height.",
    ),
    "outside": _error(
        "Outline leaves the picture",
        "A coordinate is below 0 or above 1. The trainer refuses the line.",
        "Divide by the picture's size if these are pixels; otherwise cut the outline at the edge.",
    ),
    "no_area": _error(
        "Outline without area",
        "The outline has fewer than three different points, or all of them lie on a line.",
        "Draw the object again, or remove the line.",
    ),
    "crosses_itself": _error(
        "Outline crosses itself",
        "Parts of the outline are wound the wrong way or covered twice, so the mask is not the "
        "object.",
        "Draw the object again; two parts need two lines.",
    ),
    "duplicate_line": _error(
        "Same outline twice",
        "Two lines of a label file have the same points. The second is a false object.",
        "Remove one of the lines.",
    ),
    "class_not_in_train": _error(
        "Class without training objects",
        "Another split has objects of the class, train has none. The model cannot learn it.",
        "Move photographs with the class to train, or remove the class.",
    ),
    "other_class": _hint(
        "Model sees another class",
        "A confident prediction has the shape of the label, but another class.",
        "Look at the picture; correct the label's class if the model is right.",
    ),
    "missed_label": _hint(
        "Model sees an object without a label",
        "A confident prediction lies where no label is. A missing label teaches the model to "
        "overlook such objects.",
        "Look at the picture; add a label if the model is right.",
    ),
    "unfound_label": _hint(
        "Label that the model does not see",
        "No prediction lies on the label, not even an unsure one, although the model finds most "
        "labels of the class.",
        "Look at the picture; correct or remove the label if nothing is there.",
    ),
    "overlap": _hint(
        "Photograph that overlaps one of another split",
        "Two photographs show a part of the same scene, such as two frames of one flight. They "
        "are no copies, but scores on such photographs are higher than on another day.",
        "Nothing, or split by flights: python parse_labels.py --input FOLDER --output NEW "
        "--split-by time, or --split-by circuit.",
    ),
    "repeated": _hint(
        "Photograph twice in a split",
        "Two photographs of a split show the same picture. It counts twice.",
        "Remove one of the two, above all if their labels differ.",
    ),
    "tiny": _hint(
        "Tiny at the trained size",
        "At the network's input size the object is smaller than one pixel of the mask that the "
        "network learns.",
        "Train with a larger --img-size or on windows (docs/windows.md), or remove the label.",
    ),
    "box_row": _hint(
        "Box instead of an outline",
        "The line holds a box (class, centre, width, height). It teaches class and box, and little "
        "of the mask.",
        "Draw the outlines of some objects, also in val, where masks are judged on outlines.",
    ),
    "rectangle": _hint(
        "Upright rectangle as an outline",
        "The outline has four corners and upright sides: perhaps a box that was turned into an "
        "outline.",
        "Draw the object's outline if it is no rectangle.",
    ),
    "touches_edge": _hint(
        "Outline cut by the picture's edge",
        "A part of the outline lies on the picture's edge. That is right for an object that the "
        "photograph cuts, such as a wire.",
        "Look at those that should be whole: a photograph that was cropped after labelling cuts "
        "outlines, too.",
    ),
    "class_not_in_val": _hint(
        "Class without validation objects",
        "Train has objects of the class, val has none. The class has no score.",
        "Move some photographs with the class to val.",
    ),
    "class_unused": _hint(
        "Class without objects",
        "No split has an object of the class.",
        "Check the class's name and number in the data-set YAML.",
    ),
    "class_share": _hint(
        "Class in different shares of the splits",
        "The share of photographs that show the class differs between train and the split, by "
        "more than chance explains.",
        "Split again by photograph, unless whole places were held out on purpose.",
    ),
    "no_label_file": _hint(
        "Photograph without a label file",
        "The photograph counts as one without objects.",
        "Add the label file, or an empty one to say that nothing is there.",
    ),
    "label_without_photo": _hint(
        "Label file without a photograph",
        "No photograph has the label file's name, so it is never read.",
        "Add the photograph, correct the name, or remove the label file.",
    ),
    "blurred": _hint(
        "Blurred photograph",
        "The photograph has far less fine detail than most others, compared at 512 pixels.",
        "Remove it if its objects cannot be made out.",
    ),
    "dark": _hint(
        "Dark photograph",
        "Almost all of the picture is nearly black.",
        "Remove it if nothing can be seen.",
    ),
    "overexposed": _hint(
        "Overexposed photograph",
        "Most of the picture is white.",
        "Remove it if its objects cannot be made out.",
    ),
    "uniform": _hint(
        "Photograph without content",
        "The picture has almost one colour.",
        "Remove it, or copy the file again.",
    ),
    "odd_size": _hint(
        "Photograph of another size",
        "The photograph has far more or fewer pixels than almost all others.",
        "Check that it is a photograph of this set, and no thumbnail.",
    ),
    "odd_shape": _hint(
        "Photograph of another shape",
        "Width divided by height differs from almost all others: a cut-out, a panorama or a "
        "turned photograph.",
        "Check that it is a photograph of this set and that its labels fit.",
    ),
    "turned": _hint(
        "Photograph turned by EXIF",
        "The file stores the picture turned and says so. This project turns it upright; other "
        "tools may not.",
        "Check that the outlines fit the upright picture.",
    ),
}


MODEL_KINDS = ("other_class", "missed_label", "unfound_label")  # need a model


@dataclass(frozen=True)
class Mark:
    """An outline on a shown photograph, float (V, 2) as shares of width and height.

    The view shows the subjects and their surroundings; other outlines are drawn as far as they lie
    in the view.
    """

    outline: np.ndarray
    text: str = ""
    is_subject: bool = True
    is_prediction: bool = False
    is_drawn: bool = True


@dataclass(frozen=True)
class View:
    """A picture of a finding: the part of a photograph around the subjects, or the whole photograph
    without any.
    """

    photo: Path
    caption: str
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Finding:
    """One finding: the file, the line if it is about one, and what is wrong.

    Higher `weight` is shown first.
    """

    kind: str
    split: str
    file: Path
    text: str
    line: int | None = None
    weight: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)
    views: Sequence[View] = ()

    @property
    def place(self) -> str:
        """The file, with the line if there is one."""
        return shown_path(self.file) + ("" if self.line is None else f":{self.line}")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding for check.json."""
        is_error = KINDS[self.kind].is_error
        place = {"split": self.split, "file": shown_path(self.file), "line": self.line}
        return {"kind": self.kind, "is_error": is_error, **place, "text": self.text, **self.details}


def shown_path(file: Path) -> str:
    """Return a path relative to the current folder if it lies in it, else as it is."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings: errors first, by kind, the heaviest first, then by file and line."""
    position = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(
        findings,
        key=lambda one: (position[one.kind], -one.weight, one.split, str(one.file), one.line or 0),
    )


def count_kinds(findings: Sequence[Finding]) -> dict[str, int]:
    """Return the number of findings of each kind, in the order of KINDS, 0 included."""
    counts = Counter(finding.kind for finding in findings)
    return {kind: counts[kind] for kind in KINDS}


def num_errors(findings: Sequence[Finding]) -> int:
    """Count the findings that are errors."""
    return sum(KINDS[finding.kind].is_error for finding in findings)

"""Other names of options: Ultralytics', those that people type instead, and misspelt ones."""

import difflib
from collections.abc import Collection, Sequence

# Ultralytics' name of an option, and its names here; a script has at most one of them.
OTHER_NAMES = {
    "imgsz": ("img_size",),
    "batch": ("batch_size", "batch_sizes"),
    "workers": ("num_workers",),
    "max_det": ("max_detections",),
    "weights": ("model",),
}
_MAPS = (
    "python -m yolo_seg_ddp maps makes the map, after this command "
    "(yolo_seg_ddp/extras/maps/README.md)"
)
_CUT = (
    "python -m yolo_seg_ddp orthophotos.cut reads labels of orthophotos "
    "(yolo_seg_ddp/extras/orthophotos/README.md)"
)
# What people type, an option by which the script is known, and what to do there.
INSTEAD = (
    ("half", "amp", "--amp auto computes in half precision where the hardware has it"),
    (
        "augment",
        "mosaic",
        "training always augments; --mosaic, --scale, --fliplr, --hsv-h and others say how much",
    ),
    (
        "augment",
        "tiles",
        "predictions are made once; --tiles or a larger --img-size finds smaller objects",
    ),
    (
        "show",
        "source",
        "no window opens; the annotated pictures, or the film, are written to --output",
    ),
    ("every frames-per-second", "source", "it is for a film: name one with --source, on this line"),
    (
        "save save-txt save-conf",
        "source",
        "pictures, labels/ and predictions.json are always in --output",
    ),
    (
        "classes",
        "mosaic",
        "python parse_labels.py --classes NAME ... makes a data set of these classes",
    ),
    ("geo assets asset-range before ground-height ground-sigma", "source", _MAPS),
    ("labels line-width-m", "line_width", _CUT),
)
# Ultralytics names a folder by two options: its parent and its name
FOLDER_PARTS = ("project", "name")
FOLDERS = ("save_dir", "output")  # the scripts here name it by one of these
NEAR = 0.75  # similarity by difflib: `modle` is near `model`, `rect` is not near `project`


def known_name(name: str, known: Collection[str]) -> str:
    """Return the name of an option in a script with the options `known`; `name` may be Ultralytics'
    name or a wrong one.
    """
    return (
        name
        if name in known
        else next((other for other in OTHER_NAMES.get(name, ()) if other in known), name)
    )


def other_names(name: str, known: Collection[str]) -> list[str]:
    """Return Ultralytics' names for the option `name` of a script with the options `known`."""
    return [
        other for other in OTHER_NAMES if other not in known and known_name(other, known) == name
    ]


def instead(name: str, known: Collection[str]) -> str:
    """Return `; ` and what to do in a script with the options `known` instead of a wrong one, or an
    empty string.
    """
    return next(
        (
            f"; {way}"
            for names, hint, way in INSTEAD
            if hint in known and _bare(name) in names.split()
        ),
        "",
    )


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` with the known word of the most similar spelling, or an empty
    string.
    """
    bare = {_bare(each): each for each in reversed(known)}
    matches = difflib.get_close_matches(_bare(word), bare, n=1, cutoff=NEAR)
    return f" (did you mean {bare[matches[0]]}?)" if matches else ""


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-")

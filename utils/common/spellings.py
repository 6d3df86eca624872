"""Ultralytics' names of options, which the scripts accept too, and the known word nearest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

# Ultralytics' name of an option, and its names here; a script has at most one of them.
OTHER_NAMES = {
    "imgsz": ("img_size",),
    "batch": ("batch_size", "batch_sizes"),
    "workers": ("num_workers",),
    "weights": ("model",),
}
# Options of a script that became a command of their own.
MOVED = {
    "inference.py": (
        ("--geo", "--assets", "--asset-range", "--before", "--ground-height", "--ground-sigma"),
        "python -m extras.maps makes the map, after this command (extras/maps/README.md)",
    ),
    "parse_labels.py": (
        ("--labels", "--line-width-m"),
        "python -m extras.orthophotos.cut reads labels of orthophotos (extras/orthophotos/README.md)",
    ),
}
FOLDER_PARTS = ("project", "name")  # Ultralytics names a folder by two options: its parent and its name
FOLDERS = ("save_dir", "output")  # the scripts here name it by one of these
NEAR = 0.75  # similarity by difflib: `modle` is near `model`, `rect` is not near `project`


def own_name(name: str, known: Collection[str]) -> str:
    """Return the name of an option in a script with the options `known`; `name` may be Ultralytics' name or a wrong one."""
    return name if name in known else next((own for own in OTHER_NAMES.get(name, ()) if own in known), name)


def other_names(name: str, known: Collection[str]) -> list[str]:
    """Return Ultralytics' names for the option `name` of a script with the options `known`."""
    return [other for other in OTHER_NAMES if other not in known and own_name(other, known) == name]


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` with the known word of the most similar spelling, or an empty string."""
    bare = {_bare(each): each for each in reversed(known)}
    matches = difflib.get_close_matches(_bare(word), bare, n=1, cutoff=NEAR)
    return f" (did you mean {bare[matches[0]]}?)" if matches else ""


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-")

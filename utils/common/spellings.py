"""How else an option may be called: Ultralytics' names of the same things, and the nearest known word to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

# Ultralytics' name of an option, and what a script here may call it: the first that it has.
OTHER_NAMES = {
    "imgsz": ("img_size",),
    "batch": ("batch_size", "batch_sizes"),
    "workers": ("num_workers",),
    "weights": ("model",),
}
FOLDER_PARTS = ("project", "name")  # Ultralytics' two options for the parent of a folder, and for its name
FOLDERS = ("save_dir", "output")  # our one option for it
NEAR = 0.75  # similarity by difflib: `modle` is near `model`, `rect` is not near `project`


def own_name(name: str, known: Collection[str]) -> str:
    """Return what a script whose options are `known` calls the option that is called `name` elsewhere; or `name`."""
    return name if name in known else next((own for own in OTHER_NAMES.get(name, ()) if own in known), name)


def other_names(name: str, known: Collection[str]) -> list[str]:
    """Return how else an option of a script whose options are `known` may be called."""
    return [other for other in OTHER_NAMES if other not in known and own_name(other, known) == name]


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` with the known word that is spelt nearly alike, or an empty string."""
    bare = {_bare(each): each for each in reversed(known)}
    matches = difflib.get_close_matches(_bare(word), bare, n=1, cutoff=NEAR)
    return f" (did you mean {bare[matches[0]]}?)" if matches else ""


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-")

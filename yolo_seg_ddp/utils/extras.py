"""The one way in which the core reaches an optional feature: by its name,
if its folder is there.
"""

import importlib
from pathlib import Path
from types import ModuleType

from yolo_seg_ddp.utils.errors import UserError, printable


def find_extra(name: str) -> ModuleType | None:
    """Import the package `yolo_seg_ddp.extras.<name>`; None if its folder is not there."""
    try:
        return importlib.import_module(f"yolo_seg_ddp.extras.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (
            "yolo_seg_ddp.extras",
            f"yolo_seg_ddp.extras.{name}",
        ):  # the extra is there, and a package that it needs is not
            raise
        return None


def refuse_orthophoto(flag: str, path: str, command: str) -> None:
    """Raise UserError that names the command for an orthophoto, which is read as a photograph where
    that extra is not there.
    """
    orthophotos = find_extra("orthophotos")
    if orthophotos is not None and orthophotos.is_orthophoto(Path(path)):
        raise UserError(
            f"{flag} {printable(path)}: an orthophoto; {command} reads it "
            "(yolo_seg_ddp/extras/orthophotos/README.md)"
        )


def require_extra(name: str) -> ModuleType:
    """Import the package `yolo_seg_ddp.extras.<name>`.

    Raises UserError if its folder is not there.
    """
    extra = find_extra(name)
    if extra is None:
        raise UserError(
            f"yolo_seg_ddp/extras/{name} is not in this folder: get it from the project's "
            "repository"
        )
    return extra

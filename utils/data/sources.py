"""Finds the photographs that a command is given: one, a folder of them, a pattern, or a list of paths in a text file."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from utils.common.errors import UserError, printable
from utils.common.files import read_text, walk
from utils.data.dataset_yaml import IMAGE_SUFFIXES, is_photograph, not_read


def list_photos(source: str) -> list[Path]:
    """Return the photographs that `--source` names, sorted, or in the order of a list. Raises UserError if there are none."""
    path = Path(source)
    if path.is_file():
        return list(_listed(path)) if path.suffix.lower() == ".txt" else [path]
    if path.is_dir():
        tree = walk(
            path,
            lambda folder: not folder.is_symlink(),
            lambda folder, reason: print(f"skipped {printable(str(folder), 400)}: {reason}"),
        )
        found: Iterator[Path] = (folder / entry.name for folder, entries in tree for entry in entries)
    else:
        try:
            found = map(Path, glob.glob(source, recursive=True))
        except RecursionError as error:
            raise UserError(f"--source {source}: folders too deep for a pattern; name the folder") from error
    every = [file for file in found if file.is_file()]
    files, others = sorted(file for file in every if is_photograph(file.name)), not_read(every)
    if not files:
        raise UserError(f"--source {source}: no photographs there ({others or ', '.join(IMAGE_SUFFIXES)})")
    if others and os.environ.get("RANK", "0") == "0":
        print(f"--source: {others}", flush=True)
    return files


def _listed(file: Path) -> Iterator[Path]:
    """Yield the photographs of a text file, one path a line, seen from the working folder or else from the file's own."""
    number, names = 0, [line.strip() for line in read_text(file).split("\n")]
    for number, name in enumerate(names, 1):
        found = [path for path in (Path(name), file.parent / name) if is_photograph(path.name) and path.is_file()]
        if name and not found:
            raise UserError(
                f"{file}:{number}: {printable(name, 400)}: no photograph, neither from here nor from the list's folder"
            )
        yield from found[:1]
    if not any(names):
        raise UserError(f"--source {file}: names no photograph; write one path a line")

"""Resumable checkpoints of tensors and plain values: written atomically, the newest few kept.

CheckpointFolders, verified when loaded:

checkpoint/step-00000420/state.pt       torch.save of plain containers and tensors
checkpoint/step-00000420/manifest.json  size and SHA-256 of state.pt, written last

CheckpointFiles:

ckpt-420.pt                             torch.save of plain containers and tensors
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from yolo_seg_ddp.utils import tensor_files
from yolo_seg_ddp.utils.contents import mapping, read_back
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import open_regular

STATE_FILE = "state.pt"
MANIFEST_FILE = "manifest.json"
# What a training reads of a manifest, if it is there; a recipe's has less.
_MANIFEST_TYPES: dict[str, Any] = {
    **dict.fromkeys(
        ("step", "epoch", "global_batch_size", "world_size", "threads", "cores"), int | None
    ),
    "size_bytes": int | None,
    "sha256": str | None,
    "optimizer": str | None,
    "amp": str | None,
    "lr": float | int | None,
    "skipped_photographs": list | None,
}


class CheckpointStore(Protocol):
    """Where a run's complete states are kept."""

    folder: Path

    def save(self, step: int, state: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        """Write a state, with what a manifest says of the run; remove old ones.

        Rank 0 only. Raises OSError.
        """

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest readable state; None when there is none.

        Raises UserError when all are damaged.
        """

    def make_room(self) -> int:
        """Remove all states but the newest undamaged one, for room on a full disk; return how many
        were removed.
        """


class CheckpointFolders:
    """A folder for each state, with its checksum; the newest two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        save_checkpoint(self.folder, step, state, manifest=manifest)

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        return load_latest(self.folder)

    def make_room(self) -> int:
        candidates = _checkpoints(self.folder)
        kept = next((candidate for candidate in candidates if verify(candidate) is None), None)
        others = [candidate for candidate in candidates if candidate != kept] if kept else []
        for other in others:
            shutil.rmtree(other, ignore_errors=True)
        return len(others)


class CheckpointFiles:
    """A file `ckpt-<step>.pt` for each state, which also holds `step` and the manifest; only the
    newest is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        path = self.folder / f"ckpt-{step}.pt"
        tensor_files.atomic_torch_save({"step": step, **manifest, **state}, path)
        for other in self.files():
            if other != path:
                other.unlink(missing_ok=True)

    def load(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest readable file's content, also of one that was copied here."""
        reasons = []
        for file in self.files():
            try:
                return file, load_state(file)
            except UserError as error:
                reasons.append(str(error))
        if reasons:
            raise UserError("; ".join(reasons) + "; remove it to start afresh")
        return None

    def make_room(self) -> int:
        return 0

    def files(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        numbered = [
            (int(match[1]), path)
            for path in self.folder.glob("ckpt-*.pt")
            if (match := _FILE.match(path.name))
        ]
        return [path for _, path in sorted(numbered, reverse=True)]


_FILE = re.compile(r"ckpt-(\d+)\.pt$")


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a run's folder holds a checkpoint of either kind."""
    return bool(_checkpoints(run_folder / "checkpoint") or CheckpointFiles(run_folder).files())


def save_checkpoint(
    folder: Path,
    step: int,
    state: dict[str, Any],
    keep: int = 2,
    manifest: Mapping[str, Any] | None = None,
) -> Path:
    """Write `state` as `folder/step-<step>`, then remove all but the newest `keep` checkpoints.
    Call on one rank only.

    Writes a temporary folder, flushes it to the disk and renames it: a kill at any moment leaves a
    complete checkpoint. `manifest` goes into the file that `latest_manifest` reads without loading
    the state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    number = 0
    # Saved before: replacing it would leave a moment without a checkpoint.
    while final.exists():
        number += 1
        final = folder / f"step-{step:08d}-{number:02d}"
    temporary = folder / f".tmp-{final.name}-{os.getpid()}"
    # A process that was killed while saving has left them.
    for leftover in folder.glob(".tmp-step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        state_file = temporary / STATE_FILE
        tensor_files.write_tensors(state, state_file)
        size_bytes, sha256 = state_file.stat().st_size, _sha256(state_file)
        content = {**(manifest or {}), "step": step, "size_bytes": size_bytes, "sha256": sha256}
        with (temporary / MANIFEST_FILE).open("w", encoding="utf-8") as file:
            json.dump(content, file)
            tensor_files.flush_file(file)
        os.replace(temporary, final)
        tensor_files.flush_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest_manifest(folder: Path) -> dict[str, Any]:
    """Return the newest readable manifest; empty without a checkpoint."""
    for candidate in _checkpoints(folder):
        with suppress(OSError, UserError):
            return read_back(candidate / MANIFEST_FILE, _checked_manifest, "")
    return {}


def _checked_manifest(content: Any) -> dict[str, Any]:
    """Return a manifest's content. Raises TypeError if a value has another type."""
    for name, kind in _MANIFEST_TYPES.items():
        if not isinstance(value := mapping(content).get(name), kind):
            raise TypeError(f"{name} is a {type(value).__name__}")
    return dict(content)


def load_latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint with a correct checksum and its state on the CPU; None when
    there is no checkpoint.

    Skips damaged checkpoints. Raises UserError when all are damaged.
    """
    candidates = _checkpoints(folder)
    reasons = []
    for candidate in candidates:
        problem = verify(candidate)
        if problem is None:
            return candidate, load_state(candidate / STATE_FILE)
        reasons.append(f"{candidate.name}: {problem}")
    if candidates:
        raise UserError(
            f"{folder}: no readable checkpoint ({'; '.join(reasons)}); remove the folder to start "
            "afresh"
        )
    return None


def verify(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None when size
    and checksum are correct.
    """
    state_file, manifest_file = checkpoint / STATE_FILE, checkpoint / MANIFEST_FILE
    try:
        size_and_digest = itemgetter("size_bytes", "sha256")
        size_bytes, sha256 = read_back(
            manifest_file, lambda content: size_and_digest(_checked_manifest(content)), ""
        )
        if state_file.stat().st_size != size_bytes:
            return "state.pt and its manifest differ in size"
        return None if _sha256(state_file) == sha256 else "state.pt does not match its checksum"
    except (OSError, UserError) as error:
        return f"unreadable ({error})"


def load_state(file: Path) -> dict[str, Any]:
    """Load a state onto the CPU.

    Raises UserError if the file holds more than tensors and plain values.
    """
    state: dict[str, Any] = tensor_files.read_tensors(file, "a checkpoint of this trainer")
    return state


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

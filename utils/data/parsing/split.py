"""Assigns photographs to train or val and gives their files names."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable

from utils.common.errors import UserError
from utils.data.parsing.sources import Photograph

TRAIN, VAL = "train", "val"
SPLITS = (TRAIN, VAL)
SPLIT_BY_CHOICES = ("hash", "circuit")


def assign_splits(photographs: Iterable[Photograph], split_by: str, val_fraction: float) -> dict[str, str]:
    """Return `train` or `val` for each photograph's key, the same in every run and on every machine.

    `hash`: by a hash of the file name only, so that adding photographs moves none. Exception: if one of the two splits
    is empty and there are two or more photographs, the one with the smallest hash moves to it.
    `circuit`: whole circuits, because photographs of a circuit show the same poles. Raises UserError for one only.
    """
    chosen = list(photographs)
    if split_by == "circuit":
        held_out = _held_out_circuits(Counter(photograph.circuit for photograph in chosen), val_fraction)
        return {photograph.key: VAL if photograph.circuit in held_out else TRAIN for photograph in chosen}
    hashes = {photograph.key: _unit_hash(_stem(photograph.key)) for photograph in chosen}
    splits = {key: VAL if value < val_fraction else TRAIN for key, value in hashes.items()}
    if len(splits) >= 2 and len(set(splits.values())) == 1:
        smallest = min(hashes, key=lambda key: (hashes[key], key))
        splits[smallest] = TRAIN if splits[smallest] == VAL else VAL
    return splits


def output_stems(photographs: Iterable[Photograph]) -> dict[str, str]:
    """Return a safe file name without suffix for each photograph's key, unique also without case."""
    chosen = list(photographs)
    stems = {photograph.key: _safe(_stem(photograph.name)) for photograph in chosen}
    shared = Counter(stem.lower() for stem in stems.values())
    return {
        key: stem if shared[stem.lower()] == 1 else f"{stem}-{_digest(key)[:8]}"  # `a.jpg` beside `a.png`
        for key, stem in stems.items()
    }


def _held_out_circuits(sizes: Counter[str], val_fraction: float) -> set[str]:
    """Take circuits in the order of their hash if that brings the share nearer to `val_fraction`."""
    if len(sizes) < 2:
        found = ", ".join(sizes) or "none"
        raise UserError(f"--split-by circuit needs photographs of two circuits, found {found}; use --split-by hash")
    target = val_fraction * sizes.total()
    ordered = sorted(sizes, key=lambda circuit: (_unit_hash(circuit), circuit))
    held_out: set[str] = set()
    taken = 0
    for circuit in ordered:
        if abs(taken + sizes[circuit] - target) < abs(taken - target) and len(held_out) < len(sizes) - 1:
            held_out.add(circuit)
            taken += sizes[circuit]
    return held_out or {min(ordered, key=lambda circuit: sizes[circuit])}


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _safe(stem: str) -> str:
    """Replace all but letters, digits and ` _-+().`: other characters are special to a shell or a file system."""
    safe = re.sub(r"[^\w \-+().]", "_", stem.encode("utf-8", "replace").decode())[:120]
    safe = safe.encode()[:200].decode(errors="ignore").strip(" .")  # file systems allow 255 bytes, including the suffix
    return safe or "photograph"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _unit_hash(text: str) -> float:
    return int(_digest(text), 16) / 2**64

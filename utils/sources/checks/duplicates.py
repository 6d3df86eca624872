"""Reports photographs that show the same picture as another one, in the same split or in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.sources.checks.findings import Finding, View, shown_path
from utils.sources.checks.pictures import Picture
from utils.sources.near_duplicates import UNIFORM_CONTRAST, details, perceptual_hash, same_pictures

MAX_COMPARED = 32  # photographs of a split among which the most similar one is named
Entry = tuple[str, Path, Picture]


def same_measured(pictures: Sequence[Picture]) -> np.ndarray:
    """Return a number for each photograph that is equal for those that show the same picture: int64 (N,)."""
    return same_pictures(
        [one.digest for one in pictures],
        [perceptual_hash(one.thumb) if one.contrast >= UNIFORM_CONTRAST else b"" for one in pictures],
        [one.shape for one in pictures],
        lambda positions: np.stack([pictures[position].thumb for position in positions]),
    )


def find_duplicates(entries: Sequence[Entry]) -> list[Finding]:
    """Return the photographs, given as (split, file, measures), that show the same as another one of any split.

    The order of the splits is that of `entries`: a finding is about the later one.
    """
    pictures = [picture for _, _, picture in entries]
    groups = same_measured(pictures)
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order], prepend=-1, append=-1))
    findings = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        seen: dict[str, list[int]] = {}
        for later in order[start:end].tolist():
            split = entries[later][0]
            others = [one for name, earlier in seen.items() if name != split for one in earlier[:MAX_COMPARED]]
            if others:
                findings.append(_finding("leak", entries, later, others))
            if split in seen:
                findings.append(_finding("repeated", entries, later, seen[split][:1]))
            seen.setdefault(split, []).append(later)
    return findings


def _finding(kind: str, entries: Sequence[Entry], later: int, earlier: Sequence[int]) -> Finding:
    vectors = details(np.stack([entries[position][2].thumb for position in (later, *earlier)]))
    similarity = vectors[1:] @ vectors[0]
    nearest = int(similarity.argmax())
    is_same_file = any(entries[one][2].digest == entries[later][2].digest for one in earlier)
    if is_same_file:
        nearest = next(n for n, one in enumerate(earlier) if entries[one][2].digest == entries[later][2].digest)
    split, file, _ = entries[later]
    other_split, other, _ = entries[earlier[nearest]]
    how = "the same file" if is_same_file else f"similarity {similarity[nearest]:.2f}"
    value = 1.0 if is_same_file else round(float(similarity[nearest]), 3)
    views = (View(file, f"{split}: {file.name}"), View(other, f"{other_split}: {other.name}"))
    facts = {"other_split": other_split, "other_file": shown_path(other), "similarity": value}
    return Finding(
        kind, split, file, f"shows the same as {shown_path(other)} of {other_split} ({how})", None, value, facts, views
    )

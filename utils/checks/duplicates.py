"""Finds photographs that show the same picture: a hash of 255 bits proposes pairs, their fine detail decides.

The bits are the signs of the lowest 16 x 16 coefficients of the cosine transform of a 64 x 64 grey picture, without the
mean. Changes of brightness, contrast, size and JPEG quality keep most of them (the idea of pHash: Zauner,
"Implementation and benchmarking of perceptual image hash functions", 2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.checks.findings import Finding, View, shown_path
from utils.checks.pictures import UNIFORM_CONTRAST, Picture

HASH_SIDE = 16
MAX_BITS = 64  # of 255 that differ in a proposed pair; different photographs differ in 90 and more
MIN_SIMILARITY = 0.6  # correlation of fine detail; different photographs have at most 0.3, changed copies 0.78 and more
DETAIL_SIGMA_PX = 2.0  # of the 64 x 64 picture: coarser structures are left out
MAX_SHAPE_FACTOR = 1.03  # between the pictures' width / height
BLOCK = 128  # photographs compared with all others at a time: 30 MB for 30,000 photographs
PAIRS_PER_PART = 2048
MAX_COMPARED = 32  # photographs of a split among which the most similar one is named
Entry = tuple[str, Path, Picture]


def perceptual_hash(thumb: np.ndarray) -> np.ndarray:
    """Return the hash of a grey picture uint8 (64, 64): uint64 (4,)."""
    is_positive = cv2.dct(thumb.astype(np.float32))[:HASH_SIDE, :HASH_SIDE].ravel() > 0
    is_positive[0] = False  # the mean
    return np.packbits(is_positive).view(np.uint64)


def details(thumbs: np.ndarray) -> np.ndarray:
    """Return the fine detail of grey pictures (n, 64, 64) as vectors of length 1: float32 (n, 4096)."""
    fine = [thumb - cv2.GaussianBlur(thumb, (0, 0), DETAIL_SIGMA_PX) for thumb in thumbs.astype(np.float32)]
    vectors = np.stack(fine).reshape(len(thumbs), -1)
    vectors -= vectors.mean(axis=1, keepdims=True)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


def same_pictures(pictures: Sequence[Picture]) -> np.ndarray:
    """Return a number for each photograph that is equal for those that show the same picture: int64 (N,)."""
    groups = np.arange(len(pictures))
    first: dict[bytes, int] = {}
    for position, picture in enumerate(pictures):
        groups[position] = first.setdefault(picture.digest, position)
    # Equal files are known already, and pictures of one colour have no detail to compare.
    chosen = np.array(
        [
            position
            for position, picture in enumerate(pictures)
            if groups[position] == position and picture.contrast >= UNIFORM_CONTRAST
        ],
        np.int64,
    )
    if len(chosen) < 2:
        return groups
    hashes = np.stack([perceptual_hash(pictures[position].thumb) for position in chosen])
    shapes = np.array([pictures[position].shape for position in chosen])
    for start in range(0, len(chosen), BLOCK):
        distances = bit_distances(hashes[start : start + BLOCK], hashes[start:])
        likely = distances <= MAX_BITS
        likely &= np.abs(np.log(shapes[start : start + BLOCK, None] / shapes[start:])) <= np.log(MAX_SHAPE_FACTOR)
        likely &= np.arange(len(chosen) - start) > np.arange(len(likely))[:, None]  # each pair once
        for row in np.flatnonzero(likely.any(axis=1)).tolist():
            mine, others = chosen[start + row], chosen[start + np.flatnonzero(likely[row])]
            _join(groups, pictures, int(mine), others[groups[others] != groups[mine]])
    return groups


def bit_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the number of bits in which hashes (m, 4) and (n, 4) differ: uint16 (m, n)."""
    distances = np.zeros((len(first), len(second)), np.uint16)
    for word in range(first.shape[1]):
        distances += np.bitwise_count(first[:, word, None] ^ second[None, :, word])
    return distances


def _join(groups: np.ndarray, pictures: Sequence[Picture], mine: int, others: np.ndarray) -> None:
    """Give those of the others that show the same picture as `mine`, and their groups, its number."""
    for start in range(0, len(others), PAIRS_PER_PART):
        part = others[start : start + PAIRS_PER_PART]
        for other in part[_similarity(pictures, mine, part) >= MIN_SIMILARITY].tolist():
            groups[groups == groups[other]] = groups[mine]


def _similarity(pictures: Sequence[Picture], mine: int, others: np.ndarray) -> np.ndarray:
    if not len(others):
        return np.zeros(0)
    vectors = details(np.stack([pictures[position].thumb for position in (mine, *others.tolist())]))
    return vectors[1:] @ vectors[0]


def find_duplicates(entries: Sequence[Entry]) -> list[Finding]:
    """Return the photographs, given as (split, file, measures), that show the same as another one of any split.

    The order of the splits is that of `entries`: a finding is about the later one.
    """
    pictures = [picture for _, _, picture in entries]
    groups = same_pictures(pictures)
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
    similarity = _similarity([picture for _, _, picture in entries], later, np.array(earlier))
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

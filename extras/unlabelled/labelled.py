"""The labelled photographs: which new photographs show the same as one of them, or look like none of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.threads import ordered_map
from utils.data.images import read_image
from utils.predict.shift_features import deviations
from utils.predict.thresholds import FEWEST_GROUPS, MOST_FALSE_ALARMS
from utils.sources.near_duplicates import (
    LIKELY,
    MEASURED_PX,
    UNIFORM_CONTRAST,
    likeness,
    orientations,
    signature,
    small_grey,
    thumbnail,
)
from utils.sources.parsing.rows import digest_of

MOST_COMPARED = 8  # labelled photographs, the most similar ones, with which a new one is compared in detail


def thumb_of(photo: np.ndarray) -> np.ndarray | None:
    """Return the thumbnail of an RGB picture; None for a picture without detail to compare."""
    grey = small_grey(photo)
    return thumbnail(grey) if grey.std() >= UNIFORM_CONTRAST else None


def _unit(pictures: Sequence[np.ndarray]) -> np.ndarray:
    flat = np.array(pictures, np.float32).reshape(len(pictures), -1)
    flat -= flat.mean(axis=1, keepdims=True)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6)


class Originals:
    """All labelled photographs by split. Of a photograph, 10 kB are kept."""

    def __init__(self, files: Sequence[tuple[str, Path]]) -> None:
        """Read them. Raises ImageError."""

        def read(entry: tuple[str, Path]) -> tuple[bytes, np.ndarray | None]:
            return digest_of(entry[1].read_bytes()), thumb_of(read_image(entry[1], MEASURED_PX))

        read_ones = list(zip(files, ordered_map(read, files, usable_cpu_count()), strict=True))
        self.digests = {digest: f"{split}/{file.name}" for (split, file), (digest, _) in read_ones}
        self.thumbs = [(*entry, thumb) for entry, (_, thumb) in read_ones if thumb is not None]
        self.table = _unit([np.frombuffer(signature(thumb), np.uint8) for *_, thumb in self.thumbs])

    def shown_by(self, file: Path, photo: np.ndarray) -> str:
        """Return the labelled photograph that a new one is a copy of, or of val and test one that it overlaps; else nothing."""
        if same := self.digests.get(digest_of(file.read_bytes())):
            return same
        thumb = thumb_of(photo)
        if thumb is None or not self.thumbs:
            return ""
        side = int(self.table.shape[1] ** 0.5)
        turned = orientations(np.frombuffer(signature(thumb), np.uint8).reshape(side, side))
        alike = (_unit(list(turned)) @ self.table.T).max(axis=0)
        for number in np.argsort(-alike, kind="stable")[:MOST_COMPARED]:
            split, original, other = self.thumbs[number]
            if alike[number] >= LIKELY:
                found = likeness(other, thumb)
                if found.is_copy or (found.is_same and split != "train"):
                    return f"{split}/{original.name}"
        return ""


def looks_unlike(traits: np.ndarray, judged: np.ndarray) -> bool:
    """Return whether a photograph's traits (5 + 32,) are as far off as those of at most one in twenty, judged (n, 5 + 32) included.

    This is the test of inference.py for a flight, with photographs for flights: one that is like the others fails it with a
    probability of at most 5 %. With few judged photographs none fails.
    """
    if len(judged) < FEWEST_GROUPS:
        return False
    furthest = np.abs(deviations(np.vstack([judged, traits]))).max(axis=1)
    return bool((furthest >= furthest[-1]).mean() <= MOST_FALSE_ALARMS)

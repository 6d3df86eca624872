"""Finds photographs that show the same picture: a hash of 255 bits proposes pairs, their fine detail decides.

The bits are the signs of the lowest 16 x 16 coefficients of the cosine transform of a 64 x 64 grey picture, without the
mean. Changes of brightness, contrast, size and JPEG quality keep most of them (the idea of pHash: Zauner,
"Implementation and benchmarking of perceptual image hash functions", 2010). Photographs of a fixed camera share their
background, so every part of the detail decides, not only the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import cv2
import numpy as np

from utils.data.images import fit_long_side

MEASURED_PX = 512  # long side to which a photograph is shrunk first
THUMB_PX = 64  # side of the square grey picture that photographs are compared on
UNIFORM_CONTRAST = 4.0  # standard deviation of the grey values; below it there is no detail to compare
HASH_SIDE = 16
HASH_BYTES = HASH_SIDE**2 // 8
MAX_BITS = 64  # of 255 that differ in a proposed pair; different photographs differ in 90 and more
MIN_SIMILARITY = 0.6  # correlation of fine detail; different photographs have at most 0.3, changed copies 0.78 and more
BLOCK_PX = 8  # side of the parts of the 64 x 64 picture that must agree, too
MAX_DIFFERENCE = 0.5  # of a part: objects that one of two pictures has reach 0.54 and more, 99 % of changed copies 0.46
LITTLE_DETAIL = 0.5 / (THUMB_PX // BLOCK_PX) ** 2  # of a part, in the detail of the whole: noise differs
DETAIL_SIGMA_PX = 2.0  # of the 64 x 64 picture: coarser structures are left out
MAX_SHAPE_FACTOR = 1.03  # between the pictures' width / height
BLOCK = 128  # photographs compared with all others at a time: 30 MB for 30,000 photographs
DETAILED = 2048  # photographs whose detail is compared at a time: 34 MB


def small_grey(image: np.ndarray) -> np.ndarray:
    """Return an RGB picture in grey, uint8, with a long side of at most MEASURED_PX."""
    return fit_long_side(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), MEASURED_PX)


def thumbnail(grey: np.ndarray) -> np.ndarray:
    """Return the picture uint8 (64, 64) that photographs are compared on."""
    return cv2.resize(grey, (THUMB_PX, THUMB_PX), interpolation=cv2.INTER_AREA)


def perceptual_hash(thumb: np.ndarray) -> bytes:
    """Return the hash of a grey picture uint8 (64, 64): HASH_BYTES bytes."""
    is_positive = cv2.dct(thumb.astype(np.float32))[:HASH_SIDE, :HASH_SIDE].ravel() > 0
    is_positive[0] = False  # the mean
    return np.packbits(is_positive).tobytes()


def details(thumbs: np.ndarray) -> np.ndarray:
    """Return the fine detail of grey pictures (n, 64, 64), of length 1 in all, by parts: float32 (parts, n, pixels)."""
    fine = [thumb - cv2.GaussianBlur(thumb, (0, 0), DETAIL_SIGMA_PX) for thumb in thumbs.astype(np.float32)]
    vectors = np.stack(fine).reshape(len(thumbs), -1)
    vectors -= vectors.mean(axis=1, keepdims=True)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    side = THUMB_PX // BLOCK_PX
    parts = vectors.reshape(-1, side, BLOCK_PX, side, BLOCK_PX).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(parts).reshape(side * side, len(thumbs), BLOCK_PX**2)


def same_detail(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return which pictures with some `details` show the same in all and in each part: bool (m, n)."""
    similarity = np.zeros((first.shape[1], second.shape[1]), np.float32)
    differs = np.zeros(similarity.shape, bool)
    for one, two in zip(first, second, strict=True):
        product = one @ two.T
        similarity += product
        detail = (one**2).sum(axis=1)[:, None] + (two**2).sum(axis=1)
        differs |= detail - 2 * product > MAX_DIFFERENCE * (detail + LITTLE_DETAIL)
    return (similarity >= MIN_SIMILARITY) & ~differs


def same_pictures(
    digests: Sequence[Hashable],
    hashes: Sequence[bytes],
    shapes: Sequence[float],
    read_thumbs: Callable[[Sequence[int]], np.ndarray],
    max_bits: int = MAX_BITS,
) -> np.ndarray:
    """Return a number for each photograph that is equal for those that show the same picture: int64 (N,).

    Equal digests are equal files. An empty hash is a picture without detail, which is the same only as an equal file.
    shapes: width / height. `read_thumbs` returns the grey pictures uint8 (n, 64, 64) of the photographs at n positions.
    """
    first: dict[Hashable, int] = {}
    groups = np.array([first.setdefault(digest, number) for number, digest in enumerate(digests)], np.int64)
    chosen = np.array([number for number, one in enumerate(hashes) if one and groups[number] == number], np.int64)
    if len(chosen) < 2:
        return groups
    bits = np.frombuffer(b"".join(hashes[number] for number in chosen), np.uint64).reshape(len(chosen), -1)
    logs = np.log(np.array(shapes, float)[chosen])
    for start in range(0, len(chosen), BLOCK):
        mine, others = chosen[start : start + BLOCK], chosen[start:]
        likely = bit_distances(bits[start : start + BLOCK], bits[start:]) <= max_bits
        likely &= np.abs(logs[start : start + BLOCK, None] - logs[start:]) <= np.log(MAX_SHAPE_FACTOR)
        _join(groups, mine, others, likely, read_thumbs)
    return groups


def bit_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the number of bits in which hashes uint64 (m, 4) and (n, 4) differ: uint16 (m, n)."""
    distances = np.zeros((len(first), len(second)), np.uint16)
    for word in range(first.shape[1]):
        distances += np.bitwise_count(first[:, word, None] ^ second[None, :, word])
    return distances


def _join(
    groups: np.ndarray,
    mine: np.ndarray,
    others: np.ndarray,
    likely: np.ndarray,
    read_thumbs: Callable[[Sequence[int]], np.ndarray],
) -> None:
    """Give photographs at the positions `mine` and `others`, if they are likely the same and their detail is, one number.

    The detail of a photograph is computed once for each block, not once for each pair.
    """
    for start in range(0, len(others), DETAILED):
        part = others[start : start + DETAILED]
        pairs = likely[:, start : start + DETAILED] & (groups[mine][:, None] != groups[part])
        rows, columns = np.flatnonzero(pairs.any(axis=1)), np.flatnonzero(pairs.any(axis=0))
        if not len(rows):
            continue
        thumbs = (read_thumbs(positions.tolist()) for positions in (mine[rows], part[columns]))
        is_same = same_detail(*map(details, thumbs)) & pairs[np.ix_(rows, columns)]
        for row, found in zip(mine[rows], is_same, strict=True):
            numbers = np.unique(groups[part[columns[found]]])
            if np.any(numbers != groups[row]):
                groups[np.isin(groups, [groups[row], *numbers])] = min(groups[row], numbers[0])

"""Decodes run-length masks of COCO, of Label Studio and of CVAT. The input is not trusted: sizes are checked before memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from utils.data.images import MAX_IMAGE_PIXELS

CHARACTERS_PER_COUNT = 7  # of 5 bits each, sign included: enough for any image


class RunLengthError(ValueError):
    """A mask cannot be decoded. The message is the reason."""


def decode_coco(segmentation: dict[Any, Any], size: tuple[int, int] | None) -> tuple[np.ndarray, int, int]:
    """Decode COCO's run lengths `{"size": [height, width], "counts": list or text}`.

    Returns (mask bool (h, w), left, top): the columns and rows that hold pixels. `size` is the image's (width, height).
    Raises RunLengthError.
    """
    height, width = _coco_size(segmentation.get("size"), size)
    counts = segmentation.get("counts")
    runs = _counts_of_text(counts) if isinstance(counts, str) else _counts_of_list(counts)
    if (runs < 0).any() or int(runs.sum()) != width * height:
        raise RunLengthError(f"its runs do not add up to the {width}x{height} pixels of its size")
    ends = runs.cumsum()
    starts, stops = ends[0:-1:2], ends[1::2]  # of the runs of pixels inside, column by column
    is_used = stops > starts
    starts, stops = starts[is_used], stops[is_used]
    if not len(starts):
        raise RunLengthError("it has no pixels")
    left, right = int(starts[0]) // height, int(stops[-1] - 1) // height + 1
    toggles = np.zeros((right - left) * height + 1, np.int8)
    toggles[starts - left * height] += 1
    toggles[stops - left * height] -= 1
    columns: np.ndarray = toggles[:-1].cumsum(dtype=np.int8).view(bool).reshape(right - left, height)
    mask, _, top = _cut(columns.T)
    return np.ascontiguousarray(mask), left, top


def decode_label_studio(codes: Any, size: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """Decode Label Studio's `rle`: the bytes of a packed RGBA image of `size` (width, height), row by row.

    A pixel belongs to the mask if its alpha is above 0. The format is that of the npm package @thi.ng/rle-pack: 32 bits for
    the number of values, 5 for the bits per value minus 1, four times 4 for the bits per run length minus 1. Then follow blocks:
    1 bit (one repeated value, or different ones), 2 bits (which of the four sizes of length), the length minus 1, the values.
    Returns like `decode_coco`. Raises RunLengthError.
    """
    width, height = size
    if not isinstance(codes, list) or not all(type(code) is int and 0 <= code <= 255 for code in codes):
        raise RunLengthError("`rle` is not a list of numbers from 0 to 255")
    if width * height > MAX_IMAGE_PIXELS:
        raise RunLengthError(f"{width}x{height} is more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels")
    bits = _Bits(bytes(codes))
    num_values = bits.read(32)
    if num_values != 4 * width * height:
        raise RunLengthError(f"`rle` holds {num_values:,} values, not 4 for each of {width}x{height} pixels")
    value_bits = bits.read(5) + 1
    length_bits = [bits.read(4) + 1 for _ in range(4)]
    alpha = np.zeros(width * height, bool)
    done = 0
    while done < num_values:
        is_repeated = bits.read(1)
        end = done + 1 + bits.read(length_bits[bits.read(2)])
        if end > num_values:
            raise RunLengthError("`rle` has runs beyond the image")
        if is_repeated:
            alpha[done // 4 : end // 4] = bits.read(value_bits) > 0  # those whose fourth value lies in the run
        else:
            values = bits.read_many(end - done, value_bits)
            alpha[done // 4 : end // 4] = values[3 - done % 4 :: 4]
        done = end
    return _cut(alpha.reshape(height, width))


def decode_rows(text: str, box: Sequence[int]) -> tuple[np.ndarray, int, int]:
    """Decode CVAT's `rle` of a box (left, top, width, height): lengths of runs outside and inside, alternating, row by row.

    Returns like `decode_coco`. Raises RunLengthError.
    """
    left, top, width, height = box
    if min(width, height) < 1 or width * height > MAX_IMAGE_PIXELS:
        raise RunLengthError(f"a mask of {width}x{height} pixels")
    try:
        runs = np.array([int(run) for run in text.split(",")], np.int64)
    except (ValueError, OverflowError) as error:
        raise RunLengthError("`rle` is not a list of whole numbers") from error
    if (runs < 0).any() or (runs > width * height).any() or int(runs.sum()) != width * height:
        raise RunLengthError(f"its runs do not add up to the {width}x{height} pixels of its box")
    mask, first_column, first_row = _cut(np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width))
    return mask, left + first_column, top + first_row


class _Bits:
    """Reads numbers of any bits, highest bit first. Raises RunLengthError at the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def read(self, num_bits: int) -> int:
        first, last = self.position // 8, (self.position + num_bits + 7) // 8
        self._advance(num_bits)
        number = int.from_bytes(self.data[first:last], "big") >> (last * 8 - self.position)
        return number & ((1 << num_bits) - 1)

    def read_many(self, num_numbers: int, num_bits: int) -> np.ndarray:
        """Return whether each of the next numbers is above 0, bool (num_numbers,)."""
        first, offset = divmod(self.position, 8)
        self._advance(num_numbers * num_bits)
        octets = np.frombuffer(self.data, np.uint8, (self.position + 7) // 8 - first, first)
        bits = np.unpackbits(octets)[offset : offset + num_numbers * num_bits]
        is_above_0: np.ndarray = bits.reshape(num_numbers, num_bits).max(axis=1) > 0
        return is_above_0

    def _advance(self, num_bits: int) -> None:
        self.position += num_bits
        if self.position > 8 * len(self.data):
            raise RunLengthError("`rle` ends too early")


def _coco_size(declared: Any, size: tuple[int, int] | None) -> tuple[int, int]:
    """Return height and width, after a check against the image's size."""
    if not (
        isinstance(declared, list) and len(declared) == 2 and all(type(side) is int and side > 0 for side in declared)
    ):
        raise RunLengthError("`size` is not [height, width]")
    height, width = declared
    if size is not None and (width, height) != size:
        raise RunLengthError(f"its `size` is {width}x{height} pixels, the image has {size[0]}x{size[1]}")
    if width * height > MAX_IMAGE_PIXELS:
        raise RunLengthError(f"{width}x{height} is more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels")
    return height, width


def _counts_of_list(counts: Any) -> np.ndarray:
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise RunLengthError("`counts` is neither a text nor a list of whole numbers")
    if any(abs(count) > MAX_IMAGE_PIXELS for count in counts):
        raise RunLengthError(f"a run of more than {MAX_IMAGE_PIXELS:,} pixels")
    return np.array(counts, np.int64)


def _counts_of_text(text: str) -> np.ndarray:
    """Decode COCO's compressed counts.

    A number is a sequence of characters from 48 on. Each holds 5 bits, the lowest first, and a sixth bit if more follow. The
    fifth bit of the last character is the sign. From the fourth number on, the difference to the number two before is stored.
    """
    if text[:2] in ("b'", 'b"') and text[1] == text[-1]:  # Python's str() of bytes
        text = text[2:-1].replace("\\\\", "\\")
    codes = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) - 48
    if ((codes < 0) | (codes > 63)).any():
        raise RunLengthError("`counts` holds characters that run lengths do not have")
    ends = np.flatnonzero(codes & 32 == 0)
    if not len(ends) or ends[-1] != len(codes) - 1:
        raise RunLengthError("`counts` ends inside a number")
    lengths = np.diff(ends, prepend=-1)
    if lengths.max() > CHARACTERS_PER_COUNT:
        raise RunLengthError("`counts` holds a number too large for an image")
    place = np.arange(len(codes)) - np.repeat(ends - lengths + 1, lengths)
    numbers = np.add.reduceat((codes & 31) << (5 * place), ends - lengths + 1)
    is_negative = codes[ends] & 16 > 0
    numbers -= is_negative * (1 << (5 * lengths))
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()
    return numbers


def _cut(mask: np.ndarray) -> tuple[np.ndarray, int, int]:
    left, top, width, height = cv2.boundingRect(mask.view(np.uint8))
    if not width:
        raise RunLengthError("it has no pixels")
    return mask[top : top + height, left : left + width], left, top

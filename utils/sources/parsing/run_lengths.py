"""Decodes run-length masks of COCO, of Label Studio and of CVAT. Sizes are checked before memory is taken: the input is not trusted."""

import re
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from utils.data.images import MAX_IMAGE_PIXELS


class RunLengthError(ValueError):
    """A mask cannot be decoded. The message is the reason."""


def decode_coco(segmentation: dict[Any, Any], size: tuple[int, int] | None) -> tuple[np.ndarray, int, int]:
    """Decode COCO's run lengths `{"size": [height, width], "counts": list or text}`.

    Returns (mask bool (h, w), left, top): the columns and rows that hold pixels. `size` is the image's (width, height).
    Raises RunLengthError.
    """
    from faster_coco_eval.core import mask as coco_mask  # takes 0.25 s

    height, width = _coco_size(segmentation.get("size"), size)
    counts = segmentation.get("counts")
    is_list = isinstance(counts, list) and all(type(run) is int and run >= 0 for run in counts)
    if not isinstance(counts, str) and not is_list:
        raise RunLengthError("`counts` is neither a text nor a list of whole numbers from 0 on")
    packed: Any = {"size": [height, width], "counts": _packed(counts) if isinstance(counts, str) else counts}
    try:
        columns = coco_mask.decode(coco_mask.frPyObjects(packed, height, width) if is_list else packed).T
    except (ValueError, RuntimeError) as error:
        reason = f"its runs do not add up to the {width}x{height} pixels of its size, or are damaged"
        raise RunLengthError(reason) from error
    mask, top, left = _cut(columns)
    return np.ascontiguousarray(mask.T).view(bool), left, top


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


def _packed(text: str) -> bytes:
    """Return COCO's compressed counts as bytes, also if the text is Python's str() of bytes."""
    if text[:2] in ("b'", 'b"') and text[1] == text[-1]:
        text = text[2:-1].replace("\\\\", "\\")
    if not re.fullmatch("[0-o]*", text):
        raise RunLengthError("`counts` holds characters that run lengths do not have")
    return text.encode("ascii")


def _cut(mask: np.ndarray) -> tuple[np.ndarray, int, int]:
    left, top, width, height = cv2.boundingRect(mask.view(np.uint8))
    if not width:
        raise RunLengthError("it has no pixels")
    return mask[top : top + height, left : left + width], left, top

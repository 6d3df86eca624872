"""Decodes run-length masks of COCO. Sizes are checked before memory is taken: the input is not trusted."""

import re
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
    mask, top, left = cut_out(columns)
    return np.ascontiguousarray(mask.T).view(bool), left, top


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


def cut_out(mask: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Return the part of a mask bool (H, W) that holds pixels, and its left and top. Raises RunLengthError if none does."""
    left, top, width, height = cv2.boundingRect(mask.view(np.uint8))
    if not width:
        raise RunLengthError("it has no pixels")
    return mask[top : top + height, left : left + width], left, top

"""Files of Label Studio, CVAT and VIA for a folder of tests/prepare/parsing/tool_folder.py."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.prepare.parsing.tool_folder import BOX, HEIGHT, WIDTH, Mask, corners


def brush(mask: Mask, first_values: Sequence[int] = (0, 0, 0)) -> list[int]:
    """Pack a mask as Label Studio does; with `first_values` for red, green and blue runs end inside
    pixels.
    """
    rgba = np.zeros((*mask.shape, 4), np.uint8)
    rgba[mask] = [*first_values, 255]
    values = rgba.reshape(-1)
    starts = np.flatnonzero(np.diff(values.astype(int), prepend=-1))
    bits = [f"{len(values):032b}", f"{7:05b}", *(f"{size - 1:04b}" for size in (3, 4, 8, 16))]
    pending: list[int] = []

    def write_different() -> None:
        for at in range(0, len(pending), 16):
            block = pending[at : at + 16]
            bits.extend(["0", "01", f"{len(block) - 1:04b}", *(f"{value:08b}" for value in block)])
        pending.clear()

    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(values)], strict=True):
        if end - start == 1:
            pending.append(int(values[start]))
            continue
        write_different()
        lengths = (min(end - at, 1 << 16) for at in range(start, end, 1 << 16))
        bits += [f"111{length - 1:016b}{int(values[start]):08b}" for length in lengths]
    write_different()
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return [int(text[at : at + 8], 2) for at in range(0, len(text), 8)]


def region(number: int, kind: str, label: str = "pole", **value: Any) -> dict[str, Any]:
    size = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
    return {"id": f"r{number}", "type": kind, **size, "value": {**value, kind: [label]}}


def task(number: int, image: str, regions: Sequence[Any], **more: Any) -> dict[str, Any]:
    annotations = [
        {"id": 1, "result": list(regions), "was_cancelled": False, "ground_truth": False}
    ]
    return {"id": number, "data": {"image": image}, "annotations": annotations, **more}


def shape(tag: str, label: str, **attributes: object) -> str:
    return (
        f'<{tag} label="{label}" '
        + " ".join(f'{key}="{value}"' for key, value in attributes.items())
        + "/>"
    )


def cvat(*shapes: str, head: str = "") -> str:
    labels = "".join(
        f"<label><name>{name}</name><attributes></attributes></label>" for name in ("pole", "wire")
    )
    image = (
        f'<image id="0" name="sub/a.jpg" width="{WIDTH}" '
        f'height="{HEIGHT}">{"".join(shapes)}</image>'
    )
    text = '<?xml version="1.0" encoding="utf-8"?>'
    return (
        f"{text}{head}<annotations><meta><task><labels>{labels}</labels></task></meta>{image}</"
        "annotations>"
    )


POLE = shape("polygon", "pole", points=";".join(f"{x}.00,{y}.00" for x, y in corners(BOX)))
WIRE = shape("polyline", "wire", points="10,80;140,80")


def via_region(label: str, **values: object) -> dict[str, Any]:
    return {"shape_attributes": values, "region_attributes": {"class": label}}


def via(regions: Any, **more: Any) -> str:
    entry = {"filename": "a.jpg", "size": 1, "regions": regions, "file_attributes": {}}
    return json.dumps(
        more | {"_via_img_metadata": {"a.jpg1": entry}} if more else {"a.jpg1": entry}
    )


REGIONS = [
    via_region(
        "pole", name="polygon", all_points_x=[30, 60, 60, 30], all_points_y=[20, 20, 50, 50]
    ),
    via_region("wire", name="polyline", all_points_x=[10, 140], all_points_y=[80, 80]),
]

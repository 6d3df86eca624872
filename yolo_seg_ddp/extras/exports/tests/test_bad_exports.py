"""Exports whose metadata, outputs or files are missing, stale, damaged or hostile: one clear line
each.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.predict.tiny_network import NAMES, WINDOWS, smooth_images
from yolo_seg_ddp.extras.exports.exported import METADATA_KEY, ExportedModel, read_metadata
from yolo_seg_ddp.extras.exports.tests.test_exported import facts
from yolo_seg_ddp.predict.models import open_model
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.errors import UserError

CPU = torch.device("cpu")


def stored(**changes: Any) -> dict[str, Any]:
    content = {**json.loads(facts().to_json()), **changes}
    return {METADATA_KEY: json.dumps(content), "names": dict(enumerate(NAMES))}


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "its metadata lack what this project needs"),
        ({"names": {0: "wire"}}, "its metadata lack what this project needs"),
        (stored(version=0), "made by another version of this project"),
        (stored(resize="linear"), "made by another version of this project"),
        (stored(size_px=0), "impossible values"),
        (stored(windows={**WINDOWS, "high_scale": 0}), "impossible values"),
        (stored(windows={**WINDOWS, "high_scale": 1e9}), "impossible values"),
        (stored(windows=[1, 0.5, 1]), "impossible values"),
        (stored(windows={**WINDOWS, "high_scale": "1"}), "its metadata are damaged"),
        (stored(batch_size=10**9), "impossible values"),
        (stored(batch_size=2.0), "impossible values"),
        (stored(batch_size=True), "impossible values"),
        (stored(size_px=64.0), "impossible values"),
        (stored(is_dynamic="no"), "impossible values"),
        (
            stored(names=["pole", "wire", "sign"]),
            "name the classes twice and differently, wire, pole, sign and pole,",
        ),
        (stored(names=["a\nb", "pole", "sign"]), "its metadata are damaged"),
        (stored(more=1), "its metadata are damaged"),
        ({METADATA_KEY: "{"}, "its metadata are damaged"),
        ({METADATA_KEY: "[]"}, "its metadata are damaged"),
        ({METADATA_KEY: "[" * 100_000}, "its metadata are damaged"),
        ({**stored(), "names": "[" * 100_000}, "its metadata are damaged"),
        ({**stored(), "names": "-" * 100_000}, "its metadata are damaged"),
        ({**stored(), "names": "__import__('os')"}, "its metadata are damaged"),
        ({**stored(), "names": None}, "its metadata are damaged"),
    ],
)
def test_missing_stale_or_damaged_metadata_give_one_clear_line(
    metadata: dict[str, Any], complaint: str
) -> None:
    assert read_metadata(Path("best.onnx"), stored()) == facts()
    with pytest.raises(UserError, match=complaint) as caught:
        read_metadata(Path("best.onnx"), metadata)
    assert str(caught.value).startswith("best.onnx: ")
    assert "\n" not in str(caught.value)
    assert "export it again: python export.py" in str(caught.value)


OTHERS = r"its outputs \(.* are not those of a YOLO segmentation model"


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ([(1, 39, 84)], OTHERS),
        ([(1, 39, 84), (1, 32, 16, 16), (1, 4)], OTHERS),
        ([(1, 39, 84), (1, 39, 84)], OTHERS),
        ([(2, 39, 84), (1, 32, 16, 16)], OTHERS),
        ([(1, 39, 84), (1, 32, 8, 8)], OTHERS),
        (
            [(1, 4 + 8 + 32, 84), (1, 32, 16, 16)],
            "the network has 8 classes but its metadata name 3",
        ),
    ],
)
def test_a_graph_with_other_outputs_gives_one_line(
    shapes: list[tuple[int, ...]], complaint: str
) -> None:
    model = ExportedModel(
        Path("a.onnx"), "onnx", facts(), lambda _: [torch.zeros(shape) for shape in shapes]
    )
    with pytest.raises(UserError, match=rf"^a\.onnx: {complaint}"):
        model(smooth_images(1))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_boxes_that_are_no_numbers_do_not_end_the_prediction(value: float) -> None:
    predictions, prototypes = torch.full((1, 39, 84), 0.5), torch.ones(1, 32, 16, 16)
    predictions[:, :4] = value
    model = ExportedModel(Path("a.onnx"), "onnx", facts(), lambda _: [predictions, prototypes])
    predictor = Predictor(model, 64, CPU, 1, None, {"confidence": 0.2, "iou": 0.7})
    ((_, _, found),) = predictor.predict([("photo", np.zeros((150, 200, 3), np.uint8))])
    assert ((found.boxes >= 0) & (found.boxes <= 200)).all()


PIPES = ("x.onnx", "x.torchscript", "x.engine", "x.pt", "folder/x.xml", "folder/metadata.yaml")
MISSING = r"no such file; make it with python export\.py --model best\.pt --format \w+"
DAMAGED = r"cannot be opened \(.*\); export it again"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        *((f"x.{kind}", None, MISSING) for kind in ("onnx", "torchscript", "engine")),
        *((name, b"damaged", DAMAGED) for name in ("x.onnx", "x.torchscript", "folder/x.xml")),
        *((name, "pipe", rf"{re.escape(name)}: not a (regular )?file") for name in PIPES),
    ],
)
def test_a_missing_or_damaged_export_and_a_pipe_give_one_line(
    name: str, content: bytes | str | None, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content == "pipe":
        os.mkfifo(path)  # to read it would hang
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as caught:
        open_model(str(path.parent if name.startswith("folder") else path), CPU)
    assert "\n" not in str(caught.value)

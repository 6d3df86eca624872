"""Lines as a step of the predictor."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.predict.tile_scenes import wires_and_pole
from tests.yolo.colour_network import ColourNetwork, install, paint
from yolo_seg_ddp.predict.postprocess import steps_for
from yolo_seg_ddp.predict.tiles import Predictor, Tiling

SIZE = (1280, 896)
SCENE = wires_and_pole(SIZE)  # across 24 tiles


def test_lines_are_given_the_votes_of_tiles_where_labels_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    with_lines = Mock(side_effect=lambda prediction, *_: prediction)
    monkeypatch.setattr("yolo_seg_ddp.extras.wires.step.with_lines", with_lines)
    model = ColourNetwork()
    model.args["wires_end_at"] = [1]
    steps = steps_for(model, (0,))
    limits = {"confidence": 0.25, "iou": 0.7}
    how = model, 320, torch.device("cpu"), 16, Tiling(320), limits
    list(Predictor(*how, thin=(0,), steps=steps).predict([(0, paint(SCENE, SIZE))]))
    votes = with_lines.call_args.args[-1][0]
    assert (
        votes[np.any([mask for class_id, mask in SCENE if class_id == 0], axis=0)] > 0
    ).mean() > 0.99
    assert not votes[:, 984:].any(), "the pole is of another class"

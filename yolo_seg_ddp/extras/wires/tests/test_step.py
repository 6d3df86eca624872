"""Lines as a step of the predictor."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

from tests.commands import test_pretended_gpu as pretended_gpu
from tests.predict.tile_scenes import wires_and_pole
from tests.support.plugin import TrainedRun
from tests.yolo.colour_network import ColourNetwork, install, paint
from yolo_seg_ddp.predict.postprocess import steps_for
from yolo_seg_ddp.predict.tiles import Predictor, Tiling

few = pretended_gpu.few
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


def test_a_prediction_on_a_gpu_has_lines(few: TrainedRun, tmp_path: Path) -> None:
    model = pretended_gpu.sure(tmp_path, few)["sure"]
    # nobody knows which it finds
    classes = " ".join(yaml.safe_load(few.data.read_text())["names"].values())
    line = (
        f"--model {model} --source {few.processed}/val/images --tiles 96 --conf 0.00001 "
        f"--output {tmp_path}/out --thin-classes {classes}"
    )
    (seen,) = pretended_gpu.run(tmp_path, 1, "inference", line)
    assert seen["code"] == 0, (tmp_path / "printed.txt").read_text()
    assert seen["copies"] > 0
    assert "centreline" in (tmp_path / "out" / "predictions.json").read_text()

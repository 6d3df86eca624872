"""docs/python.md: its blocks run as they stand; predictions are those of inference.py; errors are raised, not printed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import inference
from tests.conftest import PROJECT, run_main
from tests.predict.exports import smooth_data, tiny_weights
from utils.common.errors import UsageError
from utils.data.images import decode_image, read_image
from utils.run.records import read_epochs
from yolo_seg_ddp import evaluate, open_model, train

PAGE = (PROJECT / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Give each test a folder with a data set and a photograph; keep one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # two wait for each other beside other tests
    (tmp_path / "data" / "mine").mkdir(parents=True)
    smooth_data(tmp_path / "data" / "mine")
    rough = np.random.default_rng(7).integers(0, 255, (9, 12, 3), np.uint8)
    cv2.imwrite("photograph.jpg", cv2.resize(rough, (240, 180), interpolation=cv2.INTER_CUBIC))
    yield
    assert not torch.distributed.is_initialized()


def test_the_pages_blocks_train_predict_and_evaluate() -> None:
    [options] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    Path("wires.yaml").write_text(options.replace("imgsz: 320", "imgsz: 64"))
    Path("page.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    left = runpy.run_path("page.py")
    record = read_epochs(Path("models/wires"))[-1]
    names = {name for name, value in record.items() if isinstance(value, int | float)}
    names -= {"epoch", "global_step", "total_epoch_time_s"}
    assert {name: len(values) for name, values in left["history"].items()} == dict.fromkeys(names, 2)
    metrics = json.loads(Path("outputs/wires/metrics.json").read_text())
    assert json.loads(json.dumps(left["metrics"])) == metrics
    assert read_image(Path("picture.jpg")).shape == (180, 240, 3)


def test_a_prediction_holds_what_inference_py_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "best.pt")
    places = ("--model", weights, "--source", "photograph.jpg", "--output", "out")
    run_main(inference, monkeypatch, *places, "--conf", "0.4")
    [written] = json.loads(Path("out/predictions.json").read_text())
    model = open_model(weights, conf=0.4, tiles="off")
    prediction = model.predict("photograph.jpg")
    assert len(prediction) == len(written["detections"]) > 1
    named = zip(prediction.class_names, prediction.scores, prediction.boxes, written["detections"], strict=True)
    for name, score, box, entry in named:
        assert name == entry["class"] == prediction.names[entry["class_id"]]
        assert score == pytest.approx(entry["confidence"], abs=1e-4)
        assert box == pytest.approx(entry["box_xyxy"], abs=0.01)
    for mask, region in zip(prediction.masks, prediction.regions, strict=True):
        assert mask.sum() == region.mask.sum()
        if region.mask.any():
            top, left = np.argwhere(mask).min(0)
            inner = np.argwhere(region.mask).min(0)
            assert (top, left) == (region.top + inner[0], region.left + inner[1])
    assert any(region.mask.any() for region in prediction.regions)
    of_array = model.predict(read_image(Path("photograph.jpg")))
    assert np.array_equal(of_array.boxes, prediction.boxes)
    # A notebook gets the drawn photograph as PNG; the photograph itself stays.
    drawn = prediction.draw()
    assert np.array_equal(decode_image(drawn._repr_png_()), drawn.pixels)
    assert not np.array_equal(drawn.pixels, prediction.photo)
    assert np.array_equal(prediction.photo, read_image(Path("photograph.jpg")))


def test_what_is_wrong_is_raised_and_nothing_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "best.pt")
    model = open_model(weights)
    for call, line in (
        (lambda: train(epoch=2), r"--epoch=2 \(did you mean --epochs\?\)"),
        (lambda: train("none.yaml"), "--config none.yaml: No such file"),
        (lambda: train(batch=-1), "--batch-size -1: must be at least 0"),
        (lambda: evaluate(weights, source="x"), "unknown argument --source=x"),
        (lambda: open_model(weights, output="x"), "unknown argument --output=x"),
        (lambda: open_model(weights, conf=2), "--conf 2.0: must be at least 0 and at most 1"),
        (lambda: model.predict(np.zeros((4, 4), np.uint8)), r"an array uint8 \(4, 4\): expected RGB"),
    ):
        with pytest.raises(UsageError, match=line):
            call()  # type: ignore[no-untyped-call]
    assert not Path("models").exists()
    assert not Path("outputs").exists()
    assert "error" not in capsys.readouterr().err


def test_importing_it_loads_no_torch_and_says_nothing() -> None:
    words = [sys.executable, "-c", "import sys, yolo_seg_ddp; sys.exit('torch' in sys.modules)"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

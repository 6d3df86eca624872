"""docs/python.md: its blocks run as they stand; predictions are those of inference.py; errors are
raised, not printed.
"""

import json
import re
import runpy
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import shapely
import torch
from PIL import Image

import inference
from tests.predict.tiny_network import smooth_data, tiny_weights
from tests.support.local_server import LocalServer
from tests.support.plugin import PROJECT, read_json
from tests.support.recipes import run_command
from yolo_seg_ddp import evaluate, open_model, train
from yolo_seg_ddp.api import Names, Prediction, Predictions
from yolo_seg_ddp.data.images import ImageError, decode_image, read_image
from yolo_seg_ddp.predict.detections import Detections, PhotoPrediction
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils.errors import UsageError, UserError
from yolo_seg_ddp.utils.text import SCRIPTS

PAGE = (PROJECT / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a folder with a data set and a photograph; keep one thread."""
    monkeypatch.chdir(tmp_path)
    # two wait for each other beside other tests
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
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
    assert {name: len(values) for name, values in left["history"].items()} == dict.fromkeys(
        names, 2
    )
    metrics = read_json(Path("outputs/wires/metrics.json"))
    assert json.loads(json.dumps(left["metrics"])) == metrics
    # enlarged, so that labels hide no object
    assert read_image(Path("picture.jpg")).shape == (360, 480, 3)


def test_a_prediction_holds_what_inference_py_writes(tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "best.pt")
    places = ("--model", weights, "--source", "photograph.jpg", "--output", "out")
    run_command(inference, *places, "--conf", "0.4")
    [written] = read_json(Path("out/predictions.json"))
    model = open_model(weights, conf=0.4, tiles="off")
    [prediction] = model.predict("photograph.jpg")
    assert len(prediction) == len(written["detections"]) > 1
    named = zip(
        prediction.class_names,
        prediction.scores,
        prediction.boxes,
        written["detections"],
        strict=True,
    )
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
    # A notebook gets the drawn photograph as JPEG; the photograph itself stays.
    drawn = prediction.draw()
    assert np.abs(decode_image(drawn._repr_jpeg_()).astype(int) - drawn.pixels).mean() < 20
    assert not np.array_equal(drawn.pixels, prediction.photo)
    assert np.array_equal(prediction.photo, read_image(Path("photograph.jpg")))


def test_a_source_is_whatever_holds_a_photograph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, pixels = (
        open_model(tiny_weights(tmp_path / "best.pt"), conf=0.4),
        read_image(Path("photograph.jpg")),
    )
    assert str(model).startswith("Model(names=('wire', ")
    Path("photos").mkdir()
    Image.fromarray(pixels).save("photos/a.png")
    Path("photos/b.jpg").write_bytes(b"no picture")
    turned = Image.Exif()
    turned[274] = 3
    Image.fromarray(pixels[::-1, ::-1]).convert("RGBA").save("turned.png", exif=turned)
    with LocalServer(SimpleHTTPRequestHandler) as server:
        address = f"{server.root}/photos/a.png?sig=secret"
        sources: list[Any] = ["photos/a.png", Path("photos"), "ph*os/*.*", address]
        sources += [["photos/a.png"], pixels, Image.open("turned.png"), iter([pixels])]
        expected = model("photograph.jpg").boxes
        for source in sources:
            [found] = model(source)
            assert np.array_equal(found.boxes, expected), source
        names = [each.file for each in model([sources[0], address, pixels])]
        assert names == ["photos/a.png", f"{server.root}/photos/a.png?…", ""]
        assert "skipped photos/b.jpg: not a picture" in capsys.readouterr().err
        monkeypatch.setattr("yolo_seg_ddp.prepare.download.web.MAX_READ_BYTES", 99)
        for source, line in (
            (address, "/photos/a.png: larger than"),
            (f"{server.root}/c.png?sig=secret", "/c.png: the server answered 404"),
            (["photos/a.png", "photos/b.jpg"], "photos/b.jpg: not a picture"),
        ):
            with pytest.raises((UserError, ImageError), match=line) as error:
                model(source)
            assert "secret" not in str(error.value)


def test_results_answer_to_the_names_that_people_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = open_model(tiny_weights(tmp_path / "best.pt"), conf=0.4)
    results = model("photograph.jpg")
    [r] = results
    assert (r.path, r.orig_img is r.photo) == ("photograph.jpg", True)
    assert (
        dict(model.names.items())
        == dict(enumerate(model.names))
        == dict(enumerate(r.names.values()))
    )
    assert r.boxes.xyxy.cpu().numpy().tolist() == results.boxes.tolist()
    assert r.boxes.conf.tolist() == r.scores.tolist()
    assert [r.names[int(c)] for c in r.boxes.cls] == r.class_names
    for number, (box, mask) in enumerate(zip(r.boxes, r.masks, strict=True)):
        x1, y1, x2, y2 = box
        assert box.xyxy[0].tolist() == [x1, y1, x2, y2]
        assert box.xywh[0].tolist() == pytest.approx(
            [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
        )
        assert (float(box.conf), int(box.cls), box.id) == (
            r.scores[number],
            r.class_ids[number],
            None,
        )
        [outline] = mask.xy
        assert mask[outline[:, 1], outline[:, 0]].all()
        assert len(outline) > 2 or mask.sum() < 3
    assert (type(r.boxes.max()), type(r.boxes * 2)) == (np.float32, np.ndarray)
    sure = r[r.boxes.conf > 0.6]
    assert len(sure) == len(sure.masks) == (r.scores > 0.6).sum() < len(r)
    assert r.boxes[1:3].conf.tolist() == r[1:3].scores.tolist() == r.scores[1:3].tolist()
    assert list(r.speed) == ["preprocess", "inference", "postprocess"]
    assert all(0 < each_ms < 60_000 for each_ms in r.speed.values())
    shown: list[Any] = []
    monkeypatch.setattr(
        "yolo_seg_ddp.api.ImageShow.show", lambda picture: shown.__iadd__([picture])
    )
    results.show()
    assert np.array_equal(np.asarray(shown[0]), r.plot())
    monkeypatch.setattr("yolo_seg_ddp.api.ImageShow.show", lambda _: False)
    with pytest.raises(UserError, match=r"show\(\): .* save\(\) writes"):
        r.show()
    for attribute, line in (
        (lambda: r.to_df(), r"Prediction has no to_df; prediction.to_pandas\(\)"),
        (lambda: r.orig_shape, r"Prediction has no orig_shape; prediction.photo.shape"),
        (lambda: r.boxes.xyxyn, r"Rows has no xyxyn; divide xyxy"),
        (lambda: r.boxes.xyxz, r"Rows has no xyxz \(did you mean xyxy\?\)"),
        (lambda: model.track("a.mp4"), "Model has no track; python inference.py --source film.mp4"),
        (lambda: model.anything, r"Model has no anything.*docs/python.md"),
    ):
        with pytest.raises(AttributeError, match=line):
            attribute()
    assert not hasattr(r.boxes, "__array_ufunc_of_another__")


def test_a_model_trains_on_and_is_evaluated(tmp_path: Path) -> None:
    model, data = open_model(tiny_weights(tmp_path / "best.pt"), conf=0.4), "data/mine/dataset.yaml"
    assert (
        model.val(data=data)["mask_map50"]
        == evaluate(tmp_path / "best.pt", data=data)["mask_map50"]
    )
    assert (
        len(
            model.train(data=data, epochs=1, batch=2, imgsz=64, project="models", name="on")[
                "val_loss"
            ]
        )
        == 1
    )
    assert (Path("models/on/args.yaml")).read_text().count(str(tmp_path / "best.pt")) == 1


def test_an_option_of_a_call_applies_to_that_call(tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "best.pt")
    model = open_model(weights, conf=0.4)
    before = model("photograph.jpg")
    confident = model("photograph.jpg", conf=0.95)
    assert 0 < len(confident[0]) == (before.scores > 0.95).sum() < len(before[0])
    assert {*model("photograph.jpg", classes=["pole"]).class_names} == {"pole"}
    assert {*model("photograph.jpg", classes=[0]).class_names} == {"wire"}
    assert np.array_equal(model("photograph.jpg", max_det=3).boxes, before.boxes[:3])
    assert len(model("photograph.jpg", iou=0.1)[0]) < len(before[0])
    other = open_model(weights, conf=0.4, imgsz=96)("photograph.jpg")
    assert np.array_equal(model("photograph.jpg", imgsz=96).boxes, other.boxes)
    assert not np.array_equal(other.boxes, before.boxes)
    assert np.array_equal(model("photograph.jpg").boxes, before.boxes)
    taken: list[int] = []

    def photos() -> Iterator[np.ndarray]:
        for number in range(9):
            taken.append(number)
            yield before.photo

    stream = model(photos(), stream=True, batch=2)
    assert not taken
    assert next(stream).boxes == pytest.approx(before.boxes, abs=0.01)
    assert len(taken) == 2
    assert len(list(stream)) == 8


# Shows the help of each script, or of each command of the module that is named first. Each prints a
# line: whether it names options, and whether PyTorch was imported.
HELP_OF_ALL = """
import contextlib, io, runpy, sys
_, module, *names = sys.argv
for name in names:
    sys.argv = [module, name, "--help"] if module else [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__") if module else runpy.run_path(
            name, run_name="__main__"
        )
    print(name, said.getvalue().count("--") > 1, "torch" in sys.modules)
"""


def test_the_wheel_works_beside_a_project_with_such_names_and_gives_all_commands(
    tmp_path: Path,
) -> None:
    """`import yolo_seg_ddp` took the project's own `utils.py` for a part of the wheel."""
    (tmp_path / "source").mkdir()
    for each in [
        *PROJECT.glob("*.[lmpty]*"),
        *(PROJECT / name for name in ("LICENSE", "yolo_seg_ddp")),
    ]:
        (tmp_path / "source" / each.name).symlink_to(each)  # the build writes beside them
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    [packages] = (tmp_path / "env").glob("lib/*/site-packages")
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib"))  # torch and the others
    project = tmp_path / "project"
    for name in ("utils", "inference", "export", "dataset", "extras/__init__", "tests/__init__"):
        file = project / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('a stranger')\n")

    def run(*words: str | Path, code: int = 0) -> str:
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr * (code != 0)

    options = ("--no-deps", "--no-index", "--no-build-isolation")
    run(python, "-m", "pip", "install", *options, tmp_path / "source")
    names = {file.relative_to(packages).parts[0] for file in packages.rglob("*.py")}
    assert names == {"yolo_seg_ddp"}
    assert not [file for file in packages.rglob("test_*.py") if file.name != "test_ddp.py"]

    command = python.with_name("yolo-seg-ddp")
    module = (python, "-m", "yolo_seg_ddp")
    assert "yolo-seg-ddp train --model yolov8n-seg.pt" in run(command, "train", "--help")
    assert "Next: yolo-seg-ddp parse --input=" in run(command, "download", "--sample", "4")
    assert "Next: python -m yolo_seg_ddp check" in run(*module, "parse", "--long-side", "64")
    assert (project / "data" / "processed" / "dataset.yaml").exists()
    places = (
        "--model",
        tiny_weights(tmp_path / "best.pt"),
        "--source",
        "data/processed/val/images",
    )
    assert "Results in outputs/predictions" in run(*module, "predict", *places, "--img-size", "64")
    assert "yolo-seg-ddp maps --predictions" in run(command, "maps", "--help")

    listed = run(command)
    commands = [*SCRIPTS, "maps", "orthophotos", "unlabelled"]
    for name in commands:
        assert re.search(rf"^  {name} +[A-Z].+\.$", listed, re.MULTILINE), name
    told = run(python, "-c", HELP_OF_ALL, "yolo_seg_ddp", *commands)
    assert [line.split()[:2] for line in told.splitlines()] == [[name, "True"] for name in commands]
    assert "wires is no command; yolo-seg-ddp lists them" in run(command, "wires", code=2)
    code = "from yolo_seg_ddp import open_model, train, evaluate; print(open_model.__module__)"
    assert run(python, "-c", code) == "yolo_seg_ddp.api\n"


def test_a_prediction_becomes_arrays_polygons_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, boxes = np.ones((3, 4), bool), np.array([[1, 2, 5, 5], [2, 8, 12, 9]], np.float32)
    ring[1, 1] = False
    line = Line(np.array([[2, 8.5], [12, 8.5]]), np.ones(2), np.zeros((0, 2, 2)))
    masks = [Region(1, 2, ring), Region(2, 8, np.ones((1, 10), bool))]
    found = Detections(
        torch.from_numpy(boxes), torch.tensor([0.75, 0.5]), torch.tensor([1, 0]), torch.zeros(2, 32)
    )
    result = PhotoPrediction(found, masks, boxes, [None, line])
    prediction = Prediction(
        np.zeros((10, 16, 3), np.uint8), Names(("wire", "pole")), result, "a.jpg"
    )
    assert repr(prediction) == "2 detections of 2 classes in 16 x 10: 1 pole, 1 wire"
    assert np.array_equal(read_image(Path(prediction.save("drawn.png"))), prediction.plot())
    assert prediction.save() == "results_a.jpg"
    both = Predictions([prediction] * 2)
    assert repr(both) == "4 detections of 2 classes in 2 photographs: 2 pole, 2 wire"
    with pytest.raises(
        AttributeError, match=r"boxes of 2 photographs: take one, such as predictions\[0\].boxes"
    ):
        print(both.boxes)
    arrays = prediction.arrays()
    shapes = {
        name: (arrays[name].dtype.name, arrays[name].shape) for name in arrays.keys() - {"data"}
    }
    several = {"mask": ("bool", (2, 10, 16)), "xyxy": ("float32", (2, 4))}
    assert shapes == {**several, "confidence": ("float32", (2,)), "class_id": ("int64", (2,))}
    assert arrays["data"]["class_name"].tolist() == ["pole", "wire"]
    y, x = np.mgrid[:10, :16] + 0.5
    inside = [shapely.contains_xy(polygon, x, y) for polygon in prediction.polygons()]
    assert np.array_equal(inside, arrays["mask"])
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    named: dict[str, Any] = {
        "image": ["a.jpg"] * 2,
        "class": ["pole", "wire"],
        "confidence": [0.75, 0.5],
    }
    sides = {"left": [1, 2], "top": [2, 8], "right": [5, 12], "bottom": [5, 9]}
    sizes = {"area_px": [11, 10], "length_px": [np.nan, 10], "width_px": [np.nan, 1]}
    table = {name: list(column) for name, column in prediction.to_pandas().items()}
    np.testing.assert_equal(table, {**named, **sides, **sizes})
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it was not installed
    with pytest.raises(UserError, match="pip install pandas"):
        prediction.to_pandas()


def test_the_cells_of_the_notebook_run_and_its_file_is_small(tmp_path: Path) -> None:
    file = PROJECT / "examples" / "first_model.ipynb"
    cells = [cell for cell in read_json(file)["cells"] if cell["cell_type"] == "code"]
    code = ["".join(cell["source"]) for cell in cells]
    [at] = [
        number
        for number, cell in enumerate(cells)
        if "parameters" in cell["metadata"].get("tags", ())
    ]
    code.insert(
        at + 1, f"FOLDER, PHOTOGRAPHS, EPOCHS, SIZE_PX = Path({str(tmp_path)!r}), 16, 1, 64"
    )
    words = [sys.executable, "-c", "\n".join(code)]
    done = subprocess.run(
        words, cwd=file.parent, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mask_map50" in done.stdout
    assert (tmp_path / "evaluation" / "metrics.json").exists()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        "saved without its outputs"
    )
    assert "image/jpeg" in cells[-1]["outputs"][-1]["data"]
    assert file.stat().st_size < 300_000


def test_what_is_wrong_is_raised_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weights = tiny_weights(tmp_path / "best.pt")
    model = open_model(weights)
    for call, line in (
        (lambda: train(epoch=2), r"--epoch=2 \(did you mean --epochs\?\)"),
        (lambda: train("none.yaml"), "--config none.yaml: No such file"),
        (lambda: train(batch=-1), "--batch-size -1: must be at least 0"),
        (lambda: evaluate(weights, source="x"), "unknown argument --source=x"),
        (
            lambda: open_model(weights, output="x"),
            "unknown argument --output=x; known are imgsz, .*conf",
        ),
        (
            lambda: model("photograph.jpg", confidence=0.5),
            "--confidence=0.5.*; known are imgsz, .*conf,.*max_det",
        ),
        (
            lambda: model("photograph.jpg", imgsz=(640, 480)),
            r"imgsz=\(640, 480\): the network's input is square",
        ),
        (lambda: model("photograph.jpg", device="cpu"), "unknown argument --device=cpu"),
        (
            lambda: model("photograph.jpg", stream=True, max_det=0),
            "--max-detections 0: must be at least 1",
        ),
        (lambda: model(7), "a source of type int: expected a path"),
        (lambda: model("ftp://example.org/a.jpg"), "source ftp://example.org: expected https"),
        (lambda: model(Image.new("I;16", (4, 4))), "an array uint16"),
        (lambda: open_model(weights, conf=2), "--conf 2.0: must be at least 0 and at most 1"),
        (
            lambda: model.predict(np.zeros((4, 4), np.uint8)),
            r"an array uint8 \(4, 4\): expected RGB",
        ),
    ):
        with pytest.raises(UsageError, match=line):
            call()  # type: ignore[no-untyped-call]
    assert not Path("models").exists()
    assert not Path("outputs").exists()
    assert "error" not in capsys.readouterr().err


def test_the_help_of_each_command_is_there_before_pytorch_is_imported() -> None:
    """It took 2.5 s of processor time."""
    scripts = [f"{name}.py" for name in SCRIPTS.values()]
    # these are extras'
    there = [script for script in scripts if script not in ("check_data.py", "export.py")]
    words = [sys.executable, "-c", HELP_OF_ALL, "", *there]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{script} True False" for script in there]

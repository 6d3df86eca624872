"""export.py from its command line; inference.py and evaluate_model.py with what it wrote."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

import evaluate_model
import export
import inference
from tests.commands import test_pretended_gpu as pretended_gpu
from tests.predict.tiny_network import NAMES, SIZE_PX, WINDOWS, smooth_data, tiny_weights
from tests.support.plugin import read_json
from tests.support.recipes import run_command
from yolo_seg_ddp import open_model
from yolo_seg_ddp.extras.exports import exported
from yolo_seg_ddp.extras.exports import report as export_report
from yolo_seg_ddp.extras.exports import speed as export_speed
from yolo_seg_ddp.extras.exports.conversion import (
    LOCK_FILE,
    CalibrationImages,
    publish,
    scratch_folder,
)
from yolo_seg_ddp.extras.exports.speed import images_per_second
from yolo_seg_ddp.predict.thresholds import FEWEST_GROUPS, NUM_FEATURES, VERSION, digest_of_model
from yolo_seg_ddp.predict.tiles import Tiling
from yolo_seg_ddp.utils.errors import UsageError, UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def commands_keep_one_thread() -> Iterator[None]:
    """Two threads wait for each other beside other tests.

    The handler that export.py sets goes again.
    """
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
        yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smooth_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_weights(tmp_path_factory.mktemp("run") / "best.pt", WINDOWS)


@pytest.fixture(scope="module")
def written(weights: Path, data: Path) -> dict[str, Any]:
    """What `--format onnx --half --int8` reported and wrote, next to the weights."""
    for package in ("onnx", "onnxruntime", "onnxslim"):
        pytest.importorskip(
            package, reason="needs the packages of exports (pip install -r requirements-export.txt)"
        )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(export_report, "peak_memory", lambda *_: 10**8)
        flags = ("--format", "onnx", "--half", "--int8", "--batch-size", "2", "--ap-tolerance", "1")
        code = run_command(export, "--model", weights, "--data", data, *flags)
    assert code == 0
    return read_json(weights.parent / "export.json")


def test_each_precision_is_written_proven_and_measured(
    written: dict[str, Any], weights: Path
) -> None:
    rows = {(row["format"], row["precision"], row["compute"]): row for row in written["rows"]}
    assert ("torch", "fp32", "off") in rows
    for precision, name in (
        ("fp32", "best.onnx"),
        ("fp16", "best_fp16.onnx"),
        ("int8", "best_int8.onnx"),
    ):
        row = rows["onnx", precision, "off"]
        assert row["bytes"] == (weights.parent / name).stat().st_size
        assert row["failures"] == []
        assert row["images_per_second"] > 0
        assert row["peak_memory_bytes"] == 10**8
        assert [one["name"] for one in row["per_class"]] == ["wire", "pole"]
        assert row["largest_difference"]["prototypes"] > 0
    sizes = [rows["onnx", precision, "off"]["bytes"] for precision in ("fp32", "fp16", "int8")]
    assert sizes[0] > 1.8 * sizes[1] > 2.5 * sizes[2]
    # the weights were trained on windows at the photographs' scale
    assert written["tiles_px"] == SIZE_PX
    assert written["num_photographs"] == 2
    files = {"best.pt", "export.json", "best.onnx", "best_fp16.onnx", "best_int8.onnx"}
    assert {path.name for path in weights.parent.iterdir()} == files


def test_a_model_exports_itself_from_python_as_the_command_does(
    written: dict[str, Any], weights: Path, data: Path, tmp_path: Path
) -> None:
    trained = shutil.copy(weights, tmp_path / "best.pt")
    (tmp_path / "config.yaml").write_text(f"data: {data}\n")
    model, options = open_model(trained, conf=0.3), {"output": tmp_path, "speed": False}
    exported = model.export(format="onnx", ap_tolerance=1.0, batch=2, **options)
    assert Path(exported) == tmp_path / "best.onnx"
    assert open_model(exported).names == model.names
    with pytest.raises(UsageError, match="format: 'tflite' is not one of"):
        model.export(format="tflite", **options)


@pytest.mark.parametrize("tiles", ["auto", "off"])
def test_inference_finds_the_same_with_the_export(
    written: dict[str, Any], weights: Path, data: Path, tiles: str, tmp_path: Path
) -> None:
    found = []
    for name in ("best.pt", "best.onnx"):
        places = ("--source", data.parent / "val" / "images", "--output", tmp_path / name)
        flags = ("--conf", "0.3", "--tiles", tiles, "--batch-size", "3", "--max-detections", "10")
        assert run_command(inference, "--model", weights.with_name(name), *places, *flags) == 0
        found.append(read_json(tmp_path / name / "predictions.json"))
    ours, theirs = found
    assert sum(len(entry["detections"]) for entry in ours) > 5
    for mine, its in zip(ours, theirs, strict=True):
        assert [one["class"] for one in its["detections"]] == [
            one["class"] for one in mine["detections"]
        ]
        for name in ("box_xyxy", "confidence"):
            expected, got = ([one[name] for one in entry["detections"]] for entry in (mine, its))
            np.testing.assert_allclose(got, expected, atol=0.05)


def test_evaluation_takes_an_export_and_compares_it_with_torch(
    written: dict[str, Any], weights: Path, data: Path, tmp_path: Path
) -> None:
    flags = (
        "--data",
        data,
        "--output",
        tmp_path,
        "--num-workers",
        "0",
        "--mask-resolution",
        "native",
    )
    models = ("--model", weights.with_name("best.onnx"), "--compare", weights)
    assert run_command(evaluate_model, *models, *flags) == 0
    theirs, ours = (
        read_json(tmp_path / f"{name}.json") for name in ("metrics", "compared_metrics")
    )
    assert ours["val_loss"] > 0
    assert theirs["val_loss"] is None
    assert theirs["tiles"] == SIZE_PX
    for name in ("num_targets", "box_map50", "mask_map50_95"):
        assert theirs[name] == pytest.approx(ours[name], abs=0.02)


def test_a_failed_proof_names_the_number_writes_nothing_and_keeps_the_export_before(
    written: dict[str, Any],
    weights: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "best.onnx").write_bytes(b"the export before")
    real = exported._OnnxRuntime.__call__
    monkeypatch.setattr(
        exported._OnnxRuntime, "__call__", lambda self, images: real(self, images[:, [2, 1, 0]])
    )
    flags = ("--data", data, "--output", tmp_path, "--no-speed")
    assert run_command(export, "--model", weights, *flags) == 1
    printed = capsys.readouterr().out
    assert "✗ best.onnx: its probabilities of class" in printed
    assert "allowed 0.0001 + 0.001 * |torch's|; not written" in printed
    assert "failed" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"best.onnx", "export.json"}
    assert (tmp_path / "best.onnx").read_bytes() == b"the export before"
    assert read_json(tmp_path / "export.json")["rows"][0]["failures"]
    with pytest.raises(UserError, match=r"export .*: a proof failed"):
        open_model(weights).export(data=data, output=tmp_path, speed=False)


@pytest.mark.parametrize(
    ("convert", "error", "said"),
    [
        (
            Mock(side_effect=RuntimeError("unsupported\noperator")),
            UserError,
            r"^--format torchscript \(fp32\): unsupported operator$",
        ),
        (lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM), SystemExit, "143"),
    ],
    ids=["fails", "is terminated"],
)
def test_an_export_that_does_not_end_well_leaves_nothing(
    weights: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    convert: Any,
    error: Any,
    said: str,
) -> None:
    monkeypatch.setattr(torch.jit, "trace", convert)
    flags = ("--data", data, "--output", tmp_path, "--no-speed", "--tiles", "off")
    with pytest.raises(error, match=said):
        run_command(export, "--model", weights, "--format", "torchscript", *flags)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_export_is_removed_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if child == 0:
        with scratch_folder(tmp_path) as killed:
            (killed / "one").mkdir()
            (killed / "one" / "best.onnx").write_text("half")
            # `publish` moved the folder before, and no more
            (killed / "one" / "best_openvino_model.old").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (killed,) = tmp_path.iterdir()
    (tmp_path / ".export-mine1234").mkdir()
    (tmp_path / ".export-link1234").symlink_to(killed)
    with scratch_folder(tmp_path) as living, scratch_folder(tmp_path) as second:
        assert (living / LOCK_FILE).exists()
        found = {path.name for path in tmp_path.iterdir()}
    assert found == {
        living.name,
        second.name,
        ".export-mine1234",
        ".export-link1234",
        "best_openvino_model",
    }
    assert capsys.readouterr().out == f"Removed {killed}, which an export that was killed left\n"


def test_a_batch_that_no_memory_holds_and_a_model_of_other_classes_are_refused(
    weights: Path, data: Path
) -> None:
    flags = ("--data", data, "--img-size", "1280", "--batch-size", "164")
    with pytest.raises(UsageError, match="--batch-size 164: at most 163 images of 1280 px"):
        run_command(export, "--model", weights, *flags)
    other = data.with_name("other.yaml")
    other.write_text(data.read_text().replace("sign", "mast"))
    with pytest.raises(
        UserError,
        match=r"knows the classes wire, pole, sign but .*other\.yaml has wire, pole, mast",
    ):
        run_command(export, "--model", weights, "--data", other, "--format", "torchscript")


def test_a_folder_replaces_the_folder_before(tmp_path: Path) -> None:
    scratch, target = tmp_path / "scratch", tmp_path / "best_openvino_model"
    for number in range(2):
        made = scratch / target.name
        made.mkdir(parents=True)
        (made / f"{number}.xml").write_text("")
        publish(made, target)
        assert [file.name for file in target.iterdir()] == [f"{number}.xml"]
    assert list(scratch.iterdir()) == []


def test_calibration_shows_photographs_and_tiles_of_the_training_size(data: Path) -> None:
    files = sorted((data.parent / "train" / "images").iterdir())
    for tiling, count in ((None, 2), (Tiling(64), 4)):
        images = CalibrationImages(files, SIZE_PX, tiling)
        found = [one["img"] for one in images]
        assert len(found) == len(images) == count
        assert {(image.dtype, tuple(image.shape)) for image in found} == {
            (torch.uint8, (1, 3, SIZE_PX, SIZE_PX))
        }
    assert all(
        torch.equal(one["img"], again["img"]) for one, again in zip(images, images, strict=True)
    )


def test_speed_is_measured_in_turn() -> None:
    calls: list[str] = []

    class Network(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            calls.append(self.name)
            return {}

    networks: Any = {0: (Network("a"), None), 1: (Network("b"), None)}
    speeds = images_per_second(networks, torch.zeros(2, 3, 32, 32), rounds=2)
    assert calls == ["a", "b"] * 3
    assert set(speeds) == {0, 1}
    assert min(speeds.values()) > 0


def test_the_process_that_measures_memory_opens_the_model_and_answers(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        "path": str(weights),
        "device": "cpu",
        "amp": "off",
        "shape": (1, 3, SIZE_PX, SIZE_PX),
        "threads": 1,
    }
    answers: list[dict[str, int]] = []
    monkeypatch.setattr(export_speed, "read_job", lambda: job)
    monkeypatch.setattr(export_speed, "write_answer", answers.append)
    export_speed.measure_memory()
    assert answers[0]["bytes"] > 50 * 2**20


def write_thresholds(weights: Path) -> Path:
    """Write what `evaluate_model.py --guarantee` would, with groups of which nothing is known."""
    classes = [
        {"class": name, "threshold": level}
        for name, level in zip(NAMES, (0.4, 0.5, None), strict=True)
    ]
    numbers = {
        "img_size": SIZE_PX,
        "overlap": 0.0,
        "iou": 0.7,
        "max_detections": 300,
        "confidence": 0.001,
        "mask_score": True,
    }
    settings = {**numbers, "amp": "off", "tiles": "off", "thin_classes": ["none"]}
    groups = [[float("nan")] * NUM_FEATURES] * FEWEST_GROUPS
    judged = {"version": VERSION, "classes": classes, "settings": settings, "calibration": groups}
    words = {"promises": ["recall=0.15"], "certainty": 0.95, "unit": "folders", "proof": "proved"}
    file = weights.with_name("thresholds.yaml")
    file.write_text(yaml.safe_dump({**judged, **words, "model_sha256": digest_of_model(weights)}))
    return file


def test_thresholds_go_from_the_pt_file_to_its_export(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = tiny_weights(tmp_path / "last.pt")
    thresholds = ("--thresholds", write_thresholds(weights))
    carried = (
        "--model",
        weights,
        *thresholds,
        "--format",
        "torchscript",
        "--no-speed",
        "--data",
        data,
    )
    assert run_command(export, *carried) == 0
    with pytest.raises(UserError, match="judged with --img-size 64, the export's is 96"):
        run_command(export, *carried, "--img-size", "96")
    where = ("--source", data.parent / "val/images", "--output")
    of_export = ("--model", "last.torchscript", *where, "exported")
    run_command(inference, *of_export)
    said = capsys.readouterr().out
    run_command(inference, "--model", weights, *thresholds, *where, "found")
    ours, theirs = (
        read_json(Path(f"{folder}/predictions.json")) for folder in ("found", "exported")
    )
    classes = [
        [one["class"] for entry in found for one in entry["detections"]] for found in (ours, theirs)
    ]
    assert classes[0] == classes[1]
    assert set(classes[0]) == set(NAMES)
    assert theirs[0]["guarantee"]["model_sha256"] == ours[0]["guarantee"]["model_sha256"], (
        "of the .pt file"
    )
    assert (
        theirs[0]["guarantee"]["proof"]
        == "proved; judged with the .pt file, whose outputs the export has"
    )
    assert all(
        line in said
        for line in ("wire 0.4, pole 0.5, sign none", "Like the folders it was checked on")
    )
    for flags, cure in (
        (("--iou", "0.5"), "judged with --iou"),
        (thresholds, "made for another model file"),
    ):
        with pytest.raises(UserError, match=cure):
            run_command(inference, *of_export, *flags)
    run_command(inference, *of_export, "--thresholds", "off")
    assert "guarantee" not in read_json(Path("exported/predictions.json"))[0]


def test_the_command_runs_on_a_gpu(weights: Path, data: Path, tmp_path: Path) -> None:
    line = (
        f"--model {weights} --data {data} --format torchscript --tiles off --output {tmp_path}/out"
    )
    (seen,) = pretended_gpu.run(tmp_path, 1, "export", line)
    assert seen["code"] == 0, (tmp_path / "printed.txt").read_text()
    assert seen["copies"] > 0

"""Hostile .pt and model YAML files: nothing in them runs, and each is refused with one line, in
every place that opens one.
"""

import functools
import json
import pickle
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import evaluate_model
import inference
from tests.support.hostile import Call, hostile_weights, saved, zipped
from tests.support.processes import wait_until
from tests.support.recipes import run_command
from yolo_seg_ddp.data.images import write_jpeg
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.model import (
    build_model,
    class_names,
    load_weights,
    save_deployable,
    trained_size_px,
)

NAMES = ("pole", "wire")
KINDS = (
    *(
        "os_system",
        "eval_through_getattr",
        "nested_pickle",
        "deep_in_a_dictionary",
        "persistent_id",
        "no_data_pkl",
    ),
    "legacy",
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Import what the loaders import, so that the times below are those of the refusal."""
    build_model("yolov8n-seg.yaml", NAMES)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "best.pt"
    save_deployable(
        path, build_model("yolov8n-seg.yaml", NAMES), {}, img_size=96, data="dataset.yaml"
    )
    return path


def inference_script(file: Path) -> None:
    photo, output = file.with_name("photo.jpg"), file.with_name("out")
    write_jpeg(photo, np.zeros((64, 64, 3), np.uint8))
    run_command(
        inference,
        "--model",
        file,
        "--source",
        photo,
        "--output",
        output,
        "--device",
        "cpu",
    )


LOADERS: dict[str, Callable[[Path], Any]] = {
    "pretrained": lambda file: build_model(str(file), NAMES),
    "evaluate_model.py": lambda file: run_command(
        evaluate_model, "--model", file, "--device", "cpu"
    ),
    "inference.py": inference_script,
}


@pytest.mark.parametrize(
    ("kind", "loader"),
    [
        *((kind, "pretrained") for kind in KINDS),
        *(("os_system", loader) for loader in [*LOADERS][1:]),
    ],
)
def test_hostile_files_run_nothing(tmp_path: Path, kind: str, loader: str) -> None:
    marker = tmp_path / "marker"
    file = tmp_path / f"{kind}.pt"
    file.write_bytes(hostile_weights(marker)[kind])
    threads = torch.get_num_threads()
    # of this process: another program on the machine must not fail the test
    start_s = time.process_time()
    with pytest.raises(UserError) as refused:
        LOADERS[loader](file)
    assert time.process_time() - start_s < 1
    torch.set_num_threads(threads)
    assert not marker.exists()
    message = str(refused.value)
    assert file.name in message
    assert message.isprintable()
    # PyTorch advises to switch it off
    assert "weights_only" not in message or "weights_only=True" in message
    assert len(message) < 500


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "no_data_pkl"])
def test_control_opened_without_care_each_of_them_runs(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    file = tmp_path / "hostile.pt"
    file.write_bytes(hostile_weights(marker)[kind])
    try:
        torch.load(file, weights_only=False)
    except (TypeError, AttributeError, RuntimeError, pickle.UnpicklingError):
        # they run first and fail afterwards
        assert kind in ("persistent_id", "eval_through_getattr")
    wait_until(marker.exists, 5)  # Popen does not wait for its child


def changed(honest: Path, tmp_path: Path, change: Callable[[Any], None]) -> Path:
    """Return a copy of an honest file with its model changed as an attacker would: real classes,
    other contents.
    """
    content = torch.load(honest, weights_only=False)
    change(content["model"])
    file = tmp_path / "changed.pt"
    torch.save(content, file)
    return file


def test_an_activation_that_is_code_is_not_evaluated(honest: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payload = f"open({str(marker)!r}, 'w').close() or __import__('torch').nn.SiLU()"
    file = changed(honest, tmp_path, lambda model: model.yaml.update(activation=payload))
    for load in (lambda: build_model(str(file), NAMES), lambda: load_weights(str(file))):
        with pytest.raises(UserError, match="activation"):
            load()
    description = tmp_path / "model.yaml"
    description.write_text(
        f"nc: 2\nactivation: {json.dumps(payload)}\nbackbone: [[-1, 1, Conv, [8]]]\nhead: []\n"
    )
    with pytest.raises(UserError, match="activation"):
        build_model(str(description), NAMES)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: model.yaml.update(backbone=[[-1, 1, "TorchVision", [512, "resnet18"]]]),
            "is not supported",
        ),
        (
            lambda model: model.yaml.update(
                backbone=[[-1, 1, "check_yaml", ["http://127.0.0.1:9/x.yaml"]]]
            ),
            "check_yaml is not supported",
        ),
        (
            lambda model: model.yaml.update(
                head=[[-1, 1, "DetectionModel", ["http://127.0.0.1:9/x.yaml"]]]
            ),
            "Model is not supported",
        ),
        (
            lambda model: model.yaml.update(backbone=[[-1, 1, "os.system", ["true"]]]),
            "is not supported",
        ),
        (
            lambda model: model.yaml.update(backbone=[[-1, 10**9, "Conv", [8, 3, 2]]]),
            "no layer takes: int",
        ),
        (lambda model: model.yaml.update(nc=10**12), "no layer takes: int"),
        (
            lambda model: model.yaml.update(
                head=functools.reduce(lambda nested, _: [nested, nested], range(30), list[Any]())
            ),
            "more than 20000 items",
        ),
        (lambda model: setattr(model, "names", {0: "a\x1b[2J", 1: "b"}), "not printable"),
        (lambda model: setattr(model, "names", {0: "a", 5: "b"}), "not numbered"),
        (
            lambda model: setattr(model, "names", {0: "a", 1: "b", 2: "c"}),
            "do not fit its network description",
        ),
        (lambda model: setattr(model, "yaml", None), "lacks the lists"),
        (lambda model: model.model.pop(3), "do not fit its network description"),
    ],
)
def test_hostile_contents_are_refused(
    honest: Path, tmp_path: Path, change: Callable[[Any], None], reason: str
) -> None:
    start_s = time.process_time()
    with pytest.raises(UserError, match=reason) as refused:
        load_weights(str(changed(honest, tmp_path, change)))
    assert str(refused.value).isprintable()
    assert time.process_time() - start_s < 10  # three of these build a network first


def test_hooks_and_methods_that_a_file_brings_along_are_left_behind(
    honest: Path, tmp_path: Path
) -> None:
    def change(model: Any) -> None:
        model.register_forward_pre_hook(print)
        model.model[0].forward = model.model[1].forward
        model.args = {"imgsz": 10**9}

    content = torch.load(honest, weights_only=False)
    content["model"].model[0].conv.forward_hooks_of_mine = [1]
    content["model"].args = {"imgsz": 10**9}
    torch.save(content, tmp_path / "extra.pt")
    model = load_weights(str(tmp_path / "extra.pt"))
    assert not hasattr(model.model[0].conv, "forward_hooks_of_mine")
    assert trained_size_px(model) == 640
    with pytest.raises(UserError, match=r"builtins\.print"):
        load_weights(str(changed(honest, tmp_path, change)))


def test_a_constructor_named_by_a_file_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics.nn import tasks

    chosen = AssertionError("the file chose the arguments of a constructor")
    payload = saved({"model": Call(tasks.SegmentationModel, "http://127.0.0.1:9/evil.yaml")})
    (tmp_path / "evil.pt").write_bytes(payload)
    monkeypatch.setattr(tasks.SegmentationModel, "__init__", Mock(side_effect=chosen))
    with pytest.raises(UserError):
        load_weights(str(tmp_path / "evil.pt"))
    with pytest.raises(AssertionError):  # the control
        torch.load(tmp_path / "evil.pt", weights_only=False)


def test_containers_that_torch_never_writes_are_refused(honest: Path, tmp_path: Path) -> None:
    bomb, claim, script = tmp_path / "bomb.pt", tmp_path / "claim.pt", tmp_path / "script.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    data = bytearray(zipped(b"\x80\x02}."))
    directory = data.index(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = (2**31).to_bytes(4, "little")
    claim.write_bytes(bytes(data))
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(script))
    for file, reason in (
        (bomb, "compressed"),
        (claim, "more than its own size"),
        (script, "TorchScript"),
    ):
        with pytest.raises(UserError, match=reason):
            load_weights(str(file))
    (tmp_path / "cut.pt").write_bytes(honest.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"cut\.pt"):
        load_weights(str(tmp_path / "cut.pt"))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (saved(OrderedDict(weight=torch.zeros(3))), "to convert it load them into a model"),
        (
            saved({"model": {"w": torch.zeros(1)}, "optimizer": {}, "progress": {}}),
            "best.pt or last.pt",
        ),
        (saved([1, 2]), "not a segmentation model"),
        (saved({}, _use_new_zipfile_serialization=False), r"torch\.load\(old, weights_only=True\)"),
        (
            zipped(b"\x80\x02cmodels.yolo\nSegmentationModel\n."),
            r"YOLOv5 .* train one again from yolov8n-seg\.pt",
        ),
        (zipped(b"\x80\x02cdill._dill\nThing\n."), r"_dill\.Thing.*YOLO\('FILE'\)\.save"),
        (b"", r"foreign\.pt: damaged"),
    ],
)
def test_a_harmless_foreign_file_says_what_to_do(tmp_path: Path, file: bytes, words: str) -> None:
    (tmp_path / "foreign.pt").write_bytes(file)
    with pytest.raises(UserError, match=words):
        load_weights(str(tmp_path / "foreign.pt"))


def test_a_file_saved_by_ultralytics_loads_without_any_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics import YOLO
    from ultralytics.utils import IterableSimpleNamespace

    monkeypatch.delenv("ULTRALYTICS_SAFE_LOAD", raising=False)
    yolo = YOLO("yolov8n-seg.yaml", task="segment")
    assert isinstance(yolo.model, torch.nn.Module)
    yolo.model.args = IterableSimpleNamespace(
        imgsz=320, data=Path("coco.yaml"), lr0=np.float64(0.01)
    )
    yolo.ckpt = {
        "train_metrics": {"fitness": np.float64(0.5)},
        "train_args": {"model": Path("a.pt")},
    }
    yolo.save(tmp_path / "theirs.pt")
    before = set(torch.serialization.get_safe_globals())
    model = load_weights(str(tmp_path / "theirs.pt"))
    assert set(torch.serialization.get_safe_globals()) == before
    assert len(class_names(model)) == 80
    assert trained_size_px(model) == 320
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        # files are in half precision
        ours, theirs = model(image)[0], yolo.model.half().float().eval()(image)[0]
    first, second = (
        output[0] if isinstance(output, tuple) else output for output in (ours, theirs)
    )
    torch.testing.assert_close(first, second)


def test_only_a_bare_official_name_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from ultralytics.utils import downloads

    monkeypatch.setattr(
        downloads, "attempt_download_asset", Mock(side_effect=AssertionError("a request was sent"))
    )
    for source in (
        "http://127.0.0.1:9/yolov8n-seg.pt",
        "https://example.org/yolov8m-seg.pt",
        "nowhere/yolov8n-seg.pt",
    ):
        with pytest.raises(UserError, match="no such file"):
            build_model(source, NAMES)
    with pytest.raises(
        UserError, match=r"yolo11n\.pt: the name of a detection model, .* name yolo11n-seg\.pt"
    ):
        build_model("yolo11n.pt", NAMES)
    with pytest.raises(UserError, match="an address"):
        build_model("https://someone:hush@example.org/yolov8n-seg.yaml", NAMES)

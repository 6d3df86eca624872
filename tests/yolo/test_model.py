"""Building, loading, transferring and deploying models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from utils.common.errors import UserError
from utils.distributed.sync_bn import SyncBatchNorm2d, convert_sync_batchnorm
from utils.yolo.model import (
    build_model,
    class_names,
    copy_for_prediction,
    load_for_prediction,
    load_weights,
    save_deployable,
    trained_windows,
    weights_or_description,
)

NAMES = ("conductor", "other_wire", "pole")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = build_model("yolov8n-seg.yaml", NAMES)
    path = tmp_path_factory.mktemp("model") / "best.pt"
    info, windows = {"epoch": 3, "metrics": {"mask_map50": 0.5}}, {"per_photo": 4, "low_scale": 0.5, "high_scale": 1.0}
    save_deployable(path, model, info, img_size=96, data="dataset.yaml", windows=windows)
    return path


def test_a_deployed_file_opens_again_with_the_same_weights_and_classes(saved: Path) -> None:
    model = load_weights(str(saved))
    assert class_names(model) == NAMES
    assert model.args["imgsz"] == 96
    assert trained_windows(model) == {"per_photo": 4, "low_scale": 0.5, "high_scale": 1.0}
    torch.manual_seed(0)
    original = build_model("yolov8n-seg.yaml", NAMES)
    for name, tensor in original.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].half(), tensor.half(), msg=name)


def test_the_form_that_predicts_fastest_has_no_batchnorm_and_the_same_outputs(saved: Path) -> None:
    model = load_weights(str(saved))
    image = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    for fast in (load_for_prediction(str(saved), torch.device("cpu")), copy_for_prediction(model)):
        assert not [module for module in fast.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        assert (class_names(fast), trained_windows(fast)) == (class_names(model), trained_windows(model))
        with torch.no_grad():
            ours, theirs = fast(image)[1], model(image)[1]
        for name in ("boxes", "scores", "mask_coefficient", "proto"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4, msg=name)
    assert [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]  # only the copy changed


def test_the_deployed_file_is_opened_by_ultralytics_for_prediction_and_export(saved: Path) -> None:
    from ultralytics import YOLO

    yolo = YOLO(saved)
    assert yolo.task == "segment"
    assert tuple(yolo.names.values()) == NAMES
    results = list(yolo.predict(torch.rand(1, 3, 96, 96), verbose=False, conf=0.0001))
    assert len(results) == 1
    exported = Path(yolo.export(format="torchscript", imgsz=96, verbose=False))
    assert exported.stat().st_size > 1_000_000


@pytest.mark.parametrize(
    "windows",
    [
        None,
        {"per_photo": 4},
        {"per_photo": 4, "low_scale": -1, "high_scale": 1},
        {"per_photo": 4, "low_scale": 0.5, "high_scale": 1e9},
    ],
)
def test_a_file_without_proper_facts_about_windows_has_none(windows: dict[str, float] | None) -> None:
    model = build_model("yolov8n-seg.yaml", NAMES)
    model.args = {"imgsz": 64, "windows": windows}
    assert trained_windows(model) is None


def test_classes_of_the_same_name_keep_their_classifier_rows(saved: Path) -> None:
    source = load_weights(str(saved))
    other = build_model(str(saved), ("pole", "tree"))
    for level in range(3):
        kept = other.model[-1].cv3[level][-1].weight[0]
        torch.testing.assert_close(kept, source.model[-1].cv3[level][-1].weight[2])
    assert other.nc == 2
    assert class_names(other) == ("pole", "tree")


def test_transfer_from_eighty_classes_keeps_all_that_can_be_kept(tmp_path: Path) -> None:
    names = (*(f"class {index}" for index in range(79)), "pole")
    path = tmp_path / "coco.pt"
    save_deployable(path, build_model("yolov8n-seg.yaml", names), {}, img_size=96, data="coco.yaml")
    source = load_weights(str(path)).state_dict()
    model = build_model(str(path), NAMES)
    equal = sum(
        value.shape == source[name].shape and bool((value == source[name]).all())
        for name, value in model.state_dict().items()
    )
    assert len(source) == 417
    assert equal >= 411  # all but the classifiers' last layers
    model.train()(torch.rand(2, 3, 64, 64))["scores"].sum().backward()


def test_synchronised_batchnorm_never_reaches_a_file(tmp_path: Path) -> None:
    model = convert_sync_batchnorm(build_model("yolov8n-seg.yaml", NAMES))
    assert any(isinstance(module, SyncBatchNorm2d) for module in model.modules())
    save_deployable(tmp_path / "best.pt", model, {}, img_size=64, data="dataset.yaml")
    loaded = load_weights(str(tmp_path / "best.pt"))
    assert not any(isinstance(module, SyncBatchNorm2d) for module in loaded.modules())
    assert any(isinstance(module, SyncBatchNorm2d) for module in model.modules()), "the model in training was changed"


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (witness,))

    hostile = tmp_path / "hostile.pt"
    torch.save({"model": Payload()}, hostile)
    with pytest.raises(UserError, match=r"hostile\.pt"):
        load_weights(str(hostile))
    assert not witness.exists()
    torch.load(hostile, weights_only=False)  # the control: opened without care the payload runs
    assert witness.exists()


def test_a_file_of_weights_alone_is_refused_with_one_line(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="not a segmentation model"):
        load_weights(str(tmp_path / "weights.pt"))


def test_a_missing_file_names_what_would_do() -> None:
    with pytest.raises(UserError, match=r"yolov8n-seg\.yaml"):
        load_weights("nowhere/best.pt")


def test_official_weights_without_a_network_point_to_training_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics.utils import downloads

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(downloads, "attempt_download_asset", unreachable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--model yolov8m-seg\.yaml"):
        build_model("yolov8m-seg.pt", NAMES)


def test_missing_official_weights_become_their_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source, note = weights_or_description("yolov8m-seg.pt")
    assert source == "yolov8m-seg.yaml"
    assert note is not None
    assert "yolov8m-seg.pt is not here" in note
    Path("yolov8m-seg.pt").touch()
    for model in ("yolov8m-seg.pt", "best.pt", "yolov8n-seg.yaml"):
        assert weights_or_description(model) == (model, None)

"""Building, loading, transferring and deploying models of all families."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.yolo.conftest import FAMILIES, NAMES, SIZE_PX, WINDOWS, WIRE_LABELS
from yolo_seg_ddp.predict.detections import raw_outputs
from yolo_seg_ddp.utils.distributed.sync_bn import SyncBatchNorm2d, convert_sync_batchnorm
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.model import (
    FILTER_LENGTH,
    build_model,
    choose_mask_score,
    class_names,
    copy_for_prediction,
    equalise_filters,
    freeze_layers,
    is_trained,
    load_for_prediction,
    load_weights,
    save_deployable,
    trained_label_lengths,
    trained_size_px,
    trained_stretch,
    trained_thin_classes,
    trained_windows,
    trained_wire_labels,
    weights_or_description,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_opens_again_with_equal_outputs(saved: dict[str, Path], family: str) -> None:
    path = str(saved[family])
    model, state = load_weights(path), torch.load(saved[family].with_name("weights.pt"))
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name].half().to(value.dtype), msg=name)
    model.end2end = False  # YOLO26's outputs that need suppression
    images = torch.rand(1, 3, SIZE_PX, SIZE_PX, generator=torch.Generator().manual_seed(0))
    for fast in (load_for_prediction(path, CPU), copy_for_prediction(model)):
        assert (class_names(fast), trained_size_px(fast), trained_windows(fast)) == (
            NAMES,
            SIZE_PX,
            WINDOWS,
        )
        assert trained_thin_classes(fast) == (1,)
        assert trained_wire_labels(fast) == WIRE_LABELS
        assert trained_label_lengths(fast) == [2, 90.5, 0.5]
        assert not [module for module in fast.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        with torch.no_grad():
            ours, theirs = raw_outputs(fast, images), raw_outputs(model, images)
        for name in ("boxes", "scores", "mask_coefficient"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4, msg=name)
    # only the copy changed
    assert [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    said: list[str] = []
    # another order and number of classes
    tuned = build_model(path, ("insulator", "tree"), said.append)
    assert said == [
        f"Classes that {path} knows and keeps: insulator; classes that begin anew: tree"
    ]
    build_model(path, class_names(model), said.append)
    assert len(said) == 1
    assert (tuned.nc, class_names(tuned)) == (2, ("insulator", "tree"))
    for level in range(3):
        kept = tuned.model[-1].cv3[level][-1].weight[0]
        torch.testing.assert_close(kept, model.model[-1].cv3[level][-1].weight[2])
    mine, theirs = tuned.state_dict(), model.state_dict()
    changed = [name for name, value in mine.items() if not torch.equal(value, theirs[name])]
    assert len(changed) == (14 if family == "yolo26n" else 6)  # the last layers that know classes
    if family == "yolov8n":
        tuned.train()(images.repeat(2, 1, 1, 1))["scores"].sum().backward()


def test_statistics_follow_the_weights_and_tell_trained_ones_from_random_ones() -> None:
    model = build_model("yolov8n-seg.yaml", NAMES).train()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {layer.momentum for layer in layers} == {0.1}  # Ultralytics builds them with 0.03
    assert not is_trained(model)
    model(torch.rand(2, 3, SIZE_PX, SIZE_PX))
    assert is_trained(model)


@pytest.mark.parametrize("family", ["yolov8n", "yolo26n"])
def test_trained_weights_begin_alike_however_long_their_filters_are(family: str) -> None:
    model: Any = build_model(f"{family}-seg.yaml", NAMES).train()
    for _ in range(3):
        model(torch.rand(2, 3, SIZE_PX, SIZE_PX))
    freeze_layers(model, 1)
    images = torch.rand(1, 3, SIZE_PX, SIZE_PX)
    before = model.eval()(images)[0][0].detach()
    frozen = model.model[0].conv.weight.clone()
    # As in a file whose filters are four times as long: BatchNorm divides by it.
    longer = copy.deepcopy(model)
    for layer in longer.modules():
        if (
            isinstance(getattr(layer, "bn", None), torch.nn.BatchNorm2d)
            and layer is not longer.model[0]
        ):
            layer.conv.weight.data *= 4
            layer.bn.running_mean *= 4
            layer.bn.running_var.copy_((layer.bn.running_var + layer.bn.eps) * 16 - layer.bn.eps)
    for one in (model, longer):
        equalise_filters(one)
        torch.testing.assert_close(one(images)[0][0], before, rtol=1e-3, atol=1e-3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(longer.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(model.model[0].conv.weight, frozen)
    lengths = model.model[1].conv.weight.flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, FILTER_LENGTH))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_began_as_one_of_80_classes_opens_again(family: str, tmp_path: Path) -> None:
    start, best = tmp_path / "coco.pt", tmp_path / "best.pt"
    facts: dict[str, Any] = {"img_size": SIZE_PX, "data": "dataset.yaml"}
    save_deployable(
        start, build_model(f"{family}-seg.yaml", tuple(map(str, range(80)))), {}, **facts
    )
    tuned = build_model(str(start), NAMES)
    # with three classes alone the smallest networks have 64
    assert tuned.model[-1].cv3[0][-1].in_channels == 80
    save_deployable(best, tuned, {}, **facts)
    expected, opened = tuned.half().state_dict(), load_weights(str(best)).state_dict()
    assert expected.keys() == opened.keys()
    assert all(
        torch.equal(opened[name], value.to(opened[name].dtype)) for name, value in expected.items()
    )


def test_the_deployed_file_is_opened_by_ultralytics_for_prediction_and_export(
    saved: dict[str, Path],
) -> None:
    from ultralytics import YOLO

    yolo = YOLO(saved["yolov8n"])
    assert yolo.task == "segment"
    assert tuple(yolo.names.values()) == NAMES
    results = list(yolo.predict(torch.rand(1, 3, SIZE_PX, SIZE_PX), verbose=False, conf=0.0001))
    assert len(results) == 1
    exported = Path(yolo.export(format="torchscript", imgsz=SIZE_PX, verbose=False))
    assert exported.stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (
            ("windows",),
            [None, {"per_photo": 4}, {**WINDOWS, "low_scale": -1}, {**WINDOWS, "high_scale": 1e9}],
        ),
        (
            ("thin_classes", "wires_end_at", "wires_bent"),
            [None, 1, [99], ["conductor"], [True], {"conductor": 1}],
        ),
        (("wire_width",), [None, 1.0, [1.0], ["1", "2"], [1, 2], [1.0, 1e9], [1.0, float("nan")]]),
        (
            ("wires_parallel",),
            [None, 0.4, [0], [0, 1], [9, 0.4], [0, 1.5], [0, float("nan")], [[], 0.4]],
        ),
        (("stretch",), [None, 1, [1], [2, 1], [True, 2], [0, float("inf")], [float("nan"), 1]]),
        (
            ("label_lengths",),
            [None, 1, [1], [0, 1.0], [9, 1.0, 1.0], [0, 1, 1.0], [0, 1.0, 0.0], [[], 1.0, 1.0]],
        ),
    ],
)
def test_a_file_without_proper_facts_has_none(names: tuple[str, ...], values: list[object]) -> None:
    for value in values:
        model = SimpleNamespace(args=dict.fromkeys(names, value), names=NAMES)
        assert trained_windows(model) is None
        assert trained_thin_classes(model) == ()
        assert trained_wire_labels(model) == {
            "wires_end_at": [],
            "wire_width": [],
            "wires_parallel": [],
            "wires_bent": [],
        }
        assert trained_label_lengths(model) == []
        assert trained_stretch(model) is None


def test_masks_decide_on_scores_unless_the_user_or_the_file_says_otherwise() -> None:
    for asked, args, expected in (
        (None, {}, True),  # the file of an earlier version, or of Ultralytics
        (None, {"mask_score": True}, True),
        (None, {"mask_score": False}, False),
        (True, {"mask_score": False}, True),
        (False, {"mask_score": True}, False),
        (None, {"mask_score": "no"}, True),
    ):
        assert choose_mask_score(asked, SimpleNamespace(args=args)) is expected


def test_synchronised_batchnorm_never_reaches_a_file(tmp_path: Path) -> None:
    model = convert_sync_batchnorm(build_model("yolov8n-seg.yaml", NAMES))
    assert any(isinstance(module, SyncBatchNorm2d) for module in model.modules())
    save_deployable(tmp_path / "best.pt", model, {}, img_size=64, data="dataset.yaml")
    loaded = load_weights(str(tmp_path / "best.pt"))
    assert not any(isinstance(module, SyncBatchNorm2d) for module in loaded.modules())
    assert any(isinstance(module, SyncBatchNorm2d) for module in model.modules()), (
        "the model in training was changed"
    )


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("nowhere/best.pt", r"yolov8n-seg\.yaml"),
        ("yolov8m-seg.pt", r"--model yolov8m-seg\.yaml"),  # without a network
        ("yolo12s-seg.pt", r"publishes none; train from scratch: --model yolo12s-seg\.yaml"),
        (
            "yolov8n.yaml",
            r"^--model yolov8n\.yaml: its last layer, Detect .*, is not supported; .*yolo11",
        ),
    ],
)
def test_a_model_that_cannot_be_had_points_to_what_can(
    source: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics.utils import downloads

    monkeypatch.setattr(
        downloads, "attempt_download_asset", Mock(side_effect=ConnectionError("no route to host"))
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=complaint):
        build_model(source, NAMES)


def test_without_suppression_other_families_are_refused(saved: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"best\.pt: needs non-maximum suppression; only YOLO26"):
        load_for_prediction(str(saved["yolo11n"]), CPU, nms=False)


def test_missing_official_weights_become_their_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, note = weights_or_description("yolov8m-seg.pt")
    assert source == "yolov8m-seg.yaml"
    assert note is not None
    assert "yolov8m-seg.pt is not here" in note
    Path("yolov8m-seg.pt").touch()
    for model in ("yolov8m-seg.pt", "best.pt", "yolov8n-seg.yaml"):
        assert weights_or_description(model) == (model, None)

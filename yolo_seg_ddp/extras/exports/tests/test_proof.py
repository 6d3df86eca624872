"""The proof of an export notices each planted fault and names it; without a fault it passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.predict.tiny_network import NAMES, SIZE_PX, tiny_weights
from tests.support.oracle import NAMES as ORACLE_NAMES
from tests.support.oracle import SIZE_PX as ORACLE_PX
from tests.support.oracle import STRIDES, Oracle, draw_photos
from yolo_seg_ddp.data.dataset import Photo
from yolo_seg_ddp.data.images import letterbox, read_image
from yolo_seg_ddp.extras.exports import proof as export_proof
from yolo_seg_ddp.extras.exports.exported import ExportedModel, open_export
from yolo_seg_ddp.extras.exports.proof import (
    AP_NAMES,
    BOUNDS,
    Judge,
    Proof,
    bounds_of,
    compare_ap,
    compare_outputs,
    decoded_outputs,
)
from yolo_seg_ddp.extras.exports.report import inference_command, instead_of_ap, table
from yolo_seg_ddp.extras.exports.tests.test_exported import export, facts
from yolo_seg_ddp.predict.detections import decode
from yolo_seg_ddp.yolo.inputs import prepare_images
from yolo_seg_ddp.yolo.model import load_for_prediction

CPU = torch.device("cpu")
Run = Callable[[torch.Tensor], list[torch.Tensor]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_weights(tmp_path_factory.mktemp("tiny") / "best.pt")


@pytest.fixture(scope="module")
def judge(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Knows the torch model; its photographs are smooth colours, not square,
    with one object each.
    """
    folder = tmp_path_factory.mktemp("photos")
    photos = []
    for index in range(3):
        rough = np.random.default_rng(index).integers(0, 255, (5, 8, 3), np.uint8)
        file = folder / f"{index}.png"
        cv2.imwrite(
            str(file), cv2.resize(rough, (160, 90 + 10 * index), interpolation=cv2.INTER_CUBIC)
        )
        square = np.array([[0.2, 0.2], [0.7, 0.2], [0.7, 0.7], [0.2, 0.7]], np.float32)
        photos.append(Photo(file, np.array([index]), [square]))
    found = Judge(photos, NAMES, SIZE_PX, CPU, None)
    found.learn(load_for_prediction(str(weights), CPU))
    return found


def through_torch(
    weights: Path, change: Run | None = None, precision: str = "fp32", rounds: bool = False
) -> ExportedModel:
    """Return an export without any runtime: torch's own decoded outputs, with a fault in front, or
    rounded weights.
    """
    model = load_for_prediction(str(weights), CPU)
    if rounds:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16).float())

    def run(images: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(model(images if change is None else change(images))[0])

    return ExportedModel(Path("best.onnx"), "onnx", facts(precision), run)


def test_a_faithful_export_passes(weights: Path, judge: Judge) -> None:
    proof = judge.prove(through_torch(weights), facts())
    assert proof.failures == []
    assert [row["name"] for row in proof.per_class] == list(NAMES)
    assert proof.largest["boxes"] < 1e-3


def test_the_inputs_are_each_photograph_and_its_lower_right_quarter(judge: Judge) -> None:
    whole, quarter = judge.inputs[:2]
    image = read_image(judge.photos[0].file)
    for shown, part in ((whole, image), (quarter, image[45:, 80:])):
        assert torch.equal(
            shown, prepare_images(torch.from_numpy(letterbox(part, SIZE_PX)[0][None]), CPU)[0]
        )


def another_resize(images: torch.Tensor) -> Any:
    """Shrink once more and enlarge, as a backend with a resize of its own does."""
    small = F.interpolate(images, scale_factor=0.5, mode="nearest")
    return F.interpolate(small, size=images.shape[-2:], mode="bilinear")


@pytest.mark.parametrize("fault", [another_resize, lambda images: images[:, [2, 1, 0]]])
def test_another_resize_and_swapped_channels_are_noticed(
    fault: Run, weights: Path, judge: Judge
) -> None:
    proof = judge.prove(through_torch(weights, fault), facts())
    assert any("its probabilities of class" in failure for failure in proof.failures)
    assert judge.prove(through_torch(weights, fault, "fp16"), facts("fp16")).failures


def test_an_overflow_in_fp16_is_noticed(judge: Judge, tmp_path: Path) -> None:
    """A real conversion of weights that fp16 cannot hold; fp32 can."""
    for package in ("onnx", "onnxruntime", "onnxslim"):
        pytest.importorskip(
            package, reason="needs the packages of exports (pip install -r requirements-export.txt)"
        )
    large = tiny_weights(tmp_path / "best.pt", prototype_scale=1e6)
    mine = Judge(judge.photos, NAMES, SIZE_PX, CPU, None)
    mine.learn(load_for_prediction(str(large), CPU))
    path = export(large, "onnx", tmp_path / "half", facts("fp16"))
    failures = mine.prove(open_export(path, CPU), facts("fp16")).failures
    assert any(
        "its prototypes differ" in line or "prototypes are infinite" in line for line in failures
    )
    assert not any("probabilities" in line for line in failures)


def test_outputs_that_are_no_numbers_are_noticed(weights: Path, judge: Judge) -> None:
    model = through_torch(weights)
    inner = model._run
    model._run = lambda images: [output.half() * 1e5 for output in inner(images)]
    (boxes, *_, prototypes) = judge.prove(model, facts()).failures
    assert " boxes are infinite or not a number" in boxes
    assert " prototypes are infinite or not a number" in prototypes


def test_permuted_class_names_are_noticed(weights: Path, judge: Judge) -> None:
    model = through_torch(weights)
    model.metadata = replace(model.metadata, names=("pole", "wire", "sign"))
    assert judge.prove(model, facts()).failures == ["class 0 is called pole, torch's wire"]
    model.metadata = replace(model.metadata, names=NAMES[:2])
    assert judge.prove(model, facts()).failures == ["class 2 is called missing, torch's sign"]


def test_rounded_weights_are_noticed(weights: Path, judge: Judge) -> None:
    proof = judge.prove(through_torch(weights, rounds=True), facts())
    assert any("differ by up to" in failure for failure in proof.failures)


def test_facts_other_than_those_asked_for_are_noticed(weights: Path, judge: Judge) -> None:
    windows = {"per_photo": 2, "low_scale": 0.5, "high_scale": 1}
    labels: Any = {
        "wires_end_at": [0],
        "wire_width": [1.0, 2.0],
        "wires_parallel": [1, 0.5],
        "wires_bent": [0],
        "label_lengths": [1, 9.5, 0.5],
        "stretch": [3, 4000],
    }
    wanted = facts(windows=windows, source_sha256="1" * 64, thin_classes=[1], **labels)
    failures = judge.prove(
        through_torch(weights), replace(wanted, size_px=96, batch_size=4)
    ).failures
    named = [failure.split()[1] for failure in failures]
    assert named == ["size_px", "batch_size", "windows", "thin_classes", *labels, "source_sha256"]
    assert failures[0] == "its size_px is 64, expected 96"


class Decoded:
    """The oracle's outputs as an export returns them."""

    def __init__(self, oracle: Oracle, order: list[int]) -> None:
        self.oracle, self.order = oracle, order

    def __call__(self, images: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.oracle(images)
        boxes, probabilities = decode(outputs, [float(stride) for stride in STRIDES], ORACLE_PX)
        low, high = boxes.chunk(2, 2)
        xywh = torch.cat([(low + high) / 2, high - low], 2)
        rows = torch.cat([xywh, probabilities[..., self.order]], 2).transpose(1, 2)
        return [torch.cat([rows, outputs["mask_coefficient"]], 1), outputs["proto"]]


def test_two_classes_that_change_places_show_in_the_ap_of_each(tmp_path: Path) -> None:
    photos = draw_photos(tmp_path, 9)
    oracle: Any = Oracle(photos)
    oracle.stride = STRIDES
    judge = Judge(photos, ORACLE_NAMES, ORACLE_PX, CPU, None)
    judge.inputs = judge.inputs[::2]  # whole photographs: it knows no others
    judge.learn(oracle)
    wanted = facts(batch_size=8, names=ORACLE_NAMES, size_px=ORACLE_PX)

    def prove(order: list[int]) -> Proof:
        return judge.prove(
            ExportedModel(Path("x.onnx"), "onnx", wanted, Decoded(oracle, order)), wanted
        )

    right = prove([0, 1, 2])
    assert right.failures == []
    assert right.per_class[0]["mask_map50"] > 0.2
    assert right.per_class[0]["mask_map50"] == right.per_class[0]["mask_map50_torch"]
    wrong = prove([1, 0, 2]).failures
    assert wrong[0].startswith("box mAP50 of pole is ")
    assert any(failure.startswith("mask mAP50-95 of crossarm is ") for failure in wrong)
    assert not any("of insulator" in failure for failure in wrong)


def ap(value: float, num_targets: int = 5) -> dict[str, Any]:
    names = ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95")
    return {
        "per_class": [{"name": "wire", "num_targets": num_targets, **dict.fromkeys(names, value)}]
    }


@pytest.mark.parametrize(
    ("precision", "found", "num_failures"),
    [
        *(
            ("fp32", 0.5019, 0),
            ("fp32", 0.4979, 4),
            ("fp32", 0.5021, 4),
            ("fp16", 0.4951, 0),
            ("fp16", 0.4949, 4),
        ),
        *(("int8", 0.481, 0), ("int8", 0.479, 4), ("int8", 0.6, 0)),
    ],
)
def test_the_bounds_of_ap(precision: str, found: float, num_failures: int) -> None:
    rows, failures = compare_ap(ap(0.5), ap(found), bounds_of("onnx", precision))
    assert len(failures) == num_failures
    assert rows[0]["mask_map50"] == found
    assert compare_ap(ap(0.5, num_targets=0), ap(0.0), BOUNDS["fp32"]) == ([], [])
    assert compare_ap(ap(0.5), ap(found), bounds_of("onnx", precision, 0.2))[1] == []


def test_the_largest_change_has_its_sign_and_one_class_that_is_found_is_enough() -> None:
    rows = [
        *compare_ap(ap(0.5), ap(0.4), BOUNDS["fp32"])[0],
        *compare_ap(ap(0.0), ap(0.05), BOUNDS["fp32"])[0],
    ]
    assert [*(export_proof.largest_change(rows) or ())] == [pytest.approx(-0.1), "box mAP50, wire"]
    assert [export_proof.finds_nothing(chosen) for chosen in (rows, rows[1:])] == [False, True]


def export_row(
    ap_of_torch: float, precision: str = "fp32", failures: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    per_class = [
        {"name": "wire"}
        | {key: ap_of_torch for name in AP_NAMES for key in (name, f"{name}_torch")}
    ]
    facts = {
        "format": "onnx",
        "precision": precision,
        "compute": "off",
        "file": f"best_{precision}.onnx",
        "bytes": 9,
    }
    found = {
        "largest_difference": {"probabilities": 1e-6},
        "per_class": per_class,
        "mask_iou": (0.9991, 0.97),
    }
    return {**facts, "failures": list(failures), **found, **more}


def test_equal_ap_near_zero_is_not_called_a_proof_and_the_masks_that_were_compared_are_named() -> (
    None
):
    for ap_of_torch, precision, verdict in (
        (0.009, "fp32", "outputs only"),
        (0.009, "int8", "finite"),
        (0.011, "int8", "proven"),
    ):
        row = export_row(ap_of_torch, precision)
        assert table([row]).rstrip().endswith(verdict)
        lines = instead_of_ap([row], "best.pt")
        assert bool(lines) == (verdict != "proven")
        if lines:
            assert "best.pt finds nothing" in lines[0]
            assert (
                "0.9991 with torch's, the lowest 0.9700; probabilities differ by at most 1e-06"
                in lines[1]
            )


def test_the_last_line_is_a_command_with_the_fastest_export_that_was_written() -> None:
    torch_row = {
        "format": "torch",
        "precision": "fp32",
        "compute": "off",
        "file": "best.pt",
        "failures": [],
    }
    slow, fast = (
        export_row(0.5, images_per_second=5.0),
        export_row(0.5, "fp16", images_per_second=7.0),
    )
    refused = export_row(0.5, "int8", ["its AP"], images_per_second=9.0)
    folder = Path("my models")
    assert inference_command([torch_row, slow, fast, refused], folder) == (
        "Use my models/best_fp16.onnx (the fastest here): "
        "python inference.py --model 'my models/best_fp16.onnx' --source PHOTOGRAPHS"
    )
    assert inference_command([torch_row, slow], folder).startswith(
        "Use my models/best_fp32.onnx: python"
    )
    assert inference_command([{**fast, "compute": "bf16"}], folder).endswith(
        "--source PHOTOGRAPHS --amp bf16"
    )
    assert inference_command([torch_row, refused], folder) == ""


def test_masks_before_suppression_tell_a_changed_export_from_a_faithful_one(
    weights: Path, judge: Judge
) -> None:
    ours = decoded_outputs(load_for_prediction(str(weights), CPU), judge.inputs)
    assert export_proof.mask_ious(ours, ours) == (1.0, 1.0)
    mean, lowest = export_proof.mask_ious(
        ours, {**ours, "coefficients": ours["coefficients"] + 0.3}
    )
    assert 0 <= lowest < mean < 0.999
    assert judge.prove(through_torch(weights), facts()).mask_iou == (1.0, 1.0)


def test_tensorrt_in_fp32_gets_the_bounds_of_fp16_for_outputs_alone() -> None:
    assert bounds_of("engine", "fp32") == replace(BOUNDS["fp16"], ap=BOUNDS["fp32"].ap)


@pytest.mark.parametrize(
    ("name", "precision", "distance", "is_near"),
    [
        *(
            ("boxes", "fp16", 1.6, True),
            ("boxes", "fp16", 1.8, False),
            ("boxes", "fp32", 0.2, False),
        ),
        *(
            (name, "fp16", far, far < 0.07)
            for name in export_proof.OUTPUTS[1:]
            for far in (0.0695, 0.0705)
        ),
    ],
)
def test_boxes_in_fp16_and_nothing_else_may_move_by_a_hundredth_of_the_input(
    name: str, precision: str, distance: float, is_near: bool
) -> None:
    ours = {
        name: torch.full((1, 2, 4), -1.0) for name in ("boxes", "probabilities", "coefficients")
    }
    ours["prototypes"] = torch.full((1, 32, 40, 40), -1.0)  # of an input of 160 px
    moved = {**ours, name: ours[name] + distance}
    assert (compare_outputs(ours, moved, BOUNDS[precision])[1] == []) == is_near

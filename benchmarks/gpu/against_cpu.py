"""The part `same_as_cpu`: one batch on the GPU and on the CPU gives the same loss, gradients,
detections and masks.

The reference is the network in float64 on the CPU. A computation in 16 or 32 bits differs from it
by the rounding errors of its format, which this network enlarges. So the CPU's own errors give the
bounds for a GPU:

- fp32 (TensorFloat-32 off): SLACK times the CPU's errors in fp32. A GPU sums in another order, and
  cuDNN's Winograd transforms may lose a few bits more (not measured). TensorFloat-32, which rounds
  to 10 bits, has 600 times these errors (measured on a CPU in fp16, which rounds to as many).
- 16 bits: the median and the 90 % quantile of the tensors' errors within twice those of bf16 on the
  CPU. fp16 and TensorFloat-32 round more finely than bf16, but fp16 loses gradients that are too
  small for it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torchvision.ops import box_iou

from benchmarks.gpu.plan import Finding, Json, NeedsGpu, PartFailed, Setting
from benchmarks.gpu.trainings import precisions_of
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.engine.loop import FIRST_SCALE
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.predict.detections import Detections, detect, prototype_masks
from yolo_seg_ddp.utils.devices import choose_device, choose_precision, tune_device
from yolo_seg_ddp.utils.options import PRECISION_CHOICES
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import SegmentationLoss
from yolo_seg_ddp.yolo.model import YoloModel, build_model

CPU = torch.device("cpu")
CLASSES = tuple("abcdefgh")
SLACK = 32.0  # between 1, another order of sums, and the 600 of TensorFloat-32
HALF_SLACK = 2.0
KINDS = ("outputs", "gradients")
RAW = ("boxes", "scores", "mask_coefficient", "proto")
GRADIENT = "gradient of "
PIXELS_PER_PROTOTYPE = 4
CANDIDATES = 100  # per image: the random network's most confident anchors
# of the largest gradient's norm: smaller ones, which fp16 rounds to zero, are left out
NEGLIGIBLE = 1e-4
SAME_BOX = 0.9  # IoU
# in fp32: a score at the threshold or a pixel at the border may still flip
EXACT = {"detections": 0.98, "masks": 0.99}


@dataclass(frozen=True)
class StepResult:
    """The results of a training step."""

    loss: dict[str, float]
    outputs: dict[str, torch.Tensor]  # raw, float32 on the device
    tensors: dict[str, torch.Tensor]  # outputs and gradients, float64 on the CPU
    strides: list[float]


def compare_with_cpu(setting: Setting) -> Finding:
    """Compute a batch in every precision on the device, and compare each with the CPU's errors.

    Raises PartFailed.
    """
    device = choose_device(setting.device, 0)
    torch.manual_seed(0)
    model = build_model(setting.sizes.small_model, CLASSES).train()
    batch = synthetic_batch(4, setting.sizes.compared_px, len(CLASSES), colours=Augmentation())
    exact = one_step(model, batch, CPU, "float64")
    on_cpu = {name: errors(one_step(model, batch, CPU, name), exact) for name in ("off", "bf16")}
    figures: Json = {"reference": exact.loss, "cpu": on_cpu}
    names = [*precisions_of(setting), *(["TensorFloat-32"] if setting.is_gpu else [])]
    figures["device"] = on_device = {}
    problems = []
    for name in names:
        is_exact = name == "off"
        tune_device(device, deterministic=is_exact, fixed_shapes=True)
        on_device[name] = errors(one_step(model, batch, device, name), exact)
        problems += [
            f"{name}: {line}" for line in beyond(on_device[name], limits_of(on_cpu, is_exact))
        ]
    worst = {
        name: max(measured[kind]["median"] for kind in KINDS)
        for name, measured in on_device.items()
    }
    said = ", ".join(
        f"{'fp32' if name == 'off' else name} {error:.1e}" for name, error in worst.items()
    )
    if problems:
        raise PartFailed(f"{'; '.join(problems)} (median errors: {said})", **figures)
    if not setting.is_gpu:
        raise NeedsGpu(f"the CPU's own median errors from float64: {said}", **figures)
    return Finding(
        f"median errors from float64: {said}; the CPU's {on_cpu['off']['gradients']['median']:.1e}",
        figures,
    )


def one_step(model: YoloModel, batch: Batch, device: torch.device, name: str) -> StepResult:
    """Compute outputs, loss and gradients of a copy of the model in the precision `name`."""
    is_double = name == "float64"
    precision = choose_precision(name if name in PRECISION_CHOICES else "off", device)
    model = copy.deepcopy(model).to(
        device, torch.float64 if is_double else None, memory_format=torch.channels_last
    )
    images, targets = prepare_batch(batch, device)
    with precision.autocast(device):
        outputs = {
            name: value
            for name, value in model(images.double() if is_double else images).items()
            if name in RAW
        }
        # The loss always computes in float32.
        inputs = {name: value.float() for name, value in outputs.items()} if is_double else outputs
        loss, values = SegmentationLoss(model)(inputs, targets)
    scale = FIRST_SCALE if precision.use_scaler else 1.0
    (loss * scale).backward()
    gradients = {
        f"{GRADIENT}{name}": weight.grad / scale
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    tensors = {
        name: value.detach().double().cpu() for name, value in {**outputs, **gradients}.items()
    }
    outputs = {name: value.detach().float() for name, value in outputs.items()}
    losses = {name: float(value) for name, value in values.items()}
    return StepResult(losses, outputs, tensors, [float(stride) for stride in model.stride])


def errors(result: StepResult, exact: StepResult) -> Json:
    """Return relative errors: of the loss, and quantiles over outputs and gradients; and shares of
    what was found again.
    """
    of_tensors = {
        name: float((result.tensors[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        for name, tensor in exact.tensors.items()
    }
    norms = {
        name: float(tensor.norm()) for name, tensor in exact.tensors.items() if name not in RAW
    }
    outputs = [of_tensors[name] for name in RAW]
    gradients = [
        of_tensors[name] for name, norm in norms.items() if norm > NEGLIGIBLE * max(norms.values())
    ]
    detections, masks = same_detections(result, exact)
    loss = max(abs(result.loss[name] / value - 1) for name, value in exact.loss.items())
    shares = {"detections": detections, "masks": masks}
    return {
        "loss": loss,
        "outputs": quantiles(outputs),
        "gradients": quantiles(gradients),
        **shares,
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 90 % quantile and the largest."""
    values_at = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
    )
    return dict(zip(("median", "most", "largest"), values_at.tolist(), strict=True))


def same_detections(result: StepResult, exact: StepResult) -> tuple[float, float]:
    """Return the share of the reference's detections that have one of their class and box, and the
    mean IoU of their masks.
    """
    scores = exact.outputs["scores"].sigmoid().amax(1)  # (B, A)
    threshold = float(
        scores.flatten().topk(min(CANDIDATES * len(scores), scores.numel() // 2)).values[-1]
    )
    total = 0
    ious = [torch.zeros(0)]
    for (predicted, masks), (true, true_masks) in zip(
        *(detections(one, threshold) for one in (result, exact)), strict=True
    ):
        total += len(true)
        if not len(predicted) or not len(true):
            continue
        iou, partner = (
            box_iou(true.boxes, predicted.boxes) * (true.class_ids[:, None] == predicted.class_ids)
        ).max(1)
        ours = masks[partner[iou > SAME_BOX]].flatten(1)
        theirs = true_masks[iou > SAME_BOX].flatten(1)
        ious.append((ours & theirs).sum(1) / (ours | theirs).sum(1).clamp(min=1))
    again = torch.cat(ious)
    return len(again) / max(total, 1), float(again.mean()) if len(again) else 0.0


def detections(result: StepResult, threshold: float) -> list[tuple[Detections, torch.Tensor]]:
    """Return each image's detections above a score, and their masks bool (n, h, w) on the CPU."""
    size_px = int(result.outputs["proto"].shape[-1] * PIXELS_PER_PROTOTYPE)
    of_images = detect(
        result.outputs,
        result.strides,
        size_px,
        confidence=threshold,
        iou=0.7,
        max_detections=CANDIDATES,
    )
    maps = result.outputs["proto"]
    return [
        (one, prototype_masks(map, one, size_px).cpu())
        for one, map in zip(of_images, maps, strict=True)
    ]


def limits_of(on_cpu: Json, is_exact: bool) -> Json:
    """Return the bounds of a device's `errors`, from those of the CPU: see
    the head of this file.
    """
    if not is_exact:
        half = on_cpu["bf16"]
        kinds = {
            kind: {name: HALF_SLACK * half[kind][name] for name in ("median", "most")}
            for kind in KINDS
        }
        shares = {name: 1 - HALF_SLACK * (1 - half[name]) for name in EXACT}
        return {
            "loss": HALF_SLACK * max(half["loss"], half["outputs"]["median"]),
            **kinds,
            **shares,
        }
    full = on_cpu["off"]
    kinds = {kind: {name: SLACK * error for name, error in full[kind].items()} for kind in KINDS}
    # A loss's own error may be zero by chance. It averages over outputs, so it is not less accurate
    # than they are.
    return {"loss": SLACK * max(full["loss"], full["outputs"]["median"]), **kinds, **EXACT}


def beyond(measured: Json, limits: Json) -> list[str]:
    """Return a line for each bound that is exceeded, also by a value that is not a number."""
    lines = (
        [f"loss off by {measured['loss']:.1e}"] if not measured["loss"] <= limits["loss"] else []
    )
    for kind in KINDS:
        for name, limit in limits[kind].items():
            if not measured[kind][name] <= limit:
                lines.append(
                    f"{name} error of {kind} {measured[kind][name]:.1e}, at most {limit:.1e}"
                )
    lines += [
        f"{measured[name]:.1%} of {name} found again"
        for name in EXACT
        if not measured[name] >= limits[name]
    ]
    return lines

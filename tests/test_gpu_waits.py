"""Training, evaluation and inference on a pretended GPU: devices, CUDA kernels and host waits.

All cases run in one process of their own, which has a pretended GPU and returns what the tests look
at.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.support.pretended.gpu import switch_on
from tests.support.pretended.graphs import PretendedGraph
from tests.support.pretended.tensors import OPERATORS, WAITS, Watch, is_on_gpu, without_kernel
from tests.support.ranks import run_ranks
from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.evaluation.evaluate import PhotoPixels, evaluate
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import SegmentationLoss
from yolo_seg_ddp.yolo.model import YoloModel, build_model
from yolo_seg_ddp.yolo.optimizer import OptimizerPlan, build_optimizer
from yolo_seg_ddp.yolo.training_step import SegmentationStep

GPU = torch.device("cuda", 0)
NAMES = ("pole", "wire", "insulator")
SIZE_PX = 64
SURER = 9.0  # of the logits of classes: a network that has not learnt detects something, too
# Of each batch of a training, except where a step is logged.
WAITS_PER_BATCH = {
    "yolo_seg_ddp/yolo/assigner.py assign: nonzero": 1,
    "yolo_seg_ddp/yolo/mask_loss.py find_positives: tolist": 1,
}
WAITS_OF_DETECT = {
    "yolo_seg_ddp/predict/detections.py _find_candidates: tolist": 1,
    "yolo_seg_ddp/predict/detections.py _suppress_at_once: to the host": 1,
}
WAITS_PER_EVALUATED_BATCH = {  # of 2 images
    # The event is the end of the batch before; the GPU has the network of this one to run.
    "at input": {
        **WAITS_PER_BATCH,
        **WAITS_OF_DETECT,
        "yolo_seg_ddp/utils/devices.py wait: an earlier event": 1,
    },
    # Each photograph's prototypes and coefficients, in one copy.
    "native": {
        **WAITS_PER_BATCH,
        **WAITS_OF_DETECT,
        "yolo_seg_ddp/predict/detections.py photo_runs: to the host": 2,
    },
}
WAITS_PER_INFERENCE = {
    **WAITS_OF_DETECT,
    "yolo_seg_ddp/predict/detections.py photo_runs: to the host": 2,
}
Answers = dict[str, Any]
# All kinds of layers of YOLOv8-seg, in less than half the number.
NETWORK = """
nc: 3
scales: {n: [0.33, 0.25, 1024]}
backbone:
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 3, C2f, [256, True]]
  - [-1, 1, Conv, [512, 3, 2]]
  - [-1, 1, Conv, [1024, 3, 2]]
  - [-1, 1, SPPF, [1024, 5]]
head:
  - [-1, 1, nn.Upsample, [None, 2, "nearest"]]
  - [[-1, 4], 1, Concat, [1]]
  - [[3, 8, 6], 1, Segment, [nc, 32, 256]]
"""

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a PyTorch built for CUDA (make setup)"
)


@dataclass(frozen=True)
class Case:
    precision: str
    optimizer: str
    accumulate: int = 1
    jitters: bool = False


CASES = {
    "bf16 with MuSGD": Case("bf16", "musgd", accumulate=2, jitters=True),
    "fp16 with MuSGD": Case("fp16", "musgd", jitters=True),
    "fp16 with AdamW": Case("fp16", "adamw", accumulate=2),
}


class Laps:
    """A loader of one batch, again and again; `waits` holds what the
    program waited for after each.
    """

    def __init__(self, batch: Batch, num_batches: int) -> None:
        self.batch, self.num_batches = batch, num_batches
        self.waits: list[dict[str, int]] = []

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.num_batches):
            before = Counter(WAITS)
            yield self.batch
            self.waits.append(dict(WAITS - before))


def require_gpu(*values: Any) -> None:
    astray = [
        tuple(leaf.shape)
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and not is_on_gpu(leaf)
    ]
    assert not astray, f"not on the GPU: {astray}"


def network_and_batch(folder: Path, jitters: bool = False) -> tuple[YoloModel, Batch]:
    batch = synthetic_batch(2, SIZE_PX, len(NAMES), objects_per_image=5)
    batch.colour_gains = torch.ones(2, 3) if jitters else None
    batch.ignored, batch.ignored_of = (
        torch.ones(2, 16, 16, dtype=torch.bool),
        torch.tensor([[0, 1], [-1, 2]]),
    )
    batch.rough = torch.arange(len(batch.class_ids)) % 3 == 1
    batch.boxed = torch.arange(len(batch.class_ids)) % 3 == 2
    description = folder / "small-seg.yaml"
    description.write_text(NETWORK)
    return build_model(str(description), NAMES).to(memory_format=torch.channels_last), batch


def engine_of(model: YoloModel, case: Case, folder: Path) -> TrainingEngine:
    options = EngineOptions(
        precision=case.precision,
        accumulate=case.accumulate,
        clip_norm=10.0,
        ema_decay=0.9999,
        log_interval=1000,
        tensorboard=False,
        quiet=True,
    )
    engine = TrainingEngine(model, GPU, options, task=SegmentationStep(), run=folder)
    optimizer = build_optimizer(model, OptimizerPlan(case.optimizer, 0.01, 5e-4, 0.937, 64, ()))
    engine.begin(optimizer, SegmentationLoss(model, class_weights=torch.ones(len(NAMES))))
    return engine


def train(folder: Path, case: Case) -> Answers:
    """Train three optimizer steps, of which the first and the last are
    logged; look at the second.
    """
    model, batch = network_and_batch(folder, case.jitters)
    OPERATORS.clear()
    PretendedGraph.replays = 0
    with Watch():
        batch.pin_memory()
        engine = engine_of(model, case, folder)
        engine.stop_agreement._step_s = 0.1  # so that the ranks need not agree after each step
        loader = Laps(batch, 2 * case.accumulate + 1)
        engine.train_one_epoch(loader)
        assert engine.state.ema is not None
        require_gpu(
            model.state_dict(),
            engine.state.optimizer.state_dict(),
            engine.state.ema.module.state_dict(),
        )
        waits = loader.waits[case.accumulate : 2 * case.accumulate]
        return {
            "waits": waits,
            "without kernel": without_kernel(),
            "graphs": PretendedGraph.replays > 0,
        }


def run_evaluation(folder: Path) -> Answers:
    """Evaluate batches of two images at the input's resolution and at the photographs', then
    predict.
    """
    model, batch = network_and_batch(folder)
    answers: Answers = {}
    OPERATORS.clear()
    with Watch():
        batch.pin_memory()
        model.to(GPU)
        criterion = SegmentationLoss(model)
        model.stride = criterion.strides
        photo = PhotoPixels(lambda _: (96, 64), compare=True)
        for name, precision, pixels in (("at input", "bf16", None), ("native", "off", photo)):
            loader = Laps(batch, 2)
            chosen = choose_precision(precision, GPU)
            evaluate(model, loader, NAMES, criterion, GPU, precision=chosen, photo=pixels)
            answers[name] = loader.waits[1]
        for branch in model.model[-1].cv3:  # type: ignore[union-attr]
            branch[-1].bias.data += SURER
        WAITS.clear()
        photos = [np.zeros((60, 80, 3), np.uint8)] * 2
        limits = {"confidence": 0.25, "iou": 0.7, "classes": (0, 2)}
        found = list(Predictor(model, SIZE_PX, GPU, 2, None, limits).predict(enumerate(photos)))
        assert all(len(prediction.masks) > 0 for *_, prediction in found)
        return answers | {"inference": dict(WAITS), "without kernel": without_kernel()}


# -- planted faults --------------------------------------------------------------------------------


@torch.library.custom_op("planted::only_on_cpus", mutates_args=(), device_types="cpu")
def only_on_cpus(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


class CpuTensorInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.zeros(gradient.shape)


def unsafe_in_half_precision(scores: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.float16):
        return torch.nn.functional.binary_cross_entropy(scores.sigmoid(), torch.ones_like(scores))


LOSS = "yolo_seg_ddp/engine/task.py loss"
MIXED = "all tensors to be on the same device"
# What is planted, and what is seen: waits more than usual, the operators without a kernel, or an
# error.
FAULTS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, int] | list[str] | str]] = {
    "none": (lambda scores: None, {}),
    "a number that is read": (lambda scores: scores.sum().item(), {f"{LOSS}: item": 1}),
    "a boolean mask as index": (lambda scores: scores[scores > 0], {f"{LOSS}: boolean mask": 1}),
    "numbers copied from the host": (
        lambda scores: scores + torch.tensor([1.0, 2.0, 3.0], device=GPU)[:, None],
        {f"{LOSS}: from the host": 1},
    ),
    "an operator without CUDA kernel": (
        lambda scores: only_on_cpus(scores.detach()),
        ["planted::only_on_cpus"],
    ),
    "a tensor left on the CPU": (lambda scores: scores + torch.zeros(scores.shape), MIXED),
    "a tensor left on the CPU in a backward pass": (
        lambda scores: CpuTensorInBackward.apply(scores.detach().requires_grad_()).sum().backward(),
        MIXED,
    ),
    "an operator that autocast refuses": (unsafe_in_half_precision, "unsafe to autocast"),
}


def plant_faults(folder: Path) -> Answers:
    """Plant each fault in the loss of a batch; return the waits and
    operators seen, or the error.
    """
    model, batch = network_and_batch(folder)
    answers: Answers = {}
    with Watch():
        batch.pin_memory()
        images, targets = prepare_batch(batch, GPU)
        outputs = model.to(GPU).train()(images)
        criterion = SegmentationLoss(model)
        criterion(outputs, targets)  # the first one also makes what later ones use again
        for name, (fault, _) in FAULTS.items():
            WAITS.clear()
            OPERATORS.clear()
            task = SegmentationStep(
                lambda *inputs, fault=fault: (fault(inputs[0]["scores"]), criterion(*inputs))[1]
            )
            try:
                loss, _ = task.loss(outputs, targets)
                require_gpu(loss)
                answers[name] = {"waits": dict(WAITS), "without kernel": without_kernel()}
            except Exception as error:  # noqa: BLE001 # whatever it is, the test looks at it
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
    return answers


# -- the tests -------------------------------------------------------------------------------------


def run_everything(folder: Path) -> Answers:
    switch_on(1)
    trainings = {name: train(folder, case) for name, case in CASES.items()}
    return {**trainings, "evaluation": run_evaluation(folder), "faults": plant_faults(folder)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    (found,) = run_ranks(
        run_everything, 1, tmp_path_factory.mktemp("gpu_waits"), join=False, timeout_s=300
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_waits_twice_per_batch_and_every_operator_has_a_cuda_kernel(
    answers: Answers, name: str
) -> None:
    num_batches = CASES[name].accumulate
    expected = {
        "waits": [WAITS_PER_BATCH] * num_batches,
        "without kernel": [],
        "graphs": num_batches == 1,
    }
    assert answers[name] == expected, "graphs do not accumulate gradients"


def test_evaluation_and_inference_wait_no_more_than_they_must_and_operators_have_cuda_kernels(
    answers: Answers,
) -> None:
    expected = {**WAITS_PER_EVALUATED_BATCH, "inference": WAITS_PER_INFERENCE, "without kernel": []}
    assert answers["evaluation"] == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(answers: Answers, fault: str) -> None:
    found, seen = answers["faults"][fault], FAULTS[fault][1]
    if isinstance(seen, str):
        assert seen in found["error"]
    else:
        waits, operators = (seen, []) if isinstance(seen, dict) else ({}, seen)
        assert found == {"waits": {**WAITS_PER_BATCH, **waits}, "without kernel": operators}

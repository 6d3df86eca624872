"""Training, evaluation and inference on a pretended GPU: devices, types, CUDA kernels, collectives and host waits.

All cases run in one process of their own (tests/support/fake_cuda.py says why), which returns what the tests look at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.fake_cuda import GPU, FakeGpu, join_fake_group, require_gpu
from tests.support.ranks import run_ranks
from utils import distributed
from utils.common.devices import choose_precision
from utils.data.dataset import Batch
from utils.distributed import collectives, ddp
from utils.engine import EngineOptions, TrainingEngine, meters
from utils.evaluation.evaluate import PhotoPixels, evaluate
from utils.measure.step_timer import SegmentationStep
from utils.measure.synthetic import synthetic_batch
from utils.predict.tiles import Predictor
from utils.yolo.inputs import prepare_batch
from utils.yolo.loss import SegmentationLoss
from utils.yolo.model import YoloModel, build_model
from utils.yolo.optimizer import OptimizerPlan, build_optimizer

NAMES = ("pole", "wire", "insulator")
SIZE_PX = 64
# Of each batch of a training, except where a step is logged.
WAITS_PER_BATCH = {"utils/yolo/assigner.py assign: nonzero": 1, "utils/yolo/mask_loss.py find_positives: tolist": 1}
WAITS_OF_DETECT = {
    "utils/predict/detections.py _find_candidates: tolist": 1,
    "utils/predict/detections.py _suppress_at_once: to the host": 1,
}
WAITS_PER_EVALUATED_BATCH = {  # of 2 images
    # The event is the end of the batch before; the GPU has the network of this one to run.
    "at input": {**WAITS_PER_BATCH, **WAITS_OF_DETECT, "utils/common/devices.py wait: an earlier event": 1},
    # Each photograph's prototypes and coefficients, in one copy.
    "native": {**WAITS_PER_BATCH, **WAITS_OF_DETECT, "utils/predict/detections.py photo_masks: to the host": 2},
}
WAITS_PER_INFERENCE = {**WAITS_OF_DETECT, "utils/predict/detections.py photo_masks: to the host": 2}
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
NUM_BATCH_NORMS = 32  # in it

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a PyTorch built for CUDA (make setup)"
)


@dataclass(frozen=True)
class Case:
    """How to train."""

    precision: str
    optimizer: str
    accumulate: int = 1
    jitters: bool = False
    num_ranks: int = 1
    sync_batchnorm: bool = False


CASES = {
    "fp32 with AdamW on two ranks": Case("off", "adamw", num_ranks=2),
    "bf16 with MuSGD and synchronised BatchNorm": Case(
        "bf16", "musgd", accumulate=2, jitters=True, num_ranks=2, sync_batchnorm=True
    ),
    "fp16 with MuSGD": Case("fp16", "musgd", jitters=True),
    "fp16 with AdamW": Case("fp16", "adamw", accumulate=2),
}


class Laps:
    """A loader of one batch, again and again; `waits` holds what the program waited for after each."""

    def __init__(self, gpu: FakeGpu, batch: Batch, num_batches: int) -> None:
        self.gpu, self.batch, self.num_batches = gpu, batch, num_batches
        self.waits: list[dict[str, int]] = []

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.num_batches):
            before = Counter(self.gpu.waits)
            yield self.batch
            self.waits.append(dict(self.gpu.waits - before))


class WithoutReducer(DistributedDataParallel):
    """DDP, but only what it sends first: its reducer needs a driver."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self.process_group = dist.distributed_c10d._get_default_group()
        weights = [weight.detach() for weight in module.parameters()]
        dist._broadcast_coalesced(self.process_group, weights, 250 * 2**20, 0)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def network_and_batch(folder: Path, jitters: bool = False) -> tuple[YoloModel, Batch]:
    """Return both with values, because their makers look at these: call it before the GPU without values is there."""
    batch = synthetic_batch(2, SIZE_PX, len(NAMES), objects_per_image=5)
    batch.colour_gains = torch.ones(2, 3) if jitters else None
    description = folder / "small-seg.yaml"
    description.write_text(NETWORK)
    return build_model(str(description), NAMES).to(memory_format=torch.channels_last), batch


def engine_of(gpu: FakeGpu, model: YoloModel, case: Case, folder: Path) -> TrainingEngine:
    options = EngineOptions(
        precision=case.precision,
        accumulate=case.accumulate,
        sync_batchnorm=case.sync_batchnorm,
        clip_norm=10.0,
        ema_decay=0.9999,
        log_interval=1000,
        tensorboard=False,
        quiet=True,
    )
    engine = TrainingEngine(model, GPU, options, task=SegmentationStep(), run=folder)
    optimizer = build_optimizer(model, OptimizerPlan(case.optimizer, 0.01, 5e-4, 0.937, 0.1, 64, ()))
    gpu.answers = iter((8, 16, 32))  # the strides
    engine.begin(optimizer, SegmentationLoss(model, class_weights=torch.ones(len(NAMES))))
    return engine


def train(folder: Path, case: Case) -> Answers:
    """Train three optimizer steps, of which the first and the last are logged; look at the second."""
    model, batch = network_and_batch(folder, case.jitters)
    with FakeGpu(has_bf16=case.precision != "fp16") as gpu:
        batch.pin_memory()
        engine = engine_of(gpu, model, case, folder)
        engine.stop_agreement._step_s = 0.1  # so that the ranks need not agree after each step
        loader = Laps(gpu, batch, 2 * case.accumulate + 1)
        engine.train_one_epoch(loader)
        assert engine.state.ema is not None
        require_gpu(model.state_dict(), engine.state.optimizer.state_dict(), engine.state.ema.module.state_dict())
        waits = loader.waits[case.accumulate : 2 * case.accumulate]
        return {"waits": waits, "without kernel": gpu.without_kernel(), "collectives": dict(gpu.collectives)}


def train_as_one_of_two(folder: Path, case: Case) -> Answers:
    join_fake_group(case.num_ranks)
    # The answer of `gather_arrays` is read, so it needs values.
    with (
        mock.patch.object(ddp, "DistributedDataParallel", WithoutReducer),
        mock.patch.object(meters, "gather_arrays", lambda arrays: [arrays]),
    ):
        answers = train(folder, case)
    dist.destroy_process_group()
    return answers


def run_evaluation(folder: Path) -> Answers:
    """Evaluate batches of two images at the input's resolution and at the photographs', then predict."""
    model, batch = network_and_batch(folder)
    answers: Answers = {}
    with FakeGpu(reads=1.0) as gpu:  # the validation loss is divided by a number that is read
        batch.pin_memory()
        model.to(GPU)
        gpu.answers = iter((8, 16, 32))
        criterion = SegmentationLoss(model)
        model.stride = criterion.strides
        photo = PhotoPixels(lambda _: (96, 64), compare=True)
        for name, precision, pixels in (("at input", "bf16", None), ("native", "off", photo)):
            loader = Laps(gpu, batch, 2)
            chosen = choose_precision(precision, GPU)
            evaluate(model, loader, NAMES, criterion, GPU, precision=chosen, photo=pixels)
            answers[name] = loader.waits[1]
        gpu.waits.clear()
        photos = [np.zeros((60, 80, 3), np.uint8)] * 2
        limits = {"confidence": 0.25, "iou": 0.7, "classes": (0, 2)}
        found = list(Predictor(model, SIZE_PX, GPU, 2, None, limits).predict(enumerate(photos)))
        assert [len(prediction.masks) for *_, prediction in found] == [24] * 2
        return answers | {"inference": dict(gpu.waits), "without kernel": gpu.without_kernel()}


def send_everything() -> dict[str, int]:
    """Call every collective of the project as rank 0 of 2; return how often each operator was called."""
    join_fake_group(2)
    payload = {"json": np.frombuffer(b"1", np.uint8)}
    with FakeGpu() as gpu, mock.patch.object(collectives, "_decode", return_value=payload):
        distributed.all_reduce_sum(torch.zeros(3, device=GPU))
        distributed.max_over_ranks([True, 2.0])
        distributed.barrier()
        mixed = [torch.zeros(4, 3, 8, 8, device=GPU).to(memory_format=torch.channels_last), torch.zeros(2, device=GPU)]
        distributed.average_tensors([*mixed, torch.zeros((), dtype=torch.int64, device=GPU)])
        distributed.check_ranks_agree({str(number): tensor for number, tensor in enumerate(mixed)})
        gpu.answers = iter([len(collectives._encode(payload))] * 2)
        assert distributed.broadcast_from_main(1) == 1
        sent = dict(gpu.collectives)
    dist.destroy_process_group()
    return sent


# -- planted faults -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("planted::only_on_cpus", mutates_args=(), device_types="cpu")
def only_on_cpus(values: torch.Tensor) -> torch.Tensor:
    """An operator without CUDA kernel."""
    return values.clone()


only_on_cpus.register_fake(torch.empty_like)


FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda scores: None,
    "a tensor left on the CPU": lambda scores: scores + torch.zeros(scores.shape),
    "a number that is read": lambda scores: scores.sum().item(),
    "a boolean mask as index": lambda scores: scores[scores > 0],
    "numbers copied from the host": lambda scores: scores + torch.tensor([1.0, 2.0, 3.0], device=GPU)[:, None],
    "an operator without CUDA kernel": lambda scores: only_on_cpus(scores.detach()),
    "a collective of bools": lambda scores: dist.all_reduce(scores > 0),
    "a collective of strided numbers": lambda scores: distributed.all_reduce_sum(scores.detach().transpose(1, 2)),
    "a collective on the CPU": lambda scores: distributed.all_reduce_sum(torch.zeros(3)),
}


def plant_faults(folder: Path) -> Answers:
    """Plant each fault in the loss of a batch; return the waits and operators seen, or the error."""
    join_fake_group(2)
    model, batch = network_and_batch(folder)
    answers: Answers = {}
    with FakeGpu() as gpu:
        batch.pin_memory()
        images, targets = prepare_batch(batch, GPU)
        outputs = model.to(GPU).train()(images)
        gpu.answers = iter((8, 16, 32))
        criterion = SegmentationLoss(model)
        criterion(outputs, targets)  # the first one also makes what later ones use again
        for name, fault in FAULTS.items():
            gpu.forget()
            task = SegmentationStep(lambda *inputs, fault=fault: (fault(inputs[0]["scores"]), criterion(*inputs))[1])
            try:
                loss, _ = task.loss(outputs, targets)
                require_gpu(loss)
                answers[name] = {"waits": dict(gpu.waits), "without kernel": gpu.without_kernel()}
            except Exception as error:  # noqa: BLE001 # whatever it is, the test looks at it
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
    dist.destroy_process_group()
    return answers


# -- the tests ----------------------------------------------------------------------------------------------------------


def run_everything(folder: Path) -> Answers:
    answers: Answers = {
        "collectives": send_everything(),
        "evaluation": run_evaluation(folder),
        "faults": plant_faults(folder),
    }
    for name, case in CASES.items():
        answers[name] = (train if case.num_ranks == 1 else train_as_one_of_two)(folder, case)
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    (found,) = run_ranks(run_everything, 1, tmp_path_factory.mktemp("fake_gpu"), join=False, timeout_s=300)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_waits_for_the_gpu_twice_per_batch(answers: Answers, name: str) -> None:
    assert answers[name]["waits"] == [WAITS_PER_BATCH] * CASES[name].accumulate


@pytest.mark.parametrize("name", CASES)
def test_every_operator_of_a_training_step_has_a_cuda_kernel(answers: Answers, name: str) -> None:
    assert answers[name]["without kernel"] == []


def test_ranks_that_train_send_only_what_nccl_takes(answers: Answers) -> None:
    """NCCL's rules were checked at each call; here are their numbers in 3 steps, of which 2 are logged."""
    first = {"broadcast_": 3}  # weights, and buffers of two types
    log = 2 + 1  # and the epoch's speed
    plain, synchronised = (answers[name]["collectives"] for name, case in CASES.items() if case.num_ranks == 2)
    assert plain == {**first, "allreduce_": 3 * 2 + log}  # normalisers and statistics
    num_batches = 5  # the last step has one
    assert synchronised == {
        **first,
        "allreduce_": num_batches * (1 + NUM_BATCH_NORMS) + log,
        "_allgather_base_": num_batches * NUM_BATCH_NORMS,
    }


def test_every_collective_sends_only_what_nccl_takes(answers: Answers) -> None:
    assert answers["collectives"] == {"allreduce_": 5, "allgather_": 2}


@pytest.mark.parametrize("name", WAITS_PER_EVALUATED_BATCH)
def test_evaluation_waits_for_the_gpu_no_more_often_than_it_must(answers: Answers, name: str) -> None:
    assert answers["evaluation"][name] == WAITS_PER_EVALUATED_BATCH[name]


def test_inference_waits_for_the_gpu_no_more_often_than_it_must(answers: Answers) -> None:
    assert answers["evaluation"]["inference"] == WAITS_PER_INFERENCE


def test_every_operator_of_evaluation_and_inference_has_a_cuda_kernel(answers: Answers) -> None:
    assert answers["evaluation"]["without kernel"] == []


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("none", {"waits": WAITS_PER_BATCH, "without kernel": []}),
        ("a number that is read", {"utils/engine/task.py loss: item": 1}),
        ("a boolean mask as index", {"utils/engine/task.py loss: boolean mask": 1}),
        ("numbers copied from the host", {"utils/engine/task.py loss: from the host": 1}),
        ("an operator without CUDA kernel", ["planted::only_on_cpus"]),
        ("a tensor left on the CPU", r"two (different )?devices"),
        ("a collective of bools", "NCCL does not send torch.bool"),
        ("a collective of strided numbers", "not contiguous"),
        ("a collective on the CPU", "not on the GPU"),
    ],
)
def test_a_planted_fault_is_seen(answers: Answers, fault: str, seen: Any) -> None:
    found = answers["faults"][fault]
    if fault == "none":
        assert found == seen
    elif isinstance(seen, dict):
        assert found["waits"] == {**WAITS_PER_BATCH, **seen}
    elif isinstance(seen, list):
        assert found["without kernel"] == seen
    else:
        assert re.search(seen, found["error"])

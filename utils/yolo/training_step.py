"""What one step of a YOLO training needs, and an engine for steps alone: to measure them, and for `--batch-size auto`."""

import torch

from utils.common.devices import Precision
from utils.engine import EngineOptions, Task, TrainingEngine
from utils.yolo.inputs import prepare_batch
from utils.yolo.loss import SegmentationLoss
from utils.yolo.loss26 import loss_for
from utils.yolo.model import YoloModel
from utils.yolo.optimizer import GRADIENT_CLIP_NORM, OptimizerPlan, build_optimizer
from utils.yolo.options import NOMINAL_BATCH_SIZE

LEARNING_RATE = 1e-5  # small, so that training on noise does not diverge
WEIGHT_DECAY = 5e-4
MOMENTUM = 0.9


class SegmentationStep(Task):
    """What one step of a YOLO training needs. The loss normalises over all batches of an optimizer step."""

    criterion: SegmentationLoss
    prepare = staticmethod(prepare_batch)
    repeats_kernels = True

    def begin_group(self) -> None:
        """Begin the sums of the loss anew."""
        self.criterion.begin_group()

    def join_group(self, loss: torch.Tensor, num_batches: int, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Divide the gradients so far by the sums that they have with this batch; the loss is divided by them already."""
        if gradients:
            torch._foreach_mul_(gradients, self.criterion.gradient_rescale)
        return loss


def build_training(
    model: YoloModel, device: torch.device, precision: Precision, optimizer: str = "musgd"
) -> TrainingEngine:
    """Set up the trainer's engine with the defaults of `train_yolo_ddp.py`: channels last, clip, EMA, DDP.

    One difference: each rank keeps its own BatchNorm statistics. `optimizer` is one of OPTIMIZER_NAMES.
    """
    model = model.to(device, memory_format=torch.channels_last)
    options = EngineOptions(precision=precision.name, clip_norm=GRADIENT_CLIP_NORM, static_graph=True, quiet=True)
    engine = TrainingEngine(model, device, options, task=SegmentationStep())
    plan = OptimizerPlan(optimizer, LEARNING_RATE, WEIGHT_DECAY, MOMENTUM, NOMINAL_BATCH_SIZE, ())
    engine.begin(build_optimizer(model, plan), loss_for(model))
    return engine

"""What one step of a YOLO training needs."""

import torch

from yolo_seg_ddp.engine import Task
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import SegmentationLoss


class SegmentationStep(Task):
    """What one step of a YOLO training needs.

    The loss normalises over all batches of an optimizer step.
    """

    criterion: SegmentationLoss
    prepare = staticmethod(prepare_batch)
    repeats_kernels = True

    def begin_group(self) -> None:
        """Begin the sums of the loss anew."""
        self.criterion.begin_group()

    def join_group(
        self, loss: torch.Tensor, num_batches: int, gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """Divide the gradients so far by the sums that they have with this batch; the loss is
        divided by them already.
        """
        if gradients:
            torch._foreach_mul_(gradients, self.criterion.gradient_rescale)
        return loss

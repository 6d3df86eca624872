"""What the engine needs to train YOLO segmentation: its batches, loss, evaluation, pictures and
files.
"""

from pathlib import Path
from typing import Any

import torch

from yolo_seg_ddp.engine import Epoch, TrainingEngine
from yolo_seg_ddp.evaluation.evaluate import AP_LIMITS, evaluate
from yolo_seg_ddp.evaluation.metrics.summary import precision_counts
from yolo_seg_ddp.evaluation.tables import SCORES
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.run.records import MEAN_MAP
from yolo_seg_ddp.run.status import RUNNING
from yolo_seg_ddp.training.data import Data
from yolo_seg_ddp.training.loader_cost import LoaderCost
from yolo_seg_ddp.training.pictures import CHOSEN_FROM, Curves, ValidationPictures
from yolo_seg_ddp.training.plan import TrainPlan
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.extras import find_extra
from yolo_seg_ddp.yolo.loss import PARTS
from yolo_seg_ddp.yolo.loss26 import EndToEndLoss, loss_for
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    copy_for_prediction,
    save_deployable,
)
from yolo_seg_ddp.yolo.training_step import SegmentationStep

COLUMNS = {  # Ultralytics' names, in its order
    **{f"train_{part}": f"train/{part}_loss" for part in PARTS},
    **{
        f"{kind}_{score}": f"metrics/{title}({kind[0].upper()})"
        for kind in ("box", "mask")
        for score, title in SCORES.items()
    },
    **{f"val_{part}": f"val/{part}_loss" for part in PARTS},
    "lr": "lr/pg0",
}


class Segmentation(SegmentationStep):
    """YOLO segmentation: its batches, its loss and metrics, its pictures
    and its deployable files.
    """

    shown = ("mask_map50_95", "box_map50_95", "val_loss")
    columns = COLUMNS

    def __init__(self, plan: TrainPlan, model: YoloModel, run: OwnedRun, data: Data) -> None:
        super().__init__(
            loss_for(model, class_weights=plan.class_weights, within_reach=data.policy.within_reach)
        )
        self.options = plan.options
        self.names = data.spec.names
        self.run = run
        # It is the same in all runs, so that their losses compare.
        self.val_criterion = loss_for(model)
        self.curves = Curves(run.folder)
        self.precision: list[int] = []
        # Rank 0 calls `save`.
        self.metadata = distributed.run_on_main(data.metadata) or {}
        if "thin_classes" in self.metadata:
            wires = find_extra("wires")
            rules = (
                wires.line_rules(self.metadata, self.names)
                if wires
                else "yolo_seg_ddp/extras/wires is not in this folder: thin objects keep masks"
            )
            print(rules, flush=True)
        labels = [data.val.labels(index) for index in range(min(len(data.val), CHOSEN_FROM))]
        ranks = (distributed.rank(), distributed.world_size())
        are_windows = data.val.windowed is not None
        every = plan.options.val_pictures_every
        self.pictures = ValidationPictures(
            labels, self.names, every, *ranks, are_windows=are_windows
        )
        uses_gpu = plan.setup.device.type == "cuda"
        self.loader_cost = LoaderCost(
            plan.workers if uses_gpu else 0,
            plan.options.batch_size,
            plan.setup.ranks.local_world_size,
        )

    def evaluate(self, model: torch.nn.Module, loader: Any, epoch: Epoch) -> dict[str, float]:
        """Return the validation loss and the mean average precisions over all ranks."""
        predictor = copy_for_prediction(model)
        criterion = self.val_criterion
        observer = self.pictures.observer(epoch.number, epoch.is_last)
        limits = {**AP_LIMITS, "mask_score": self.options.mask_score}
        observed: dict[str, Any] = {
            "precision": epoch.precision,
            "on_image": [observer] if observer else (),
            "limits": limits,
        }
        evaluation = evaluate(predictor, loader, self.names, criterion, epoch.device, **observed)
        metrics = evaluation.metrics

        # Windows say little of how precise whole photographs are.
        if "windows" not in self.metadata:
            self.precision = precision_counts(evaluation.results, len(self.names))
        values = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if self.options.monitor == MEAN_MAP:
            values[MEAN_MAP] = (values["mask_map50_95"] + values["box_map50_95"]) / 2
        return values

    def save(self, path: Path, model: torch.nn.Module, info: dict[str, Any]) -> None:
        """Write a file that Ultralytics opens."""
        metadata = {
            "mask_score": self.options.mask_score,
            "precision": self.precision,
            **self.metadata,
        }
        save_deployable(
            path, model, info, img_size=self.options.img_size, data=self.options.data, **metadata
        )

    def after_log(self, record: dict[str, Any], log: RunLog) -> None:
        """Say once what the loader needs, when GPUs wait for more cores."""
        if line := self.loader_cost.line(record):
            log.print(line)

    def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
        """Draw curves and validation pictures, and update the run's status."""
        self.curves.draw(epoch.is_last)
        self.pictures.finish(self.run.folder, epoch.log.image, epoch.number)
        self.run.set_status(RUNNING, epoch=epoch.number, step=record["global_step"])


def follow_epochs(criterion: Any, engine: TrainingEngine) -> None:
    """Let YOLO26's loss read from the engine how much of the run is done: whole epochs, as in
    Ultralytics.

    They are part of every checkpoint, so a resumed run has the same weights of the loss.
    """
    if isinstance(criterion, EndToEndLoss):
        criterion.run_done = lambda: engine.progress.epoch / max(engine.options.epochs - 1, 1)

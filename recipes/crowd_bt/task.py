"""The scorer as a task of the training engine: batches, loss, validation and files."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from crowd_bt.comparisons import Comparisons, image_list, write_json
from crowd_bt.images import normalised
from crowd_bt.loss import Answers, crowd_loss, prior_loss
from crowd_bt.metrics import order_values, validation_values
from crowd_bt.model import PairModel
from crowd_bt.options import BEST_MODEL
from crowd_bt.scoring import score_images
from torch import nn

from yolo_seg_ddp.engine import Epoch, Task
from yolo_seg_ddp.engine.state import TrainState
from yolo_seg_ddp.utils.contents import read_back
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import warn_on_write_error
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save

SAVE_EVERY = 5  # epochs between two checkpoint_epoch_<k>.pt
LOG_FILE = "training_log.json"


class PairComparison(Task):
    """Trains a PairModel on comparisons.

    `state` is the engine's, from which files take the optimizer.
    """

    state: TrainState

    def __init__(self, comparisons: Comparisons, config: dict[str, Any]) -> None:
        """`config` names backbone_name and input_size, for files."""
        super().__init__()
        self.comparisons = comparisons
        self.config = config
        self.val_images = image_list(comparisons.val)
        self.total_weight = sum(row.weight for row in comparisons.train)

    def prepare(
        self, batch: dict[str, torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, Answers]:
        """Return normalised images (B, 2, 3, S, S) and the answers about them."""
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        return normalised(moved["images"]), Answers(
            moved["label"], moved["weight"], moved["annotator"]
        )

    def loss(self, outputs: Any, targets: Answers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the accuracy, normalised over all ranks.

        Each step has the prior's share that belongs to a pair of mean weight, so an epoch has the
        whole prior.
        """
        difference, eta, draw_log = outputs
        with torch.autocast(difference.device.type, enabled=False):
            loss, values = crowd_loss(difference, eta, draw_log, targets)
            return loss + (
                prior_loss(eta) / self.total_weight if eta.requires_grad and eta.dim() else 0
            ), values

    def evaluate(self, model: nn.Module, loader: Any, epoch: Epoch) -> dict[str, Any]:
        """Score each validation image once, on one of the ranks; return the
        metrics of all pairs.
        """
        assert isinstance(model, PairModel)
        scores = score_images(model.scorer, loader, self.val_images, epoch.device, epoch.precision)
        eta = self.eta_of(model)
        order = order_values(scores, self.comparisons.known_order)
        values = validation_values(self.comparisons.val, scores, eta, model.draw_log.item())
        shown = ("order_accuracy", "kendall_tau", "spearman_rho")
        values.update({f"val_{name}": order[name] for name in shown if name in order})
        return values | {"eta": eta if isinstance(eta, float) else sum(eta.values()) / len(eta)}

    def eta_of(self, model: PairModel) -> float | dict[str, float]:
        """Return the crowd's reliability, or each annotator's by name."""
        eta = model.eta.tolist()
        return (
            eta
            if isinstance(eta, float)
            else dict(zip(self.comparisons.measured, eta, strict=True))
        )

    def save(self, path: Path, model: nn.Module, info: dict[str, Any]) -> None:
        """Write last.pt or best_model.pt, and every five epochs checkpoint_epoch_<k>.pt."""
        content = self.content(model, info)
        if path.name == "best.pt":
            atomic_torch_save(content, path.with_name(BEST_MODEL))
            return
        atomic_torch_save(content, path)
        if info["epoch"] % SAVE_EVERY == 0:
            atomic_torch_save(content, path.with_name(f"checkpoint_epoch_{info['epoch']}.pt"))

    def content(self, model: nn.Module, info: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the .pt files."""
        assert isinstance(model, PairModel)
        metrics = info["metrics"]
        state = self.state.state_dict()
        return {
            "epoch": info["epoch"],
            "model": model.scorer.state_dict(),
            "optimizer": state["optimizer"],
            "scheduler": state["scheduler"],
            "metrics": {
                **metrics,
                "loss": metrics["train_loss"],
                "accuracy": metrics["train_accuracy"],
            },
            "config": dict(self.config),
            "eta_logit": None if model.eta_logit is None else model.eta_logit.tolist(),
            "draw_log": model.draw_log.item(),
        }

    def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
        """Print the guide's lines and add the epoch to training_log.json."""
        epoch.log.print(
            f"  Train Loss: {record['train_loss']:.4f}, Train Acc with draws: "
            f"{record['train_accuracy']:.4f}",
            f"  Val Loss: {record['val_loss']:.4f}, Val Acc with draws: "
            f"{record['val_accuracy']:.4f}, eta: {record['eta']:.3f}",
        )
        names = [name for name in record if name.startswith(("train_", "val_")) or name == "eta"]
        number = record["epoch"]
        values = {name: record[name] for name in names}
        entry = {"epoch": number, **values, "learning_rate": record["lr"]}
        add_to_log(epoch.log.run_dir, entry, lambda earlier: earlier.get("epoch", number) < number)


def add_to_log(
    run_folder: Path, entry: dict[str, Any], is_kept: Callable[[dict[str, Any]], bool]
) -> None:
    """Write an entry with the time to training_log.json, after the earlier ones that are kept.

    A missing or damaged file has none; a full disk gives a warning only.
    """
    file = run_folder / LOG_FILE
    try:
        earlier = read_back(file, list, "")
    except (OSError, UserError):
        earlier = []
    entries = [old for old in earlier if isinstance(old, dict) and is_kept(old)]
    with warn_on_write_error(str(file)):
        write_json(file, [*entries, {**entry, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S")}])

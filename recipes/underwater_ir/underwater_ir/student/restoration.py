"""The student as a task of the engine: its batches, loss, evaluation, files and log lines."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from underwater_ir.data.datasets import RestorationDataset
from underwater_ir.metrics import psnr_db, ssim, uciqe, uiqm
from underwater_ir.student.losses import WEIGHTS, StudentLoss
from yolo_seg_ddp.engine import Epoch, Task
from yolo_seg_ddp.pages import plot_training_curves
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils.distributed import gather_arrays
from yolo_seg_ddp.utils.files import warn_on_write_error
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save

INPUTS, FROM_TEACHER = (
    ("picture", "z_d", "masks"),
    ("global_prob", "confidence_scale", "text_embeddings"),
)
CURVES_PICTURE = "curves.png"
REFERENCE, NO_REFERENCE = ("psnr", "ssim"), ("uiqm", "uciqe")
METRICS = (*REFERENCE, *NO_REFERENCE, "uiqm_paper", "uciqe_paper")  # the columns of `measure`


class Restoration(Task):
    """Trains the student. `benchmarks` holds the pictures of all benchmark sets."""

    def __init__(
        self,
        criterion: StudentLoss,
        benchmarks: RestorationDataset,
        num_epochs: int,
        save_path: Path,
    ) -> None:
        super().__init__(criterion)
        self.benchmarks = benchmarks
        self.num_epochs = num_epochs
        self.save_path = save_path

    def prepare(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Return the inputs of the network, and the targets of the losses."""
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        targets = {
            name: moved[name] for name in ("target", "masks", *FROM_TEACHER) if name in moved
        }
        return {name: moved[name] for name in INPUTS}, targets

    def evaluate(self, model: nn.Module, loader: Any, epoch: Epoch) -> dict[str, Any]:
        """Return `val_psnr` and so on over all sets of a kind, and each set's values as
        `psnr/<set>`.
        """
        return summarise(self.benchmarks, measure(model, self.benchmarks, loader, epoch.device))

    def save(self, path: Path, model: nn.Module, info: dict[str, Any]) -> None:
        """Write the bare state dict: last.pt as the guide's --save-path."""
        atomic_torch_save(model.state_dict(), self.save_path if path.name == "last.pt" else path)

    def epoch_lines(self, record: dict[str, Any], monitor: str, is_best: bool) -> list[str]:
        """Return the guide's lines: the epoch's, then one for each set."""
        lines = [
            f"Epoch {record['epoch']}/{self.num_epochs} - Train loss: {record['train_loss']:.4f}"
        ]
        for name, has_target in sets_of(self.benchmarks):
            first, second = (
                record[f"{metric}/{name}"] for metric in (REFERENCE if has_target else NO_REFERENCE)
            )
            if has_target:
                lines.append(f"[Ref] {name}: PSNR={first:.2f} dB, SSIM={second:.4f}")
            else:
                lines.append(f"[Non-Ref] {name}: UIQM={first:.3f}, UCIQE={second:.3f}")
        return lines


def measure(
    model: nn.Module, dataset: RestorationDataset, loader: Any, device: torch.device
) -> np.ndarray:
    """Evaluate the network on this rank's share; return METRICS (N, 6) for all N pictures of the
    data set, on every rank.

    A picture without a target has NaN for PSNR and SSIM. Every rank must reach this.
    """
    model.eval()
    rows: list[list[float]] = []
    for batch in loader:
        inputs = {name: batch[name].to(device) for name in INPUTS}
        restored = model(inputs).picture.float()
        targets = batch["target"].to(device)
        quality = torch.stack([psnr_db(restored, targets), ssim(restored, targets)], 1).tolist()
        for number, index in enumerate(batch["index"].tolist()):
            pixels = to_pixels(restored[number])
            pair = (
                [math.nan, math.nan] if dataset.entries[index].target is None else quality[number]
            )
            scales = [
                scale(pixels, as_in_paper)
                for as_in_paper in (False, True)
                for scale in (uiqm, uciqe)
            ]
            rows.append([index, *pair, *scales])
    values = np.full((len(dataset), len(METRICS)), np.nan)
    for part in gather_arrays({"rows": np.array(rows, np.float64).reshape(-1, 1 + len(METRICS))}):
        values[part["rows"][:, 0].astype(np.int64)] = part["rows"][:, 1:]
    return values


def to_pixels(picture: torch.Tensor) -> np.ndarray:
    """Return a picture (3, H, W) in [0, 1] as RGB uint8 (H, W, 3)."""
    return (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def sets_of(dataset: RestorationDataset) -> dict[tuple[str, bool], list[int]]:
    """Return the indices of the pictures of each set, by (name, has targets)."""
    found: dict[tuple[str, bool], list[int]] = {}
    for index, entry in enumerate(dataset.entries):
        found.setdefault((entry.set_name, entry.target is not None), []).append(index)
    return found


def summarise(dataset: RestorationDataset, values: np.ndarray) -> dict[str, float]:
    """Return the means of `measure`'s values: of each set, and over all pictures with and without a
    target.

    They are PSNR and SSIM with a target, and UIQM and UCIQE without.
    """
    summary: dict[str, float] = {}
    everything: dict[bool, list[int]] = {}
    for (name, has_target), indices in sets_of(dataset).items():
        for metric in REFERENCE if has_target else NO_REFERENCE:
            summary[f"{metric}/{name}"] = float(values[indices, METRICS.index(metric)].mean())
        everything.setdefault(has_target, []).extend(indices)
    for has_target, indices in everything.items():
        for metric in REFERENCE if has_target else NO_REFERENCE:
            summary[f"val_{metric}"] = float(values[indices, METRICS.index(metric)].mean())
    return summary


def draw_curves(run_folder: Path) -> None:
    """Draw the losses and each test set's metrics over the epochs into curves.png of a run's
    folder.
    """
    metrics = {"psnr": "PSNR in dB", "ssim": "SSIM", "uiqm": "UIQM", "uciqe": "UCIQE"}
    with warn_on_write_error(str(run_folder / CURVES_PICTURE)):
        epochs = read_epochs(run_folder)
        names = dict.fromkeys(name for record in epochs for name in record)
        of_sets = [
            (
                title,
                {name.partition("/")[2]: name for name in names if name.startswith(f"{metric}/")},
            )
            for metric, title in metrics.items()
        ]
        of_losses = [(f"loss: {name}", {name: f"train_{name}"}) for name in WEIGHTS]
        panels = [("loss", {"loss": "train_loss"}), *of_sets, *of_losses]
        plot_training_curves(epochs, run_folder / CURVES_PICTURE, panels)

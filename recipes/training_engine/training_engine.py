"""The TrainingEngine of the multi-GPU guide (reference.md), on the project's training loop.

from training_engine import TrainingEngine, launch_distributed_training, distributed_train_worker
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT)] if str(PROJECT) not in sys.path else []

import torch
import torch.distributed as dist
from launching import launch_distributed_training
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from yolo_seg_ddp import engine
from yolo_seg_ddp.engine import EngineOptions, Task
from yolo_seg_ddp.engine.state import TrainState
from yolo_seg_ddp.pages import plot_training_curves
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import seed_everything
from yolo_seg_ddp.utils.distributed import all_reduce_sum, cleanup_ddp, join_process_group, rank
from yolo_seg_ddp.utils.errors import EXIT_STOPPED_BY_SIGNAL, UserError, one_line
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save, read_tensors
from yolo_seg_ddp.utils.text import counted

__all__ = ["TrainingEngine", "distributed_train_worker", "launch_distributed_training"]
SEED = 0
DEFAULTS = EngineOptions(
    ema=False, patience=0, sync_batchnorm=True, monitor="val_accuracy", seed=SEED, log_interval=100
)
CURVES = (
    ("loss", {"train": "train_loss", "validation": "val_loss"}),
    (
        "accuracy",
        {
            "train": "train_accuracy",
            "validation": "val_accuracy",
            "validation, top 5": "val_top5_accuracy",
        },
    ),
    ("learning rate", {"learning rate": "lr"}),
)
# of a checkpoint: each as `<part>_state_dict`
_PARTS = ("model", "ema", "optimizer", "scheduler", "scaler")


class Classification(Task):
    """Reports top-1 and top-5 accuracy beside the loss; best.pt and last.pt hold all that
    `load_checkpoint` needs.
    """

    state: TrainState

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Return the criterion's loss and, for class numbers (B,) and scores (B, classes), the
        accuracies.
        """
        loss = super().loss(outputs, targets)
        if (
            isinstance(loss, tuple)
            or outputs.dim() != 2
            or targets.dim() != 1
            or targets.is_floating_point()
        ):
            return loss
        best = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]  # (B, 5)
        return loss, {
            "accuracy": best[:, 0].float().mean(),
            "top5_accuracy": best.any(1).float().mean(),
        }

    def save(self, path: Path, model: nn.Module, info: dict[str, Any]) -> None:
        """Write the raw module's weights under its own names, the moving average, and the rest of
        the state.
        """
        state = self.state.state_dict()
        content = {f"{part}_state_dict": state.pop(part) for part in _PARTS}
        progress = {name: state["progress"][name] for name in ("history", "global_step")}
        atomic_torch_save({**info, **progress, **content, **state}, path)


class TrainingEngine(engine.TrainingEngine):
    """The project's engine with the guide's names and defaults: SyncBatchNorm, accuracy, mixed
    precision, a bar.
    """

    setup_distributed = staticmethod(join_process_group)
    cleanup_distributed = staticmethod(cleanup_ddp)

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        *,
        distributed: bool | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        backend: str | None = None,
        use_amp: bool | None = None,
        use_ema: bool | None = None,
        ema_decay: float | None = None,
        gradient_clip_val: float | None = None,
        save_dir: str | Path = "./checkpoints",
        experiment_name: str = "experiment",
        **options: Any,
    ) -> None:
        """See reference.md for the keywords; `options` are fields of EngineOptions. Files go to
        `save_dir`/`experiment_name`.

        Raises TypeError for an unknown keyword, UserError where `local_rank`, `world_size` or
        `backend` contradict the process group. `local_rank` may be the rank, as in the guide.
        """
        ema = ema_decay is not None if use_ema is None else use_ema
        precision = None if use_amp is None else "auto" if use_amp else "off"
        guide = _given(
            ema=ema, ema_decay=ema_decay, precision=precision, clip_norm=gradient_clip_val
        )
        task = Classification()
        run = Path(save_dir) / experiment_name
        chosen = replace(DEFAULTS, **guide, **options)
        super().__init__(
            model, torch.device(device), chosen, task=task, run=run, distributed=distributed
        )
        task.state = self.state
        if use_amp is None and self.precision.dtype:
            self.log.print(f"Mixed precision: {self.precision.name}; use_amp=False trains in fp32")

        ranks = (rank(), int(os.environ.get("LOCAL_RANK", rank())))
        group = dist.get_backend() if dist.is_initialized() else backend
        places = ("world_size", world_size, (self.world_size,)), ("backend", backend, (group,))
        for name, value, actual in (("local_rank", local_rank, ranks), *places):
            if value not in (None, *actual):
                raise UserError(
                    f"{name}={value}: the process group says {actual[-1]}; leave {name} out"
                )

    def train(
        self,
        train_loader: Any,
        val_loader: Any,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        scheduler: Any = None,
        *,
        num_epochs: int | None = None,
        save_best: bool | None = None,
        save_last: bool | None = None,
        early_stopping_patience: int | None = None,
        monitor_metric: str | None = None,
        resume: bool = False,
    ) -> dict[str, list[float]]:
        """Train and return the history: one list per value, such as train_loss, val_loss and
        val_accuracy.

        `monitor_metric` is the validation's unless it begins with `train_`. `resume` continues
        exactly from the newest checkpoint of the folder, if there is one. Every rank calls this.
        """
        if monitor_metric is not None and not monitor_metric.startswith(("val_", "train_")):
            monitor_metric = f"val_{monitor_metric}"
        changes = _given(
            epochs=num_epochs, patience=early_stopping_patience, monitor=monitor_metric
        )
        changes |= _given(save_best=save_best, save_last=save_last)
        self.options = self.recovery.options = self.epoch_end.options = replace(
            self.options, **changes
        )
        history = super().train(
            train_loader, val_loader, optimizer, criterion, scheduler, resume=resume
        )
        return {**history, "train_learning_rate": history.get("lr", [])}

    def load_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        load_ema: bool = True,
        map_location: Any = "cpu",
    ) -> int:
        """Load best.pt or last.pt and return its number of epochs; every rank calls this, before or
        after DDP's wrapping.

        With the optimizer (and scheduler) `train` continues exactly from there; without it only
        weights are loaded.
        """
        saved = _read_checkpoint(Path(path), map_location)
        # the average starts from the loaded weights
        if not load_ema or saved["ema_state_dict"] is None:
            saved.update(ema_state_dict=saved["model_state_dict"], ema_updates=0)
        try:
            if optimizer is None:
                self.state.model.load_state_dict(saved["model_state_dict"])
                if self.state.ema is not None:
                    self.state.ema.module.load_state_dict(saved["ema_state_dict"])
                return int(saved["epoch"])
            self.begin(optimizer, None, scheduler)
            self.state.load_state_dict(
                {**saved, **{part: saved[f"{part}_state_dict"] for part in _PARTS}}
            )
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{path}: does not fit this model and optimizer ({one_line(error)})"
            ) from error
        self.log.truncate_after(self.progress.global_step)
        return self.progress.epoch

    def _reduce_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all ranks. Every rank must reach this."""
        return all_reduce_sum(tensor) / self.world_size

    def plot_training_history(self, path: str | Path | None = None) -> Path:
        """Draw loss, accuracies and learning rate; by default as training_history.png in the run's
        folder.
        """
        file = Path(path or self.log.run_dir / "training_history.png")
        history = self.progress.history
        epochs = [
            dict(zip(history, values, strict=True))
            for values in zip(*history.values(), strict=True)
        ]
        records = [{"epoch": number, **epoch} for number, epoch in enumerate(epochs, 1)]
        plot_training_curves(records, file, CURVES)
        return file


def distributed_train_worker(
    rank: int,
    world_size: int,
    *,
    model_fn: Callable[[], nn.Module],
    train_dataset: Dataset[Any],
    val_dataset: Dataset[Any],
    optimizer_fn: Callable[[Any], torch.optim.Optimizer],
    criterion_fn: Callable[[], Any],
    scheduler_fn: Callable[[Any], Any] | None = None,
    batch_size: int = 32,
    num_workers: int = 4,
    engine_kwargs: dict[str, Any] | None = None,
    train_kwargs: dict[str, Any] | None = None,
) -> dict[str, list[float]]:
    """Train on one rank, as Method 2 of the guide describes; return the history.

    `batch_size` is per rank. `num_workers` is the largest number of loader processes: fewer where
    cores are few.
    """
    engine_kwargs = dict(engine_kwargs or {})
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    threads, workers = choose_threads_and_workers(per_machine, num_workers, device.type)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    seed = engine_kwargs.get("seed", SEED)
    seed_everything(seed)
    if world_size > 1:
        TrainingEngine.setup_distributed(rank, world_size)
    model = model_fn().to(device)
    optimizer = optimizer_fn(model.parameters())
    place = {"distributed": world_size > 1, "local_rank": local_rank, "world_size": world_size}
    trainer = TrainingEngine(model, device, **{**place, **engine_kwargs})
    trainer.log.print(
        f"Device: {device}, {world_size} process(es) with {torch.get_num_threads()} thread(s) and "
        f"{workers} loader worker(s) each",
        f"Effective batch: {batch_size} x {world_size} = {batch_size * world_size}; precision: "
        f"{trainer.precision.name}; moving average: {'on' if trainer.state.ema else 'off'}",
    )
    train_loader, val_loader = (
        DataLoader(
            data,
            batch_size,
            sampler=DistributedSampler(
                data, world_size, rank, shuffle=data is train_dataset, seed=seed
            ),
            num_workers=workers,
            pin_memory=device.type == "cuda",
        )
        for data in (train_dataset, val_dataset)
    )
    scheduler = None if scheduler_fn is None else scheduler_fn(optimizer)
    history = trainer.train(
        train_loader, val_loader, optimizer, criterion_fn(), scheduler, **(train_kwargs or {})
    )
    report_end(trainer)
    # not after an error: NCCL would wait for ranks that have not failed
    TrainingEngine.cleanup_distributed()
    if trainer.stopped_by:
        raise SystemExit(EXIT_STOPPED_BY_SIGNAL)
    return history


def report_end(trainer: TrainingEngine) -> None:
    """Print the final and the best accuracy and draw the history, on rank 0."""
    history, progress = trainer.progress.history, trainer.progress
    if trainer.stopped_by or not trainer.is_main or not history:
        return
    names = [
        name for name in ("train_accuracy", "val_accuracy", "val_top5_accuracy") if name in history
    ]
    shown = ", ".join(f"{name} {history[name][-1]:.4f}" for name in names)
    best = (
        ""
        if progress.best_value is None
        else f" (best {trainer.options.monitor} {progress.best_value:.4f})"
    )
    trainer.log.print(
        f"\nTraining complete after {counted(progress.epoch, 'epoch')}: {shown}{best}"
    )
    trainer.log.print(f"Curves: {trainer.plot_training_history()}")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _read_checkpoint(path: Path, map_location: Any) -> dict[str, Any]:
    """Return a checkpoint's content.

    Raises UserError when it is missing or another kind of file.
    """
    what = "a checkpoint of TrainingEngine"
    missing = "no such checkpoint; training writes last.pt and best.pt there"
    saved: dict[str, Any] = read_tensors(path, what, missing, device=map_location)
    if "model_state_dict" not in saved or "progress" not in saved:
        raise UserError(f"{path}: not {what}")
    # From a module that was wrapped when it was saved by other programs.
    nn.modules.utils.consume_prefix_in_state_dict_if_present(saved["model_state_dict"], "module.")
    return saved

"""What the training engine does so that no work is lost: agreed checkpoints, resuming, and undoing steps that went bad."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from utils.common.errors import EXIT_IO, UserError, one_line
from utils.distributed import any_rank, check_ranks_agree, run_on_main
from utils.engine.nonfinite import MOST_IN_A_ROW, MOST_ROLLBACKS, Diverged, RollBack, all_finite
from utils.engine.state import Progress
from utils.run.checkpoint import load_latest, remove_all_but_newest, save_checkpoint

if TYPE_CHECKING:
    from utils.engine.loop import TrainingEngine

LONG_VALIDATION_S = 10.0  # launchers and schedulers grant 30 seconds between a stop and a kill
MOST_FAILED_SAVES = 3  # in a row: what follows would be lost
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
CURE = "lower --lr, try --amp off, or look at the photographs of these batches"


class CannotSave(UserError):
    """No checkpoint could be written several times in a row."""

    exit_code = EXIT_IO


class Recovery:
    """Saves, restores and rolls back one engine's state. Every rank must reach every method."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self.num_rollbacks = 0
        self._num_failed_saves = 0
        self._saved_at_s = time.monotonic()
        self._last_validation_s = 0.0
        self._suspects: list[list[int]] = []  # [epoch, batch] of the steps that were bad

    def require_agreement(self) -> None:
        """Refuse to go on, and to save anything, when weights, averages or statistics differ between ranks or are lost."""
        engine = self.engine
        modules = {"model": engine.raw_model, **({"ema": engine.ema.module} if engine.ema else {})}
        tensors = {f"{kind}.{name}": t for kind, module in modules.items() for name, t in module.state_dict().items()}
        check_ranks_agree(tensors)
        if not all_finite(tensors.values()):
            raise Diverged(f"weights or statistics are not finite any more; the last checkpoint is kept; {CURE}")

    def require_health(self) -> None:
        """Tell of steps left out; raise RollBack on every rank after several in a row, or when a statistic is spoilt."""
        engine, progress = self.engine, self.engine.progress
        skipped, in_a_row = engine.guard.counts()
        news = skipped - engine.guard.told
        if not news:
            return
        engine.guard.told = skipped
        engine.log.print(f"  {news} step(s) left out by step {progress.global_step}: their gradient was not finite")
        engine.log.metrics({"kind": "skip", "global_step": progress.global_step, "skipped": skipped})
        if in_a_row >= MOST_IN_A_ROW or not all_finite(engine.raw_model.buffers()):
            first = max(progress.batch - max(in_a_row, 1) * engine.accumulation_steps, 0)
            first -= first % engine.accumulation_steps  # an epoch's last group may be smaller
            self._suspects = [[progress.epoch, number] for number in range(first, progress.batch)]
            raise RollBack

    def roll_back(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Go back to the last checkpoint and leave the batches out that led here. Raises Diverged when that cannot help."""
        engine = self.engine
        self.num_rollbacks += 1
        step = engine.progress.global_step
        if self.num_rollbacks > MOST_ROLLBACKS:
            raise Diverged(f"the gradient is not finite at step {step}, after {MOST_ROLLBACKS} roll-backs; {CURE}")
        if not self.load(optimizer, scheduler):
            raise Diverged(f"the gradient is not finite at step {step}, before the first checkpoint; {CURE}")
        left_out = engine.progress.left_out
        left_out += [batch for batch in self._suspects if batch not in left_out]
        engine.guard.forget_row()
        engine.log.print(f"Rolled back from step {step} to {engine.progress.global_step}, leaving out {self._suspects}")

    def is_due(self) -> bool:
        """Whether the last checkpoint is older than the engine's `save_every_s`; rank 0's clock decides."""
        limit_s = self.engine.save_every_s
        return self.engine.is_main and limit_s is not None and time.monotonic() - self._saved_at_s >= limit_s

    def save(self, optimizer: torch.optim.Optimizer, scheduler: Any, is_last_chance: bool = False) -> None:
        """Write a checkpoint on rank 0; nobody goes on, or leaves, before it stands or is given up.

        A disk that cannot take it is told of, and the training goes on with the checkpoint before. Raises CannotSave
        when that happens several times in a row, or at the last chance to save what was trained.
        """
        run_on_main(lambda: self._save(optimizer, scheduler, 1 if is_last_chance else MOST_FAILED_SAVES))
        self._saved_at_s = time.monotonic()

    @contextmanager
    def validating(self, record: dict[str, Any], optimizer: torch.optim.Optimizer, scheduler: Any) -> Iterator[None]:
        """Before a validation that will be long, as the last one was, save what was trained: no stop is heard in it."""
        progress = self.engine.progress
        if progress.trained is None and any_rank(self._last_validation_s > LONG_VALIDATION_S):
            progress.trained = dict(record)
            self.save(optimizer, scheduler)
        start_s = time.monotonic()
        yield
        self._last_validation_s = time.monotonic() - start_s
        progress.trained = None

    def save_if_owed(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Try once more when the last checkpoint could not be written, before the training is left."""
        if any_rank(self._num_failed_saves > 0):
            self.save(optimizer, scheduler, is_last_chance=True)

    def _save(self, optimizer: torch.optim.Optimizer, scheduler: Any, most_failures: int) -> None:
        engine = self.engine
        state = {
            "model": engine.raw_model.state_dict(),
            "ema": engine.ema.module.state_dict() if engine.ema else None,
            "ema_updates": engine.ema.updates if engine.ema else 0,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "scaler": engine.scaler.state_dict(),
            "progress": asdict(engine.progress),
            "accumulation_steps": engine.accumulation_steps,
            "config": engine.config,
        }
        folder, step = engine.save_dir / "checkpoint", engine.progress.global_step
        try:
            _with_room_made(folder, lambda: save_checkpoint(folder, step, state, facts=engine.checkpoint_facts))
        except OSError as error:
            self._num_failed_saves += 1
            problem = f"{folder}: no checkpoint at step {engine.progress.global_step}: {error.strerror or error}"
            if self._num_failed_saves >= most_failures:
                raise CannotSave(f"{problem}; make room there, then run the same command again") from error
            count = f"{self._num_failed_saves} of {most_failures} such failures in a row, at which the training stops"
            engine.log.print(f"  WARNING: {problem}; the one before is kept, make room there ({count})")
        else:
            self._num_failed_saves = 0

    def load(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> bool:
        """Continue from the newest checkpoint that passes its checksum; return whether there is one."""
        engine = self.engine
        found = load_latest(engine.save_dir / "checkpoint")
        if found is None:
            return False
        path, state = found
        try:
            self._restore(state, optimizer, scheduler)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError(
                f"{path}: not a checkpoint of this model and these options ({one_line(error)}); continue it with the "
                f"version of the project that wrote it, or choose a new --save-dir"
            ) from error
        if engine.is_main:
            engine.log.truncate_after(engine.progress.global_step)
        place = f"epoch {engine.progress.epoch + 1}, batch {engine.progress.batch}"
        engine.log.print(f"Resumed from {path} ({place})")
        return True

    def _restore(self, state: dict[str, Any], optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        engine = self.engine
        saved, own = state["optimizer"]["param_groups"][0], optimizer.param_groups[0]
        if ("betas" in saved) != ("betas" in own):  # PyTorch would take it, and fail at the first step
            raise ValueError(f"it holds the state of {'AdamW' if 'betas' in saved else 'SGD'}")
        engine.raw_model.load_state_dict(state["model"])
        if engine.ema is not None and state["ema"] is not None:
            engine.ema.module.load_state_dict(state["ema"])
            engine.ema.updates = state["ema_updates"]
        optimizer.load_state_dict(state["optimizer"])
        if state["scheduler"] is not None and hasattr(scheduler, "load_state_dict"):
            scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:  # empty from a run that needed none; this device may
            engine.scaler.load_state_dict(state["scaler"])
        engine.progress = Progress(**state["progress"])
        engine.progress.regroup(state.get("accumulation_steps", engine.accumulation_steps), engine.accumulation_steps)


def _with_room_made(folder: Path, save: Callable[[], object]) -> None:
    """Save; on a full disk remove all checkpoints but the newest and try once more."""
    try:
        save()
    except OSError as error:
        if error.errno not in _DISK_IS_FULL or not remove_all_but_newest(folder):
            raise
        save()

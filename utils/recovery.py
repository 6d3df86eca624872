"""What the training engine does so that no work is lost: agreed checkpoints, resuming, and undoing steps that went bad."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from utils.checkpoint import load_latest, save_checkpoint
from utils.distributed import barrier, check_ranks_agree
from utils.guard import MOST_IN_A_ROW, MOST_ROLLBACKS, Diverged, RollBack, all_finite
from utils.progress import Progress

if TYPE_CHECKING:
    from utils.engine import TrainingEngine

CURE = "lower --lr, try --amp off, or look at the photographs of these batches"


class Recovery:
    """Saves, restores and rolls back one engine's state. Every rank must reach every method."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self.num_rollbacks = 0
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

    def save(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Write a checkpoint on rank 0; nobody goes on, or leaves, before it stands."""
        engine = self.engine
        if engine.is_main:
            state = {
                "model": engine.raw_model.state_dict(),
                "ema": engine.ema.module.state_dict() if engine.ema else None,
                "ema_updates": engine.ema.updates if engine.ema else 0,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
                "scaler": engine.scaler.state_dict(),
                "progress": asdict(engine.progress),
                "config": engine.config,
            }
            save_checkpoint(engine.save_dir / "checkpoint", engine.progress.global_step, state)
        barrier()

    def load(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> bool:
        """Continue from the newest checkpoint that passes its checksum; return whether there is one."""
        engine = self.engine
        found = load_latest(engine.save_dir / "checkpoint")
        if found is None:
            return False
        path, state = found
        engine.raw_model.load_state_dict(state["model"])
        if engine.ema is not None and state["ema"] is not None:
            engine.ema.module.load_state_dict(state["ema"])
            engine.ema.updates = state["ema_updates"]
        optimizer.load_state_dict(state["optimizer"])
        if state["scheduler"] is not None and hasattr(scheduler, "load_state_dict"):
            scheduler.load_state_dict(state["scheduler"])
        engine.scaler.load_state_dict(state["scaler"])
        engine.progress = Progress(**state["progress"])
        if engine.is_main:
            engine.log.truncate_after(engine.progress.global_step)
        place = f"epoch {engine.progress.epoch + 1}, batch {engine.progress.batch}"
        engine.log.print(f"Resumed from {path} ({place})")
        return True

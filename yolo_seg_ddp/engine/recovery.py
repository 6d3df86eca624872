"""How no work is lost: checkpoints that all ranks agree on, resuming, and rolling back steps with
non-finite gradients.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from yolo_seg_ddp.engine.options import EngineOptions
from yolo_seg_ddp.engine.state import TrainState
from yolo_seg_ddp.run.checkpoint import CheckpointStore
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.utils.distributed import any_rank, check_ranks_agree, run_on_main
from yolo_seg_ddp.utils.errors import (
    DISK_IS_FULL,
    EXIT_DIVERGED,
    EXIT_IO,
    UserError,
    is_out_of_memory,
    one_line,
)

# After so many bad steps the weights themselves are suspected.
MOST_IN_A_ROW = 5
MOST_ROLLBACKS = 3


class Diverged(UserError):
    """Training cannot continue."""

    exit_code = EXIT_DIVERGED


class RollBack(Exception):  # leaves the loop; not an error
    """Raised on every rank when the last steps must be undone."""


class NonFiniteGuard:
    """Skips optimizer steps with a non-finite gradient.

    With a fused optimizer the host does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._skipped = torch.zeros((), device=device)
        self.in_a_row = torch.zeros((), device=device)  # of the last steps; a roll-back resets it
        self.num_reported = 0  # skipped steps that the log has reported

    def should_step(self, optimizer: torch.optim.Optimizer, gradient_norm: torch.Tensor) -> bool:
        """Return whether to take the optimizer's step: not if the gradient's norm () is infinite or
        NaN.

        A fused optimizer is always allowed: it skips the step on the device, by `found_inf`.
        """
        # Infinity times 0 is NaN.
        is_bad = (gradient_norm * 0 != 0).float().to(self._skipped.device)
        self._skipped += is_bad
        self.in_a_row = torch.addcmul(is_bad, is_bad, self.in_a_row)
        # With dampening, momentum that starts at zero would give another result.
        if all(
            group.get("fused") and not group.get("dampening") for group in optimizer.param_groups
        ):
            _begin_momentum(optimizer)
            # As torch.amp.GradScaler does: where this is 1, the kernels change neither weights nor
            # state.
            optimizer.found_inf = is_bad  # type: ignore[attr-defined]
            return True
        return not is_bad.item()

    def counts(self) -> tuple[int, int]:
        """Return the number of skipped steps, and how many of the last steps in a row.

        Waits for the device.
        """
        skipped, in_a_row = torch.stack([self._skipped, self.in_a_row]).tolist()
        return int(skipped), int(in_a_row)


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD momentum buffers of zeros: when its first step is skipped, PyTorch leaves new ones
    uninitialised.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for weight in group["params"]:
            if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no floating-point tensor holds an infinity or a NaN.

    Waits for the device once.
    """
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return True
    # The maximum is NaN or infinite as soon as one element is.
    largest = torch._foreach_norm([tensor.detach() for tensor in floats], torch.inf)
    return bool(torch.isfinite(torch.stack([value.float() for value in largest])).all())


# Launchers and schedulers grant 30 seconds between a stop and a kill.
LONG_VALIDATION_S = 10.0
# After so many in a row training stops, because its progress could not be kept.
MOST_FAILED_SAVES = 3
CURE = "lower --lr, try --amp off, or look at the photographs of these batches"


class CannotSave(UserError):
    """Several checkpoints in a row could not be written."""

    exit_code = EXIT_IO


@dataclass(eq=False)
class Recovery:
    """Saves, restores and rolls back a TrainState. Every rank must reach every method.

    Each checkpoint holds `manifest`, too.
    """

    state: TrainState
    guard: NonFiniteGuard
    log: RunLog
    options: EngineOptions
    checkpoints: CheckpointStore
    manifest: dict[str, Any]
    num_rollbacks: int = 0
    _num_failed_saves: int = 0
    _saved_at_s: float = field(default_factory=time.monotonic)
    _last_validation_s: float = 0.0
    # [epoch, batch] of the steps with non-finite gradients
    _suspects: list[list[int]] = field(default_factory=list)

    def require_agreement(self) -> None:
        """Raise RankDisagreement when weights, averages or statistics differ between ranks,
        Diverged when not finite.
        """
        tensors = {
            f"{kind}.{name}": tensor
            for kind, module in self.state.modules().items()
            for name, tensor in module.state_dict().items()
        }
        check_ranks_agree(tensors)
        if not all_finite(tensors.values()):
            raise Diverged(
                "weights or statistics are not finite any more; the last checkpoint is kept; "
                f"{CURE}"
            )

    def require_health(self) -> None:
        """Log skipped steps.

        Raise RollBack on every rank after several in a row, or when a statistic is not finite.
        """
        progress, accumulate = self.state.progress, self.state.accumulate
        num_skipped, in_a_row = self.guard.counts()
        num_new = num_skipped - self.guard.num_reported
        if not num_new:
            return
        self.guard.num_reported = num_skipped
        self.log.print(
            f"  {num_new} step(s) skipped by step {progress.global_step}: their gradient was not "
            "finite"
        )
        self.log.metrics(
            {"kind": "skip", "global_step": progress.global_step, "skipped": num_skipped}
        )
        if in_a_row >= MOST_IN_A_ROW or not all_finite(self.state.model.buffers()):
            first = max(progress.batch - max(in_a_row, 1) * accumulate, 0)
            # An epoch's last group may be smaller.
            first -= first % accumulate
            self._suspects = [[progress.epoch, number] for number in range(first, progress.batch)]
            raise RollBack

    def roll_back(self) -> None:
        """Return to the last checkpoint and skip the batches after it that failed.

        Raises Diverged when that cannot help.
        """
        self.num_rollbacks += 1
        step = self.state.progress.global_step
        if self.num_rollbacks > MOST_ROLLBACKS:
            raise Diverged(
                f"the gradient is not finite at step {step}, after {MOST_ROLLBACKS} roll-backs; "
                f"{CURE}"
            )
        if not self.load():
            raise Diverged(
                f"the gradient is not finite at step {step}, before the first checkpoint; {CURE}"
            )
        progress = self.state.progress
        progress.left_out += [batch for batch in self._suspects if batch not in progress.left_out]
        self.guard.in_a_row.zero_()
        self.log.print(
            f"Rolled back from step {step} to {progress.global_step}, leaving out {self._suspects}"
        )

    def is_due(self) -> bool:
        """Whether a checkpoint is due at this step, or the last one is older than `save_every_s`,
        by rank 0's clock.
        """
        if self.is_due_at(self.state.progress.global_step):
            return True
        limit_s = self.options.save_every_s
        return (
            self.log.is_main
            and limit_s is not None
            and time.monotonic() - self._saved_at_s >= limit_s
        )

    def is_due_at(self, step: int) -> bool:
        """Whether a checkpoint is due after this step by `save_every_steps`."""
        every = self.options.save_every_steps
        return every is not None and step % every == 0

    def save(self, is_last_chance: bool = False) -> None:
        """Write a checkpoint on rank 0; the other ranks wait until it is written or given up.

        When the disk refuses it, rank 0 prints a warning and training continues with the checkpoint
        before. Raises CannotSave when that happens several times in a row, or at the last chance to
        save.
        """
        run_on_main(lambda: self._save(1 if is_last_chance else MOST_FAILED_SAVES))
        self._saved_at_s = time.monotonic()

    def save_if_owed(self) -> None:
        """Try once more before leaving, when the last checkpoint could not be written."""
        if any_rank(self._num_failed_saves > 0):
            self.save(is_last_chance=True)

    @contextmanager
    def validating(self, record: dict[str, Any]) -> Iterator[None]:
        """Save the trained epoch before a validation that will be long, as the last one was: it
        hears no stop signal.
        """
        progress = self.state.progress
        if progress.record_awaiting_validation is None and any_rank(
            self._last_validation_s > LONG_VALIDATION_S
        ):
            progress.record_awaiting_validation = dict(record)
            self.save()
        start_s = time.monotonic()
        yield
        self._last_validation_s = time.monotonic() - start_s
        progress.record_awaiting_validation = None

    def load(self) -> bool:
        """Continue from the newest checkpoint that passes its checksum; return whether there is
        one.
        """
        newest = self.checkpoints.load()
        if newest is None:
            return False
        path, saved = newest
        try:
            self.state.load_state_dict(saved)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"{path}: not a checkpoint of this model and these options ({one_line(error)}); "
                "continue it with the "
                f"version of the project that wrote it, or choose a new --save-dir"
            ) from error
        progress = self.state.progress
        self.log.truncate_after(progress.global_step, progress.epoch)
        self.log.print(f"Resumed from {path} (epoch {progress.epoch + 1}, batch {progress.batch})")
        return True

    def _save(self, most_failures: int) -> None:
        step = self.state.progress.global_step
        state = {**self.state.state_dict(), "options": asdict(self.options)}
        # The epochs that a resumed run will not repeat.
        manifest = {**self.manifest, "epoch": self.state.progress.epoch}
        try:
            _with_room_made(self.checkpoints, lambda: self.checkpoints.save(step, state, manifest))
        except OSError as error:
            self._num_failed_saves += 1
            problem = (
                f"{self.checkpoints.folder}: no checkpoint at step {step}: "
                f"{error.strerror or error}"
            )
            if self._num_failed_saves >= most_failures:
                raise CannotSave(
                    f"{problem}; make room there, then run the same command again"
                ) from error
            count = (
                f"{self._num_failed_saves} of {most_failures} such failures in a row, at which the "
                "training stops"
            )
            self.log.print(
                f"  WARNING: {problem}; the one before is kept, make room there ({count})"
            )
        else:
            self._num_failed_saves = 0


def _with_room_made(checkpoints: CheckpointStore, save: Callable[[], object]) -> None:
    """Save; when the disk is full, remove all checkpoints but the newest and try once more."""
    try:
        save()
    except OSError as error:
        if error.errno not in DISK_IS_FULL or not checkpoints.make_room():
            raise
        save()

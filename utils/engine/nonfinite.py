"""Steps with a non-finite gradient: skipped on all ranks, counted, and rolled back when they continue.

After the all-reduce every rank holds the same gradient, so all ranks skip the same steps without communication.
"""

from collections.abc import Iterable

import torch

from utils.common.errors import EXIT_DIVERGED, UserError

MOST_IN_A_ROW = 5  # bad steps after which the weights themselves are suspected
MOST_ROLLBACKS = 3


class Diverged(UserError):
    """Training cannot continue."""

    exit_code = EXIT_DIVERGED


class RollBack(Exception):  # leaves the loop; not an error
    """Raised on every rank when the last steps must be undone."""


class NonFiniteGuard:
    """Skips optimizer steps with a non-finite gradient. With a fused optimizer the host does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._skipped = torch.zeros((), device=device)
        self._in_a_row = torch.zeros((), device=device)
        self.num_reported = 0  # skipped steps that the log has reported

    def should_step(self, optimizer: torch.optim.Optimizer, gradient_norm: torch.Tensor) -> bool:
        """Return whether to take the optimizer's step: not if the gradient's norm () is infinite or NaN.

        A fused optimizer is always allowed: it skips the step on the device, by `found_inf`.
        """
        is_bad = (gradient_norm * 0 != 0).float().to(self._skipped.device)  # infinity times 0 is NaN
        self._skipped += is_bad
        self._in_a_row = torch.addcmul(is_bad, is_bad, self._in_a_row)
        # With dampening, momentum that starts at zero would give another result.
        if all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups):
            _begin_momentum(optimizer)
            # As torch.amp.GradScaler does: where this is 1, the kernels change neither weights nor state.
            optimizer.found_inf = is_bad  # type: ignore[attr-defined]
            return True
        return not is_bad.item()

    def counts(self) -> tuple[int, int]:
        """Return the number of skipped steps, and how many of the last steps in a row. Waits for the device."""
        skipped, in_a_row = torch.stack([self._skipped, self._in_a_row]).tolist()
        return int(skipped), int(in_a_row)

    def reset_streak(self) -> None:
        """Reset the row after a roll-back."""
        self._in_a_row.zero_()


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD momentum buffers of zeros: when its first step is skipped, PyTorch leaves new ones uninitialised."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for weight in group["params"]:
            if weight.grad is not None and optimizer.state[weight].get("momentum_buffer") is None:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no floating-point tensor holds an infinity or a NaN. Waits for the device once."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return True
    # The maximum is NaN or infinite as soon as one element is.
    largest = torch._foreach_norm([tensor.detach() for tensor in floats], torch.inf)
    return bool(torch.isfinite(torch.stack([value.float() for value in largest])).all())

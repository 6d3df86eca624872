"""One training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = Any
PrepareBatch = Callable[[Batch, torch.device], tuple[Any, Any]]


def default_prepare_batch(batch: Batch, device: torch.device) -> tuple[Any, Any]:
    """Move an `(inputs, targets)` pair of tensors to the device."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def _named_values(result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, values = result if isinstance(result, tuple) else (result, {})
    return loss, {"loss": loss, **values}


def _batch_length(inputs: Any) -> int:
    return len(next(iter(inputs.values()))) if isinstance(inputs, dict) else len(inputs)

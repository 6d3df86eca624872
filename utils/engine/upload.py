"""Copies batches to a GPU on a second CUDA stream, while the previous step still computes.

From the loss on, the host is ahead of the GPU: while the backward pass runs, the next batch is copied from page-locked
memory and prepared. On a CPU nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class Upload:
    """Calls `prepare(batch, device)` on the second stream, so that its work does not wait for the step before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, prepare: Callable[[Any, torch.device], Any], batch: Any) -> Any:
        """Return what `prepare` returns. The current stream waits for it."""
        if self._stream is None:
            return prepare(batch, self.device)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            prepared = prepare(batch, self.device)
        computing.wait_stream(self._stream)
        for tensor in tensors_in(prepared):
            tensor.record_stream(computing)  # else its memory could be reused by the next batch before the step ends
        return prepared


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in (nested) lists, tuples, dictionaries and objects with attributes, such as dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))

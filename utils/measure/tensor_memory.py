"""Measure which tensors a training step holds at its memory peak, and how many bytes its operators read and write.

The result of every operator is observed, forward and backward, on any device. Memory outside tensors, such as the
workspace of a convolution, is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# activations: kept by autograd for the backward pass; temporary: all others.
KINDS = ("weights", "averaged weights", "optimizer", "input", "activations", "gradients", "temporary")


@dataclass
class _Block:
    """A tensor storage: its kind as far as known, its size, and the finalizer that reports its end."""

    kind: str
    num_bytes: int
    watch: Any


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of all live tensors on one device by kind while it is active. For one step only.

    `known` are existing tensors by kind. It is also a `utils.measure.step_timer.Marker`: the marks show when the input is
    made.
    """

    def __init__(self, device: torch.device, known: Mapping[str, Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self.device = device
        self.bytes_moved = 0
        self._live_bytes = self._peak_bytes = 0
        self._blocks: dict[int, _Block] = {}  # by address of the storage
        self._at_peak: list[_Block] = []  # the kind of a block may be set later
        self._born_as = "temporary"
        for kind, tensors in known.items():
            for tensor in tensors:
                self._register(tensor, kind)
        self._note_peak()
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda tensor: tensor)

    def __enter__(self) -> TensorMemory:
        self._saving.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._saving.__exit__(kind, error, trace)
        for block in self._blocks.values():
            block.watch.detach()

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of the tensors that were alive at the peak, by kind."""
        return _by_kind(self._at_peak)

    def mark(self, phase: str) -> None:
        """Begin `phase`: tensors made in the input phase are of kind input."""
        self._born_as = "input" if phase == "input" else "temporary"

    def watch_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
        """Count complete gradients as kind gradients; return the hooks, which the caller removes."""
        return [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in parameters]

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*arguments, **(keywords or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._register(tensor, self._born_as)
        self._note_peak()
        if not operator.is_view and not operator.overloadpacket.__name__.startswith(("empty", "detach")):
            given = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
            self.bytes_moved += sum(tensor_bytes(tensor) for tensor in (*given, *made) if self._is_here(tensor))
        return result

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and tensor.layout == torch.strided

    def _register(self, tensor: torch.Tensor, kind: str) -> None:
        if not self._is_here(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks and storage.nbytes():
            self._blocks[key] = _Block(kind, storage.nbytes(), weakref.finalize(storage, self._forget, key))
            self._live_bytes += storage.nbytes()

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._blocks.pop(key).num_bytes

    def _note_peak(self) -> None:
        if self._live_bytes > self._peak_bytes:
            self._peak_bytes = self._live_bytes
            self._at_peak = list(self._blocks.values())

    def _rename(self, tensor: torch.Tensor, kind: str, only_from: tuple[str, ...]) -> None:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.kind in only_from:
            block.kind = kind

    def _on_save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._rename(tensor, "activations", ("temporary",))
        return tensor.detach()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._register(parameter.grad, "gradients")
            self._rename(parameter.grad, "gradients", ("temporary", "activations"))


def _by_kind(blocks: Iterable[_Block]) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for block in blocks:
        found[block.kind] += block.num_bytes
    return found


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel reads to read a whole tensor; repeated elements of an expanded tensor count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return every tensor of an optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]

"""Count how often the host waits for the device. Each such wait leaves the device idle until new work arrives.

On a GPU, PyTorch itself reports each wait. On a CPU, operations that would wait on a GPU are counted: values read back,
results whose size depends on values, and tensors made from Python numbers, which are copied to the device. All tensors
then count as the device's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators, without overload, whose result's shape or value the host must know before it can continue.
_WAITING = frozenset(
    {
        *("_local_scalar_dense", "equal", "is_nonzero", "lift_fresh"),
        *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    }
)
_WAITING_FOR_MASKS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
# Methods that copy a tensor to the host; for a CPU tensor they call no operator.
_READING = {torch.Tensor.tolist: "tolist", torch.Tensor.cpu: "cpu", torch.Tensor.numpy: "numpy"}
_GPU_MESSAGE = "synchronizing CUDA operation"


def count_host_syncs(function: Callable[[], Any], device: torch.device | None = None) -> dict[str, int]:
    """Call `function`; return the number of its waits by operator, or on a GPU by line of code.

    `device` is the one that it computes on; unset: the CPU.
    """
    if device is not None and device.type == "cuda":
        return _count_on_gpu(function)
    found: Counter[str] = Counter()
    with _Operators(found) as operators, _Methods(found, operators):
        function()
    return dict(found)


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found
        self.is_counting = True

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        name = operator.overloadpacket.__name__
        if self.is_counting and _waits(name, arguments, keywords):
            self.found[name] += 1
        return operator(*arguments, **keywords)


class _Methods(TorchFunctionMode):
    def __init__(self, found: Counter[str], operators: _Operators) -> None:
        super().__init__()
        self.found = found
        self.operators = operators

    def __torch_function__(
        self, method: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        name = _READING.get(method)
        if name is None:
            return method(*arguments, **(keywords or {}))
        self.found[name] += 1
        self.operators.is_counting = False  # the operators it calls belong to the same wait
        try:
            return method(*arguments, **(keywords or {}))
        finally:
            self.operators.is_counting = True


def _waits(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if name in _WAITING_FOR_MASKS:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    if name == "repeat_interleave":
        return keywords.get("output_size") is None
    return name in _WAITING


def _count_on_gpu(function: Callable[[], Any]) -> dict[str, int]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return dict(Counter(f"{entry.filename}:{entry.lineno}" for entry in caught if _GPU_MESSAGE in str(entry.message)))

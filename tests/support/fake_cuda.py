"""A pretended GPU: tensors on it have a device, a shape, strides and a type, but no values, so no driver is needed.

It builds on PyTorch's FakeTensorMode, which raises an error when tensors of two devices meet and lets autocast treat
the tensors as CUDA's. Where the program asks for values (a number, or the size of a search's result) it gets made-up
ones, and the line that asked is counted: with a real GPU the host waits there. The autograd engine needs a driver, so
`backward()` walks the graph here, node by node.

It sees neither values nor several ranks (tests/support/pretended does), real kernels, memory and streams. PyTorch replaces its CUDA device guard
for good, so use it in a process of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.cuda.amp import common
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROJECT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
FOUND = 24  # how many elements a search finds
# Their result's size depends on values, so the host waits for it.
_SEARCHES = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount", "nms")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # they search when an index is a boolean mask
# FakeTensorMode does not know them. They change their arguments in place.
_IN_PLACE = ("_fused_sgd_", "_fused_adamw_", "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
_KERNELS = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class FakeGpu:
    """Pretend in a `with` block that this process has one GPU, the device GPU.

    `waits` counts where the host would wait for the GPU, as "file function: operator". `operators` counts what ran on
    the GPU. Reading a number gives the next of `answers`; without one FOUND for an integer,
    which may be a size, `reads` for a float, and False for a bool.
    """

    def __init__(self, *, has_bf16: bool = True, reads: float = 0.0) -> None:
        self.has_bf16 = has_bf16
        self.reads = reads
        self.waits: Counter[str] = Counter()
        self.operators: Counter[Any] = Counter()
        self.answers: Iterator[float] = iter(())
        self.pinned: list[Any] = []  # tensors in page-locked memory, from which copies do not wait
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeGpu:
        stream = SimpleNamespace(wait_stream=lambda _: None)
        event = SimpleNamespace(
            record=lambda *_: None, query=lambda: False, synchronize=lambda: self.note_wait("an earlier event")
        )
        cuda: dict[str, Any] = {
            "Stream": lambda *_: stream,
            "Event": lambda **_: event,
            "current_stream": lambda *_: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "current_device": lambda: GPU.index,
            "is_bf16_supported": lambda including_emulation=True: self.has_bf16,
        }
        patches: list[Any] = [mock.patch.object(torch.cuda, name, value) for name, value in cuda.items()]
        patches += [
            mock.patch.object(common, "amp_definitely_not_available", return_value=False),
            mock.patch.object(torch.Tensor, "record_stream", lambda tensor, _: require_gpu(tensor)),
            mock.patch.object(FakeTensor, "tolist", lambda tensor: self.read_all(tensor)),
        ]
        for part in (*patches, FakeTensorMode(allow_non_fake_inputs=True), _Operators(self), _Methods(self)):
            self._stack.enter_context(part)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forget(self) -> None:
        self.waits.clear()
        self.operators.clear()

    def without_kernel(self) -> list[str]:
        """Return the names of the operators used for which PyTorch has no CUDA kernel."""
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        names = {operator.name() for operator in self.operators if operator.namespace != "prim"}
        return sorted(name for name in names if not any(has_kernel(name, key) for key in _KERNELS))

    def note_wait(self, operator: str) -> None:
        """Count that the host waits, for the innermost function of the project, else the innermost one outside torch."""
        frame, outside = sys._getframe(1), None
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if PROJECT in file.parents and not {"tests", ".venv", "site-packages"} & {*file.parts}:
                self.waits[f"{file.relative_to(PROJECT)} {frame.f_code.co_name}: {operator}"] += 1
                return
            if outside is None and "torch" not in file.parts and file != Path(__file__).resolve():
                outside = f"{file.name} {frame.f_code.co_name}: {operator}"
            frame = frame.f_back  # type: ignore[assignment]
        self.waits[str(outside)] += 1

    def read(self, tensor: torch.Tensor) -> Any:
        """Return a made-up number for a tensor that holds one."""
        if (number := next(self.answers, None)) is not None:
            return number
        return self.reads if tensor.dtype.is_floating_point else False if tensor.dtype == torch.bool else FOUND

    def read_all(self, tensor: torch.Tensor) -> Any:
        """Do what `tensor.tolist()` does: read all numbers at once."""
        if tensor.device == GPU:
            self.note_wait("tolist")
        numbers = np.array([self.read(tensor) for _ in range(tensor.numel())], object)
        return numbers.reshape(tuple(tensor.shape)).tolist()


def require_gpu(*values: Any) -> None:
    """Raise AssertionError unless all tensors lie on the GPU."""
    astray = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device != GPU]
    assert not astray, f"not on the GPU: {[tuple(tensor.shape) for tensor in astray]}"


class _Operators(TorchDispatchMode):
    """Looks at every operator below autograd."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu, name = kwargs or {}, self.gpu, operator.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            self._note_transfer(name, args, kwargs)
        if not any(tensor.device == GPU for tensor in tensors):
            with contextlib.suppress(DataDependentOutputException):
                return operator(*args, **kwargs)
            return gpu.read(args[0])  # a number that was copied to the host
        gpu.operators[operator] += 1
        if name in _IN_PLACE:
            require_gpu(tensors)
            return args[0] if name == "_amp_update_scale_" else None
        if name == "_local_scalar_dense":
            gpu.note_wait("item")
            return gpu.read(args[0])
        if name in _SEARCHES:
            gpu.note_wait(name)
            size = (FOUND, args[0].dim()) if name == "nonzero" else (FOUND,)
            return torch.empty(size, dtype=torch.int64, device=GPU)
        masks = [part for part in args[1] if part is not None and part.dtype == torch.bool] if name in _INDEXING else []
        if masks:
            gpu.note_wait("boolean mask")
        elif name == "equal" or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            gpu.note_wait(name)
        if masks and name == "index":
            return torch.empty(FOUND, *args[0].shape[masks[0].dim() :], dtype=args[0].dtype, device=GPU)
        return operator(*args, **kwargs)

    def _note_transfer(self, name: str, args: Any, kwargs: Any) -> None:
        source, target = args[0], kwargs.get("device") or args[0].device
        if name == "copy_":
            source, target = args[1], args[0].device
        # Copies to the host that do not wait go to page-locked memory, which PyTorch allocates.
        is_pinned = source.device == GPU or any(source is tensor for tensor in self.gpu.pinned)
        is_asynchronous = kwargs.get("non_blocking") and is_pinned
        if source.device != torch.device(target) and not is_asynchronous:
            self.gpu.note_wait("to the host" if source.device == GPU else "from the host")


class _Methods(TorchFunctionMode):
    """Replaces the methods of tensors that need a driver or values."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, method: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if method is torch.Tensor.backward:
            return walk_backward(args[0])
        if method is torch.Tensor.__deepcopy__:
            return _deepcopy(*args)
        if method is torch.Tensor.pin_memory:
            self.gpu.pinned.append(args[0].clone())
            return self.gpu.pinned[-1]
        if method is torch.Tensor.numpy and isinstance(args[0], FakeTensor):
            assert args[0].device != GPU, "a tensor on the GPU has no .numpy()"
            return np.zeros(tuple(args[0].shape), str(args[0].dtype).removeprefix("torch."))
        return method(*args, **kwargs)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        twin = tensor.detach().clone() if tensor.device == GPU else tensor
        is_weight = isinstance(tensor, torch.nn.Parameter) and twin is not tensor
        memo[id(tensor)] = torch.nn.Parameter(twin, tensor.requires_grad) if is_weight else twin
    return memo[id(tensor)]


@torch.no_grad()
def walk_backward(root: torch.Tensor) -> None:
    """Do what `root.backward()` does: call each node of the graph once all gradients of its outputs are there."""
    missing: Counter[Any] = Counter()  # gradients that a node still waits for
    stack, seen = [root.grad_fn], {root.grad_fn}
    while stack:
        for child, _ in stack.pop().next_functions:  # type: ignore[union-attr]
            missing[child] += 1
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    gradients: dict[Any, list[Any]] = {root.grad_fn: [torch.ones_like(root)]}
    ready = [root.grad_fn]
    while ready:
        node: Any = ready.pop()
        results = getattr(node, "apply", node)(*gradients.pop(node))
        results = results if isinstance(results, tuple) else (results,)
        for (child, number), value in zip(node.next_functions, results, strict=False):
            if child is None:
                continue
            outputs = child._input_metadata
            held = gradients.setdefault(child, [None] * len(outputs))
            if value is not None:
                require_gpu(value)
                value = value.sum_to_size(outputs[number].shape).to(outputs[number].dtype)
                held[number] = value if held[number] is None else held[number] + value
            missing[child] -= 1
            if not missing[child]:
                ready.append(child)

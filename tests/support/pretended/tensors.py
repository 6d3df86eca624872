"""Tensors on pretended GPUs: they lie in the host's memory and carry a mark, which gives them their
device.

`PretendedGpu` gives each result its mark, refuses what a GPU refuses, and counts where the host
would wait for the GPU. `Watch` does so for the operators below autograd, too, and in backward
passes.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor
PROJECT = Path(__file__).resolve().parents[3]
COPIES = [0]  # from the host to a GPU, in this process
WAITS: Counter[str] = Counter()  # of the host for a GPU, in this process: "file function: operator"
OPERATORS: Counter[Any] = Counter()  # of a GPU, that `Watch` saw
MARK, _PINNED = "_pretended_gpu", "_pretended_pinned"
HERE = SimpleNamespace(index=0)  # the current device of this process
_NAMES_OF_DEVICE = {"device", "device_type", "map_location"}
# Operators that take tensors of two devices on a GPU, too.
_TAKE_BOTH = {
    *(
        "copy_",
        "to",
        "__getitem__",
        "__setitem__",
        "index_put_",
        "index",
        "set_",
        "__set__",
        "__eq__",
        "__deepcopy__",
    ),
    *(
        "__reduce_ex__",
        "_foreach_copy_",
        "is_set_to",
        "swap_tensors",
        "_has_compatible_shallow_copy_type",
        "type_as",
    ),
    *("_make_subclass", "new_tensor", "__format__", "__repr__"),
}
_TO_HOST = {
    "cpu",
    "item",
    "tolist",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__format__",
    "__repr__",
}
_IN_PLACE = {"copy_", "__setitem__", "index_put_", "set_"}
# Their result's size depends on values, so the host waits for it.
_SEARCHES = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "bincount",
    "nms",
    "equal",
}
# they search when an index is a boolean mask
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_KERNELS = (
    "CUDA",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def is_on_gpu(tensor: object) -> bool:
    """Return whether a value is a tensor on a pretended GPU."""
    return isinstance(tensor, Tensor) and MARK in tensor.__dict__


def mark(value: Any, index: int | None) -> Any:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf.__dict__[MARK] = index
    return value


def gpu_index(value: Any) -> int | None:
    """Return N if `value` names GPU N, else None."""
    if isinstance(value, torch.device):
        return (
            (HERE.index if value.index is None else value.index) if value.type == "cuda" else None
        )
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return int(value[5:] or 0) if ":" in value else HERE.index
    return None


def _names_host(args: Any, kwargs: Any) -> bool:
    named = (*args, kwargs.get("device"))
    if any(
        value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu")
        for value in named
        if isinstance(value, str | torch.device)
    ):
        return True
    others = [value for value in args[1:] if isinstance(value, Tensor)]
    return bool(others) and not is_on_gpu(others[0])  # x.to(other)


def _with_host_for_gpu(
    name: str, args: Any, kwargs: dict[str, Any]
) -> tuple[int | None, list[Any]]:
    """Return the GPU that a call names (None: none), and its arguments with the host instead;
    change `kwargs` likewise.
    """
    target, positional = None, list(args)
    for place, value in enumerate(args):
        index = gpu_index(value) if not isinstance(value, str) or name in ("to", "device") else None
        if index is not None:
            target, positional[place] = index, torch.device("cpu")
        elif name == "to" and place > 0 and is_on_gpu(value):
            target = value.__dict__[MARK]
    for key in _NAMES_OF_DEVICE & kwargs.keys():
        if (index := gpu_index(kwargs[key])) is not None:
            target, kwargs[key] = index, "cpu" if key == "device_type" else torch.device("cpu")
    return target, positional


def _refuse_mixed(name: str, tensors: list[Tensor], index: int) -> None:
    strangers = [
        one
        for one in tensors
        if one.__dict__.get(MARK) != index and (is_on_gpu(one) or one.dim() > 0)
    ]
    if strangers:
        found = [f"{one.__dict__.get(MARK, 'cpu')} {tuple(one.shape)}" for one in strangers]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:{index} and {found} "
            f"in {name} (pretended GPU)"
        )


def note_wait(operator: str) -> None:
    """Count that the host waits, for the innermost function of the project, else the innermost one
    outside torch.
    """
    frame, outside = sys._getframe(1), None
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if PROJECT in file.parents and not {"tests", ".venv", "site-packages"} & {*file.parts}:
            WAITS[f"{file.relative_to(PROJECT)} {frame.f_code.co_name}: {operator}"] += 1
            return
        if outside is None and "torch" not in file.parts and file != Path(__file__).resolve():
            outside = f"{file.name} {frame.f_code.co_name}: {operator}"
        frame = frame.f_back  # type: ignore[assignment]
    WAITS[str(outside)] += 1


def without_kernel() -> list[str]:
    """Return the names of the `OPERATORS` for which PyTorch has no CUDA kernel."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {operator.name() for operator in OPERATORS if operator.namespace != "prim"}
    return sorted(name for name in names if not any(has_kernel(name, key) for key in _KERNELS))


class Watch(TorchDispatchMode):
    """Counts every operator of a GPU and what it waits for; backward passes are watched as forward
    passes are.
    """

    is_on = False

    def __enter__(self) -> Watch:
        Watch.is_on = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Watch.is_on = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, operator.overloadpacket.__name__
        with torch._C.DisableTorchFunction():
            # not what was copied before: it grows
            given = args[:1] if name == "__deepcopy__" else (args, kwargs)
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            index = next((one.__dict__[MARK] for one in tensors if is_on_gpu(one)), None)
            result = operator(*args, **kwargs)
            if index is None:
                return result
            OPERATORS[operator] += 1
            if name == "_local_scalar_dense":
                note_wait("item")
            elif name in _SEARCHES or (
                name == "repeat_interleave" and kwargs.get("output_size") is None
            ):
                note_wait(name)
            elif name in _INDEXING and any(
                part is not None and part.dtype == torch.bool for part in args[1]
            ):
                note_wait("boolean mask")
            changed = {id(tensor) for tensor in tensors}  # in place, on their own device
            mark([leaf for leaf in tree_leaves(result) if id(leaf) not in changed], index)
            return result


class PretendedGpu(TorchFunctionMode):
    """Gives the tensors of this thread their devices."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if function is torch.device or name == "_parse_to":
            return function(*args, **kwargs)
        if name == "backward" and Watch.is_on:
            with self:  # the nodes that are written in Python see it, too
                options: dict[str, bool] = {"allow_unreachable": True, "accumulate_grad": True}
                return _engine_run_backward(
                    args, (torch.ones_like(args[0]),), False, False, (), **options
                )
        with torch._C.DisableTorchFunction():  # what follows asks tensors themselves
            # not what was copied before: it grows
            given = args[:1] if name == "__deepcopy__" else (args, kwargs)
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            index = next((one.__dict__[MARK] for one in tensors if is_on_gpu(one)), None)
            if name in ("__get__", "__set__"):
                return _attribute(function, name, args, index)
            if name in _ANSWERS:
                return _ANSWERS[name](args[0], index)
            target, positional = _with_host_for_gpu(name, args, kwargs)
            if name in ("to", "cpu") and (
                target is not None or name == "cpu" or _names_host(args, kwargs)
            ):
                return _moved(function(*positional, **kwargs), args[0], target, kwargs)
            if index is not None and name not in _TAKE_BOTH and name not in _TO_HOST:
                _refuse_mixed(name, tensors, index)
            if (
                name == "binary_cross_entropy"
                and index is not None
                and torch.is_autocast_enabled("cpu")
            ):
                raise RuntimeError("binary_cross_entropy is unsafe to autocast (pretended GPU)")
            if name == "tolist" and index is not None:
                note_wait("tolist")
            elif name in ("tensor", "as_tensor") and target is not None:
                note_wait("from the host")
            elif (
                name == "copy_"
                and is_on_gpu(args[0]) != is_on_gpu(args[1])
                and not kwargs.get("non_blocking")
            ):
                note_wait("from the host" if is_on_gpu(args[0]) else "to the host")
            result = function(*positional, **kwargs)
        if name in _TO_HOST or name in _IN_PLACE:
            return result
        if target is not None:
            return mark(result, target)
        if name in ("__deepcopy__", "__getitem__", "index"):
            return mark(result, args[0].__dict__[MARK]) if is_on_gpu(args[0]) else result
        if index is not None and not (name.endswith("_like") and _names_host(args, kwargs)):
            return mark(result, index)
        return result


def _attribute(function: Any, name: str, args: Any, index: int | None) -> Any:
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "__set__":
        function(*args)
        if owner == "data" and is_on_gpu(args[1]):
            mark(args[0], args[1].__dict__[MARK])
        return None
    if owner == "device":
        return torch.device("cuda", index) if index is not None else function(*args)
    if owner in ("is_cuda", "is_cpu"):
        return (index is not None) == (owner == "is_cuda")
    result = function(*args)
    return (
        mark(result, index) if index is not None and isinstance(result, Tensor | tuple) else result
    )


def _moved(result: Tensor, tensor: Tensor, target: int | None, kwargs: dict[str, Any]) -> Tensor:
    """Return the result of `tensor.to(...)` on the GPU `target`, or on the host."""
    moves = (target is not None) != is_on_gpu(tensor)
    if moves and not kwargs.get("non_blocking"):
        note_wait("to the host" if target is None else "from the host")
    elif moves and target is not None and _PINNED not in tensor.__dict__ and tensor.numel():
        raise RuntimeError(
            f"copies {tuple(tensor.shape)} from pageable memory: the host would wait (pretended "
            "GPU)"
        )
    COPIES[0] += moves and target is not None
    if moves and result is tensor:
        result = result.clone(memory_format=torch.preserve_format)
    result.__dict__.pop(MARK, None)
    return mark(result, target) if target is not None else result


def _refuse_numpy(tensor: Tensor, index: int | None) -> Any:
    if index is not None:
        raise TypeError(
            f"can't convert cuda:{index} device type tensor to numpy. Use Tensor.cpu() first "
            "(pretended GPU)"
        )
    return tensor.numpy()


def _pinned(tensor: Tensor, index: int | None) -> Tensor:
    assert index is None, "cannot pin a tensor of the GPU"
    twin = tensor.clone()
    twin.__dict__[_PINNED] = True
    return twin


_ANSWERS = {
    "numpy": _refuse_numpy,
    "__array__": _refuse_numpy,
    "pin_memory": _pinned,
    "is_pinned": lambda tensor, index: _PINNED in tensor.__dict__,
    "get_device": lambda tensor, index: -1 if index is None else index,
    "cuda": lambda tensor, index: (
        tensor if index is not None else _moved(tensor, tensor, HERE.index, {})
    ),
}

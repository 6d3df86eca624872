"""Pretended GPUs that compute: whole commands run their CUDA branches, with real values, on a machine without a GPU.

    PRETEND_GPUS=2 PYTHONPATH=tests/support/pretended bash train_ddp.sh 2 ...

Tensors stay in the host's memory. Those that the program put on a GPU carry a mark. With the mark `tensor.device` is
cuda:N, `is_cuda` is true and `.numpy()` raises; an operator that meets tensors of two devices raises, as on a GPU. Results
of marked tensors are marked. NCCL is gloo; autocast and GradScaler of CUDA are those of the CPU. A training computes the
same bits as on the CPU.

What a real GPU would do in silence raises here, because it is always a mistake in this project: a copy from pageable
memory that is meant not to wait, `torch.load` without `map_location` or to another rank's GPU, a GradScaler for the CPU,
DDP with another device than the process's own, a collective of what NCCL does not send. Autocast for the CPU casts nothing.

It does not see CUDA kernels and their types, streams and races, memory, NCCL, cuDNN, speed, or where the host waits
(`tests/support/fake_cuda.py` counts those). In backward passes the mode is off, so mixed devices are not seen there.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphs import PretendedGraph, capture

Tensor = torch.Tensor
GIB = 2**30
COPIES = [0]  # from the host to a GPU, in this process
_MARK, _PINNED = "_pretended_gpu", "_pretended_pinned"
_HERE = SimpleNamespace(index=0)  # the current device of this process
_NAMES_OF_DEVICE = {"device", "device_type", "map_location"}
# Operators that take tensors of two devices on a GPU, too.
_TAKE_BOTH = {
    *("copy_", "to", "__getitem__", "__setitem__", "index_put_", "index", "set_", "__set__", "__eq__", "__deepcopy__"),
    *("__reduce_ex__", "_foreach_copy_", "is_set_to", "swap_tensors", "_has_compatible_shallow_copy_type", "type_as"),
    *("_make_subclass", "new_tensor", "__format__", "__repr__"),
}
_TO_HOST = {"cpu", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__format__", "__repr__"}
_IN_PLACE = {"copy_", "__setitem__", "index_put_", "set_"}
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
NCCL_TYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def is_on_gpu(tensor: object) -> bool:
    """Return whether a value is a tensor on a pretended GPU."""
    return isinstance(tensor, Tensor) and _MARK in tensor.__dict__


def _mark(value: Any, index: int | None) -> Any:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf.__dict__[_MARK] = index
    return value


def _gpu_index(value: Any) -> int | None:
    """Return N if `value` names GPU N, else None."""
    if isinstance(value, torch.device):
        return (_HERE.index if value.index is None else value.index) if value.type == "cuda" else None
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return int(value[5:] or 0) if ":" in value else _HERE.index
    return None


def _names_host(args: Any, kwargs: Any) -> bool:
    named = (*args, kwargs.get("device"))
    if any(value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu") for value in named
           if isinstance(value, str | torch.device)):  # fmt: skip
        return True
    others = [value for value in args[1:] if isinstance(value, Tensor)]
    return bool(others) and not is_on_gpu(others[0])  # x.to(other)


def _with_host_for_gpu(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[int | None, list[Any]]:
    """Return the GPU that a call names (None: none), and its arguments with the host instead; change `kwargs` likewise."""
    target, positional = None, list(args)
    for place, value in enumerate(args):
        index = _gpu_index(value) if not isinstance(value, str) or name in ("to", "device") else None
        if index is not None:
            target, positional[place] = index, torch.device("cpu")
        elif name == "to" and place > 0 and is_on_gpu(value):
            target = value.__dict__[_MARK]
    for key in _NAMES_OF_DEVICE & kwargs.keys():
        if (index := _gpu_index(kwargs[key])) is not None:
            target, kwargs[key] = index, "cpu" if key == "device_type" else torch.device("cpu")
    return target, positional


def _refuse_mixed(name: str, tensors: list[Tensor], index: int) -> None:
    strangers = [one for one in tensors if one.__dict__.get(_MARK) != index and (is_on_gpu(one) or one.dim() > 0)]
    if strangers:
        found = [f"{one.__dict__.get(_MARK, 'cpu')} {tuple(one.shape)}" for one in strangers]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:{index} and {found} in {name} (pretended GPU)"
        )


class _PretendedGpu(TorchFunctionMode):
    """Gives the tensors of this thread their devices."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if function is torch.device or name == "_parse_to":
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # what follows asks tensors themselves
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            index = next((one.__dict__[_MARK] for one in tensors if is_on_gpu(one)), None)
            if name in ("__get__", "__set__"):
                return _attribute(function, name, args, index)
            if name in _ANSWERS:
                return _ANSWERS[name](args[0], index)
            target, positional = _with_host_for_gpu(name, args, kwargs)
            if name in ("to", "cpu") and (target is not None or name == "cpu" or _names_host(args, kwargs)):
                return _moved(function(*positional, **kwargs), args[0], target, kwargs)
            if index is not None and name not in _TAKE_BOTH and name not in _TO_HOST:
                _refuse_mixed(name, tensors, index)
            result = function(*positional, **kwargs)
        if name in _TO_HOST or name in _IN_PLACE:
            return result
        if target is not None:
            return _mark(result, target)
        if name in ("__deepcopy__", "__getitem__", "index"):
            return _mark(result, args[0].__dict__[_MARK]) if is_on_gpu(args[0]) else result
        if index is not None and not (name.endswith("_like") and _names_host(args, kwargs)):
            return _mark(result, index)
        return result


def _attribute(function: Any, name: str, args: Any, index: int | None) -> Any:
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "__set__":
        function(*args)
        if owner == "data" and is_on_gpu(args[1]):
            _mark(args[0], args[1].__dict__[_MARK])
        return None
    if owner == "device":
        return torch.device("cuda", index) if index is not None else function(*args)
    if owner in ("is_cuda", "is_cpu"):
        return (index is not None) == (owner == "is_cuda")
    result = function(*args)
    return _mark(result, index) if index is not None and isinstance(result, Tensor | tuple) else result


def _moved(result: Tensor, tensor: Tensor, target: int | None, kwargs: dict[str, Any]) -> Tensor:
    """Return the result of `tensor.to(...)` on the GPU `target`, or on the host."""
    moves = (target is not None) != is_on_gpu(tensor)
    if (
        moves
        and target is not None
        and kwargs.get("non_blocking")
        and _PINNED not in tensor.__dict__
        and tensor.numel()
    ):
        raise RuntimeError(f"copies {tuple(tensor.shape)} from pageable memory: the host would wait (pretended GPU)")
    COPIES[0] += moves and target is not None
    if moves and result is tensor:
        result = result.clone(memory_format=torch.preserve_format)
    result.__dict__.pop(_MARK, None)
    return _mark(result, target) if target is not None else result


def _refuse_numpy(tensor: Tensor, index: int | None) -> Any:
    if index is not None:
        raise TypeError(
            f"can't convert cuda:{index} device type tensor to numpy. Use Tensor.cpu() first (pretended GPU)"
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
    "cuda": lambda tensor, index: tensor if index is not None else _moved(tensor, tensor, _HERE.index, {}),
}


# -- SyncBatchNorm's kernels, by their formulas: backward passes call them, too, where the mode is off --------------------


def _over_channels(values: Tensor, row: Tensor) -> Tensor:
    return row.view(1, -1, *[1] * (values.dim() - 2))


def _stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims, wide = [0, *range(2, values.dim())], values.float()
    return wide.mean(dims), (wide.var(dims, unbiased=False) + eps).rsqrt()


def _gather(
    values: Tensor,
    means: Tensor,
    invstds: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert {tensor.dtype for tensor in (means, invstds, counts)} == {torch.float32}
    counts = counts.view(-1, 1)
    total = counts.sum()
    center = (means * counts).sum(0) / total
    variance = ((invstds.pow(-2) - eps + (means - center) ** 2) * counts).sum(0) / total
    if mean is not None and var is not None:
        mean.lerp_(center, momentum)
        var.lerp_(variance * total / (total - 1), momentum)
    return center, (variance + eps).rsqrt()


def _elemt(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    out = (values.float() - _over_channels(values, mean)) * _over_channels(values, invstd)
    if weight is not None and bias is not None:
        out = out * _over_channels(values, weight) + _over_channels(values, bias)
    return out.to(values.dtype)


def _backward_reduce(
    gradient: Tensor, values: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, ...]:
    assert gradient.dtype == values.dtype
    dims, centred = [0, *range(2, values.dim())], values.float() - _over_channels(values, mean)
    sum_dy, sum_dy_xmu = gradient.float().sum(dims), (gradient.float() * centred).sum(dims)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def _backward_elemt(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32, "the kernel reads the counts as int32"
    total, centred = counts.sum().float(), values.float() - _over_channels(values, mean)
    part = _over_channels(values, sum_dy / total) + centred * _over_channels(values, invstd**2 * sum_dy_xmu / total)
    scale = invstd if weight is None else invstd * weight
    return ((gradient.float() - part) * _over_channels(values, scale)).to(values.dtype)


_BATCH_NORM = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}


def _as_kernel(function: Any) -> Any:
    def call(*tensors: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = function(*tensors, **kwargs)
        return _mark(result, tensors[0].__dict__[_MARK]) if is_on_gpu(tensors[0]) else result

    return call


# -- torch.cuda -----------------------------------------------------------------------------------------------------------


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", _HERE.index)

    def wait_stream(self, *_: Any) -> None:
        """Everything has happened already."""

    wait_event = synchronize = wait_stream

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at_s = 0.0

    def record(self, *_: Any) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other.at_s - self.at_s) * 1000

    def wait(self, *_: Any) -> None:
        """Everything has happened already."""

    synchronize = wait

    def query(self) -> bool:
        return True


class _Nothing(contextlib.ContextDecorator):
    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _record_stream(tensor: Tensor, stream: Any) -> None:
    assert is_on_gpu(tensor), "record_stream of a tensor that is not on the GPU"


def _returning(value: Any) -> Any:
    """Return a new function each time: torch.compile refuses one function under two names."""
    return lambda *_, **__: value


def _cuda_functions(count: int) -> dict[str, Any]:
    facts = SimpleNamespace(name="Pretended GPU", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132)
    facts.__dict__.update(L2_cache_size=50 * 2**20, max_threads_per_multi_processor=2048, is_integrated=False, uuid="0")
    facts.__dict__.update(gcnArchName="", warp_size=32)
    state = torch.zeros(16, dtype=torch.uint8)
    stats = {"allocated_bytes.all.peak": GIB, "reserved_bytes.all.peak": GIB, "num_ooms": 0, "num_alloc_retries": 0}
    fixed: dict[str, Any] = {"is_initialized": True, "is_current_stream_capturing": False, "is_bf16_supported": True}
    fixed |= {"get_device_name": facts.name, "get_device_capability": (9, 0), "get_device_properties": facts}
    fixed |= {"get_arch_list": ["sm_90"], "can_device_access_peer": True, "mem_get_info": (70 * GIB, 80 * GIB)}
    fixed |= {
        "memory_summary": "",
        "utilization": 50,
        "temperature": 40,
        "is_available": count > 0,
        "device_count": count,
    }
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    nothing = (
        *("init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all"),
        *("set_rng_state", "set_rng_state_all", "reset_peak_memory_stats"),
    )

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else _gpu_index(torch.device(device))
        if index is None or index >= count:
            raise RuntimeError(f"invalid device ordinal {device} (pretended GPUs: {count})")
        _HERE.index = index

    return {
        **{name: _returning(None) for name in nothing},
        **{name: _returning(GIB) for name in memory},
        **{name: _returning(value) for name, value in fixed.items()},
        "CUDAGraph": PretendedGraph,
        "graph": capture,
        "graph_pool_handle": _returning((0, 0)),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _Nothing,
        "device": _Nothing,
        "set_device": set_device,
        "current_device": lambda: _HERE.index,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "memory_stats": lambda *_: dict(stats),
        "get_rng_state": lambda *_: state.clone(),
        "get_rng_state_all": lambda: [state.clone()] * count,
    }


def _accelerator_functions(cuda: dict[str, Any]) -> dict[str, Any]:
    same = {name: name for name in ("is_available", "device_count", "synchronize", "current_stream")}
    same |= {"current_device_index": "current_device", "set_device_index": "set_device"}
    functions = {name: lambda *args, its=its, **_: cuda[its](*args) for name, its in same.items()}
    return {**functions, "current_accelerator": _returning(torch.device("cuda"))}


# -- autocast, DDP, files -------------------------------------------------------------------------------------------------


class _Autocast(torch.autocast):
    def __init__(self, device_type: Any, *args: Any, **kwargs: Any) -> None:
        if not str(device_type).startswith("cuda"):  # tensors of the GPU stay as they are
            kwargs["enabled"] = False
        super().__init__("cpu", *args, **kwargs)


class _Scaler(torch.amp.GradScaler):
    def __init__(self, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        enabled = kwargs.get("enabled", True)
        assert str(device).startswith("cuda") or not enabled, f"a GradScaler for {device} (pretended GPU)"
        super().__init__("cpu", *args, **kwargs)


class _Profile(torch.profiler.profile):
    def __init__(self, *, activities: Any = None, **kwargs: Any) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)


def require_sendable(*values: Any) -> None:
    """Raise AssertionError unless NCCL can send all tensors: on a GPU, contiguous, of a type it knows."""
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            has_marks = torch._C._len_torch_function_stack() > 0  # not in a backward pass
            assert is_on_gpu(tensor) or not has_marks, f"not on the GPU: {tuple(tensor.shape)} (pretended GPU)"
            assert tensor.is_contiguous(), f"not contiguous: {tuple(tensor.shape)}, strides {tensor.stride()}"
            assert tensor.dtype in NCCL_TYPES, f"NCCL does not send {tensor.dtype} (pretended GPU)"


def _checked(collective: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if dist.get_backend(group) == "nccl":
            require_sendable(args, kwargs)
        return collective(*args, **kwargs)

    return call


def _patch_distributed() -> None:
    start, new_group, build = dist.init_process_group, dist.new_group, DistributedDataParallel.__init__

    def backend_of(name: str | None) -> str | None:
        return "gloo" if name and "nccl" in name else name

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        kwargs.pop("pg_options", None)
        if backend and "nccl" in backend:
            dist.get_backend = lambda *_: "nccl"
        start(backend_of(backend), *args, **kwargs)

    def made_group(*args: Any, backend: str | None = None, device_id: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        kwargs["backend"] = backend_of(backend)
        return new_group(*args, **kwargs)

    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        devices = {weight.device for weight in module.parameters()}
        if devices != {torch.device("cpu")}:
            assert devices == {torch.device("cuda", _HERE.index)}, f"DDP over {devices}, but this is GPU {_HERE.index}"
            assert device_ids == [_HERE.index], f"DDP's device_ids are {device_ids}, but this is GPU {_HERE.index}"
        build(self, module, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    dist.new_group = dist.distributed_c10d.new_group = made_group
    dist.is_nccl_available = lambda: True
    for name in _COLLECTIVES:
        setattr(dist, name, _checked(getattr(dist, name)))
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign,assignment]


def _patch_files() -> None:
    load, load_script = torch.load, torch.jit.load

    def load_to(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        in_memory = isinstance(file, io.BytesIO)  # what pickle holds of a tensor
        assert in_memory or map_location, f"torch.load({file}) without map_location goes to the GPU that saved it"
        index = _gpu_index(map_location)
        assert index in (None, _HERE.index), f"torch.load({file}) to GPU {index}, but this is GPU {_HERE.index}"
        value = load(file, map_location="cpu" if index is not None else map_location, **kwargs)
        return value if index is None else _mark(value, index)

    def load_script_to(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        return load_script(file, "cpu" if _gpu_index(map_location) is not None else map_location, **kwargs)

    torch.load, torch.jit.load = load_to, load_script_to  # type: ignore[assignment]


def switch_on(count: int) -> None:
    """Give this process `count` pretended GPUs. Call it once, as soon as torch is imported."""
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().daemon:
        return  # a loader's worker
    cuda = _cuda_functions(count)
    for module, functions in ((torch.cuda, cuda), (torch.accelerator, _accelerator_functions(cuda))):
        for name, function in functions.items():
            setattr(module, name, function)
    torch.cuda.nccl.version = lambda: (2, 29, 0)
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = _Autocast  # type: ignore[misc]
    torch.amp.GradScaler = torch.amp.grad_scaler.GradScaler = _Scaler  # type: ignore[misc]
    torch.profiler.profile = _Profile  # type: ignore[misc]
    _patch_distributed()
    _patch_files()
    run_thread, new_parameter = threading.Thread.run, torch.nn.Parameter.__new__

    def run_in_mode(self: threading.Thread) -> None:
        with _PretendedGpu():
            run_thread(self)

    def marked_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter = new_parameter(cls, data, requires_grad)
        return _mark(parameter, data.__dict__[_MARK]) if is_on_gpu(data) else parameter

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
    torch.nn.Parameter.__new__ = marked_parameter  # type: ignore[method-assign,assignment]
    torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign,assignment]
    for name, kernel in _BATCH_NORM.items():
        setattr(torch, name, _as_kernel(kernel))
    _PretendedGpu().__enter__()

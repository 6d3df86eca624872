"""Pretended GPUs that compute: whole commands run their CUDA branches, with real values, on a
machine without a GPU.

    PRETEND_GPUS=2 PYTHONPATH=tests/support/pretended/start bash train_ddp.sh 2 ...

Tensors stay in the host's memory. Those that the program put on a GPU carry a mark. With the mark
`tensor.device` is cuda:N, `is_cuda` is true and `.numpy()` raises; an operator that meets tensors
of two devices raises, as on a GPU. Results of marked tensors are marked. NCCL is gloo; autocast and
GradScaler of CUDA are those of the CPU. A training computes the same bits as on the CPU.

What a real GPU would do in silence raises here, because it is always a mistake in this project: a
copy from pageable memory that is meant not to wait, `torch.load` without `map_location` or to
another rank's GPU, a GradScaler for the CPU, DDP with another device than the process's own, a
collective of what NCCL does not send. Autocast for the CPU casts nothing.

`tensors.WAITS` counts where the host would wait; in a `with tensors.Watch()` block each operator is
looked at, too. It does not see CUDA kernels and their types, streams and races, memory, NCCL, cuDNN
or speed. Outside of that block the mode is off in backward passes, so mixed devices are not seen
there.
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
from torch.utils._pytree import tree_leaves

from tests.support.pretended.batch_norm import BATCH_NORM, as_kernel
from tests.support.pretended.graphs import PretendedGraph, capture
from tests.support.pretended.tensors import (
    HERE,
    MARK,
    PretendedGpu,
    gpu_index,
    is_on_gpu,
    mark,
    note_wait,
)

Tensor = torch.Tensor
GIB = 2**30
_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "gather",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)
NCCL_TYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


# -- torch.cuda ------------------------------------------------------------------------------------


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", HERE.index)

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

    def synchronize(self) -> None:
        note_wait("an earlier event")

    def query(self) -> bool:
        return True


def _record_stream(tensor: Tensor, stream: Any) -> None:
    assert is_on_gpu(tensor), "record_stream of a tensor that is not on the GPU"


def _returning(value: Any) -> Any:
    """Return a new function each time: torch.compile refuses one function under two names."""
    return lambda *_, **__: value


def _cuda_functions(count: int) -> dict[str, Any]:
    facts = SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132
    )
    facts.__dict__.update(
        L2_cache_size=50 * 2**20,
        max_threads_per_multi_processor=2048,
        is_integrated=False,
        uuid="0",
    )
    facts.__dict__.update(gcnArchName="", warp_size=32)
    state = torch.zeros(16, dtype=torch.uint8)
    stats = {
        "allocated_bytes.all.peak": GIB,
        "reserved_bytes.all.peak": GIB,
        "num_ooms": 0,
        "num_alloc_retries": 0,
    }
    fixed: dict[str, Any] = {
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
    }
    fixed |= {
        "get_device_name": facts.name,
        "get_device_capability": (9, 0),
        "get_device_properties": facts,
    }
    fixed |= {
        "get_arch_list": ["sm_90"],
        "can_device_access_peer": True,
        "mem_get_info": (70 * GIB, 80 * GIB),
    }
    fixed |= {"memory_summary": "", "utilization": 50, "temperature": 40}
    fixed |= {"is_available": count > 0, "device_count": count}
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    nothing = (
        *(
            "init",
            "_lazy_init",
            "synchronize",
            "empty_cache",
            "ipc_collect",
            "manual_seed",
            "manual_seed_all",
        ),
        *("set_rng_state", "set_rng_state_all", "reset_peak_memory_stats"),
    )

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else gpu_index(torch.device(device))
        if index is None or index >= count:
            raise RuntimeError(f"invalid device ordinal {device} (pretended GPUs: {count})")
        HERE.index = index

    return {
        **{name: _returning(None) for name in nothing},
        **{name: _returning(GIB) for name in memory},
        **{name: _returning(value) for name, value in fixed.items()},
        "CUDAGraph": PretendedGraph,
        "graph": capture,
        "graph_pool_handle": _returning((0, 0)),
        "Stream": _Stream,
        "Event": _Event,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "set_device": set_device,
        "current_device": lambda: HERE.index,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "memory_stats": lambda *_: dict(stats),
        "get_rng_state": lambda *_: state.clone(),
        "get_rng_state_all": lambda: [state.clone()] * count,
    }


def _accelerator_functions(cuda: dict[str, Any]) -> dict[str, Any]:
    same = {
        name: name for name in ("is_available", "device_count", "synchronize", "current_stream")
    }
    same |= {"current_device_index": "current_device", "set_device_index": "set_device"}
    functions = {name: lambda *args, its=its, **_: cuda[its](*args) for name, its in same.items()}
    return {**functions, "current_accelerator": _returning(torch.device("cuda"))}


# -- autocast, DDP, files --------------------------------------------------------------------------


class _Autocast(torch.autocast):
    def __init__(self, device_type: Any, *args: Any, **kwargs: Any) -> None:
        if not str(device_type).startswith("cuda"):  # tensors of the GPU stay as they are
            kwargs["enabled"] = False
        super().__init__("cpu", *args, **kwargs)


class _Scaler(torch.amp.GradScaler):
    def __init__(self, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        enabled = kwargs.get("enabled", True)
        assert str(device).startswith("cuda") or not enabled, (
            f"a GradScaler for {device} (pretended GPU)"
        )
        super().__init__("cpu", *args, **kwargs)


class _Profile(torch.profiler.profile):
    def __init__(self, *, activities: Any = None, **kwargs: Any) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)


def require_sendable(*values: Any) -> None:
    """Raise AssertionError unless NCCL can send all tensors: on a GPU, contiguous, of a type it
    knows.
    """
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            has_marks = torch._C._len_torch_function_stack() > 0  # not in a backward pass
            assert is_on_gpu(tensor) or not has_marks, (
                f"not on the GPU: {tuple(tensor.shape)} (pretended GPU)"
            )
            assert tensor.is_contiguous(), (
                f"not contiguous: {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
            assert tensor.dtype in NCCL_TYPES, f"NCCL does not send {tensor.dtype} (pretended GPU)"


def _checked(collective: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        if dist.get_backend(group) == "nccl":
            require_sendable(args, kwargs)
        return collective(*args, **kwargs)

    return call


def _patch_distributed() -> None:
    start, new_group, build = (
        dist.init_process_group,
        dist.new_group,
        DistributedDataParallel.__init__,
    )

    def backend_of(name: str | None) -> str | None:
        return "gloo" if name and "nccl" in name else name

    def init_process_group(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        kwargs.pop("pg_options", None)
        if backend and "nccl" in backend:
            dist.get_backend = lambda *_: "nccl"
        start(backend_of(backend), *args, **kwargs)

    def made_group(
        *args: Any, backend: str | None = None, device_id: Any = None, **kwargs: Any
    ) -> Any:
        kwargs.pop("pg_options", None)
        kwargs["backend"] = backend_of(backend)
        return new_group(*args, **kwargs)

    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        devices = {weight.device for weight in module.parameters()}
        if devices != {torch.device("cpu")}:
            assert devices == {torch.device("cuda", HERE.index)}, (
                f"DDP over {devices}, but this is GPU {HERE.index}"
            )
            assert device_ids == [HERE.index], (
                f"DDP's device_ids are {device_ids}, but this is GPU {HERE.index}"
            )
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
        assert in_memory or map_location, (
            f"torch.load({file}) without map_location goes to the GPU that saved it"
        )
        index = gpu_index(map_location)
        assert index in (None, HERE.index), (
            f"torch.load({file}) to GPU {index}, but this is GPU {HERE.index}"
        )
        value = load(file, map_location="cpu" if index is not None else map_location, **kwargs)
        return value if index is None else mark(value, index)

    def load_script_to(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        return load_script(
            file, "cpu" if gpu_index(map_location) is not None else map_location, **kwargs
        )

    torch.load, torch.jit.load = load_to, load_script_to  # type: ignore[assignment]


def _patch_groups() -> None:
    """Let the lists of tensors that optimizers and clipping group in C++ have the device of their
    marks.
    """
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices).items()
        gpu = torch.device("cuda", HERE.index)
        return {
            (gpu if is_on_gpu(value[0][0][0]) else key[0], key[1]): value for key, value in found
        }

    torch._C._group_tensors_by_device_and_dtype = grouped  # type: ignore[assignment]


def switch_on(count: int) -> None:
    """Give this process `count` pretended GPUs. Call it once, as soon as torch is imported."""
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().daemon:
        return  # a loader's worker
    cuda = _cuda_functions(count)
    for module, functions in (
        (torch.cuda, cuda),
        (torch.accelerator, _accelerator_functions(cuda)),
    ):
        for name, function in functions.items():
            setattr(module, name, function)
    torch.cuda.nccl.version = lambda: (2, 29, 0)
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = _Autocast  # type: ignore[misc]
    torch.amp.GradScaler = torch.amp.grad_scaler.GradScaler = _Scaler  # type: ignore[misc]
    torch.profiler.profile = _Profile  # type: ignore[misc]
    _patch_distributed()
    _patch_files()
    _patch_groups()
    run_thread, new_parameter = threading.Thread.run, torch.nn.Parameter.__new__

    def run_in_mode(self: threading.Thread) -> None:
        with PretendedGpu():
            run_thread(self)

    def marked_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        parameter = new_parameter(cls, data, requires_grad)
        return mark(parameter, data.__dict__[MARK]) if is_on_gpu(data) else parameter

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
    torch.nn.Parameter.__new__ = marked_parameter  # type: ignore[method-assign,assignment]
    torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign,assignment]
    for name, kernel in BATCH_NORM.items():
        setattr(torch, name, as_kernel(kernel))
    PretendedGpu().__enter__()

"""DistributedDataParallel and its options."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}

# PyTorch 2.13 renamed the option.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_FORWARD_SYNC = (
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
)


def wrap_for_ranks(
    module: nn.Module,
    device: torch.device,
    local_rank: int,
    *,
    backend: str | None = None,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    grad_compression: str = "none",
) -> DistributedDataParallel:
    """Wrap a module in DDP, which copies rank 0's weights and buffers to all ranks. Every rank must
    reach this.

    `static_graph` promises that every step uses the same parameters in the same order.
    `find_unused_parameters`: a step may leave some without gradient. `grad_compression` sends and
    sums gradients as bf16 or fp16, half the bytes.
    """
    # the engine averages BatchNorm statistics once per optimizer step
    no_forward_sync: Any = {_FORWARD_SYNC: False}
    wrapped = DistributedDataParallel(
        module,
        device_ids=[local_rank] if backend != "gloo" and device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_bytes(gradient_bytes(module)) / 2**20,
        **no_forward_sync,
    )
    if buffers := [buffer.detach() for buffer in module.buffers()]:
        # Before PyTorch 2.13 the option above also turns off DDP's first broadcast of buffers.
        dist._broadcast_coalesced(wrapped.process_group, buffers, 25 * 2**20, 0)
    if grad_compression != "none":
        wrapped.register_comm_hook(None, _HOOKS[grad_compression])
    settle_buckets(wrapped, device)
    return wrapped


def settle_buckets(wrapped: DistributedDataParallel, device: torch.device) -> None:
    """Let DDP arrange its buckets now. Every rank must reach this.

    It does so once, after the first step, or with `static_graph` after the second. The order in
    which three and more ranks are summed depends on a gradient's place in its bucket: a resumed
    training would differ in its first steps. So two steps with gradients of 0 come first; they
    change neither weights nor buffers.
    """
    module = wrapped.module
    wrapped.module = _SumOfWeights(
        [weight for weight in module.parameters() if weight.requires_grad]
    )
    for _ in range(2):
        wrapped(torch.zeros((), device=device)).backward()
    wrapped.module = module
    wrapped.zero_grad(set_to_none=True)


class _SumOfWeights(nn.Module):
    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight.sum() * factor for weight in self.weights]).sum()


def gradient_bytes(module: nn.Module) -> int:
    """Return the size of all gradients, which each optimizer step sends."""
    return sum(
        weight.numel() * weight.element_size()
        for weight in module.parameters()
        if weight.requires_grad
    )


def bucket_bytes(num_bytes: int) -> int:
    """Return DDP's bucket size for gradients of `num_bytes`: an eighth of them, from 1 to 25 MiB.

    DDP's default of 25 MiB can hold all gradients of a small model: they would be sent only after
    the backward pass.
    """
    return min(max(num_bytes // 8, 2**20), 25 * 2**20)

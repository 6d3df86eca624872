"""Synchronised BatchNorm for the CPU: torch.nn.SyncBatchNorm works on CUDA only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks. Its gradient is summed over ranks too: each rank's input affects every rank's output."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class _GlooSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the batches of all ranks, by a differentiable all-reduce of (sum, sum of squares, count).

    Input and output (B, C, ...). Batches may differ in size between ranks.
    In evaluation, or with one rank, this is plain BatchNorm.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise (B, C, ...). Every rank must reach this in training."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        values = input.float()
        but_channels = (0, *range(2, values.dim()))
        # float64: the variance is a small difference of two large sums.
        count = values.new_full((1,), values.numel() / values.shape[1], dtype=torch.float64)
        sums = [part.sum(but_channels, dtype=torch.float64) for part in (values, values.square())]
        statistics = torch.cat([*sums, count])
        total = _AllReduceSum.apply(statistics)
        channels = values.shape[1]
        mean = total[:channels] / total[-1]
        variance = (total[channels:-1] / total[-1] - mean.square()).clamp(min=0)
        mean, variance = mean.float(), variance.float()
        self._track(mean.detach(), variance.detach(), total[-1].detach().float())
        scale = torch.rsqrt(variance + self.eps)
        shift = -mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        per_channel = (channels, *(1 for _ in values.shape[2:]))
        return torch.addcmul(shift.view(per_channel), values, scale.view(per_channel)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(unbiased, momentum)


class GlooSyncBatchNorm1d(_GlooSyncBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over the batches of all ranks."""


class GlooSyncBatchNorm2d(_GlooSyncBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over the batches of all ranks."""


class GlooSyncBatchNorm3d(_GlooSyncBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over the batches of all ranks."""


_SYNCHRONISED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GlooSyncBatchNorm1d,
    nn.BatchNorm2d: GlooSyncBatchNorm2d,
    nn.BatchNorm3d: GlooSyncBatchNorm3d,
}
# torch.nn.SyncBatchNorm does not know its number of dimensions; here it stands for BatchNorm2d, which YOLO uses.
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    nn.SyncBatchNorm: nn.BatchNorm2d,
    **{new: old for old, new in _SYNCHRONISED.items()},
}


def convert_sync_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm by a synchronised one, in place.

    The Parameter objects stay the same, so an optimizer that was built before stays valid.
    """
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return _swap(module, _SYNCHRONISED)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every synchronised BatchNorm by a plain one, in place, as a deployable file needs."""
    return _swap(module, _PLAIN)


def _swap(module: Any, replacements: dict[type[nn.Module], Any]) -> nn.Module:
    new = next((new for old, new in replacements.items() if isinstance(module, old)), type(module))
    if type(module) is not new:
        swapped = new(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        swapped._parameters = module._parameters
        swapped._buffers = module._buffers
        swapped.training = module.training
        return swapped  # type: ignore[no-any-return]
    for name, child in module.named_children():
        replacement = _swap(child, replacements)
        if replacement is not child:
            setattr(module, name, replacement)
    return module  # type: ignore[no-any-return]

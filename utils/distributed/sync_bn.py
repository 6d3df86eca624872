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


class GlooSyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over the batches of all ranks, by a differentiable all-reduce of (sum, sum of squares, count).

    Input and output (B, C, H, W). Batches may differ in size between ranks.
    In evaluation, or with one rank, this is plain BatchNorm2d.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise (B, C, H, W). Every rank must reach this in training."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        values = input.float()
        # float64: the variance is a small difference of two large sums.
        count = values.new_full((1,), values.numel() / values.shape[1], dtype=torch.float64)
        sums = [values.sum((0, 2, 3), dtype=torch.float64), values.square().sum((0, 2, 3), dtype=torch.float64)]
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
        return torch.addcmul(shift[:, None, None], values, scale[:, None, None]).to(input.dtype)

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


def convert_sync_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm by a synchronised one, in place.

    The Parameter objects stay the same, so an optimizer that was built before stays valid.
    """
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return _swap(module, nn.BatchNorm2d, GlooSyncBatchNorm2d)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every synchronised BatchNorm by a plain BatchNorm2d, in place, as a deployable file needs."""
    return _swap(module, (nn.SyncBatchNorm, GlooSyncBatchNorm2d), nn.BatchNorm2d)


def _swap(module: nn.Module, old: Any, new: type[nn.BatchNorm2d]) -> nn.Module:
    if isinstance(module, old) and type(module) is not new:
        swapped = new(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        swapped._parameters = module._parameters
        swapped._buffers = module._buffers
        swapped.training = module.training
        return swapped
    for name, child in module.named_children():
        replacement = _swap(child, old, new)
        if replacement is not child:
            setattr(module, name, replacement)
    return module

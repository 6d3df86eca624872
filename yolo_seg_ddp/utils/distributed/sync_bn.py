"""Synchronised BatchNorm for the CPU and for CUDA.

torch.nn.SyncBatchNorm works on CUDA only, and the host waits for the GPU three times per layer: it
picks the ranks that have samples with a boolean mask.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from yolo_seg_ddp.utils.distributed import collectives

# Counted for a rank without samples: too small to matter in any sum, but the kernel can divide by
# it.
NO_SAMPLES = 1e-30


class _AllReduceSum(torch.autograd.Function):
    """Sum over ranks.

    Its gradient is summed over ranks too: each rank's input affects every rank's output.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce_sum(tensor).view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce_sum(gradients[0].contiguous())


class _CudaBatchNorm(torch.autograd.Function):
    """BatchNorm over all ranks by PyTorch's CUDA kernels.

    Updates the running statistics, which must be float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        input = _dense(input)
        channels = input.shape[1]
        is_empty = not input.numel()
        if is_empty:
            mean, invstd = torch.zeros_like(running_mean), torch.ones_like(running_mean)
        else:  # mean and 1 / standard deviation (C,), float32 also for a half-precision input
            mean, invstd = torch.batch_norm_stats(input, eps)
        count = mean.new_full((1,), NO_SAMPLES if is_empty else input.numel() // channels)
        of_this_rank = torch.cat([mean, invstd, count])
        of_all = of_this_rank.new_empty(dist.get_world_size() * len(of_this_rank))
        dist.all_gather_into_tensor(of_all, of_this_rank)
        means, invstds, counts = of_all.view(-1, len(of_this_rank)).split(
            [channels, channels, 1], 1
        )
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            input, means, invstds, running_mean, running_var, momentum, eps, counts.flatten()
        )
        ctx.save_for_backward(input, weight, mean, invstd, counts.flatten().int())
        return (
            torch.empty_like(input)
            if is_empty
            else torch.batch_norm_elemt(input, weight, bias, mean, invstd, eps)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, invstd, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if not input.numel():
            zeros = torch.zeros_like(mean)
            if needs_input:
                # The other ranks wait for it.
                dist.all_reduce(torch.cat([zeros, zeros]))
            rest = (zeros if needs_weight else None, zeros if needs_bias else None)
            return torch.zeros_like(input), *rest, None, None, None, None
        # Sums over this rank's pixels: of the gradient, and of gradient * (input - mean); (C,)
        # each.
        sum_gradient, sum_product, weight_gradient, bias_gradient = (
            torch.batch_norm_backward_reduce(
                gradient, input, mean, invstd, weight, needs_input, needs_weight, needs_bias
            )
        )
        input_gradient = None
        if needs_input:
            sums = torch.cat([sum_gradient, sum_product])
            dist.all_reduce(sums)
            sum_gradient, sum_product = sums.chunk(2)
            input_gradient = torch.batch_norm_backward_elemt(
                gradient, input, mean, invstd, weight, sum_gradient, sum_product, counts
            )
        rest = (weight_gradient if needs_weight else None, bias_gradient if needs_bias else None)
        return input_gradient, *rest, None, None, None, None


def _dense(values: torch.Tensor) -> torch.Tensor:
    """Return (B, C, ...) in one of the memory formats that the kernels have."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(values.dim(), torch.contiguous_format)
    return values if values.is_contiguous(memory_format=last) else values.contiguous()


class _SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over the batches of all ranks. Input and output (B, C, ...); B may differ between
    ranks.

    In evaluation, or with one rank, this is plain BatchNorm, but for channels_last on a CPU: there
    PyTorch's kernel adds the pixels of a channel in one float32, so that it is off by 4e-6 to 4e-5
    and one rank would differ from several.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise (B, C, ...). Every rank must reach this in training."""
        is_exact = input.is_cuda or input.is_contiguous()
        if not self.training or (is_exact and not collectives.is_distributed()):
            return super().forward(input)
        tracks = (
            self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
        )
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not input.is_cuda:
            output, mean, variance = self._from_sums(input)
        elif tracks and self.momentum is not None:
            buffers = (self.running_mean, self.running_var, self.momentum)
            return _CudaBatchNorm.apply(input, self.weight, self.bias, *buffers, self.eps)
        else:  # with a momentum of 1 the buffers become the statistics of this batch
            dtype = torch.promote_types(input.dtype, torch.float32)
            mean, variance = torch.zeros(
                2, self.num_features, dtype=dtype, device=input.device
            ).unbind()
            output = _CudaBatchNorm.apply(
                input, self.weight, self.bias, mean, variance, 1.0, self.eps
            )
        if tracks:
            self._track(mean, variance)
        return output

    def _from_sums(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output, the mean and the unbiased variance, by an all-reduce of (sum, sum of
        squares, count).
        """
        values = input.float()
        per_channel = (-1, *(1,) * (values.dim() - 2))
        axes = (0, *range(2, values.dim()))
        # float64: the variance is a small difference of two large sums.
        count = values.new_full((1,), values.numel() / values.shape[1], dtype=torch.float64)
        sums = [
            values.sum(axes, dtype=torch.float64),
            values.square().sum(axes, dtype=torch.float64),
        ]
        statistics = torch.cat([*sums, count])
        total = _AllReduceSum.apply(statistics)
        channels = values.shape[1]
        mean = total[:channels] / total[-1]
        variance = (total[channels:-1] / total[-1] - mean.square()).clamp(min=0)
        count = total[-1].detach().float()
        mean, variance = mean.float(), variance.float()
        scale = torch.rsqrt(variance + self.eps)
        shift = -mean * scale
        if self.affine:
            scale = scale * self.weight
            shift = shift * self.weight + self.bias
        output = torch.addcmul(shift.view(per_channel), values, scale.view(per_channel)).to(
            input.dtype
        )
        return output, mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1))

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        # 1 / count stays a tensor, because reading it would wait for the device.
        share = (
            self.momentum
            if self.momentum is not None
            else 1 / self.get_buffer("num_batches_tracked")
        )
        self.get_buffer("running_mean").lerp_(mean, share)
        self.get_buffer("running_var").lerp_(variance, share)


class SyncBatchNorm1d(_SyncBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over the batches of all ranks."""


class SyncBatchNorm2d(_SyncBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over the batches of all ranks."""


class SyncBatchNorm3d(_SyncBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over the batches of all ranks."""


_SYNCHRONISED: dict[type[nn.Module], Any] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
_PLAIN: dict[type[nn.Module], Any] = {ours: plain for plain, ours in _SYNCHRONISED.items()}


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm by a synchronised one, in place.

    The Parameter objects stay the same, so an optimizer that was built before stays valid.
    """
    return _swap(module, _SYNCHRONISED)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every synchronised BatchNorm by a plain one, in place, as a deployable file needs."""
    return _swap(module, _PLAIN)


def _swap(module: Any, classes: dict[type[nn.Module], Any]) -> nn.Module:
    if new := classes.get(type(module)):
        swapped: nn.Module = new(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
        )
        swapped._parameters = module._parameters
        swapped._buffers = module._buffers
        swapped.training = module.training
        return swapped
    for name, child in module.named_children():
        replacement = _swap(child, classes)
        if replacement is not child:
            setattr(module, name, replacement)
    return module

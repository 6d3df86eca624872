"""The CUDA kernels of torch's SyncBatchNorm, by their formulas.

Backward passes call them, too, where the mode that marks tensors is off.
"""

from typing import Any

import torch

from tests.support.pretended.tensors import MARK, is_on_gpu, mark

Tensor = torch.Tensor


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
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
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
    part = _over_channels(values, sum_dy / total) + centred * _over_channels(
        values, invstd**2 * sum_dy_xmu / total
    )
    scale = invstd if weight is None else invstd * weight
    return ((gradient.float() - part) * _over_channels(values, scale)).to(values.dtype)


BATCH_NORM = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}


def as_kernel(function: Any) -> Any:
    def call(*tensors: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = function(*tensors, **kwargs)
        return mark(result, tensors[0].__dict__[MARK]) if is_on_gpu(tensors[0]) else result

    return call

"""Measure a device's limits and compare a training step with them (the roofline model).

A kernel that does F operations on B bytes takes at least max(F / peak operations per second, B / peak bytes per second)
(Williams, Waterman, Patterson: Roofline, an insightful visual performance model, CACM 52(4), 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from utils.common.devices import Precision

_MATMUL_SIDE = {"cuda": 8192, "cpu": 2048}
_CONVOLUTION = {"cuda": (32, 256, 64), "cpu": (8, 64, 64)}  # images, channels in and out, side
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
_SECONDS = 1.0  # duration of each measurement: a shared machine has slow moments
_FEWEST_CALLS = 3


@dataclass(frozen=True)
class DeviceLimits:
    """The device's speed in a large matrix product, a 3 x 3 convolution (training's precision) and a large copy."""

    matmul_flop_per_s: float
    convolution_flop_per_s: float
    bytes_per_s: float
    matmul_side: int
    dtype: str

    @property
    def flop_per_s(self) -> float:
        """The higher of both: a CPU's convolutions may be twice as fast (oneDNN against MKL, not on Intel's processors)."""
        return max(self.matmul_flop_per_s, self.convolution_flop_per_s)


def compare_with_limits(flop: int, bytes_moved: int, step_s: float, limits: DeviceLimits) -> dict[str, Any]:
    """Compare a training step with the device's limits, as plain values for JSON.

    `of_matmul` is above 1 where convolutions are faster. `shortest_s` is the step's duration at the limits, if each operator
    reads and writes its tensors once.
    """
    flop_per_s = flop / step_s
    arithmetic_s, traffic_s = flop / limits.flop_per_s, bytes_moved / limits.bytes_per_s
    return {
        "flop": flop,
        "bytes_moved": bytes_moved,
        "step_s": step_s,
        "limits": vars(limits),
        "flop_per_s": flop_per_s,
        "of_matmul": flop_per_s / limits.matmul_flop_per_s,
        "of_peak": flop_per_s / limits.flop_per_s,
        "limited_by": "arithmetic" if arithmetic_s >= traffic_s else "memory traffic",
        "shortest_s": max(arithmetic_s, traffic_s),
    }


def roofline_lines(found: dict[str, Any], limits: DeviceLimits, batch_size: int) -> list[str]:
    """Return what `compare_with_limits` found as three lines of text."""
    flop, num_bytes, step_s = found["flop"], found["bytes_moved"], found["step_s"]
    return [
        f"Roofline at batch {batch_size}: {found['flop_per_s'] / 1e12:.3g} TFLOP/s, {found['of_matmul']:.0%} of the "
        f"{limits.matmul_flop_per_s / 1e12:.3g} that this device reaches on a {limits.matmul_side} x {limits.matmul_side} "
        f"matmul and {found['flop_per_s'] / limits.convolution_flop_per_s:.0%} of the "
        f"{limits.convolution_flop_per_s / 1e12:.3g} in a 3 x 3 convolution, in {limits.dtype}",
        f"  {flop / 1e9:.4g} GFLOP and {num_bytes / 1e9:.3g} GB a step are {flop / num_bytes:.3g} FLOP a byte; the device's "
        f"balance is {limits.flop_per_s / limits.bytes_per_s:.3g} (a large copy: {limits.bytes_per_s / 1e9:.3g} GB/s): "
        f"{found['limited_by']} is the nearer limit,",
        f"  and the shortest possible step {found['shortest_s'] * 1e3:.1f} ms, if each operator reads and writes its "
        f"tensors once ({found['shortest_s'] / step_s:.0%} of the measured {step_s * 1e3:.1f} ms)",
    ]


@torch.no_grad()
def measure_limits(device: torch.device, precision: Precision) -> DeviceLimits:
    """Time a large matrix product and a convolution in training's precision, and a copy. Takes about three seconds."""
    kind, dtype = device.type, precision.dtype or torch.float32
    name = str(dtype).removeprefix("torch.")
    if dtype is torch.float32 and kind == "cuda" and torch.get_float32_matmul_precision() != "highest":
        name = "float32 (TF32)"
    side = _MATMUL_SIDE[kind]
    first, second = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(first)
    matmul_s = _fastest_s(lambda: torch.mm(first, second, out=product), device)

    images, channels, width = _CONVOLUTION[kind]  # in training's memory layout, channels last
    inputs = torch.randn(images, channels, width, width, device=device).to(dtype, memory_format=torch.channels_last)
    kernel = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=torch.channels_last)
    convolution_s = _fastest_s(lambda: F.conv2d(inputs, kernel, padding=1), device)

    source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _fastest_s(lambda: target.copy_(source), device)
    return DeviceLimits(
        matmul_flop_per_s=2 * side**3 / matmul_s,
        convolution_flop_per_s=2 * 9 * channels**2 * images * width**2 / convolution_s,
        bytes_per_s=2 * source.numel() / copy_s,  # read and written
        matmul_side=side,
        dtype=name,
    )


def _fastest_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the duration of the shortest of many calls, in seconds."""
    call()
    durations_s: list[float] = []
    while sum(durations_s) < _SECONDS or len(durations_s) < _FEWEST_CALLS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_s.append(time.perf_counter() - start_s)
    return min(durations_s)

"""Measure a device's limits and compare a training step with them (the roofline model).

A kernel that does F operations on B bytes takes at least max(F / peak operations per second, B / peak bytes per second)
(Williams, Waterman, Patterson: Roofline, an insightful visual performance model, CACM 52(4), 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
    """The device's speed in a large matrix product, a 3 x 3 convolution (training's precision) and a large copy.

    On a CPU, convolutions may be twice as fast as matrix products (oneDNN against MKL on a processor that is not Intel's).
    The limit is the larger of the two.
    """

    matmul_flop_per_s: float
    convolution_flop_per_s: float
    bytes_per_s: float
    matmul_side: int
    dtype: str

    @property
    def flop_per_s(self) -> float:
        """The highest operations per second that were measured."""
        return max(self.matmul_flop_per_s, self.convolution_flop_per_s)


@dataclass(frozen=True)
class Roofline:
    """One training step against the device's limits."""

    flop: int
    bytes_moved: int
    step_s: float
    limits: DeviceLimits

    @property
    def flop_per_s(self) -> float:
        """Floating-point operations per second of the step."""
        return self.flop / self.step_s

    @property
    def of_peak(self) -> float:
        """Share of the device's highest measured speed."""
        return self.flop_per_s / self.limits.flop_per_s

    @property
    def of_matmul(self) -> float:
        """Share of the speed of the large matrix product; above 1 where convolutions are faster."""
        return self.flop_per_s / self.limits.matmul_flop_per_s

    @property
    def shortest_s(self) -> float:
        """Duration of the step at the device's limits, if each operator reads and writes its tensors once."""
        return max(self.flop / self.limits.flop_per_s, self.bytes_moved / self.limits.bytes_per_s)

    @property
    def limited_by(self) -> str:
        """The limit that allows less speed: arithmetic or memory traffic."""
        is_arithmetic = self.flop / self.limits.flop_per_s >= self.bytes_moved / self.limits.bytes_per_s
        return "arithmetic" if is_arithmetic else "memory traffic"

    def lines(self, batch_size: int) -> list[str]:
        """Return the comparison as three lines of text."""
        limits = self.limits
        return [
            f"Roofline at batch {batch_size}: {self.flop_per_s / 1e12:.3g} TFLOP/s, {self.of_matmul:.0%} of the "
            f"{limits.matmul_flop_per_s / 1e12:.3g} that this device reaches on a {limits.matmul_side} x {limits.matmul_side} "
            f"matmul and {self.flop_per_s / limits.convolution_flop_per_s:.0%} of the "
            f"{limits.convolution_flop_per_s / 1e12:.3g} in a 3 x 3 convolution, in {limits.dtype}",
            f"  {self.flop / 1e9:.4g} GFLOP and {self.bytes_moved / 1e9:.3g} GB a step are {self.flop / self.bytes_moved:.3g} "
            f"FLOP a byte; the device's balance is {limits.flop_per_s / limits.bytes_per_s:.3g} (a large copy: "
            f"{limits.bytes_per_s / 1e9:.3g} GB/s): {self.limited_by} is the nearer limit,",
            f"  and the shortest possible step {self.shortest_s * 1e3:.1f} ms, if each operator reads and writes its "
            f"tensors once ({self.shortest_s / self.step_s:.0%} of the measured {self.step_s * 1e3:.1f} ms)",
        ]


def measure_limits(device: torch.device, precision: Precision) -> DeviceLimits:
    """Time a large matrix product and a convolution in training's precision, and a copy. Takes about three seconds."""
    dtype = precision.dtype or torch.float32
    name = str(dtype).removeprefix("torch.")
    if dtype is torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        name = "float32 (TF32)"
    return DeviceLimits(
        matmul_flop_per_s=_multiplied_per_s(device, dtype),
        convolution_flop_per_s=_convolved_per_s(device, dtype),
        bytes_per_s=_copied_per_s(device),
        matmul_side=_MATMUL_SIDE[device.type],
        dtype=name,
    )


def _multiplied_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a square matrix product."""
    side = _MATMUL_SIDE[device.type]
    first, second = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(first)
    return 2 * side**3 / _fastest_s(lambda: torch.mm(first, second, out=product), device)


@torch.no_grad()
def _convolved_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a 3 x 3 convolution in training's memory layout (channels last)."""
    images, channels, side = _CONVOLUTION[device.type]
    inputs = torch.randn(images, channels, side, side, device=device).to(dtype, memory_format=torch.channels_last)
    kernel = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=torch.channels_last)
    flop = 2 * 9 * channels**2 * images * side**2
    return flop / _fastest_s(lambda: F.conv2d(inputs, kernel, padding=1), device)


def _copied_per_s(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _fastest_s(lambda: target.copy_(source), device)


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

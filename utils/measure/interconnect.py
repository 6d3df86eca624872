"""How long an all-reduce takes: the cost of a ring, fitted to measurements or taken from what makers promise.

A ring over n ranks takes 2 (n - 1) steps; each costs a latency, alpha, and moves 1/n of the message (Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005, section 4.5). Bus bandwidth is
nccl-tests' 2 (n - 1) / n * bytes / time: it approaches that of the slowest link and does not depend on n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Of a link's nominal bandwidth in one direction: NCCL reckons with at most 235 GB/s on A100's NVLink, which has 300
# (NCCL, src/graph/tuning.cc). Taken for every link.
ACHIEVABLE = 0.78
GPUS_PER_NODE = 8
MEASURED = "measured"


@dataclass(frozen=True)
class Link:
    """What connects neighbours of the ring: latency of a step, and the bus bandwidth an all-reduce reaches."""

    name: str
    latency_us: float
    gb_per_s: float
    source: str

    def allreduce_ms(self, num_ranks: int, num_bytes: float, messages: int = 1) -> float:
        """Return the milliseconds to sum `num_bytes` in all over `num_ranks`, in so many messages one after another."""
        if num_ranks < 2:
            return 0.0
        steps = 2 * (num_ranks - 1)
        return messages * steps * self.latency_us / 1e3 + steps / num_ranks * num_bytes / (self.gb_per_s * 1e6)


def _preset(name: str, latency_us: float, nominal_gb_per_s: float, source: str) -> tuple[str, Link]:
    return name, Link(name, latency_us, ACHIEVABLE * nominal_gb_per_s, source)


# Latencies: a step of NCCL's ring with its Simple protocol over NVLink 3.4, PCIe 5.7, network 9.6 us (NCCL,
# src/graph/tuning.cc, hwLat). Nominal bandwidths: one direction.
PRESETS = dict(
    [
        _preset("nvlink3", 3.4, 300, "NVIDIA A100 data sheet: NVLink 600 GB/s in both directions together"),
        _preset("nvlink4", 3.4, 450, "NVIDIA H100 data sheet: NVLink 900 GB/s in both directions together"),
        _preset("nvlink5", 3.4, 900, "NVIDIA B200 data sheet: NVLink 1800 GB/s in both directions together"),
        _preset("pcie4", 5.7, 31.5, "PCI-SIG: 16 GT/s x 16 lanes x 128/130"),
        _preset("pcie5", 5.7, 63.0, "PCI-SIG: 32 GT/s x 16 lanes x 128/130"),
        _preset("10gbe", 9.6, 1.25, "IEEE 802.3: 10 Gbit/s"),
        _preset("25gbe", 9.6, 3.125, "IEEE 802.3: 25 Gbit/s"),
        _preset("100gbe", 9.6, 12.5, "IEEE 802.3: 100 Gbit/s"),
        _preset("hdr200", 9.6, 25.0, "InfiniBand Trade Association: HDR 200 Gbit/s"),
        _preset("ndr400", 9.6, 50.0, "InfiniBand Trade Association: NDR 400 Gbit/s"),
    ]
)


def bus_gb_per_s(num_ranks: int, num_bytes: float, ms: float) -> float:
    """Return the bus bandwidth of an all-reduce."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / (ms * 1e6)


def fit_link(points: Sequence[dict[str, Any]]) -> Link | None:
    """Fit latency and bandwidth to measured all-reduces: `processes`, `bytes` and `ms` of each; None without any.

    Least squares of the relative errors, so that a message of a kilobyte counts as much as one of a hundred megabytes.
    """
    found = [point for point in points if point["processes"] > 1]
    if not found:
        return None
    ranks = np.array([point["processes"] for point in found], np.float64)
    sizes = np.array([point["bytes"] for point in found], np.float64)
    times = np.array([point["ms"] for point in found], np.float64)
    columns = np.stack([2 * (ranks - 1), 2 * (ranks - 1) / ranks * sizes], 1) / times[:, None]
    answer = np.linalg.lstsq(columns, np.ones(len(found)), rcond=None)[0]
    for column in (0, 1):  # a negative latency or bandwidth: noise; the other one alone explains the times
        if answer[column] <= 0:
            other = columns[:, 1 - column]
            answer = np.zeros(2)
            answer[1 - column] = other.sum() / (other @ other)
    per_step_ms, per_byte_ms = answer
    gb_per_s = 1 / (per_byte_ms * 1e6) if per_byte_ms > 0 else float("inf")
    return Link(MEASURED, per_step_ms * 1e3, gb_per_s, f"fitted to {len(found)} measured all-reduces")


def link_for(num_ranks: int, inside: Link, between: Link, gpus_per_node: int = GPUS_PER_NODE) -> Link:
    """Return the link that limits a ring over `num_ranks`: beyond one machine the slower of the two."""
    if num_ranks <= gpus_per_node:
        return inside
    return Link(
        between.name, max(inside.latency_us, between.latency_us), min(inside.gb_per_s, between.gb_per_s), between.source
    )

"""Estimate the time of an all-reduce, from measurements or from a link's data sheet.

A ring over n ranks takes 2 (n - 1) steps. Each step costs a latency and moves 1/n of the message (Thakur, Rabenseifner,
Gropp: Optimization of Collective Communication Operations in MPICH, 2005, section 4.5). Bus bandwidth is defined as in
nccl-tests, 2 (n - 1) / n * bytes / time. It approaches the bandwidth of the slowest link and does not depend on n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Share of a link's nominal bandwidth in one direction that NCCL reaches: it assumes at most 235 of 300 GB/s for the
# NVLink of an A100 (NCCL, src/graph/tuning.cc). Applied to every link.
ACHIEVABLE = 0.78
GPUS_PER_NODE = 8
MEASURED = "measured"


@dataclass(frozen=True)
class Link:
    """The connection between neighbours of a ring: latency per step, and the bus bandwidth that an all-reduce reaches."""

    name: str
    latency_us: float
    gb_per_s: float
    source: str

    def allreduce_ms(self, num_ranks: int, num_bytes: float, messages: int = 1) -> float:
        """Return the milliseconds to sum `num_bytes` over `num_ranks`, split into `messages` sent one after another."""
        if num_ranks < 2:
            return 0.0
        steps = 2 * (num_ranks - 1)
        return messages * steps * self.latency_us / 1e3 + steps / num_ranks * num_bytes / (self.gb_per_s * 1e6)


# Name, latency in us, nominal bandwidth of one direction in GB/s, its source. Latencies: a step of NCCL's ring with its
# Simple protocol over NVLink, PCIe or a network (NCCL, src/graph/tuning.cc, hwLat).
_DATA_SHEETS = (
    ("nvlink3", 3.4, 300, "NVIDIA A100 data sheet: NVLink 600 GB/s in both directions together"),
    ("nvlink4", 3.4, 450, "NVIDIA H100 data sheet: NVLink 900 GB/s in both directions together"),
    ("nvlink5", 3.4, 900, "NVIDIA B200 data sheet: NVLink 1800 GB/s in both directions together"),
    ("pcie4", 5.7, 31.5, "PCI-SIG: 16 GT/s x 16 lanes x 128/130"),
    ("pcie5", 5.7, 63.0, "PCI-SIG: 32 GT/s x 16 lanes x 128/130"),
    ("10gbe", 9.6, 1.25, "IEEE 802.3: 10 Gbit/s"),
    ("25gbe", 9.6, 3.125, "IEEE 802.3: 25 Gbit/s"),
    ("100gbe", 9.6, 12.5, "IEEE 802.3: 100 Gbit/s"),
    ("hdr200", 9.6, 25.0, "InfiniBand Trade Association: HDR 200 Gbit/s"),
    ("ndr400", 9.6, 50.0, "InfiniBand Trade Association: NDR 400 Gbit/s"),
)
PRESETS = {
    name: Link(name, latency_us, ACHIEVABLE * nominal_gb_per_s, source)
    for name, latency_us, nominal_gb_per_s, source in _DATA_SHEETS
}


def bus_gb_per_s(num_ranks: int, num_bytes: float, ms: float) -> float:
    """Return the bus bandwidth of an all-reduce of `num_bytes` that took `ms`."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / (ms * 1e6)


def fit_link(points: Sequence[dict[str, Any]]) -> Link | None:
    """Fit latency and bandwidth to measured all-reduces, each with `processes`, `bytes` and `ms`; None without any.

    Least squares over relative errors, so that small messages weigh as much as large ones.
    """
    found = [point for point in points if point["processes"] > 1]
    if not found:
        return None
    ranks = np.array([point["processes"] for point in found], np.float64)
    sizes = np.array([point["bytes"] for point in found], np.float64)
    times = np.array([point["ms"] for point in found], np.float64)
    columns = np.stack([2 * (ranks - 1), 2 * (ranks - 1) / ranks * sizes], 1) / times[:, None]
    answer = np.linalg.lstsq(columns, np.ones(len(found)), rcond=None)[0]
    for column in (0, 1):  # negative because of noise: fit the other column alone
        if answer[column] <= 0:
            other = columns[:, 1 - column]
            answer = np.zeros(2)
            answer[1 - column] = other.sum() / (other @ other)
    per_step_ms, per_byte_ms = answer
    gb_per_s = 1 / (per_byte_ms * 1e6) if per_byte_ms > 0 else float("inf")
    return Link(MEASURED, per_step_ms * 1e3, gb_per_s, f"fitted to {len(found)} measured all-reduces")


def link_for(num_ranks: int, inside: Link, between: Link, gpus_per_node: int = GPUS_PER_NODE) -> Link:
    """Return the link that limits a ring over `num_ranks`: on several machines the slower of `inside` and `between`."""
    if num_ranks <= gpus_per_node:
        return inside
    return Link(
        between.name, max(inside.latency_us, between.latency_us), min(inside.gb_per_s, between.gb_per_s), between.source
    )

"""Predict training speed on more devices, with a model that is fitted to the runs measured on this machine.

Step time = compute + waiting for the slowest rank + blocking collectives + the part of the gradients' all-reduce that the
backward pass does not hide. The model is for weak scaling: every device keeps its batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.common.text import format_table
from utils.distributed.ddp import bucket_bytes
from utils.measure.interconnect import GPUS_PER_NODE, Link, fit_link, link_for


@dataclass(frozen=True)
class ScalingModel:
    """Fitted values. Times in ms; `compute_ms` comes from the run with the most processes, which share the machine."""

    batch_size: float  # images per device
    single_ms: float
    compute_ms: float
    spread_ms: float  # standard deviation of a rank's compute time, derived from the measured waiting
    backward_ms: float
    overlap: float  # share of the gradients' all-reduce that the backward pass hides, at most its own duration
    gradient_bytes: float
    other_collectives: float
    other_bytes: float
    measured_link: Link | None

    def step_ms(self, num_devices: int, link: Link) -> float:
        """Return the milliseconds of one step on `num_devices`."""
        if num_devices == 1:
            return self.single_ms
        messages = math.ceil(self.gradient_bytes / bucket_bytes(int(self.gradient_bytes)))
        gradients_ms = link.allreduce_ms(num_devices, self.gradient_bytes, messages)
        hidden_ms = min(self.overlap * gradients_ms, self.backward_ms)
        others = max(1, round(self.other_collectives))
        blocking_ms = link.allreduce_ms(num_devices, self.other_bytes, others)
        waiting_ms = self.spread_ms * expected_maximum(num_devices)
        return self.compute_ms + waiting_ms + blocking_ms + gradients_ms - hidden_ms

    def images_per_s(self, num_devices: int, link: Link) -> float:
        """Return the images per second of all devices together."""
        return num_devices * self.batch_size / self.step_ms(num_devices, link) * 1000


def fit_model(rows: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]) -> ScalingModel:
    """Fit the model to the rows of `utils.measure.scaling.summarise` and the points of `median_points`.

    Weak-scaling rows are used where there are any. Otherwise waiting and collectives come from the strong-scaling row with
    the most processes, and compute from the one with the fewest. Overlap is the mean over the process counts.
    """
    chosen = [row for row in rows if row["scaling"] == "weak"] or list(rows)
    first, last = chosen[0], chosen[-1]
    together = [row for row in chosen if row["processes"] > 1]
    same_batch = last if last["scaling"] == "weak" else first  # strong scaling gives a process fewer images
    hidden = [row["overlap"] for row in together]
    spread_ms = last["waiting_ms"] / expected_maximum(last["processes"]) if together else 0.0
    return ScalingModel(
        batch_size=first["global_batch_size"] / first["processes"],
        single_ms=first["compute_ms"] + first["data_ms"],
        compute_ms=same_batch["compute_ms"] + same_batch["data_ms"],
        spread_ms=spread_ms,
        backward_ms=same_batch["backward_ms"],
        overlap=float(np.mean(hidden)) if hidden else 0.0,
        gradient_bytes=first["gradient_bytes"],
        other_collectives=last["other_collectives"],
        other_bytes=last["other_bytes"],
        measured_link=fit_link(points),
    )


def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` standard normal values: 0 for one, 0.56 for two, 1.42 for eight."""
    at = np.linspace(-10, 10, 4001)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in at]) ** count
    return float(at[-1] - np.trapezoid(below, at)) if count > 1 else 0.0  # E = b - integral of P(max < x) up to b


def predict(
    model: ScalingModel,
    rows: Sequence[dict[str, Any]],
    counts: Sequence[int],
    inside: Link,
    between: Link,
    gpus_per_node: int = GPUS_PER_NODE,
) -> list[dict[str, Any]]:
    """Return one row per measured count, computed with the measured link, then one per count of `counts`.

    Predictions use `inside` within one machine, and the slower of `inside` and `between` for several machines.
    """
    found = []
    for row in rows:
        count = row["processes"]
        if row["scaling"] != "weak" or (count > 1 and model.measured_link is None):
            continue
        link = model.measured_link or inside
        found.append(_row(model, count, link, "measured", row["images_per_s"]))
    for count in counts:
        link = link_for(count, inside, between, gpus_per_node)
        found.append(_row(model, count, link, "PREDICTION", None))
    return found


def _row(model: ScalingModel, count: int, link: Link, kind: str, measured: float | None) -> dict[str, Any]:
    modelled = model.images_per_s(count, link)
    return {
        "processes": count,
        "kind": kind,
        "link": "-" if count == 1 else link.name,
        "images_per_s_measured": measured,
        "images_per_s_model": modelled,
        "efficiency_model": modelled / (count * model.images_per_s(1, link)),
        "step_ms_model": model.step_ms(count, link),
    }


def prediction_table(found: Sequence[dict[str, Any]]) -> str:
    """Return measured and predicted rows as a table."""
    lines = []
    for row in found:
        measured = row["images_per_s_measured"]
        difference = "-" if measured is None else f"{row['images_per_s_model'] / measured - 1:+.0%}"
        cells = ["-" if measured is None else f"{measured:.1f}", f"{row['images_per_s_model']:.1f}", difference]
        cells += [f"{row['step_ms_model']:.1f}", f"{row['efficiency_model']:.0%}"]
        lines.append([row["processes"], row["kind"], row["link"], *cells])
    header = ["processes", "kind", "link", "measured images/s", "model images/s", "difference", "ms/step", "efficiency"]
    return format_table(header, lines, right_from=3)

"""Made-up measurements, and the smallest job that ranks can train."""

from __future__ import annotations

from typing import Any

from utils.measure import scaling
from utils.measure.profiling import BatchProfile
from utils.measure.scaling_rank import RankJob
from utils.measure.step_ranges import RANGES
from utils.measure.step_timer import PHASES

JOB = RankJob(
    model="yolov8n-seg.yaml",
    global_batch_size=1,
    img_size=64,
    objects_per_image=3,
    warmup_steps=1,
    steps=1,
    amp="off",
    device="cpu",
    timeout_s=60,
)


def profile(batch_size: int, images_per_s: float, reserved_bytes: int | None = None) -> BatchProfile:
    step_ms = batch_size / images_per_s * 1000
    shares = dict(zip(PHASES, (0.0, 0.3, 0.1, 0.5, 0.1), strict=True))
    phase_ms = {phase: share * step_ms for phase, share in shares.items()}
    return BatchProfile(batch_size, 3, phase_ms, 0.5, batch_size * 2**20, reserved_bytes)


def answer(**values: Any) -> dict[str, Any]:
    """What a rank that trained two steps of 100 ms might answer."""
    ranges = {**dict.fromkeys(RANGES, 0.0), "data": 5.0, "forward": 50.0, "backward": 25.0, "communication": 20.0}
    blank = {
        "ranges_ms": [list(ranges.values())] * 2,
        "collectives": [[(4.0, 8), (16.0, 1000)]] * 2,
        "wall_ms": 200.0,
        "num_images": 8,
        "allreduces": [{"bytes": 1000, "ms": [20.0]}],
        "gradient_bytes": 1000,
        "batch_size": 4,
    }
    return {**blank, **values}


def run(count: int, repeat: int, images_per_s: float, scaling_kind: str = "weak", **values: Any) -> dict[str, Any]:
    blank = dict.fromkeys(scaling._MEDIANS, 1.0)
    place = {"scaling": scaling_kind, "processes": count, "repeat": repeat, "global_batch_size": 4 * count}
    return {**blank, **place, "images_per_s": images_per_s, **values}

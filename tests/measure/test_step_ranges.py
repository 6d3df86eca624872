"""Where a rank's time goes: marks, collectives and the wait for gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from utils.common.devices import choose_precision
from utils.measure import step_timer
from utils.measure.step_ranges import RANGES, MarkedLoader, RangeTimer, timed_collectives
from utils.measure.step_timer import Repeated, build_training, run_training_steps
from utils.measure.synthetic import synthetic_batch
from utils.yolo.model import build_model

CPU = torch.device("cpu")


def test_a_collective_interrupts_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = iter(range(100))  # a second between any two marks
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(moments_s))
    timer = RangeTimer(CPU)
    for _ in range(2):
        for phase in ("data", "input", "forward", "loss"):
            timer.mark(phase)
        with timer.collective(8):
            pass
        timer.mark("backward")
        for _ in range(3):  # the last gradient counts: what came before was backward
            timer.gradients_ready(1000)
        timer.mark("optimizer")
    found = timer.ranges()
    assert found.ranges_ms.shape == (1, 7)  # the second step has not ended
    seconds = dict(zip(RANGES, (found.ranges_ms[0] / 1000).tolist(), strict=True))
    once = dict.fromkeys(("data", "input", "forward", "optimizer"), 1.0)
    assert seconds == {**once, "loss": 2.0, "backward": 3.0, "communication": 2.0}
    assert found.collectives == [[(1000.0, 8), (1000.0, 1000)]]


def train_with_ranges() -> dict[str, Any]:
    """Train two steps that count, with a slow input on rank 1; return what the timer found."""
    rank = dist.get_rank()
    reduce = dist.all_reduce
    model = build_model("yolov8n-seg.yaml", ("a", "b"))
    training = build_training(model, CPU, choose_precision("off", CPU))
    timer = RangeTimer(CPU)
    loader = MarkedLoader(Repeated(synthetic_batch(1 + rank, 96, 2, objects_per_image=3), 1), 3, timer)
    with timed_collectives(timer, training.model):
        run_training_steps(training, loader, timer)
    found = timer.ranges()
    assert dist.all_reduce is reduce  # put back
    return {
        "ranges": found.ranges_ms,
        "bytes": [[size for _, size in step] for step in found.collectives],
        "images": np.array(loader.num_images),
        "gradient_bytes": sum(weight.numel() * 4 for weight in model.parameters() if weight.requires_grad),
    }


def test_real_steps_show_their_collectives_on_every_rank() -> None:
    first, second = run_ranks(train_with_ranges, 2)
    assert first["bytes"] == second["bytes"]
    assert first["bytes"][1].count(first["gradient_bytes"]) == 1
    agreement = 3 * 8  # whether to stop, which may follow any step
    assert len([size for size in first["bytes"][1] if size != agreement]) == 3  # normalisers, gradients, statistics
    assert first["images"].tolist() == [1, 1, 1]
    assert second["images"].tolist() == [2, 2, 2]
    for found in (first, second):
        assert found["ranges"].shape == (2, 7)
        assert (found["ranges"] > 0).all()

"""Synthetic batches, the phases of a training step, and its collectives."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.measure.made_up import JOB
from yolo_seg_ddp.measure import step_timer
from yolo_seg_ddp.measure.step_ranges import RangeTimer
from yolo_seg_ddp.measure.step_timer import (
    PHASES,
    StepTimer,
    build_training,
    middle_half,
    time_training_steps,
)
from yolo_seg_ddp.measure.synthetic import synthetic_batch, training_colours
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.yolo.model import build_model
from yolo_seg_ddp.yolo.optimizer import MuSGD

# --- Synthetic batches ----------------------------------------------------------------------------


def test_a_synthetic_batch_is_what_the_loader_would_give() -> None:
    batch = synthetic_batch(2, 160, 5, objects_per_image=12)
    assert batch.images.shape == (2, 160, 160, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.masks.shape == (2, 40, 40)
    assert batch.masks.dtype == torch.int32
    assert batch.batch_index.tolist() == [0] * 12 + [1] * 12
    assert batch.boxes.dtype == torch.float32
    low, high = batch.boxes[:, :2], batch.boxes[:, 2:]
    assert (low >= 0).all()
    assert (high <= 160).all()
    assert (high > low).all()
    assert set(batch.class_ids.tolist()) <= set(range(5))
    seen = {int(value) for value in batch.masks[0].unique()}
    assert 6 < len(seen) <= 13  # background, and most of the twelve; the largest lie below
    assert max(seen) == 12


def test_a_synthetic_batch_follows_from_its_arguments_and_may_be_empty() -> None:
    first, again = (synthetic_batch(1, 64, 3, seed=4) for _ in range(2))
    other, empty = synthetic_batch(1, 64, 3, seed=5), synthetic_batch(2, 64, 3, objects_per_image=0)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.boxes, again.boxes)
    assert not torch.equal(first.boxes, other.boxes)
    assert empty.boxes.shape == (0, 4)
    assert not empty.masks.any()


def test_a_batch_for_a_gpu_has_colour_gains_and_nothing_else_changes() -> None:
    plain, coloured = (
        synthetic_batch(2, 64, 3, objects_per_image=2, colours=training_colours(torch.device(name)))
        for name in ("cpu", "cuda")
    )
    assert plain.colour_gains is None
    assert coloured.colour_gains is not None
    assert coloured.colour_gains.shape == (2, 3)
    assert 0.3 <= float(coloured.colour_gains.min()) < 1 < float(coloured.colour_gains.max()) <= 1.7
    assert torch.equal(plain.images, coloured.images)
    assert torch.equal(plain.boxes, coloured.boxes)


# --- The phases of a training step ----------------------------------------------------------------

CPU = torch.device("cpu")


def test_a_phase_lasts_until_the_next_mark_and_a_step_without_all_phases_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments_s = iter([0.0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55, *range(60, 70)])
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(moments_s))
    timer, partly = StepTimer(CPU), StepTimer(CPU)
    for phase in (*PHASES, *PHASES, PHASES[0]):
        timer.mark(phase)
    np.testing.assert_allclose(
        timer.phases_ms(), [[1e3, 2e3, 3e3, 4e3, 5e3], [6e3, 7e3, 8e3, 9e3, 10e3]]
    )
    for phase in (*PHASES[:3], *PHASES):
        partly.mark(phase)
    with pytest.raises(ValueError, match="but input, forward, loss, input, forward were marked"):
        partly.phases_ms()


def test_real_steps_are_timed_and_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = build_training(build_model(JOB.model, ("a", "b")), CPU, choose_precision("off", CPU))
    assert isinstance(training.state.optimizer, MuSGD)  # the trainer's default
    before = next(training.state.model.parameters()).detach().clone()
    batch = synthetic_batch(1, 64, 2, objects_per_image=3)
    start_s = time.perf_counter()
    phases_ms = time_training_steps(training, batch, 1, 2)
    elapsed_ms = (time.perf_counter() - start_s) * 1000
    assert phases_ms.shape == (2, 5)
    assert (phases_ms > 0).all()
    assert phases_ms.sum() < elapsed_ms
    # the warm-up step, two timed ones, and the one that ends them
    assert training.progress.global_step == 4
    assert not torch.equal(next(training.state.model.parameters()), before)
    assert time_training_steps(training, batch, 1, 1).shape == (1, 5)  # it can be asked again
    assert list(tmp_path.iterdir()) == []


def test_the_middle_half_of_the_steps_leaves_out_what_was_disturbed() -> None:
    steps = np.array([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 7], [1, 2, 3, 4, 900]])
    np.testing.assert_allclose(middle_half(steps), [1, 2, 3, 4, 6])
    np.testing.assert_allclose(middle_half(steps[1:]), steps[2])  # of three the middle one
    np.testing.assert_allclose(middle_half(steps[:1]), steps[0])


# --- collectives ----------------------------------------------------------------------------------


def test_a_collective_interrupts_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = iter(range(100))  # a second between any two marks
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(moments_s))
    timer = RangeTimer(CPU)
    for _ in range(2):
        for phase in ("data", "loss"):
            timer.mark(phase)
        with timer.collective():
            pass
        timer.mark("backward")
        for _ in range(3):  # the last gradient counts: what came before was backward
            timer.gradients_ready()
        timer.mark("optimizer")
    (step,) = timer.steps()  # the second step has not ended
    names = [
        "data",
        "loss",
        "communication",
        "loss",
        *["backward"] * 3,
        "communication",
        "optimizer",
    ]
    assert step == [(name, 1000.0) for name in names]

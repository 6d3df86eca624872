"""The phases of a training step."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.measure.made_up import JOB
from utils.common.devices import choose_precision
from utils.measure import step_timer
from utils.measure.step_timer import PHASES, StepTimer, build_training, middle_half, time_training_steps
from utils.measure.synthetic import synthetic_batch
from utils.yolo.model import build_model
from utils.yolo.optimizer import MuSGD

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_phase_lasts_until_the_next_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = iter([0.0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55])
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(moments_s))
    timer = StepTimer(CPU)
    for phase in (*PHASES, *PHASES, PHASES[0]):
        timer.mark(phase)
    np.testing.assert_allclose(timer.phases_ms(), [[1e3, 2e3, 3e3, 4e3, 5e3], [6e3, 7e3, 8e3, 9e3, 10e3]])


def test_a_step_without_all_phases_is_refused() -> None:
    timer = StepTimer(CPU)
    for phase in (*PHASES[:3], *PHASES):
        timer.mark(phase)
    with pytest.raises(ValueError, match="but input, forward, loss, input, forward were marked"):
        timer.phases_ms()


def test_real_steps_are_timed_and_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert training.progress.global_step == 4  # the warm-up step, two timed ones, and the one that ends them
    assert not torch.equal(next(training.state.model.parameters()), before)
    assert time_training_steps(training, batch, 1, 1).shape == (1, 5)  # it can be asked again
    assert list(tmp_path.iterdir()) == []


def test_the_middle_half_of_the_steps_leaves_out_what_was_disturbed() -> None:
    steps = np.array([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 7], [1, 2, 3, 4, 900]])
    np.testing.assert_allclose(middle_half(steps), [1, 2, 3, 4, 6])
    np.testing.assert_allclose(middle_half(steps[1:]), steps[2])  # of three the middle one
    np.testing.assert_allclose(middle_half(steps[:1]), steps[0])

"""What one rank of the benchmark trains."""

from __future__ import annotations

import numpy as np
import torch

from tests.measure.made_up import JOB
from tests.support.ranks import run_ranks as run_test_ranks
from utils.common.devices import choose_precision
from utils.measure.scaling_rank import _alone
from utils.measure.step_timer import build_training, time_training_steps
from utils.measure.synthetic import synthetic_batch
from utils.yolo.model import build_model

CPU = torch.device("cpu")


def weights_after_each_kind_of_step() -> list[np.ndarray]:
    """Train a step with communication, then one without; return a weight after each."""
    model = build_model(JOB.model, ("a", "b"))
    weight = next(model.parameters())
    rank = torch.distributed.get_rank()
    training = build_training(model, CPU, choose_precision("off", CPU))
    batch = synthetic_batch(1, 64, 2, objects_per_image=3, seed=rank)
    time_training_steps(training, batch, 1, 1)
    after = [weight.detach().numpy().copy()]
    with training.model.no_sync():  # type: ignore[operator]
        time_training_steps(_alone(training), batch, 1, 1)
    return [*after, weight.detach().numpy().copy()]


def test_steps_without_communication_leave_the_ranks_alone() -> None:
    first, second = run_test_ranks(weights_after_each_kind_of_step, 2)
    np.testing.assert_array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])

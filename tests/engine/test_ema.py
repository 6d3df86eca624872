"""The moving average of the weights."""

from __future__ import annotations

import math

import torch

from utils.engine.ema import ModelEMA


def test_the_moving_average_is_the_one_worked_out_by_hand() -> None:
    model = torch.nn.BatchNorm1d(2)
    assert model.running_mean is not None
    assert model.num_batches_tracked is not None
    ema = ModelEMA(model, decay=0.9, ramp_updates=5.0)
    weight, mean = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for update in range(1, 8):
        with torch.no_grad():
            model.weight.fill_(update**2)
        model.running_mean.fill_(-update)
        model.num_batches_tracked.fill_(update)
        ema.update(model)
        decay = 0.9 * (1 - math.exp(-update / 5))
        weight = decay * weight + (1 - decay) * update**2
        mean = decay * mean - (1 - decay) * update
    torch.testing.assert_close(ema.module.get_parameter("weight").double(), weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(ema.module.get_buffer("running_mean").double(), mean, rtol=1e-6, atol=0)
    assert ema.module.get_buffer("num_batches_tracked").item() == 7  # counters are copied, not averaged
    assert ema.updates == 7
    assert not ema.module.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert model.weight.tolist() == [49, 49]

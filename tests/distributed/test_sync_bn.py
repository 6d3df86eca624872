"""Synchronised BatchNorm on the CPU: two ranks with 3 and 5 images are one rank with 8."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from utils import distributed
from utils.distributed.sync_bn import GlooSyncBatchNorm2d, convert_sync_batchnorm, revert_sync_batchnorm

CPU = torch.device("cpu")
SHARES = (slice(0, 3), slice(3, 8))
NUM_STEPS = 3


def network() -> nn.Sequential:
    """Return convolutions with all kinds of BatchNorm, the same on every call."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.03),
        nn.SiLU(),
        nn.Conv2d(4, 4, 1),
        nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.SiLU()),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4, momentum=None),
    ]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3)
    return model


def batch(step: int, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 images and the gradient of the outputs."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 9, 7, generator=generator) + offset, torch.randn(8, 4, 7, 5, generator=generator)


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


def run(model: nn.Module, share: slice, offset: float = 0.0, device: torch.device = CPU) -> list[dict[str, np.ndarray]]:
    """Return outputs, input gradients, weight gradients and buffers of some training steps on a share."""
    records = []
    model.to(device).train()
    for step in range(NUM_STEPS):
        images, output_gradient = (tensor[share].to(device) for tensor in batch(step, offset))
        images = images.clone().requires_grad_()
        model.zero_grad()
        outputs = model(images)
        outputs.backward(output_gradient)
        assert images.grad is not None
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
        tensors = {"outputs": outputs, "input gradient": images.grad, **gradients, **dict(model.named_buffers())}
        records.append(plain(tensors))
    model.eval()
    records.append(plain({"outputs": model(batch(99, offset)[0][share].to(device))}))
    return records


def other_dimensions(num_dimensions: int, share: slice) -> dict[str, np.ndarray]:
    """Return outputs, input gradients and buffers of a BatchNorm over inputs (B, 4) and so on, on a share."""
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm3d)[num_dimensions - 1]
    shape = (8, 4, 6, 3, 2)[: num_dimensions + 1 + (num_dimensions == 3)]
    generator = torch.Generator().manual_seed(num_dimensions)
    inputs, gradient = (torch.randn(shape, generator=generator)[share] for _ in range(2))
    model = convert_sync_batchnorm(nn.Sequential(kind(4)), CPU).train()
    outputs = model(inputs.requires_grad_())
    outputs.backward(gradient)
    assert inputs.grad is not None
    return plain({"outputs": outputs, "input gradient": inputs.grad, **dict(model.named_buffers())})


def run_shares() -> dict[str, Any]:
    share = SHARES[distributed.rank()]
    norm = GlooSyncBatchNorm2d(1)
    single = nn.Sequential(norm)
    single.train()
    few = single(torch.full((1, 1, 1, 1), float(distributed.rank())))
    return {
        "synchronised": run(convert_sync_batchnorm(network(), CPU), share),
        "far from zero": run(convert_sync_batchnorm(network(), CPU), share, offset=30.0),
        "alone": run(network(), share),
        "dimensions": [other_dimensions(number, share) for number in (1, 2, 3)],
        "two pixels": [few.item(), norm.get_buffer("running_mean").item(), norm.get_buffer("running_var").item()],
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(run_shares, 2)


pytestmark = pytest.mark.usefixtures("one_thread")


def difference(answers: list[dict[str, Any]], kind: str, expected: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Return the largest relative difference by name; the ranks' rows are joined, their weight gradients added."""
    worst: dict[str, float] = {}
    for step, wanted in enumerate(expected):
        parts = [answer[kind][step] for answer in answers]
        assert parts[0].keys() == wanted.keys()
        for name, value in wanted.items():
            if name in ("outputs", "input gradient"):
                got = [np.concatenate([part[name] for part in parts])]
            elif name.startswith("gradient of"):
                got = [parts[0][name] + parts[1][name]]
            else:
                got = [part[name] for part in parts]  # a buffer must be right on both
            scale = max(float(np.abs(value).max()), 1e-12)
            gap = max(float(np.abs(array - value).max()) / scale for array in got)
            worst[name] = max(worst.get(name, 0.0), gap)
    return worst


def test_uneven_shares_give_what_one_rank_with_all_images_gives(answers: list[dict[str, Any]]) -> None:
    gaps = difference(answers, "synchronised", run(network(), slice(0, 8)))
    gradients = [name for name in gaps if name.startswith("gradient of")]
    assert {"outputs", "input gradient", "1.running_mean", "1.running_var", "1.num_batches_tracked"} <= set(gaps)
    assert len(gradients) == len(list(network().parameters()))
    # Convolutions before a BatchNorm have a bias whose true gradient is zero: only rounding is left of it.
    without_meaning = {"gradient of 0.bias", "gradient of 3.bias", "gradient of 5.bias"}
    assert {name: gap for name, gap in gaps.items() if gap > 1e-5 and name not in without_meaning} == {}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_batchnorm_of_other_dimensions_is_synchronised_too(answers: list[dict[str, Any]], number: int) -> None:
    whole = other_dimensions(number, slice(0, 8))
    parts = [answer["dimensions"][number - 1] for answer in answers]
    for name, value in whole.items():
        joined = name in ("outputs", "input gradient")
        for found in [np.concatenate([part[name] for part in parts])] if joined else [part[name] for part in parts]:
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6, err_msg=name)


def on_two_gpus() -> dict[str, Any]:
    """Return what PyTorch's module and ours make of this rank's share on its own GPU, over NCCL."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    distributed.setup_ddp(device)
    model = network()
    for position, child in list(model.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            ours = GlooSyncBatchNorm2d(child.num_features, child.eps, child.momentum, child.affine)
            ours.load_state_dict(child.state_dict())
            setattr(model, position, ours)
    torchs = convert_sync_batchnorm(network(), device)
    assert isinstance(torchs, nn.Sequential)
    torchs[4], model[4] = nn.SiLU(), nn.SiLU()
    assert isinstance(torchs[1], nn.SyncBatchNorm)
    share = SHARES[rank]
    return {"ours": run(model, share, device=device), "torch": run(torchs, share, device=device)}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ours_agrees_with_pytorchs_on_two_gpus() -> None:
    for answer in run_ranks(on_two_gpus, 2, join=False, timeout_s=120):
        for ours, torchs in zip(answer["ours"], answer["torch"], strict=True):
            for name, value in torchs.items():
                if name not in ("gradient of 0.bias", "gradient of 3.bias", "gradient of 5.bias"):
                    np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_inputs_far_from_zero_lose_no_digits_that_matter(answers: list[dict[str, Any]]) -> None:
    gaps = difference(answers, "far from zero", run(network(), slice(0, 8), offset=30.0))
    assert {name: gaps[name] for name in ("outputs", "1.running_var") if gaps[name] > 1e-3} == {}


def test_plain_batchnorm_on_the_shares_is_clearly_different(answers: list[dict[str, Any]]) -> None:
    gaps = difference(answers, "alone", run(network(), slice(0, 8)))
    assert gaps["outputs"] > 0.01
    assert gaps["1.running_mean"] > 0.01


def test_one_pixel_on_each_rank_is_enough(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        output, mean, variance = answer["two pixels"]
        assert output == pytest.approx((-1.0, 1.0)[rank], rel=1e-4)
        assert mean == pytest.approx(0.1 * 0.5)
        assert variance == pytest.approx(0.9 + 0.1 * 0.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_conversion_keeps_the_very_same_parameters_and_numbers(device: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    model.get_buffer("1.running_mean").fill_(3.0)
    state = copy.deepcopy(model.state_dict())
    converted = convert_sync_batchnorm(model, torch.device(device))
    expected = GlooSyncBatchNorm2d if device == "cpu" else nn.SyncBatchNorm
    norms = [module for module in converted.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert [type(module) for module in norms] == [expected] * 3
    assert {name: id(parameter) for name, parameter in converted.named_parameters()} == {
        name: id(parameter) for name, parameter in parameters.items()
    }
    assert {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == set(map(id, parameters.values()))
    torch.testing.assert_close(dict(converted.state_dict()), dict(state), rtol=0, atol=0)
    assert (norms[0].eps, norms[0].momentum, norms[2].momentum) == (1e-3, 0.03, None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("training", [True, False])
def test_reverting_gives_plain_batchnorm_with_the_same_numbers(device: str, training: bool) -> None:
    model = network().train(training)
    expected = copy.deepcopy(model)
    reverted = revert_sync_batchnorm(convert_sync_batchnorm(model, torch.device(device)))
    assert [type(module) for module in reverted.modules()] == [type(module) for module in expected.modules()]
    assert [module.training for module in reverted.modules()] == [training] * len(list(expected.modules()))
    images = batch(0, 0.0)[0]
    assert torch.equal(reverted(images), expected(images))


def test_a_lone_batchnorm_is_converted_and_reverted_too() -> None:
    assert type(convert_sync_batchnorm(nn.BatchNorm2d(2), CPU)) is GlooSyncBatchNorm2d
    assert type(revert_sync_batchnorm(GlooSyncBatchNorm2d(2))) is nn.BatchNorm2d


def test_without_other_ranks_it_is_plain_batchnorm() -> None:
    plain_model, converted = network(), convert_sync_batchnorm(network(), CPU)
    images = batch(0, 0.0)[0]
    for model in (plain_model, converted):
        model.train()
    assert torch.equal(plain_model(images), converted(images))

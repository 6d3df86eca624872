"""Synchronised BatchNorm: two ranks with 3 and 5 images are one rank with 8."""

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

from tests.support.pretended.gpu import switch_on
from tests.support.ranks import run_ranks
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.distributed import sync_bn
from yolo_seg_ddp.utils.distributed.sync_bn import (
    SyncBatchNorm2d,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)

CPU = torch.device("cpu")
SHARES = (slice(0, 3), slice(3, 8))
ONE_HAS_NONE = (slice(0, 0), slice(0, 8))
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
    return torch.randn(8, 3, 9, 7, generator=generator) + offset, torch.randn(
        8, 4, 7, 5, generator=generator
    )


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


def run(
    model: nn.Module, share: slice, offset: float = 0.0, device: torch.device = CPU
) -> list[dict[str, np.ndarray]]:
    """Return outputs, input gradients, weight gradients and buffers of some training steps on a
    share.
    """
    records = []
    model.to(device).train()
    for step in range(NUM_STEPS):
        images, output_gradient = (tensor[share].to(device) for tensor in batch(step, offset))
        images = images.clone().requires_grad_()
        model.zero_grad()
        outputs = model(images)
        outputs.backward(output_gradient)
        assert images.grad is not None
        gradients = {
            f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()
        }
        tensors = {
            "outputs": outputs,
            "input gradient": images.grad,
            **gradients,
            **dict(model.named_buffers()),
        }
        records.append(plain(tensors))
    model.eval()
    records.append(plain({"outputs": model(batch(99, offset)[0][share].to(device))}))
    return records


def run_on_gpus() -> dict[str, Any]:
    """Do what `run` does on this rank's pretended GPU, which refuses what NCCL does not send."""
    switch_on(2)
    ranks = distributed.read_rank_environment()
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    distributed.setup_ddp(device, ranks)
    shares = {"on a GPU": SHARES, "one has none, on a GPU": ONE_HAS_NONE}
    return {
        name: run(convert_sync_batchnorm(network()), share[ranks.rank], device=device)
        for name, share in shares.items()
    }


def run_shares() -> dict[str, Any]:
    rank = distributed.rank()
    share = SHARES[rank]
    norm = SyncBatchNorm2d(1)
    single = nn.Sequential(norm)
    single.train()
    few = single(torch.full((1, 1, 1, 1), float(distributed.rank())))
    rows = convert_sync_batchnorm(nn.BatchNorm1d(3))(batch(0, 0.0)[0][share, :, 0, 0])
    return {
        "synchronised": run(convert_sync_batchnorm(network()), share),
        "far from zero": run(convert_sync_batchnorm(network()), share, offset=30.0),
        "alone": run(network(), share),
        "one has none": run(convert_sync_batchnorm(network()), ONE_HAS_NONE[rank]),
        "rows": rows.detach().numpy(),
        "two pixels": [
            few.item(),
            norm.get_buffer("running_mean").item(),
            norm.get_buffer("running_var").item(),
        ],
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    on_cpus, on_gpus = run_ranks(run_shares, 2), run_ranks(run_on_gpus, 2, join=False)
    return [{**first, **second} for first, second in zip(on_cpus, on_gpus, strict=True)]


def difference(
    answers: list[dict[str, Any]], kind: str, expected: list[dict[str, np.ndarray]]
) -> dict[str, float]:
    """Return the largest relative difference by name; the ranks' rows are joined, their weight
    gradients added.
    """
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


# Convolutions before a BatchNorm have a bias whose true gradient is zero: only rounding is left of
# it.
WITHOUT_MEANING = {"gradient of 0.bias", "gradient of 3.bias", "gradient of 5.bias"}


@pytest.mark.parametrize(
    "kind", ["synchronised", "one has none", "on a GPU", "one has none, on a GPU"]
)
def test_uneven_shares_give_what_one_rank_with_all_images_gives(
    answers: list[dict[str, Any]], kind: str
) -> None:
    gaps = difference(answers, kind, run(network(), slice(0, 8)))
    gradients = [name for name in gaps if name.startswith("gradient of")]
    assert {
        "outputs",
        "input gradient",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    } <= set(gaps)
    assert len(gradients) == len(list(network().parameters()))
    assert {
        name: gap for name, gap in gaps.items() if gap > 1e-5 and name not in WITHOUT_MEANING
    } == {}


def assert_equal_on_gpus() -> None:
    """Compare our autograd function with PyTorch's on this rank's GPU, over NCCL; a single rank
    works as well.
    """
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    distributed.setup_ddp(device)
    group = dist.distributed_c10d._get_default_group()
    generator = torch.Generator().manual_seed(rank)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            images, gradient = (
                torch.randn(3 + rank, 4, 9, 7, generator=generator).to(
                    device, dtype, memory_format=memory_format
                )
                for _ in range(2)
            )
            found = []
            for apply in (
                lambda *inputs: sync_bn._CudaBatchNorm.apply(*inputs, 0.1, 1e-3),
                lambda *inputs: TorchFunction.apply(*inputs, 1e-3, 0.1, group, group.size()),
            ):
                inputs = [
                    images.clone(),
                    torch.rand(4, device=device),
                    torch.ones(4, device=device),
                ]
                inputs[1].copy_(torch.arange(1, 5))
                buffers = [torch.zeros(4, device=device), torch.ones(4, device=device)]
                inputs = [tensor.requires_grad_() for tensor in inputs]
                output = apply(*inputs, *buffers)
                output.backward(gradient)
                found.append([output.detach(), *(tensor.grad for tensor in inputs), *buffers])
            torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance, check_stride=True)


@pytest.mark.gpu
def test_ours_agrees_with_pytorchs_on_gpus() -> None:
    run_ranks(assert_equal_on_gpus, min(torch.cuda.device_count(), 2), join=False, timeout_s=120)


def test_inputs_far_from_zero_lose_no_digits_that_matter_and_plain_batchnorm_is_clearly_different(
    answers: list[dict[str, Any]],
) -> None:
    gaps = difference(answers, "far from zero", run(network(), slice(0, 8), offset=30.0))
    assert {name: gaps[name] for name in ("outputs", "1.running_var") if gaps[name] > 1e-3} == {}
    alone = difference(answers, "alone", run(network(), slice(0, 8)))
    assert alone["outputs"] > 0.01
    assert alone["1.running_mean"] > 0.01


def test_rows_without_pixels_are_synchronised_too(answers: list[dict[str, Any]]) -> None:
    expected = nn.BatchNorm1d(3)(batch(0, 0.0)[0][:, :, 0, 0]).detach().numpy()
    np.testing.assert_allclose(
        np.concatenate([answer["rows"] for answer in answers]), expected, rtol=1e-5, atol=1e-6
    )


def test_one_pixel_on_each_rank_is_enough(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        output, mean, variance = answer["two pixels"]
        assert output == pytest.approx((-1.0, 1.0)[rank], rel=1e-4)
        assert mean == pytest.approx(0.1 * 0.5)
        assert variance == pytest.approx(0.9 + 0.1 * 0.5)


def test_conversion_keeps_the_very_same_parameters_and_numbers() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    model.get_buffer("1.running_mean").fill_(3.0)
    state = copy.deepcopy(model.state_dict())
    converted = convert_sync_batchnorm(model)
    norms = [
        module
        for module in converted.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    assert [type(module) for module in norms] == [SyncBatchNorm2d] * 3
    kept = {name: id(parameter) for name, parameter in parameters.items()}
    assert {name: id(parameter) for name, parameter in converted.named_parameters()} == kept
    assert {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == set(
        map(id, parameters.values())
    )
    torch.testing.assert_close(dict(converted.state_dict()), dict(state), rtol=0, atol=0)
    assert (norms[0].eps, norms[0].momentum, norms[2].momentum) == (1e-3, 0.03, None)


@pytest.mark.parametrize("training", [True, False])
def test_reverting_gives_plain_batchnorm_with_the_same_numbers(training: bool) -> None:
    model = network().train(training)
    expected = copy.deepcopy(model)
    reverted = revert_sync_batchnorm(convert_sync_batchnorm(model))
    assert [type(module) for module in reverted.modules()] == [
        type(module) for module in expected.modules()
    ]
    assert [module.training for module in reverted.modules()] == [training] * len(
        list(expected.modules())
    )
    images = batch(0, 0.0)[0]
    assert torch.equal(reverted(images), expected(images))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_lone_batchnorm_is_converted_and_reverted_too(kind: type[nn.Module]) -> None:
    converted = convert_sync_batchnorm(kind(2))
    assert isinstance(converted, kind)
    assert type(converted).__name__ == f"Sync{kind.__name__}"
    assert type(revert_sync_batchnorm(converted)) is kind


def test_without_other_ranks_it_is_plain_batchnorm() -> None:
    plain_model, converted = network(), convert_sync_batchnorm(network())
    images = batch(0, 0.0)[0]
    for model in (plain_model, converted):
        model.train()
    assert torch.equal(plain_model(images), converted(images))


def test_one_rank_rounds_as_little_as_several_where_the_channels_come_last() -> None:
    images = torch.randn(8, 4, 64, 64, generator=torch.Generator().manual_seed(0)) + 10
    exact = nn.BatchNorm2d(4).double()(images.double())
    synchronised = convert_sync_batchnorm(nn.BatchNorm2d(4))(
        images.contiguous(memory_format=torch.channels_last)
    )
    assert (synchronised - exact).norm() < 2e-6 * exact.norm()  # PyTorch's kernel: 3e-5

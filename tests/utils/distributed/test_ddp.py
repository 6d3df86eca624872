"""DDP: bucket sizes, compressed gradients, static graphs, and compiled modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.distributed.ddp import bucket_bytes, gradient_bytes, wrap_for_ranks

CPU = torch.device("cpu")


class Network(nn.Sequential):
    """Its own `forward`, because before PyTorch 2.13 only code outside PyTorch is compiled."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self:
            inputs = layer(inputs)
        return inputs


def network() -> Network:
    torch.manual_seed(0)
    return Network(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 3))


def train(folder: Path, *, spare: bool = False, **options: Any) -> dict[str, np.ndarray]:
    """Return the weights after some steps on this rank's own data, with or without a weight that no
    step uses.
    """
    model = network()
    if spare:
        model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    generator = torch.Generator().manual_seed(distributed.rank())
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(6)
    ]
    engine = TrainingEngine(
        model, CPU, EngineOptions(precision="off", quiet=True, **options), run=folder
    )
    engine.begin(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.MSELoss())
    engine.train_one_epoch(batches)
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def on_two_ranks(folder: Path) -> dict[str, Any]:
    norm = nn.BatchNorm1d(2)
    norm.get_buffer("running_mean").fill_(distributed.rank() + 1.0)
    wrap_for_ranks(norm, CPU, 0, backend="gloo")
    found = {
        "plain": train(folder),
        "static": train(folder, static_graph=True),
        "bf16": train(folder, grad_compression="bf16"),
        "fp16": train(folder, grad_compression="fp16"),
        "accumulated": train(folder, grad_compression="bf16", accumulate=2),
        "spare": train(folder, spare=True, find_unused_parameters=True),
        "buffers": norm.get_buffer("running_mean").tolist(),
        "number of buckets": number_of_buckets(),
    }
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        train(folder, spare=True)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("parallel"))


def test_both_ranks_end_with_equal_weights_and_a_static_graph_changes_no_bit(
    answers: list[dict[str, Any]],
) -> None:
    first, second = answers
    for kind in ("plain", "static", "bf16", "fp16", "accumulated"):
        np.testing.assert_equal(second[kind], first[kind], err_msg=kind)
    np.testing.assert_equal(first["static"], first["plain"])


def test_a_weight_without_gradient_needs_the_option_that_pytorch_names(
    answers: list[dict[str, Any]],
) -> None:
    for answer in answers:
        assert np.array_equal(answer["spare"].pop("spare"), np.ones(3))
        np.testing.assert_equal(answer["spare"], answer["plain"])


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_compressed_gradients_cost_some_digits_and_no_more(
    answers: list[dict[str, Any]], kind: str, tolerance: float
) -> None:
    start = {name: value.numpy() for name, value in network().state_dict().items()}
    moved = {
        run: np.concatenate([(answers[0][run][n] - start[n]).ravel() for n in start])
        for run in (kind, "plain")
    }
    gap = np.linalg.norm(moved[kind] - moved["plain"]) / np.linalg.norm(moved["plain"])
    assert 0 < gap < tolerance


def test_the_engine_compiles_what_it_trains_and_saves_plain_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def translate(graph: Any, _: Any) -> Any:
        compiled.append("graph")
        return graph.forward

    whole = nn.Module.compile
    # no compiler needed
    monkeypatch.setattr(nn.Module, "compile", lambda self: whole(self, backend=translate))
    weights, plain = (
        train(tmp_path, compile=True, ema_decay=0.9999),
        train(tmp_path, ema_decay=0.9999),
    )
    assert compiled
    assert weights.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6)


def test_buffers_begin_as_rank_0_has_them(answers: list[dict[str, Any]]) -> None:
    assert [answer["buffers"] for answer in answers] == [[1.0, 1.0]] * 2


def test_a_small_models_gradients_travel_in_several_messages(answers: list[dict[str, Any]]) -> None:
    mib = 2**20
    assert [bucket_bytes(size * mib) // mib for size in (2, 12, 80, 1000)] == [1, 1, 10, 25]
    assert [answer["number of buckets"] for answer in answers] == [4, 4]


def number_of_buckets() -> int:
    """Train 4 layers of 1 MiB each; return how many messages their gradients became once DDP knows
    their order.
    """
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    assert gradient_bytes(module) == 4 * 2**20
    wrapped = wrap_for_ranks(module, CPU, 0, backend="gloo")
    seen: list[int] = []

    def count(_, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations, and refuses text
        seen.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, count)
    for _ in range(2):
        seen.clear()
        wrapped(torch.ones(1, 512)).sum().backward()
    return len(seen)


@pytest.mark.parametrize("static_graph", [False, True])
def test_the_first_steps_of_a_resumed_training_sum_three_ranks_in_the_order_of_later_steps(
    static_graph: bool,
) -> None:
    assert run_ranks(steps_with_other_gradients, 3, static_graph) == [[], [], []]


def steps_with_other_gradients(static_graph: bool) -> list[int]:
    """Repeat a step with the same data; return the steps whose gradients have not the bits of the
    first one's.
    """
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(300 + 7 * layer, 307 + 7 * layer) for layer in range(8)))
    wrapped = wrap_for_ranks(module, CPU, 0, backend="gloo", static_graph=static_graph)
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(distributed.rank()))
    gradients = []
    for _ in range(4):
        wrapped.zero_grad(set_to_none=True)
        wrapped(inputs).square().mean().backward()
        each: list[Any] = [weight.grad for weight in module.parameters()]
        gradients.append(torch.cat([gradient.flatten().clone() for gradient in each]))
    return [step for step, found in enumerate(gradients) if not torch.equal(found, gradients[0])]

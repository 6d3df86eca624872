"""CUDA graphs of a network, on pretended graphs: the same bits, and no graph where it would be
wrong.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.pretended.graphs import PretendedGraph, capture
from yolo_seg_ddp.engine import EngineOptions, Task, TrainingEngine
from yolo_seg_ddp.engine.cuda_graphs import GraphedNetwork
from yolo_seg_ddp.utils.devices import Precision
from yolo_seg_ddp.yolo.training_step import SegmentationStep

CPU = torch.device("cpu")
OTHERS: dict[str, Any] = {"accumulate": 2, "compile": True, "cuda_graph": "off"}


class Network(nn.Module):
    """Two outputs, of which the loss uses one, and a part that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 4, 1)
        )
        self.other = nn.Conv2d(3, 2, 1)

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        return {"maps": self.body(images), "unused": [self.other(images)], "stride": 8}


def train(
    network: Network, call: Any, precision: Precision, sizes: tuple[int, ...]
) -> list[torch.Tensor]:
    """Take a step with each batch size; return the losses."""
    optimizer, losses, batches = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), [], []
    device = network.other.weight.device
    for number, size in enumerate(sizes):
        images = torch.rand(size, 3, 12, 12, generator=torch.Generator().manual_seed(number)).to(
            device
        )
        batches.append((images, images.clone()))
        with precision.autocast(device):
            network.body[0](images)  # autocast keeps its converted weights, which no graph may read
            outputs = call(images)
            assert outputs["stride"] == 8
            loss = outputs["maps"].float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    assert all(torch.equal(*batch) for batch in batches), "a batch belongs to the caller"
    return losses


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CUDA's graphs, pretended, and a GPU with memory for them."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4)
    )
    monkeypatch.setattr(PretendedGraph, "replays", 0)
    return monkeypatch


@pytest.mark.parametrize(("name", "dtype"), [("off", None), ("bf16", torch.bfloat16)])
def test_a_training_has_the_bits_that_it_has_without_graphs(
    gpu: pytest.MonkeyPatch, name: str, dtype: torch.dtype | None
) -> None:
    precision, sizes = Precision(name, dtype, use_scaler=False), (4, 3, 4, 3, 4, 2, 4, 2)
    plain, graphed = Network(), Network()
    expected = train(plain, plain, precision, sizes)
    found = train(graphed, GraphedNetwork(graphed, CPU, precision), precision, sizes)
    assert torch.equal(torch.stack(found), torch.stack(expected))
    for key, value in plain.state_dict().items():
        assert torch.equal(graphed.state_dict()[key], value), key
    # Each shape begins without a graph, and a third one goes on without.
    assert PretendedGraph.replays == 2 * 4


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        *(({"options": EngineOptions(**{name: value})}, False) for name, value in OTHERS.items()),
        *(
            ({name: value}, False)
            for name, value in {"wrapped": True, "task": Task(), "device": CPU}.items()
        ),
    ],
)
def test_graphs_are_used_only_where_they_give_what_the_network_gives(
    change: dict[str, Any], may: bool
) -> None:
    facts = {
        "device": torch.device("cuda"),
        "wrapped": False,
        "options": EngineOptions(),
        "task": SegmentationStep(),
    }
    engine: Any = SimpleNamespace(**facts | change)
    assert TrainingEngine._may_use_graphs(engine) is may


def test_a_batch_in_another_layout_has_a_graph_of_its_own(gpu: pytest.MonkeyPatch) -> None:
    images, network = torch.rand(4, 3, 12, 12), Network()
    call = GraphedNetwork(network, CPU, Precision("off", None, use_scaler=False))
    replays = []
    for batch in (images, images, images.to(memory_format=torch.channels_last)):
        call(batch)
        replays.append(PretendedGraph.replays)
    assert replays == [0, 1, 1]


def test_a_step_that_takes_more_than_a_quarter_of_the_memory_has_no_graph(
    gpu: pytest.MonkeyPatch,
) -> None:
    gpu.setattr(torch.cuda, "max_memory_allocated", lambda device: 2)
    network, precision = Network(), Precision("off", None, use_scaler=False)
    train(network, GraphedNetwork(network, CPU, precision), precision, (4, 4, 4))
    assert not PretendedGraph.replays


@pytest.mark.gpu
def test_real_graphs_give_the_bits_of_the_network_without_them() -> None:
    gpu, precision, sizes = (
        torch.device("cuda", 0),
        Precision("bf16", torch.bfloat16, use_scaler=False),
        (4, 3, 4, 3, 4),
    )
    plain, graphed = Network().to(gpu), Network().to(gpu)
    graphs = GraphedNetwork(graphed, gpu, precision)
    expected, found = (
        train(plain, plain, precision, sizes),
        train(graphed, graphs, precision, sizes),
    )
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert all(
        torch.equal(graphed.state_dict()[key], value) for key, value in plain.state_dict().items()
    )

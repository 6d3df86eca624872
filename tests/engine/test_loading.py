"""Batches: equal after a resume and over the ranks, each validation sample once, and their way to
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.engine.small import CountedLoss, Record, engine_of, fit, loader_of, plain, points
from tests.support.ranks import run_ranks
from yolo_seg_ddp.engine import Task
from yolo_seg_ddp.engine.loading import Upload, batches_from, each_sample_once, tensors_in
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.inputs import Targets


class Noisy(Dataset[Any]):
    """Points with noise from PyTorch's and NumPy's generators, as random augmentation draws it."""

    def __init__(self) -> None:
        self.points = points(24)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.points[index]
        return inputs + 0.1 * torch.randn(4) + np.float32(0.1 * np.random.randn()), label


def train_with_noise(
    folder: Path,
    num_workers: int,
    *,
    seed: int | None = 0,
    resume: bool = False,
    stop_at: int | None = None,
) -> Record:
    """Train two epochs of six batches with noise and dropout; return the weights and the optimizer
    steps taken.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    torch.seed()  # what was drawn before must not matter
    trainer = engine_of(model, folder, epochs=2, seed=seed, quiet=True)
    criterion = CountedLoss(stop_at, partial(trainer.stop_flag.set, "test"))
    data = Noisy()
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=num_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer.train(loader, loader_of(points(8), 4), optimizer, criterion, resume=resume)
    return {"weights": plain(model.state_dict()), "step": trainer.progress.global_step}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_noise_and_dropout_are_the_same_after_a_resume_within_an_epoch(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolo_seg_ddp.engine.stopping.STOP_CHECK_STEPS", 2)
    whole = train_with_noise(tmp_path / "whole", num_workers)
    stopped = train_with_noise(tmp_path / "halves", num_workers, stop_at=8)
    continued = train_with_noise(tmp_path / "halves", num_workers, resume=True)
    assert (stopped["step"], whole["step"], continued["step"]) == (8, 12, 12)
    np.testing.assert_equal(continued["weights"], whole["weights"])
    other = train_with_noise(tmp_path / "other", num_workers, seed=1)
    assert any((other["weights"][name] != value).any() for name, value in whole["weights"].items())


def test_each_epoch_draws_other_noise() -> None:
    loader = DataLoader(Noisy(), 4)
    first, second, again = (
        [inputs for inputs, _ in batches_from(loader, epoch, 0, seed=0)] for epoch in (0, 1, 0)
    )
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def validate(folder: Path) -> Record:
    """Validate the same model on 7 samples, which two ranks cannot share equally; then on 1, which
    one rank has alone.
    """

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(outputs, labels), {"margin": outputs.abs().mean()}

    torch.manual_seed(0)
    trainer = engine_of(nn.Linear(4, 2), folder, task=Task(criterion))
    values = {number: trainer.validate(loader_of(points(number), 3)) for number in (7, 1)}
    return {
        f"{name} of {number}": values[number][name]
        for number in values
        for name in ("val_loss", "val_margin")
    }


def on_two_ranks(folder: Path) -> tuple[Record, str, list[float]]:
    validated = validate(folder)
    noise = [float(torch.rand(())) for _ in batches_from(DataLoader(points(8), 4), 0, 0, seed=0)]
    data = DataLoader(points(8 if distributed.rank() else 12), 4)
    with pytest.raises(UserError) as refused:
        fit(nn.Linear(4, 2), folder, data, data, epochs=1)
    return validated, str(refused.value), noise


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Record, str, list[float]]]:
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("ranks"))


def test_samples_that_the_sampler_repeats_count_twice_in_validation(
    two_ranks: list[tuple[Record, str, list[float]]], tmp_path: Path
) -> None:
    alone = validate(tmp_path)
    for found, *_ in two_ranks:
        assert found == pytest.approx(alone, rel=1e-6)


def test_ranks_with_unequal_numbers_of_batches_hang(
    two_ranks: list[tuple[Record, str, list[float]]],
) -> None:
    for rank, (_, message, _) in enumerate(two_ranks):
        assert f"between 2 and 3 batches, {3 - rank} on rank {rank}" in message


def test_ranks_draw_other_noise(two_ranks: list[tuple[Record, str, list[float]]]) -> None:
    drawn = [number for *_, noise in two_ranks for number in noise]
    assert len(set(drawn)) == len(drawn) == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_sampler_trains_with_equal_shares_after_a_validation(drop_last: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(
        points(7), num_replicas=2, rank=1, drop_last=drop_last
    )
    loader = DataLoader(points(7), 2, sampler=sampler)
    before, batches = list(sampler), len(loader)
    with each_sample_once(loader):
        within = list(sampler)
    assert within == before[:3]
    assert list(sampler) == before
    assert len(before) == (3 if drop_last else 4)
    assert len(loader) == batches == 2


def test_tensors_are_found_in_whatever_a_batch_is() -> None:
    parts = [torch.full((), value) for value in range(8)]
    targets = Targets(parts[4], parts[5], parts[6], parts[7], size_px=64)
    found = list(
        tensors_in(
            (parts[0], [parts[1], "text", None], {"a": (parts[2],), "b": parts[3]}, targets, 3.5)
        )
    )
    assert [int(tensor) for tensor in found] == list(range(8))


class FakeStream:
    """Queued work, which runs late: only in `run`, or when another stream's work has to wait for
    it.
    """

    def __init__(self, _: object = None) -> None:
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0

    def wait_stream(self, other: FakeStream) -> None:
        num_queued = len(other.queue)
        self.queue.append(lambda: other.run(num_queued))

    def run(self, up_to: int | None = None) -> None:
        while self.num_done < (len(self.queue) if up_to is None else up_to):
            self.num_done += 1
            self.queue[self.num_done - 1]()


class FakeGpu:
    """Stands for `torch.cuda`: streams in any order that their waits allow, and memory that is
    reused when it may be.
    """

    Stream = FakeStream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing = self.active = FakeStream()
        self.users: dict[int, list[FakeStream]] = {}
        monkeypatch.setattr(torch, "cuda", self)
        note_user = lambda tensor, user: self.users.setdefault(tensor.data_ptr(), []).append(user)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "record_stream", note_user)

    def current_stream(self, _: object) -> FakeStream:
        return self.active

    @contextmanager
    def stream(self, chosen: FakeStream) -> Iterator[None]:
        self.active, before = chosen, self.active
        yield
        self.active = before

    def copy(self, values: list[float]) -> torch.Tensor:
        """Return memory whose values are there once the active stream has come to this copy."""
        memory = torch.zeros(len(values))
        self.active.queue.append(lambda: memory.copy_(torch.tensor(values)))
        return memory

    def free(self, tensor: torch.Tensor) -> None:
        """Let the next copy overwrite a tensor's memory, unless a stream noted as its user has work
        left.
        """
        if all(user.num_done == len(user.queue) for user in self.users.get(tensor.data_ptr(), [])):
            tensor.fill_(-1)


def prepare_on(gpu: FakeGpu) -> Callable[[Any, torch.device], Any]:
    return lambda batch, device: {"image": gpu.copy(batch), "targets": [gpu.copy(batch)]}


@pytest.mark.parametrize("forgotten", [None, "wait_stream", "record_stream"])
def test_a_step_finds_its_batch_ready_and_keeps_it_until_its_end(
    monkeypatch: pytest.MonkeyPatch, forgotten: str | None
) -> None:
    gpu = FakeGpu(monkeypatch)
    if forgotten == "wait_stream":  # the control: an upload that forgets this is caught below
        monkeypatch.setattr(FakeStream, "wait_stream", lambda *_: None)
    if forgotten == "record_stream":
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    batch = Upload(torch.device("cuda", 0))(prepare_on(gpu), [1.0, 2.0])
    seen: list[list[float]] = []
    tensors = list(tensors_in(batch))
    for tensor in tensors:
        gpu.computing.queue.append(partial(lambda read: seen.append(read.tolist()), tensor))
    if forgotten != "wait_stream":
        gpu.computing.run(1)  # the wait, and so the copies
    for tensor in tensors:
        gpu.free(tensor)  # Python lets go of the batch while the step is still queued
    gpu.computing.run()
    assert (seen == [[1.0, 2.0]] * 2) == (forgotten is None)


def test_an_upload_does_not_wait_for_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    done: list[str] = []
    gpu.computing.queue.append(lambda: done.append("step before"))
    upload = Upload(torch.device("cuda", 0))
    batch = upload(prepare_on(gpu), [1.0, 2.0])
    assert isinstance(upload._stream, FakeStream)
    upload._stream.run()
    assert (batch["image"].tolist(), done) == ([1.0, 2.0], [])


@pytest.mark.gpu
def test_what_is_computed_from_an_uploaded_batch_is_right_however_busy_the_gpu_is() -> None:
    device = torch.device("cuda", 0)
    upload = Upload(device)
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for step in range(50):
        pinned = torch.full((1 << 20,), float(step)).pin_memory()
        values = upload(lambda batch, where: batch.to(where, non_blocking=True) * 2, pinned)
        # what comes next on this stream has to wait, the next upload has not
        busy = (busy @ busy).tanh()
        sums.append((values + busy[0, 0] * 0).mean())
        del values
    assert torch.stack(sums).tolist() == [2.0 * step for step in range(50)]

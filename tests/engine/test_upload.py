"""Batches come onto a GPU on a second stream, and nothing uses or reuses them too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from utils.engine.upload import Upload, tensors_in
from utils.yolo.inputs import Targets


def test_on_a_cpu_the_batch_is_prepared_and_nothing_else() -> None:
    upload = Upload(torch.device("cpu"))
    assert upload(lambda batch, device: (batch, device), 7) == (7, torch.device("cpu"))


def test_tensors_are_found_in_whatever_a_batch_is() -> None:
    parts = [torch.full((), value) for value in range(8)]
    targets = Targets(parts[4], parts[5], parts[6], parts[7], size_px=64)
    found = list(tensors_in((parts[0], [parts[1], "text", None], {"a": (parts[2],), "b": parts[3]}, targets, 3.5)))
    assert [int(tensor) for tensor in found] == list(range(8))


class FakeStream:
    """Queued work, which runs late: only in `run`, or when another stream's work has to wait for it."""

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
    """Stands for `torch.cuda`: streams in any order that their waits allow, and memory that is reused when it may be."""

    Stream = FakeStream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing = self.active = FakeStream()
        self.users: dict[int, list[FakeStream]] = {}
        monkeypatch.setattr(torch, "cuda", self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, user: self.note_user(tensor, user))

    def note_user(self, tensor: torch.Tensor, user: FakeStream) -> None:
        self.users.setdefault(tensor.data_ptr(), []).append(user)

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
        """Let the next copy overwrite a tensor's memory, unless a stream noted as its user has work left."""
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
        busy = (busy @ busy).tanh()  # what comes next on this stream has to wait, the next upload has not
        sums.append((values + busy[0, 0] * 0).mean())
        del values
    assert torch.stack(sums).tolist() == [2.0 * step for step in range(50)]

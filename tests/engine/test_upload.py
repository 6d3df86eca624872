"""Batches come onto a GPU on a second stream, and nothing uses or reuses them too early."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from utils.engine.upload import Upload, tensors_in
from utils.yolo.inputs import Targets

BATCH = {"image": torch.arange(3), "targets": [torch.ones(2)]}


def test_on_a_cpu_the_batch_is_prepared_and_nothing_else() -> None:
    upload = Upload(torch.device("cpu"))
    assert upload(lambda batch, device: (batch, device), 7) == (7, torch.device("cpu"))


def test_tensors_are_found_in_whatever_a_batch_is() -> None:
    parts = [torch.full((), value) for value in range(8)]
    targets = Targets(parts[4], parts[5], parts[6], parts[7], size_px=64)
    found = list(tensors_in((parts[0], [parts[1], "text", None], {"a": (parts[2],), "b": parts[3]}, targets, 3.5)))
    assert [int(tensor) for tensor in found] == list(range(8))


class RecordingStream:
    """Stands for a CUDA stream and writes down who waits for whom."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self.said = said

    def wait_stream(self, other: RecordingStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


def test_a_batch_is_prepared_on_the_second_stream_and_the_first_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    computing, uploading = RecordingStream("computing", said), RecordingStream("uploading", said)

    @contextmanager
    def stream(chosen: RecordingStream) -> Any:
        said.append(f"on {chosen.name}")
        yield
        said.append(f"off {chosen.name}")

    fake = SimpleNamespace(Stream=lambda _: uploading, current_stream=lambda _: computing, stream=stream)
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, user: said.append(f"kept for {user.name}"))

    def prepare(batch: Any, device: torch.device) -> Any:
        said.append(f"prepare for {device}")
        return batch

    assert Upload(torch.device("cuda", 0))(prepare, BATCH) is BATCH
    assert said == [
        "on uploading",
        "prepare for cuda:0",
        "off uploading",
        "computing waits for uploading",
        "kept for computing",
        "kept for computing",
    ]


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

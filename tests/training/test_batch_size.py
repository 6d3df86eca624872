"""`--batch-size auto`: the largest batch that fits, found without changing the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from utils.common.config import parse_config
from utils.common.devices import Precision, choose_precision
from utils.common.errors import UserError
from utils.data.dataset import Batch
from utils.training import batch_size, plan
from utils.training.batch_size import largest_that_fits
from utils.training.config import TrainConfig

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("most", [1, 3, 20, 1024])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 16, 23, 24, 100])
def test_the_largest_batch_that_fits_is_found(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest_that_fits(fits, 640, most)
    assert found <= min(limit, most) < 1.5 * found + 1
    assert max(tried) <= most
    assert len(tried) == len(set(tried))


def test_a_gpu_too_small_for_one_image_is_named() -> None:
    with pytest.raises(UserError, match="not one image of 640 pixels fits the GPU"):
        largest_that_fits(lambda _: False, 640, 9)


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("FIND was unable to find an engine to execute this computation", True),
        ("an illegal memory access was encountered", False),
    ],
)
def test_without_an_engine_a_batch_does_not_fit(words: str, is_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(batch_size, "build_training", fail)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    arguments: Any = (nn.Identity(), CPU, choose_precision("off", CPU), None)
    if is_memory:
        assert not batch_size._fits(*arguments)
        return
    with pytest.raises(RuntimeError, match="illegal"):
        batch_size._fits(*arguments)


def test_a_cpu_has_a_plain_answer() -> None:
    model: Any = nn.Identity()
    assert batch_size.find_batch_size(TrainConfig(batch_size=0), model, CPU, 99) == batch_size.CPU_BATCH_SIZE
    assert batch_size.find_batch_size(TrainConfig(batch_size=3), model, CPU, 99) is None


def test_auto_is_a_word_for_the_batch_size(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_size: auto\n", encoding="utf-8")
    for arguments in (["--batch-size", "auto"], ["--config", str(file)]):
        assert parse_config(TrainConfig, "", arguments).batch_size == 0


def test_auto_keeps_the_batch_size_of_a_run_that_continues(tmp_path: Path) -> None:
    config = TrainConfig(batch_size=0, save_dir=str(tmp_path))
    assert plan.agree_batch_size(config, 12) == 12
    (tmp_path / "config.yaml").write_text("batch_size: 24\n", encoding="utf-8")
    assert plan.agree_batch_size(config, 12) == 24
    assert plan.agree_batch_size(TrainConfig(batch_size=6, save_dir=str(tmp_path)), None) == 6


@pytest.mark.parametrize(
    ("options", "has_gains"),
    [({}, True), ({"colour": "loader"}, False), ({"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}, False)],
    ids=["auto", "loader", "off"],
)
def test_the_probe_varies_colours(options: dict[str, Any], has_gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[Batch] = []

    def fits(model: nn.Module, device: torch.device, precision: Precision, batch: Batch) -> bool:
        probed.append(batch)
        return len(batch) == 1

    monkeypatch.setattr(batch_size, "_fits", fits)
    monkeypatch.setattr(batch_size, "choose_precision", lambda name, device: choose_precision("off", CPU))
    config, gpu = TrainConfig(batch_size=0, img_size=64, **options), torch.device("cuda", 0)
    model = SimpleNamespace(nc=3)
    assert batch_size.find_batch_size(config, model, gpu, 99) == 1  # type: ignore[arg-type]
    assert (probed[0].colour_gains is not None) == has_gains

"""`--batch-size auto`: the largest batch that fits, found without changing the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from utils import assembly
from utils.common.config import parse_config
from utils.common.devices import choose_precision
from utils.common.errors import UserError
from utils.measure import batch_size
from utils.measure.batch_size import largest_that_fits, probe_batch_size
from utils.train_config import TrainConfig

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 16, 23, 24, 100])
def test_the_largest_batch_that_fits_is_found(limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest_that_fits(fits, 640)
    assert found <= limit < 1.5 * found + 1
    assert len(tried) == len(set(tried))


def test_a_gpu_too_small_for_one_image_is_named() -> None:
    with pytest.raises(UserError, match="not one image of 640 pixels fits the GPU"):
        largest_that_fits(lambda _: False, 640)


def test_a_cpu_has_a_plain_answer() -> None:
    assert probe_batch_size(nn.Identity(), CPU, choose_precision("off", CPU), 64) == batch_size.CPU_BATCH_SIZE  # type: ignore[arg-type]


def test_auto_is_a_word_for_the_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_size: auto\n", encoding="utf-8")
    for arguments in (["--batch-size", "auto"], ["--config", str(file)]):
        assert parse_config(TrainConfig, "", arguments).batch_size == 0
    with pytest.raises(SystemExit, match="2"):
        parse_config(TrainConfig, "", ["--batch-size", "many"])
    assert "invalid int or auto value: 'many'" in capsys.readouterr().err


def test_auto_keeps_the_batch_size_of_a_run_that_continues(tmp_path: Path) -> None:
    config = TrainConfig(batch_size=0, save_dir=str(tmp_path))
    assert assembly.agree_batch_size(config, 12) == 12
    (tmp_path / "config.yaml").write_text("batch_size: 24\n", encoding="utf-8")
    assert assembly.agree_batch_size(config, 12) == 24
    assert assembly.agree_batch_size(TrainConfig(batch_size=6, save_dir=str(tmp_path)), None) == 6

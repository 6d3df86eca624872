"""The trainer's options and the arithmetic that follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.common.config import parse_config
from utils.common.errors import UsageError
from utils.data.windows import WindowConfig
from utils.run import folder
from utils.run.folder import differences, resume_arguments
from utils.training.config import TrainConfig


def config_of(*arguments: str) -> TrainConfig:
    return parse_config(TrainConfig, "", list(arguments))


def test_words_and_numbers_that_yaml_misreads_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("amp: off\nsync_bn: on\nlr: 1e-3\n")
    config = config_of("--config", str(file))
    assert (config.amp, config.sync_bn, config.lr) == ("off", "on", 0.001)


def test_a_run_is_the_same_whatever_only_changes_how_it_is_run() -> None:
    earlier = {"lr": 0.01, "epochs": 10, "num_workers": 2, "img_size": 640}
    assert differences(config_of("--lr", "0.01", "--epochs", "20"), earlier) == []
    assert differences(config_of("--lr", "0.02"), earlier) == ["lr 0.01 -> 0.02"]


def test_mosaic_ends_before_the_run_does() -> None:
    assert config_of("--epochs", "100").mosaic_epochs == 90
    assert config_of("--epochs", "6").mosaic_epochs == 3
    assert config_of("--epochs", "1").mosaic_epochs == 1


def test_windows_need_a_low_and_a_high_scale() -> None:
    config = config_of("--windows", "4", "--window-scale", "0.25", "1")
    assert config.window_config == WindowConfig(4, 0.25, 1.0)
    for scales in (("1", "0.5"), ("0.5",), ("0.5", "1.5"), ("0", "1")):
        with pytest.raises(SystemExit):
            config_of("--windows", "4", "--window-scale", *scales)


def test_objects_are_assigned_within_reach_when_training_on_windows() -> None:
    assert not TrainConfig().within_reach
    assert TrainConfig(reach="on").within_reach
    assert TrainConfig(windows=8).within_reach
    assert not TrainConfig(windows=8, reach="off").within_reach


def test_a_resumed_run_has_the_same_scales_as_its_yaml() -> None:
    earlier = {"window_scale": [0.25, 1.0], "windows": 4}
    assert differences(config_of("--windows", "4", "--window-scale", "0.25", "1"), earlier) == []
    assert differences(config_of("--windows", "4"), earlier) == ["window_scale (0.25, 1.0) -> (0.5, 1.0)"]
    assert differences(config_of(), {}) == []


def test_a_password_in_the_address_of_mlflow_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        config_of("--mlflow", "https://me:hush-4f1d@example.org")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in said
    assert "hush-4f1d" not in said


def test_another_folder_beside_a_resume_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "run_folder_of", Path)
    assert resume_arguments(["--resume", "a", "--epochs", "9"])[2:] == [
        "--resume",
        "a",
        "--epochs",
        "9",
        "--save-dir",
        "a",
    ]
    for flags in (["--save-dir", "b"], ["--save-dir=b"], ["--name", "b"], ["--project=b"]):
        with pytest.raises(UsageError, match=f"{flags[0].partition('=')[0]} has no effect with --resume"):
            resume_arguments(["--resume", "a", *flags])

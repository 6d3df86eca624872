"""The comparison with Ultralytics: what it keeps, and where both sides start."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import comparison
from benchmarks.comparison import Setting, compare, initial_weights, open_data
from benchmarks.ultralytics_job import machine_share, require_same_weights, skip_trial_of_amp
from tests.predict.tiny_network import NAMES, smooth_data
from tests.support.plugin import PROJECT, read_json, run_script
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.model import build_model, load_weights

SETTING = Setting("yolov8n-seg.yaml", 1, 64, 4, "cpu")


def test_it_starts_by_its_path_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "yolo_seg_ddp").mkdir()
    (tmp_path / "yolo_seg_ddp" / "__init__.py").write_text("raise RuntimeError('a stranger')\n")
    data = tmp_path / "missing.yaml"
    script = PROJECT / "benchmarks" / "recipe.py"
    done = run_script(
        "env", "-C", tmp_path, sys.executable, script, "--sets", data, "--output", tmp_path / "out"
    )
    assert done.returncode == 1
    assert str(data) in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def data_yaml(tmp_path: Path) -> Path:
    return smooth_data(tmp_path / "set")


def test_both_sides_read_the_same_folders(data_yaml: Path, tmp_path: Path) -> None:
    data = open_data(data_yaml, tmp_path / "out")
    assert (data.num_train, data.num_val) == (2, 2)
    theirs = open_data(data.ultralytics_yaml, tmp_path / "elsewhere")
    assert theirs.spec.splits == data.spec.splits
    assert theirs.spec.names == NAMES
    assert theirs.fingerprint == data.fingerprint
    (tmp_path / "set" / "train" / "labels" / "0.txt").write_text("")
    assert open_data(data_yaml, tmp_path / "out").fingerprint != data.fingerprint


def test_a_finished_training_is_kept_and_other_options_are_another_training(
    data_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    start = tmp_path / "init.pt"
    start.write_bytes(b"weights")

    def train(setting: Setting, data: Any, seed: int, start: Path, home: Path) -> dict[str, Any]:
        trained.append(setting.epochs)
        (home / "best.pt").write_bytes(b"trained")
        return {"best": "best.pt", "train_s": 2.0, "epochs": setting.epochs, "wall_s": 3.0}

    monkeypatch.setattr(comparison, "initial_weights", lambda *_: start)
    monkeypatch.setattr(comparison, "_train_project", train)
    monkeypatch.setattr(comparison, "scores", lambda *_: {"mask_map50_95": 0.5})
    data = open_data(data_yaml, tmp_path / "out")
    first, was_kept = compare(SETTING, data, 0, "project", tmp_path / "out")
    again, is_kept = compare(SETTING, data, 0, "project", tmp_path / "out")
    assert (was_kept, is_kept, trained) == (False, True, [1])
    assert again == first
    assert first["images_per_s"] == 1.0
    # of no concern to the project's side
    accumulating = Setting(**{**vars(SETTING), "nominal_batch": 4})
    assert compare(accumulating, data, 0, "project", tmp_path / "out")[1] is True
    longer = Setting(**{**vars(SETTING), "epochs": 2})
    assert compare(longer, data, 0, "project", tmp_path / "out")[1] is False
    assert compare(SETTING, data, 1, "project", tmp_path / "out")[1] is False
    assert compare(SETTING, data, 0, "project", tmp_path / "out")[1] is True
    assert trained == [1, 2, 1]
    for best in (tmp_path / "out").glob("project-*/best.pt"):
        best.unlink()
    assert compare(SETTING, data, 0, "project", tmp_path / "out")[1] is False


def test_both_sides_start_from_the_seeds_weights_and_a_difference_is_refused(
    data_yaml: Path, tmp_path: Path
) -> None:
    data = open_data(data_yaml, tmp_path / "out")
    weights = initial_weights(SETTING, data, 3, tmp_path / "out")
    written_s = weights.stat().st_mtime_ns
    assert initial_weights(SETTING, data, 3, tmp_path / "out").stat().st_mtime_ns == written_s
    usage = read_json(weights.parent / "start-usage.json")
    assert usage["peak_memory_bytes"] > 50e6
    ours = build_model(str(weights), NAMES)
    assert require_same_weights(str(weights), ours) == len(ours.state_dict()) == 417
    torch.manual_seed(3)
    fresh = build_model("yolov8n-seg.yaml", NAMES)
    for name, tensor in load_weights(str(weights)).state_dict().items():
        torch.testing.assert_close(
            fresh.state_dict()[name].half().float(), tensor.float(), msg=name
        )
    with torch.no_grad():
        next(ours.parameters()).add_(1)
    with pytest.raises(UserError, match="1 of 417 tensors differ"):
        require_same_weights(str(weights), ours)


def test_ultralytics_gets_the_projects_threads() -> None:
    device, threads, workers = machine_share("cpu")
    assert (device, threads >= 1, workers >= 0) == ("cpu", True, True)


def test_a_step_finds_what_the_user_put_on_pythonpath_and_its_failure_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").write_text("print('found', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "import sys, of_the_user\nif sys.argv[1:]:\n    print('none.pt: no such file')\n    "
        "sys.exit(1)\n"
    )
    comparison.run_script([str(script)], log)
    assert log.read_text() == "found\n"
    with pytest.raises(UserError, match=r"script.py failed \(code 1\).*none.pt.*failed.log"):
        comparison.run_script([str(script), "--model=none.pt"], tmp_path / "failed.log")
    assert not (tmp_path / "failed-usage.json").exists()


@pytest.mark.parametrize(
    ("gpu", "is_on"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA GeForce GTX 1660", False)]
)
def test_ultralytics_downloads_nothing_to_decide_on_amp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: str, is_on: bool
) -> None:
    from ultralytics import utils
    from ultralytics.engine import trainer
    from ultralytics.utils import downloads

    fetched: list[Any] = []
    monkeypatch.setattr(utils, "WEIGHTS_DIR", tmp_path)
    monkeypatch.setattr(downloads, "safe_download", lambda *args, **_: fetched.append(args))
    monkeypatch.setattr(downloads, "is_online", lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    monkeypatch.setattr(trainer, "check_amp", trainer.check_amp)  # put back at the end
    on_gpu = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))])
    )
    skip_trial_of_amp()
    assert trainer.check_amp(on_gpu) is is_on
    assert fetched == []

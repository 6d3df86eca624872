"""The environment variables set before the imports, and the report of versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from utils.common import environment


def test_environment_is_prepared_without_overriding_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "svg")
    for name in ("YOLO_OFFLINE", "YOLO_AUTOINSTALL", "ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS", "YOLO_CONFIG_DIR"):
        monkeypatch.setenv(name, "to be removed again after the test")
        monkeypatch.delenv(name)
    environment.prepare_environment()
    assert os.environ["YOLO_OFFLINE"] == "1"
    assert os.environ["YOLO_AUTOINSTALL"] == "0"
    assert os.environ["ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS"] == "1"
    assert os.environ["MPLBACKEND"] == "svg"
    assert Path(os.environ["YOLO_CONFIG_DIR"]) == tmp_path / ".cache" / "yolo-seg-ddp" / "ultralytics"
    assert Path(os.environ["YOLO_CONFIG_DIR"]).is_dir()


def test_settings_go_to_the_temporary_folder_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file where a folder should be")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = environment._settings_folder()
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)


def test_torch_is_imported_before_ultralytics_can_limit_its_threads(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    code = (
        "import sys, utils.common.environment as r; early = 'torch' in sys.modules; r.prepare_environment(); "
        "print(early, 'torch' in sys.modules, 'ultralytics' in sys.modules)"
    )
    command, path = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=PROJECT, env=path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True", "False"]


def test_environment_report_names_versions_but_no_host() -> None:
    report = environment.environment_report()
    assert report["torch"] == torch.__version__
    assert int(report["usable_cores"]) >= 1
    assert {"python", "torchvision", "ultralytics", "cuda", "cudnn", "nccl", "gpus", "cpu", "git_revision"} <= set(
        report
    )
    assert all(isinstance(value, str) and value for value in report.values())
    assert not {"host", "hostname", "user"} & set(report)


def test_git_revision_tells_changes_and_tolerates_absence(tmp_path: Path) -> None:
    assert environment.git_revision(tmp_path) == "unknown"
    (tmp_path / "file").write_text("one")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, timeout=20)
    clean = environment.git_revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert environment.git_revision(tmp_path) == clean + "+changes"


def test_the_projects_folder_comes_before_what_the_user_put_on_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/first", "/second"]))
    assert environment.python_path().split(os.pathsep) == [str(PROJECT), "/first", "/second"]
    monkeypatch.delenv("PYTHONPATH")
    assert environment.python_path() == str(PROJECT)

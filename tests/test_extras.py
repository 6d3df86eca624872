"""The core needs no extra: it imports where none is.

`make test` runs its tests there, and each extra's without the others.
"""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import check_data
import export
from tests.support.plugin import PROJECT
from tests.support.recipes import run_command
from tests.yolo.colour_network import ColourNetwork
from yolo_seg_ddp import open_model
from yolo_seg_ddp.predict.opening import predictor_for
from yolo_seg_ddp.predict.options import PredictOptions
from yolo_seg_ddp.predict.postprocess import MeanWithWhole
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.extras import find_extra, require_extra

CORE = ("*.py", "yolo_seg_ddp/**/*.py", "tests/**/*.py", "benchmarks/**/*.py", "recipes/**/*.py")
IMPORT_ALL = """
import importlib, sys
sys.modules["yolo_seg_ddp.extras"] = None  # an import of it then fails
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def files_of_the_core() -> list[Path]:
    return [
        file
        for pattern in CORE
        for file in sorted(PROJECT.glob(pattern))
        if "extras" not in file.parts
    ]


def test_nothing_but_an_extra_imports_an_extra() -> None:
    found = []
    for file in files_of_the_core():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{file}: {name}" for name in names if name.startswith("yolo_seg_ddp.extras")]
    assert found == []


def test_the_core_imports_where_there_is_no_extra() -> None:
    files = [file.relative_to(PROJECT) for file in files_of_the_core()]
    files = [file for file in files if file.parts[0] not in ("tests", "benchmarks", "recipes")]
    modules = [
        file.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for file in files
        if file.name != "__main__.py"
    ]
    assert "yolo_seg_ddp.predict.tiles" in modules
    assert "inference" in modules
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_an_extra_is_found_by_its_name_and_its_absence_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_extra("no_such_extra") is None
    with pytest.raises(
        UserError, match=r"^yolo_seg_ddp/extras/no_such_extra is not in this folder: "
    ):
        require_extra("no_such_extra")
    there = ModuleType("yolo_seg_ddp.extras.made_up")
    monkeypatch.setitem(sys.modules, "yolo_seg_ddp.extras.made_up", there)
    assert require_extra("made_up") is there


def test_an_export_without_its_extra_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an import of it then fails
    monkeypatch.setitem(sys.modules, "yolo_seg_ddp.extras.exports", None)
    for name in ("best.onnx", "best.torchscript", "best.engine", "."):  # a folder is OpenVINO's
        with pytest.raises(
            UserError,
            match=rf"^{tmp_path / name}: an export, which yolo_seg_ddp/extras/exports opens: ",
        ):
            open_model(tmp_path / name)
    with pytest.raises(UserError, match=r"^yolo_seg_ddp/extras/exports is not in this folder: "):
        run_command(export, "--model", "best.pt")


def test_a_command_whose_extra_is_not_there_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "yolo_seg_ddp.extras.check", None)
    with pytest.raises(UserError, match=r"^yolo_seg_ddp/extras/check is not in this folder: "):
        check_data.main()


def test_thin_objects_keep_their_masks_without_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yolo_seg_ddp.extras.wires", None)
    model, device = ColourNetwork(), torch.device("cpu")
    model.args["thin_classes"] = [0]
    options = PredictOptions(model="a.pt", img_size=320)
    predictor = predictor_for(options, model, device)
    assert predictor.thin == (0,)
    assert predictor.steps == (MeanWithWhole(),)
    options = replace(options, thin_classes=("wire",))
    with pytest.raises(UserError, match=r"^yolo_seg_ddp/extras/wires is not in this folder: "):
        predictor_for(options, model, device)

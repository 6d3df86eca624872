"""Files that are read back, each damaged in every way: one line that names the file, no traceback
and no waiting.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.predict.thresholds import Thresholds
from yolo_seg_ddp.prepare.download.raw_data import Ledger
from yolo_seg_ddp.prepare.parsing.label_file import read_json
from yolo_seg_ddp.prepare.parsing.state import STATE_FILE, BuildState
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.run.folder import read_fingerprint
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.run.records import RunState, read_config, read_epochs, read_status
from yolo_seg_ddp.run.view import view_lines
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.launch import trainer_settings
from yolo_seg_ddp.utils.config import config_of
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import read_bytes

# How each file is read, and what the message says to do.
READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "data.json": (lambda file: read_fingerprint(file.parent), "restore it, or remove it"),
    "config.yaml": (lambda file: read_config(file.parent), "restore it, or remove it"),
    "checkpoint/step-1/manifest.json": (
        lambda file: load_latest(file.parent.parent),
        "remove the folder",
    ),
    "thresholds.yaml": (lambda file: Thresholds.read(file, __file__), "--guarantee writes it"),
    "dataset.yaml": (load_dataset_yaml, "expected keys `path`"),
    "options.yaml": (
        lambda file: config_of(TrainConfig, {"config": file}),
        "correct the file",
    ),
    "download.json": (lambda file: Ledger(file.parent), "delete it"),
    "launched.yaml": (lambda file: trainer_settings(["--config", str(file)]), "correct the file"),
    "labels.json": (read_json, "export the file again"),
}
DAMAGES: list[bytes | Callable[[Path], Any]] = [
    *(
        b"[" * 100_000,
        b"[" * 101 + b"1" + b"]" * 101,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"names": ["a", ',
    ),
    *(b"[" + b"9" * 5000 + b"]", os.mkfifo, lambda file: file.symlink_to("/dev/null")),
]


def damage(file: Path, how: bytes | Callable[[Path], Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    how(file) if callable(how) else file.write_bytes(how)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_one_line_with_its_name_and_the_fix(name: str, tmp_path: Path) -> None:
    read, cure = READERS[name]
    for how in DAMAGES:
        damage(tmp_path / name, how)
        words = "put the file in its place" if callable(how) else cure
        with pytest.raises(UserError, match=rf"\A[^\n]*{Path(name).name}:[^\n]*{words}"):
            read(tmp_path / name)


FORMS: list[tuple[str, Any]] = [
    *((name, 7) for name in [*READERS][:-2]),
    *(("data.json", {"names": names, "photographs": {}}) for names in ("wire", [1])),
    *(
        ("data.json", {"names": [], "photographs": {"a": texts}})
        for texts in ("abc", ["aa", "bb"], [1, 2, 3])
    ),
    ("checkpoint/step-1/manifest.json", {"size_bytes": 1}),
    ("checkpoint/step-1/manifest.json", {"size_bytes": 1, "sha256": "", "global_batch_size": "4"}),
    ("thresholds.yaml", {"version": 2, "classes": [], "calibration": [], "model_sha256": ""}),
    ("download.json", {"objects": {"a": {"url": 1, "more": 2}}}),
]


@pytest.mark.parametrize(("name", "content"), FORMS)
def test_a_file_of_another_form_is_one_line(name: str, content: Any, tmp_path: Path) -> None:
    damage(tmp_path / name, json.dumps(content).encode())  # which is YAML, too
    with pytest.raises(UserError, match=rf"\A[^\n]*{Path(name).name}:[^\n]*{READERS[name][1]}"):
        READERS[name][0](tmp_path / name)


BAD_RECORDS = [
    *(b"[" * 100_000, b"\0" * 9, b"7", b'{"kind": "epoch"}', b'{"kind": "epoch", "epoch": "2"}'),
    *(
        b'{"kind": "batch", "ranks": [1]}',
        b'{"kind": "batch", "ranks": {"own_ms": [1, 2], "rss_bytes": [1]}}',
    ),
    *(
        b'{"kind": "batch", "time_s": "now"}',
        b'{"kind": "epoch", "epoch": 1, "total_epoch_time_s": "1"}',
    ),
]


def test_lines_that_are_no_records_are_removed_with_a_word_when_a_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, file = (
        b'{"kind": "epoch", "epoch": 1, "global_step": 5, "time_s": null}\n',
        tmp_path / "metrics.jsonl",
    )
    file.write_bytes(good + b"\n".join(BAD_RECORDS) + b"\n")
    assert [record["epoch"] for record in read_epochs(tmp_path)] == [1]
    RunLog(tmp_path, is_main=True).truncate_after(9)
    assert file.read_bytes() == good
    assert capsys.readouterr().err.count("9 of 10 lines are no records") == 1
    file.write_bytes(b'{"kind": "batch", "epoch": 1, "batch": 0, "num_batches": 0}\n')
    (tmp_path / "config.yaml").write_text("epochs: 0\n")
    assert view_lines(RunState(tmp_path).read(), 80, 0.0)
    with pytest.raises(UserError, match=r"metrics\.jsonl: larger than 0 MB"):
        read_bytes(file, 9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", DAMAGES[-2:], ids=["pipe", "device"])
def test_a_pipe_in_the_place_of_a_file_that_grows_is_refused(
    how: Callable[[Path], Any], tmp_path: Path
) -> None:
    for name in ("metrics.jsonl", "status.json", STATE_FILE):
        damage(tmp_path / name, how)
    log = RunLog(tmp_path, is_main=True)
    record = {"kind": "epoch", "epoch": 1}
    for call in (
        lambda: read_epochs(tmp_path),
        lambda: RunState(tmp_path).read(),
        lambda: log.truncate_after(1),
        lambda: log.metrics(record),
        lambda: BuildState(tmp_path),
    ):
        with pytest.raises(UserError, match=r"jsonl: not a regular file but a pipe or a device"):
            call()
    assert read_status(tmp_path) == {}
